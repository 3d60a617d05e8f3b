"""Restoring: a worker whose every leaf equals the donor's, from a manifest and verified bytes, or no change at all.

The order within ``commit`` matters. First come the checks that can fail, then the user's own ``load_state_dict`` and
the schedulers (loading one may write into its optimizer's groups), then the optimizers (whose groups therefore have the
last word on learning rates), then the live copies of the outer parameters, and last a comparison of every leaf in
memory with the manifest.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from recovery.errors import LayoutMismatch, MisuseError, StateMismatch
from recovery.state.agreement import layout_differences, parts_to_restore
from recovery.state.chunks import PartBytes
from recovery.state.digest import part_digests
from recovery.state.local_tensor import copy_bits, local, same_bits
from recovery.state.manifest import Manifest
from recovery.state.part import Part
from recovery.state.parts import LIVE_PARAMS, OUTER_PARAMS, WorkerState
from recovery.state.receiving import Receiving
from recovery.state.tree import join
from recovery.state.verification import part_differences
from recovery.types import PartName


class RestoreMode(enum.Enum):
    """Where the bytes are received."""

    IN_PLACE = "in-place"
    """Straight into the tensors that training will use. A failure leaves a worker that must not train."""
    STAGED = "staged"
    """Into memory of their own, copied at the commit. A failure before the commit leaves the worker as it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """What a commit did."""

    num_tensors: int
    num_bytes: int
    created: int
    """Tensors that the worker did not have."""
    removed: int
    """Tensors that the worker had and the donor did not."""
    differences: tuple[str, ...] = ()
    """Lenient only: how parts that were left as they are do not fit."""


class Restoration:
    """One restoring of chosen parts from one manifest.

    Use: construct (nothing changes), ``prepare``, write verified chunks into ``destination``, ``commit``. All on the
    thread that owns the state, except that writing into destinations may happen on any thread.
    """

    def __init__(
        self,
        state: WorkerState,
        manifest: Manifest,
        *,
        mode: RestoreMode,
        parts: Sequence[PartName] | None = None,
        lenient: bool = False,
    ) -> None:
        """Check that the manifest's parts fit the worker.

        Args:
            state: The worker's.
            manifest: The donor's.
            mode: Where to receive.
            parts: Which parts; None: all of the manifest except private-kept ones.
            lenient: Restore the parts that fit, each whole, and leave the others as they are; ``differences`` says
                which and why. For a person who carries state over into a changed model, never for joining a run.

        Raises:
            LayoutMismatch: names every leaf that differs. Nothing was changed.
        """
        self._state = state
        self._manifest = manifest
        self._mode = mode
        found = layout_differences(state, manifest, parts)
        self.differences = tuple(found.lines)
        """How the manifest does not fit; empty unless ``lenient``."""
        if self.differences and not lenient:
            raise LayoutMismatch(
                f"the state of {manifest.worker} at {manifest.cut} does not fit this worker; nothing was changed:"
                + _listed(self.differences)
            )
        self._names = [name for name in parts_to_restore(state, manifest, parts) if name not in found.by_part]
        self._receiving: dict[PartName, Receiving] | None = None
        self._committed = False
        self._live_follows = True

    @property
    def manifest(self) -> Manifest:
        """The donor's manifest."""
        return self._manifest

    @property
    def mode(self) -> RestoreMode:
        """Where the bytes are received."""
        return self._mode

    @property
    def part_names(self) -> list[PartName]:
        """The parts that are restored, in the manifest's order."""
        return list(self._names)

    def prepare(self) -> None:
        """Make a destination for every leaf. State that is missing is allocated, but not attached.

        Parameters, random generators and the worker's structures are not touched.

        Raises:
            LayoutMismatch: a leaf can neither be written nor created here.
            ManifestRejected: what is to be created is larger than this machine. Nothing was allocated for that part.
        """
        if self._receiving is None:
            self._receiving = {
                name: Receiving(
                    self._state.part(name),
                    self._manifest.part(name),
                    self._state.read_part(name),
                    staged=self._mode is RestoreMode.STAGED,
                )
                for name in self._names
            }

    def destination(self, part: PartName) -> PartBytes:
        """Return where the part's bytes belong; ``prepare`` comes first. Staged: memory that nobody else sees."""
        receiving = self._prepared()
        if self._committed:
            raise MisuseError("this restoration was committed: what it received belongs to the worker now")
        if part not in receiving:
            raise MisuseError(f"part {part!r} is not among those restored: {', '.join(self._names)}")
        return receiving[part].bytes

    def commit(self, *, live_follows: bool = True) -> RestoreReport:
        """Make the received bytes the worker's state, and prove it.

        Args:
            live_follows: Live parameters become what the outer ones are, unless they are restored here themselves.
                False: another restoration, prepared before this commit, receives them.

        Raises:
            StateMismatch: staged, and bytes received are not the manifest's: nothing was changed. Or memory differs
                from the manifest after everything was written: the worker must not train.
            LayoutMismatch: the worker has changed since ``prepare`` so that a leaf no longer fits; nothing was changed.

        *If it raises* staged and before the first tensor was written, objects that load themselves were put back, and
        an error of a user's ``load_state_dict`` passes through as it is. In place, some destinations hold new bytes.
        """
        receiving = self._prepared()
        if self._committed:
            raise MisuseError("this restoration was committed before: make a new one")
        self._live_follows = live_follows and LIVE_PARAMS not in receiving
        if self._mode is RestoreMode.STAGED:
            self._check_received()
        landings = {name: one.land(partial(self._state.read_part, name)) for name, one in receiving.items()}
        values = [(one.part, join(one.spec.tree, landings[name].leaves)) for name, one in receiving.items()]
        self._check_live_copies()
        self._load([(part, value) for part, value in values if part.loads])
        # From here on nothing is expected to fail: every shape, dtype and structure was checked.
        self._committed = True
        removed = 0
        for landing in landings.values():
            landing.copy()
        for part, value in values:
            if not part.loads:
                removed += part.attach(value)
            part.restored()
        self._write_live_copies()
        self._prove()
        return RestoreReport(
            num_tensors=sum(len(one.spec.tensors) for one in receiving.values()),
            num_bytes=sum(one.spec.num_bytes for one in receiving.values()),
            created=sum(landing.num_created for landing in landings.values()),
            removed=removed,
            differences=self.differences,
        )

    def _prepared(self) -> dict[PartName, Receiving]:
        if self._receiving is None:
            raise MisuseError("call prepare() first: there is no destination yet")
        return self._receiving

    def _check_received(self) -> None:
        """Refuse bytes that are not the manifest's while nothing has been written."""
        algorithm = self._manifest.digest_algorithm
        for name, one in self._prepared().items():
            found = part_digests(one.bytes, algorithm)
            wrong = [i for i, chunk in enumerate(one.spec.chunks) if chunk.digest != found[i]]
            if wrong:
                raise StateMismatch(
                    f"{name}: {len(wrong)} of {len(found)} chunks received (first: {wrong[0]}) are not those of the "
                    f"manifest of {self._manifest.worker}; nothing was changed"
                )

    def _live_copies(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return the live parameters that become what the restored outer ones are."""
        restored = self._prepared()
        return self._state.live_copies() if OUTER_PARAMS in restored and self._live_follows else []

    def _check_live_copies(self) -> None:
        for name, outer, live in self._live_copies():
            if local(outer).shape != local(live).shape:
                raise LayoutMismatch(
                    f"live/{name} is {list(local(live).shape)}, its outer parameter {list(local(outer).shape)}"
                )

    def _write_live_copies(self) -> None:
        for _, outer, live in self._live_copies():
            target, source = local(live), local(outer)
            if target.dtype == source.dtype:
                copy_bits(target, source)
            else:
                target.copy_(source)  # mixed precision: the outer parameter, rounded to the live one's dtype

    def _load(self, loads: Sequence[tuple[Part, object]]) -> None:
        """Run the user's code that loads; if any of it fails in staged mode, put back what was loaded before."""
        with ExitStack() as undo:
            for part, value in loads:
                if self._mode is RestoreMode.STAGED:
                    undo.callback(part.attach, copy.deepcopy(part.read()))
                part.attach(value)
            undo.pop_all()

    def _prove(self) -> None:
        """Read every restored leaf again, through its getter, and compare it with the manifest."""
        differences = []
        for name, one in self._prepared().items():
            found = self._state.read_part(name)
            differences += part_differences(one.spec, found, self._manifest.digest_algorithm)
        for parameter, outer, live in self._live_copies():
            target, source = local(live), local(outer)
            if not same_bits(target, source.to(target.dtype)):
                differences.append(f"live/{parameter}: differs from its outer parameter")
        if differences:
            raise StateMismatch(
                f"after restoring from {self._manifest.worker} at {self._manifest.cut}, memory differs from the "
                f"manifest; this worker must not train:{_listed(differences)}"
            )


def _listed(lines: Sequence[str], most: int = 50) -> str:
    more = f"\n  and {len(lines) - most} more" if len(lines) > most else ""
    return "".join(f"\n  {line}" for line in lines[:most]) + more
