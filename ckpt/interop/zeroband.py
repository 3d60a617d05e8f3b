"""zeroband's folders.

::

    step_<n>/.metadata, __<rank>_<i>.distcp     DCP: model.*, optimizer.state.<parameter>.*, optimizer.param_groups.
                                                <parameter>.<option>, scheduler.*, training_progress.*
    step_<n>/__<local rank>_0.pt                {"optimizer": the outer optimizer's state dict}
    step_<n>/data/_<local rank>.pt              {"data_loader": its state dict}
    step_<n>/diloco_<i>/...                     older: the same, one level down
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ckpt.interop.dcp import is_dcp, read_dcp, write_dcp
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
from recovery.errors import CheckpointFailed, CheckpointRejected
from recovery.types import PartName

DATA_LOADER = PartName("data_loader")
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,18})")
_OLDER = re.compile(r"diloco_(0|[1-9][0-9]*)")


def is_zeroband(path: Path) -> bool:
    """Return whether a folder is one step of zeroband's."""
    return _STEP.fullmatch(path.name) is not None and (is_dcp(path) or any(_older(path)))


def read_zeroband(path: Path, *, local_rank: int = 0, diloco: int = 0, allow_pickle: bool = False) -> Foreign:
    """Return one local rank's view of a step.

    Args:
        path: The ``step_<n>`` folder.
        local_rank: Whose outer optimizer and data loader.
        diloco: Which sub-folder, in the older layout.
        allow_pickle: Unpickle what ``weights_only`` refuses. Only for one's own files.

    Raises:
        CheckpointRejected: it is damaged, incomplete, or needs unpickling.
    """
    folder = path if is_dcp(path) else path / f"diloco_{diloco}"
    flat = read_dcp(folder, allow_pickle=allow_pickle)
    model = _below(flat, "model.")
    if not model:
        raise CheckpointRejected(f"{folder} holds no model")
    optimizer = _optimizer(flat, list(model))
    groups = optimizer["param_groups"]
    assert isinstance(groups, list)
    trained = [str(name) for group in groups for name in group["params"]] or None
    parameters, buffers = parameters_and_buffers(model, trained)
    progress = _below(flat, "training_progress.")
    tokens = number(progress.get("total_tokens", 0), "training_progress.total_tokens")
    values: dict[PartName, object] = {OUTER: parameters}
    absent: dict[PartName, str] = {}
    outer_file = folder / f"__{local_rank}_0.pt"
    if outer_file.is_file():
        content = read_torch(outer_file, str(outer_file), allow_pickle=allow_pickle)
        if not isinstance(content, dict) or not isinstance(content.get("optimizer"), dict):
            raise CheckpointRejected(f"{outer_file} holds no outer optimizer")
        values[OUTER_OPTIMIZER] = named_optimizer(content["optimizer"], list(parameters), str(outer_file))
    else:
        absent[OUTER_OPTIMIZER] = f"there is no {outer_file.name}"
    outer_step = number(progress.get("outer_step", 0), "training_progress.outer_step")
    values[RUN_PROGRESS] = {"outer_step": outer_step, "tokens": tokens}
    values[INNER_OPTIMIZER] = optimizer
    values[SCHEDULER] = scheduler_part(_below(flat, "scheduler."))
    step = number(progress.get("step", 0), "training_progress.step")
    values[LOCAL_PROGRESS] = {"inner_step": step, "tokens": tokens}
    if buffers:
        values[BUFFERS] = buffers
    data_file = folder / "data" / f"_{local_rank}.pt"
    kept = []
    if data_file.is_file():
        content = read_torch(data_file, str(data_file), allow_pickle=allow_pickle)
        if not isinstance(content, dict) or "data_loader" not in content:
            raise CheckpointRejected(f"{data_file} holds no data loader's state")
        values[DATA_LOADER] = content["data_loader"]
        kept.append(DATA_LOADER)
    else:
        absent[DATA_LOADER] = f"there is no {data_file.parent.name}/{data_file.name}"
    return Foreign(values=values, outer_step=outer_step, kept=kept, origin="zeroband", absent=absent)


def write_zeroband(root: Path, foreign: Foreign, *, local_rank: int = 0) -> Path:
    """Write parts as a step of zeroband's; return its folder.

    Raises:
        CheckpointFailed: the folder holds a checkpoint already, or the disk refused it.
    """
    values = foreign.values
    local = values.get(LOCAL_PROGRESS)
    run = values.get(RUN_PROGRESS)
    if not isinstance(local, Mapping) or not isinstance(run, Mapping):
        raise CheckpointFailed("zeroband's layout needs the parts run_progress and local_progress")
    folder = root / f"step_{local['inner_step']}"
    state: dict[str, object] = {f"model.{name}": tensor for name, tensor in model_of(values).items()}
    optimizer = values.get(INNER_OPTIMIZER)
    if isinstance(optimizer, Mapping):
        for name, entry in optimizer["state"].items():
            state.update({f"optimizer.state.{name}.{key}": value for key, value in entry.items()})
        for group in optimizer["param_groups"]:
            for name in group["params"]:
                for option, value in group.items():
                    if option != "params":
                        state[f"optimizer.param_groups.{name}.{option}"] = value
    scheduler = scheduler_state(values.get(SCHEDULER))
    if isinstance(scheduler, Mapping):
        state.update({f"scheduler.{key}": value for key, value in scheduler.items()})
    for key, value in (
        ("total_tokens", run["tokens"]),
        ("outer_step", run["outer_step"]),
        ("step", local["inner_step"]),
    ):
        state[f"training_progress.{key}"] = value
    write_dcp(folder, state)
    if OUTER_OPTIMIZER in values:
        outer = numbered_optimizer(values[OUTER_OPTIMIZER], "outer_optimizer")
        write_torch(folder / f"__{local_rank}_0.pt", {"optimizer": outer})
    loader = next((name for name in (DATA_LOADER, *foreign.kept) if name in values), None)
    if loader is not None:
        write_torch(folder / "data" / f"_{local_rank}.pt", {"data_loader": values[loader]})
    return folder


def _optimizer(flat: Mapping[str, object], names: list[str]) -> dict[str, object]:
    """Return the flattened inner optimizer as a part. Parameters with equal options become one group again."""
    longest_first = sorted(names, key=len, reverse=True)

    def split(key: str) -> tuple[str, str]:
        for name in longest_first:
            if key.startswith(f"{name}."):
                return name, key.removeprefix(f"{name}.")
        raise CheckpointRejected(f"the optimizer's entry {key} belongs to no parameter of the model")

    entries: dict[str, dict[str, object]] = {}
    for key, value in _below(flat, "optimizer.state.").items():
        name, what = split(key)
        entries.setdefault(name, {})[what] = value
    options: dict[str, dict[str, object]] = {}
    for key, value in _below(flat, "optimizer.param_groups.").items():
        name, what = split(key)
        options.setdefault(name, {})[what] = value
    groups: list[dict[str, object]] = []
    for name in (name for name in names if name in options):
        for group in groups:
            if {key: value for key, value in group.items() if key != "params"} == options[name]:
                members = group["params"]
                assert isinstance(members, list)
                members.append(name)
                break
        else:
            groups.append({**options[name], "params": [name]})
    return {"class": "", "state": {n: entries[n] for n in names if n in entries}, "param_groups": groups}


def _below(flat: Mapping[str, object], prefix: str) -> dict[str, object]:
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def _older(path: Path) -> list[Path]:
    return [sub for sub in path.glob("diloco_*") if _OLDER.fullmatch(sub.name) and is_dcp(sub)]
