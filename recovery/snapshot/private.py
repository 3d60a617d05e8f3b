"""A captured copy of the private parts: stable memory, nothing live."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from recovery.errors import DonorRefused, MisuseError
from recovery.snapshot.lease import LeaseBook, LeaseRecord, Reading
from recovery.state.digest import chunk_digest
from recovery.state.manifest import Manifest, encode


class PrivateSnapshot:
    """The private-copied parts at one cut, each as one byte string.

    Args:
        manifest: What they hold.
        data: The parts' logical bytes in the manifest's order.
        make_book: As for ``OuterSnapshot``.
    """

    def __init__(
        self,
        manifest: Manifest,
        data: Sequence[torch.Tensor],
        make_book: Callable[[Sequence[int], Callable[[], None]], LeaseBook],
    ) -> None:
        self.manifest = manifest
        self.manifest_bytes = encode(manifest)
        self._data: list[torch.Tensor] | None = list(data)
        self.book = make_book([len(part.chunks) for part in manifest.parts], self._emptied)

    def read(self, record: LeaseRecord, part: int, offset: int, num_bytes: int) -> Reading:
        """See ``Lease.read``."""
        data = self._part(part)
        if offset < 0 or num_bytes < 1 or offset + num_bytes > data.numel():
            raise MisuseError(
                f"bytes {offset} to {offset + num_bytes} are not inside part {part} of {data.numel()} bytes"
            )
        return Reading(data[offset : offset + num_bytes], live=False)

    def recheck(self, part: int, chunk: int) -> bool:
        """See ``Lease.recheck``."""
        data = self._part(part)
        chunks = self.manifest.parts[part].chunks
        if not 0 <= chunk < len(chunks):
            raise MisuseError(f"there is no chunk {chunk} of part {part}")
        spec = chunks[chunk]
        piece = data[spec.offset : spec.offset + spec.num_bytes]
        return chunk_digest(self.manifest.digest_algorithm, piece) == spec.digest

    def _part(self, part: int) -> torch.Tensor:
        if self._data is None:
            raise DonorRefused(f"the private snapshot at {self.manifest.cut} is over: nobody held it any more")
        if not 0 <= part < len(self._data):
            raise MisuseError(f"part {part} does not exist: the snapshot has {len(self._data)}")
        return self._data[part]

    def _emptied(self) -> None:
        if not len(self.book):
            self._data = None
