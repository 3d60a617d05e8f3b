"""Parts received into memory of their own, for whoever reads them as values instead of restoring a worker from them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from recovery.errors import ManifestRejected
from recovery.state.chunks import PartBytes
from recovery.state.destination import raw, staging
from recovery.state.manifest import Manifest
from recovery.state.tree import join
from recovery.types import PartName


class LooseParts:
    """Memory for every part of a manifest, on the CPU. Nothing of the worker is touched.

    Args:
        manifest: What is to be received.
        limit_bytes: More is refused before memory is taken.

    Raises:
        ManifestRejected: the manifest lists more than ``limit_bytes``.
    """

    def __init__(self, manifest: Manifest, limit_bytes: int) -> None:
        if manifest.num_bytes > limit_bytes:
            raise ManifestRejected(
                f"{manifest.worker} lends {manifest.num_bytes} bytes where at most {limit_bytes} can be meant"
            )
        self.manifest = manifest
        self._leaves: dict[PartName, list[Tensor | np.ndarray]] = {
            part.name: [staging(spec) for spec in part.tensors] for part in manifest.parts
        }
        self._bytes = {
            part.name: PartBytes([raw(leaf) for leaf in self._leaves[part.name]], part.tensors)
            for part in manifest.parts
        }

    @property
    def destinations(self) -> Mapping[PartName, PartBytes]:
        """Where verified bytes are written."""
        return self._bytes

    def value(self, name: PartName) -> object:
        """Return the part's value, whose tensors are this object's own.

        Raises:
            ManifestRejected: there is no such part, or its tree is malformed.
        """
        return join(self.manifest.part(name).tree, self._leaves.get(name, []))
