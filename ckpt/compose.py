"""Loading what does not fit exactly: another model, another optimizer, another number of local ranks, foreign values.

The checkpoint's values and the worker's own are merged into one state that fits the worker leaf by leaf; that state is
then restored, and proven, by the same code as any other.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ckpt.reader import Checkpoint
from ckpt.values import value_of
from recovery.errors import CheckpointRejected, LayoutMismatch
from recovery.state.digest import numerics_id
from recovery.state.leaf import ShardSpec
from recovery.state.live_part import LivePart, describe, live_part
from recovery.state.manifest import TensorSpec
from recovery.state.optimizer_part import RUNTIME_FLAGS
from recovery.state.parts import WorkerState
from recovery.state.restore import Restoration, RestoreMode, RestoreReport
from recovery.state.tree import join
from recovery.types import Cut, PartClass, PartName, RunId, WorkerRef


class Strictness(enum.Enum):
    """What becomes of a difference between the checkpoint and the worker."""

    STRICT = "strict"
    """It is an error, and nothing is changed."""
    REPORT = "report"
    """It is listed, and nothing is changed."""
    LENIENT = "lenient"
    """What fits is loaded, the worker keeps its own for the rest, and every difference is listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What came of it."""

    differences: tuple[str, ...]
    """One line for each leaf that is missing, unexpected, or of another form."""
    report: RestoreReport | None
    """None: nothing was changed."""


@dataclass(frozen=True, slots=True)
class _Box:
    shard: ShardSpec
    local_shape: tuple[int, ...]

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        for dim, (start, size) in enumerate(zip(self.shard.global_offset, self.local_shape, strict=True)):
            value = value.narrow(dim, start, size)
        return value.contiguous()


def apply_values(
    state: WorkerState,
    values: Mapping[PartName, object],
    *,
    strictness: Strictness,
    run_id: RunId,
    worker: WorkerRef,
    cut: Cut,
) -> Applied:
    """Make ``values`` the worker's, part by part; training thread only.

    Args:
        state: The worker's.
        values: Trees by part name. A tensor where the worker has a shard is the whole tensor; the shard is cut out.
        strictness: What becomes of differences.
        run_id: For messages and the proof's manifest, like the next two.
        worker: Whose values.
        cut: When.

    Raises:
        LayoutMismatch: strict, and something differs. Nothing was changed.
        StateMismatch: afterwards, memory differs from what was to be loaded.
    """
    differences: list[str] = []
    boxes = _boxes(state)
    parts: list[LivePart] = []
    for name, value in values.items():
        if name not in state.part_names:
            differences.append(f"{name}: unexpected, this worker has no such part (exclude it to go without)")
            continue
        own = state.read_part(name)
        merge = _Merge(name, {spec.path: spec for spec in own.specs}, boxes, differences)
        mine = join(own.tree, own.tensors)
        merged = _with_class(value, mine) if state.part(name).loads else merge.run(mine, value)
        part = live_part(name, state.part_class(name), merged)
        specs = tuple(
            dataclasses.replace(spec, shard=merge.shards[spec.path]) if spec.path in merge.shards else spec
            for spec in part.specs
        )
        parts.append(dataclasses.replace(part, specs=specs))
    if strictness is Strictness.REPORT:
        return Applied(differences=tuple(differences), report=None)
    if differences and strictness is Strictness.STRICT:
        listed = "".join(f"\n  {line}" for line in differences[:50])
        raise LayoutMismatch(f"the checkpoint does not fit this worker; nothing was changed:{listed}")
    manifest = describe(
        [dataclasses.replace(part, part_class=PartClass.PRIVATE_COPIED) for part in parts],
        run_id=run_id,
        worker=worker,
        cut=cut,
        numerics_id=numerics_id(),
        layout_digest=b"",
    )
    manifest = dataclasses.replace(
        manifest,
        parts=tuple(
            dataclasses.replace(spec, part_class=part.part_class)
            for spec, part in zip(manifest.parts, parts, strict=True)
        ),
    )
    if not parts:
        return Applied(differences=tuple(differences), report=None)
    names = [part.name for part in parts]
    restoration = Restoration(state, manifest, mode=RestoreMode.STAGED, parts=names)
    restoration.prepare()
    for part, spec in zip(parts, manifest.parts, strict=True):
        for chunk in spec.chunks:
            restoration.destination(part.name).write(chunk.offset, part.bytes.read(chunk.offset, chunk.num_bytes))
    return Applied(differences=tuple(differences), report=restoration.commit())


def whole_value(shares: Sequence[Checkpoint], part: PartName) -> object:
    """Return a part's verified value with every sharded tensor put together from all local ranks' shares.

    Args:
        shares: One checkpoint a local rank, in rank order, all of one save.
        part: Which part.

    Raises:
        CheckpointRejected: a byte differs, or the shares do not cover a tensor exactly.
    """
    values = [value_of(share, part) for share in shares]
    specs = [share.manifest.part(part).tensors for share in shares]
    if not any(spec.shard is not None for spec in specs[0]):
        return values[0]
    pieces = [_by_path(share, part, value) for share, value in zip(shares, values, strict=True)]
    leaves: list[torch.Tensor | np.ndarray] = []
    for spec in specs[0]:
        found = pieces[0][spec.path][1]
        if spec.shard is None or not isinstance(found, torch.Tensor):
            leaves.append(found)
            continue
        whole = torch.empty(spec.shard.global_shape, dtype=found.dtype)
        covered = torch.zeros(spec.shard.global_shape, dtype=torch.bool)
        for rank, by_path in enumerate(pieces):
            if spec.path not in by_path:
                raise CheckpointRejected(f"local rank {rank} has no share of {part}/{spec.path}")
            other, tensor = by_path[spec.path]
            if other.shard is None or other.shard.global_shape != spec.shard.global_shape:
                raise CheckpointRejected(f"local rank {rank} holds another tensor than rank 0 as {part}/{spec.path}")
            assert isinstance(tensor, torch.Tensor)
            region = tuple(slice(a, a + n) for a, n in zip(other.shard.global_offset, other.shape, strict=True))
            whole[region].copy_(tensor.detach())
            covered[region] = True
        if not bool(covered.all()):
            raise CheckpointRejected(f"the shares of {len(shares)} local ranks do not cover {part}/{spec.path}")
        leaves.append(whole)
    return join(shares[0].manifest.part(part).tree, leaves)


def _by_path(
    share: Checkpoint, part: PartName, value: object
) -> dict[str, tuple[TensorSpec, torch.Tensor | np.ndarray]]:
    found = live_part(part, PartClass.PRIVATE_COPIED, value)
    by_path = {leaf.path: leaf.value for leaf in found.leaves}
    return {spec.path: (spec, by_path[spec.path]) for spec in share.manifest.part(part).tensors}


def _boxes(state: WorkerState) -> dict[str, _Box]:
    """Return which box of each sharded parameter is this rank's."""
    boxes = {}
    for name in state.part_names:
        for spec in state.read_part(name).specs:
            if spec.shard is not None and "/" not in spec.path:
                boxes[spec.path] = _Box(spec.shard, spec.shape)
    return boxes


@dataclass(slots=True)
class _Merge:
    """One part: the worker's own tree, with the checkpoint's leaves wherever they fit."""

    part: PartName
    specs: Mapping[str, TensorSpec]
    boxes: Mapping[str, _Box]
    differences: list[str]
    shards: dict[str, ShardSpec] = field(default_factory=dict)

    def run(self, own: object, theirs: object) -> object:
        """Return the merged tree."""
        if _is_optimizer(own) and _is_optimizer(theirs):
            assert isinstance(own, dict)
            assert isinstance(theirs, dict)
            return self._optimizer(own, theirs)
        return self._node(own, theirs, "")

    def _optimizer(self, own: dict[str, object], theirs: dict[str, object]) -> dict[str, object]:
        if theirs["class"] not in ("", own["class"]):  # other systems do not say which class it was
            self._differs("class", f"{theirs['class']} in the checkpoint, {own['class']} here; the worker's stays")
            return own
        rest = ("class", "state", "param_groups")
        merged = dict(own)
        for key in theirs:
            if key not in rest:  # what an optimizer keeps beside its parameters' states
                merged[key] = self._node(own[key], theirs[key], key) if key in own else theirs[key]
        merged["param_groups"] = self._node(own["param_groups"], theirs["param_groups"], "param_groups")
        groups = own["param_groups"]
        assert isinstance(groups, list)
        names = {name for group in groups for name in group["params"]}
        mine, other = own["state"], theirs["state"]
        assert isinstance(mine, dict)
        assert isinstance(other, dict)
        # Lazily made state is the checkpoint's: what the worker lacks is created, for every parameter that it has.
        merged["state"] = {
            name: self._state(mine.get(name), other[name], f"state/{name}") if name in other else mine[name]
            for name in [*other, *(name for name in mine if name not in other)]
            if name in names
        }
        for name in other:
            if name not in names:
                self._differs(f"state/{name}", "unexpected, no parameter of this optimizer has that name")
        return merged

    def _state(self, own: object, theirs: object, path: str) -> object:
        if not isinstance(theirs, dict):
            return theirs
        name = path.removeprefix("state/")
        box = self.boxes.get(name)
        mine = own if isinstance(own, dict) else {}
        found = {}
        for key, value in theirs.items():
            at = f"{path}/{key}"
            if isinstance(value, torch.Tensor) and box is not None and tuple(value.shape) == box.shard.global_shape:
                self.shards[at] = box.shard
                value = box.cut(value)
            kept = mine.get(key)
            if isinstance(kept, torch.Tensor) and isinstance(value, torch.Tensor) and kept.shape != value.shape:
                self._differs(at, f"{_form(value)} in the checkpoint, {_form(kept)} here")
                return own
            found[key] = value
        return found

    def _node(self, own: object, theirs: object, path: str) -> object:
        if isinstance(own, dict) and isinstance(theirs, dict):
            return self._dict(own, theirs, path)
        if isinstance(own, list) and isinstance(theirs, list):
            if path.endswith("/params"):
                if own != theirs:
                    self._differs(path, "the parameters of the group differ; the worker's stay")
                return own
            if len(own) != len(theirs):
                self._differs(path, f"{len(theirs)} entries in the checkpoint, {len(own)} here")
                return own
            pairs = zip(own, theirs, strict=True)
            return [self._node(a, b, _join(path, i)) for i, (a, b) in enumerate(pairs)]
        if isinstance(own, torch.Tensor | np.ndarray) or isinstance(theirs, torch.Tensor | np.ndarray):
            return self._tensor(own, theirs, path)
        if type(own) is not type(theirs) and own is not None and theirs is not None:
            self._differs(path, f"a {type(theirs).__name__} in the checkpoint, a {type(own).__name__} here")
            return own
        return theirs

    def _dict(self, own: dict[object, object], theirs: dict[object, object], path: str) -> object:
        merged = type(own)()
        for key, value in own.items():
            at = _join(path, key)
            if at == "class" and theirs.get(key) == "":
                merged[key] = value  # a scheduler of another system, which does not say its class
            elif key in theirs:
                merged[key] = self._node(value, theirs[key], at)
            else:
                self._differs(at, "missing in the checkpoint; the worker's stays")
                merged[key] = value
        for key in theirs:
            if key not in own and key not in RUNTIME_FLAGS:
                self._differs(_join(path, key), "unexpected, this worker has nothing of that name")
        return merged

    def _tensor(self, own: object, theirs: object, path: str) -> object:
        spec = self.specs.get(path)
        if isinstance(theirs, torch.Tensor) and spec is not None and spec.shard is not None:
            self.shards[path] = spec.shard
            if tuple(theirs.shape) == spec.shard.global_shape:
                theirs = _Box(spec.shard, spec.shape).cut(theirs)
        fits = False
        for kind in (torch.Tensor, np.ndarray):
            if isinstance(own, kind) and isinstance(theirs, kind):
                fits = own.shape == theirs.shape and own.dtype == theirs.dtype
        if fits:
            return theirs
        self._differs(path, f"{_form(theirs)} in the checkpoint, {_form(own)} here")
        return own

    def _differs(self, path: str, what: str) -> None:
        self.differences.append(f"{self.part}/{path}: {what}")


def _is_optimizer(value: object) -> bool:
    return isinstance(value, dict) and set(value) >= {"class", "state", "param_groups"}


def _with_class(theirs: object, own: object) -> object:
    """Return a scheduler's value with this worker's class where the other system did not say one."""
    if isinstance(theirs, dict) and isinstance(own, dict) and theirs.get("class") == "" and "class" in own:
        return {**theirs, "class": own["class"]}
    return theirs


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _form(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
