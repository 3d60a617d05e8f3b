"""The scalars of the private-copied parts: what a joiner fetches once more when its moments were fetched long ago.

Moments of an inner optimizer age well: they stay consistent with the step counts that came with them. Learning rates,
schedules, scalers and progress do not: they follow the run. So the scalars of a later cut are put upon tensors of an
earlier one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recovery.errors import LayoutMismatch, StateMismatch
from recovery.state.agreement import layout_differences
from recovery.state.digest import part_digests
from recovery.state.live_part import LivePart, live_part
from recovery.state.loose import LooseParts
from recovery.state.optimizer_part import OptimizerPart
from recovery.state.parts import WorkerState
from recovery.state.restore import Restoration, RestoreMode
from recovery.types import MIB, PartName

SMALL_PART_BYTES = 4 * MIB
"""Parts that are no optimizers count as scalars as a whole up to this size (schedulers, scalers, buffers)."""

_MOMENTS = frozenset({"state", "other_state"})


def scalar_parts(state: WorkerState) -> list[LivePart]:
    """Return the private-copied parts without what is large: optimizers without their state, other parts if small.

    Training thread, between two inner steps. Tensors are live.

    Raises:
        UnsupportedLeaf: a part holds a value that has no exact form.
    """
    parts = []
    for name in state.private_copied_names:
        live = _without_moments(state, name)
        if isinstance(state.part(name), OptimizerPart) or live.bytes.num_bytes <= SMALL_PART_BYTES:
            parts.append(live)
    return parts


def restore_scalars(state: WorkerState, received: LooseParts) -> None:
    """Put a donor's scalars upon the worker's private-copied parts; its moments stay. Training thread.

    Raises:
        LayoutMismatch: they do not fit this worker; nothing was changed.
        StateMismatch: after writing, the worker does not hold them: it must not train.
    """
    manifest = received.manifest
    names = [part.name for part in manifest.parts]
    differences = layout_differences(state, manifest, names).lines
    if differences:
        raise LayoutMismatch(
            f"the scalars of {manifest.worker} at {manifest.cut} do not fit this worker; nothing was changed: "
            + "; ".join(differences[:10])
        )
    optimizers = [name for name in names if isinstance(state.part(name), OptimizerPart)]
    restoration = Restoration(
        state, manifest, mode=RestoreMode.STAGED, parts=[name for name in names if name not in optimizers]
    )
    restoration.prepare()
    for name in restoration.part_names:
        content = received.destinations[name]
        if content.num_bytes:
            restoration.destination(name).write(0, content.read(0, content.num_bytes))
    # Loading a scheduler may write into its optimizer's groups: those have the last word.
    restoration.commit()
    for name in optimizers:
        _restore_options(state, name, received)


def _restore_options(state: WorkerState, name: PartName, received: LooseParts) -> None:
    part = state.part(name)
    own, value = part.read(), received.value(name)
    assert isinstance(own, dict)
    assert isinstance(value, dict)
    groups = [
        _into_own_tensors(mine, theirs) for mine, theirs in zip(own["param_groups"], value["param_groups"], strict=True)
    ]
    part.attach({**value, "param_groups": groups, **{key: own[key] for key in _MOMENTS & own.keys()}})
    part.restored()
    spec, found = received.manifest.part(name), _without_moments(state, name)
    digests = [chunk.digest for chunk in spec.chunks]
    if found.tree != spec.tree or part_digests(found.bytes, received.manifest.digest_algorithm) != digests:
        raise StateMismatch(f"after restoring, the options of {name} are not those of {received.manifest.worker}")


def _into_own_tensors(own: dict[str, object], donor: dict[str, object]) -> dict[str, object]:
    """Return a group's options; a tensor among them (a learning rate) stays the object that schedulers write into."""
    options = dict(donor)
    for key, theirs in donor.items():
        mine = own.get(key)
        if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor):
            continue
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
            with torch.no_grad():
                mine.copy_(theirs)
            options[key] = mine
    return options


def _without_moments(state: WorkerState, name: PartName) -> LivePart:
    part = state.part(name)
    value = part.read()
    if isinstance(part, OptimizerPart):
        assert isinstance(value, dict)
        value = {**{key: item for key, item in value.items() if key not in _MOMENTS}, "state": {}}
    return live_part(name, part.part_class, value)
