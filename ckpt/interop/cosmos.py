"""Cosmos's DDP checkpoints.

::

    latest_checkpoint.txt                       one line: iter_000001000.pt; a hint
    iter_000001000_model.pt, _optim.pt, _scheduler.pt; iter_000001000.pt (trainer: scaler, iteration, callbacks')
    iter_000001000_model_mp_<rank>.pt ...       under model parallelism; the trainer's file has no suffix
    iter_000001000_trained_data_record.json     counts of trained samples
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.interop.foreign import (
    BUFFERS,
    INNER_OPTIMIZER,
    LOCAL_PROGRESS,
    OUTER,
    OUTER_OPTIMIZER,
    RUN_PROGRESS,
    SCHEDULER,
    Foreign,
    model_of,
    named_optimizer,
    number,
    numbered_optimizer,
    parameters_and_buffers,
    scheduler_part,
    scheduler_state,
)
from ckpt.interop.torch_file import read_torch, write_torch
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.types import PartName

POINTER = "latest_checkpoint.txt"
TRAINER = PartName("trainer")
RECORD = "trained_data_record"
_NAME = re.compile(r"iter_([0-9]{9,19})\.pt")
_OURS = "diloco"
"""Key of the trainer's state that holds what the layout has no place for."""


def is_cosmos(path: Path) -> bool:
    """Return whether a folder holds Cosmos's checkpoints."""
    return path.is_dir() and bool(iterations(path))


def iterations(path: Path, *, mp_rank: int | None = None) -> list[int]:
    """Return the iterations of which every file is there, newest first; the pointer is not asked."""
    found = []
    for entry in path.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match and all(
            (path / _file(int(match[1]), key, mp_rank)).is_file() for key in ("model", "optim", "scheduler")
        ):
            found.append(int(match[1]))
    return sorted(found, reverse=True)


def newest_iteration(path: Path, *, mp_rank: int | None = None) -> int:
    """Return the pointer's iteration if it is complete, else the newest complete one.

    Raises:
        CheckpointRejected: there is none.
    """
    complete = iterations(path, mp_rank=mp_rank) if path.is_dir() else []
    if not complete:
        raise CheckpointRejected(f"{path} holds no complete iteration")
    try:
        match = _NAME.fullmatch((path / POINTER).read_text().strip())
    except OSError:
        match = None
    return int(match[1]) if match and int(match[1]) in complete else complete[0]


def read_cosmos(
    path: Path,
    *,
    iteration: int | None = None,
    mp_rank: int | None = None,
    parameter_names: Sequence[str] | None = None,
    epoch_from_iteration: bool = False,
    allow_pickle: bool = False,
) -> Foreign:
    """Return one iteration as parts.

    Args:
        path: The folder.
        iteration: Which; None: what the pointer names, or the newest complete one.
        mp_rank: The model-parallel rank, where there are any.
        parameter_names: The optimizer's parameters in its order; needed where the model has buffers and the optimizer
            is keyed by index.
        epoch_from_iteration: Set the scheduler's ``last_epoch`` to the iteration, as Cosmos does after a load.
        allow_pickle: Unpickle what ``weights_only`` refuses. Only for one's own files.

    Raises:
        CheckpointRejected: it is damaged, incomplete, or needs unpickling.
        BadConfiguration: the names are needed, or the iteration is not there.
    """
    chosen = newest_iteration(path, mp_rank=mp_rank) if iteration is None else iteration
    if chosen not in iterations(path, mp_rank=mp_rank):
        raise BadConfiguration(f"{path} has no complete iteration {chosen}; it has {iterations(path, mp_rank=mp_rank)}")
    states: dict[str, dict[str, object]] = {}
    for key in ("model", "optim", "scheduler", "trainer"):
        file = path / _file(chosen, key, mp_rank)
        content = read_torch(file, str(file), allow_pickle=allow_pickle)
        if not isinstance(content, dict):
            raise CheckpointRejected(f"{file} holds a {type(content).__name__}, not a state dict")
        states[key] = content
    model = states["model"]
    trainer = dict(states["trainer"])
    ours = trainer.pop(_OURS, None)
    extra: dict[str, object] = ours if isinstance(ours, dict) else {}
    known = parameter_names if parameter_names is not None else extra.get("parameter_names", list(model))
    assert isinstance(known, list | tuple)
    where = str(path / _file(chosen, "optim", mp_rank))
    optimizer = named_optimizer(states["optim"], known, where)
    groups = optimizer["param_groups"]
    assert isinstance(groups, list)
    trained = [str(name) for group in groups for name in group["params"]] or None
    parameters, buffers = parameters_and_buffers(model, trained)
    values: dict[PartName, object] = {OUTER: parameters}
    absent: dict[PartName, str] = {}
    if OUTER_OPTIMIZER in extra:
        values[OUTER_OPTIMIZER] = extra[OUTER_OPTIMIZER]
    else:
        absent[OUTER_OPTIMIZER] = "it is a data-parallel trainer, which has none"
    run = extra.get(RUN_PROGRESS)
    values[RUN_PROGRESS] = run if isinstance(run, dict) else {"outer_step": chosen, "tokens": 0}
    values[INNER_OPTIMIZER] = optimizer
    step = number(trainer.get("iteration", chosen), "the trainer's iteration")
    scheduler = {**states["scheduler"], "last_epoch": step} if epoch_from_iteration else states["scheduler"]
    values[SCHEDULER] = scheduler_part(scheduler)
    local = extra.get(LOCAL_PROGRESS)
    values[LOCAL_PROGRESS] = local if isinstance(local, dict) else {"inner_step": step, "tokens": 0}
    if buffers:
        values[BUFFERS] = buffers
    values[TRAINER] = trainer
    progress = values[RUN_PROGRESS]
    assert isinstance(progress, dict)
    return Foreign(
        values=values,
        outer_step=number(progress["outer_step"], "outer_step"),
        records=_record(path, chosen),
        origin="Cosmos",
        absent=absent,
    )


def write_cosmos(path: Path, foreign: Foreign, *, mp_rank: int | None = None) -> int:
    """Write parts as an iteration of Cosmos's, the pointer last; return the iteration.

    What the layout has no place for (the outer optimizer, progress, names) stands in the trainer's state.

    Raises:
        CheckpointFailed: the disk refused it.
    """
    values = foreign.values
    trainer = values.get(TRAINER)
    local = values.get(LOCAL_PROGRESS)
    if isinstance(trainer, Mapping) and "iteration" in trainer:
        iteration = number(trainer["iteration"], "the trainer's iteration")
    else:
        iteration = number(local["inner_step"], "inner_step") if isinstance(local, Mapping) else foreign.outer_step
    optimizer = values.get(INNER_OPTIMIZER)
    if not isinstance(optimizer, Mapping):
        raise CheckpointFailed("Cosmos's layout needs the part inner_optimizer")
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    extra: dict[str, object] = {"parameter_names": names}
    for name in (OUTER_OPTIMIZER, RUN_PROGRESS, LOCAL_PROGRESS):
        if name in values:
            extra[name] = values[name]
    states: dict[str, object] = {
        "model": model_of(values),
        "optim": numbered_optimizer(optimizer, "inner_optimizer"),
        "scheduler": scheduler_state(values.get(SCHEDULER, {})),
        "trainer": {
            **(trainer if isinstance(trainer, Mapping) else {}),
            "iteration": iteration,
            _OURS: extra,
        },
    }
    for key, state in states.items():
        write_torch(path / _file(iteration, key, mp_rank), state)
    try:
        if RECORD in foreign.records:
            _replace(path / f"iter_{iteration:09d}_{RECORD}.json", json.dumps(foreign.records[RECORD]))
        _replace(path / POINTER, f"iter_{iteration:09d}.pt\n")
    except OSError as error:
        raise CheckpointFailed(f"{path} cannot be written: {error}") from error
    return iteration


def _file(iteration: int, key: str, mp_rank: int | None) -> str:
    if key == "trainer":
        return f"iter_{iteration:09d}.pt"
    suffix = "" if mp_rank is None else f"_mp_{mp_rank}"
    return f"iter_{iteration:09d}_{key}{suffix}.pt"


def _record(path: Path, iteration: int) -> dict[str, object]:
    file = path / f"iter_{iteration:09d}_{RECORD}.json"
    try:
        return {RECORD: json.loads(file.read_text())}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointRejected(f"{file} cannot be read: {error}") from error


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)
