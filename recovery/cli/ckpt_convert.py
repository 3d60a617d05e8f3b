"""``recovery ckpt convert`` and ``export``: between our layout, other systems' and plain safetensors."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from safetensors import SafetensorError
from safetensors.torch import save_file

from ckpt.interop.cosmos import is_cosmos, read_cosmos, write_cosmos
from ckpt.interop.dcp import is_dcp, read_dcp_nested, write_dcp
from ckpt.interop.foreign import Foreign, foreign_of, model_of
from ckpt.interop.zeroband import is_zeroband, read_zeroband, write_zeroband
from ckpt.reader import open_checkpoint
from ckpt.storage import Storage
from ckpt.writer import write_checkpoint
from recovery.cli.ckpt_options import Json, Options, Run, Url, VersionText, existing_at, step_of, storage_at, worker_of
from recovery.cli.output import Output
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.types import Incarnation, PartName, RunId, WorkerId, WorkerRef, checked_id

_KEPT = "kept_parts"
"""Entry of a DCP folder of ours that names the parts that belong to one worker alone."""


class Layout(StrEnum):
    """Whose folder a checkpoint is in."""

    OURS = "ours"
    ZEROBAND = "zeroband"
    COSMOS = "cosmos"
    DCP = "dcp"


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Our URL, or another system's folder.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where the other layout is written.")],
    to: Annotated[Layout, typer.Option("--to", help="The layout to write.")],
    step: Annotated[str, typer.Option("--step", help="Which step of ours to read.")] = "newest",
    run: Annotated[str, typer.Option("--run", help="The run; a new one's id when converting to ours.")] = "",
    worker: Annotated[
        str, typer.Option("--worker", help="Whose private parts; when converting to ours, whose they become.")
    ] = "",
    lineage: Annotated[int, typer.Option("--lineage", min=1, help="Lineage of the new step of ours.")] = 1,
    local_rank: Annotated[int, typer.Option("--local-rank", min=0, help="zeroband: whose files.")] = 0,
    names: Annotated[str, typer.Option("--parameter-names", help="Cosmos: a file with one name a line.")] = "",
    renamed: Annotated[
        list[str] | None,
        typer.Option("--rename", help="OLD=NEW: what a part is called in the worker, e.g. data_loader=data."),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Unpickle what is not plain data. Runs its writer's code!")
    ] = False,
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Convert between our layout, zeroband's, Cosmos's and torch DCP. The source's layout is recognised."""
    if to is not Layout.OURS and "://" in target:
        raise BadConfiguration(f"{target}: the layout {to.value} is written to a local folder; copy it from there")
    if to is Layout.OURS and not (run and worker):
        raise BadConfiguration("converting to our layout needs --run and --worker: whose checkpoint shall it be?")
    path = Path(source)
    found = _layout_of(path)
    listed = Path(names).read_text(encoding="utf-8").split() if names else None
    if found is Layout.OURS:
        foreign = _ours(existing_at(source, storage_options), step, run, worker)
    elif found is Layout.ZEROBAND:
        foreign = read_zeroband(path, local_rank=local_rank, allow_pickle=allow_pickle)
    elif found is Layout.COSMOS:
        foreign = read_cosmos(path, parameter_names=listed, allow_pickle=allow_pickle)
    else:
        foreign = _from_dcp(path, allow_pickle)
    if renamed:
        foreign = foreign.renamed(dict(map(_pair, renamed)))
    written = _write(to, target, foreign, run, worker, lineage, local_rank, storage_options)
    parts = sorted(foreign.values)
    Output(as_json=as_json).show(
        {
            "from": found.value,
            "to": to.value,
            "written": written,
            "parts": parts,
            "absent": {str(name): why for name, why in foreign.absent.items()},
        },
        f"{found.value} -> {to.value}: {written} ({', '.join(parts)})",
        *(f"  {name} is absent: {why}" for name, why in foreign.absent.items()),
    )


def export(
    url: Url,
    version: VersionText,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file to write.")],
    run: Run = "",
    worker: Annotated[str, typer.Option("--worker", help="Whose buffers to add; without it, the saver's.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there already.")] = False,
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Write a step's weights, and buffers if any, as one plain safetensors file. Every byte is verified."""
    _check_target(file, force=force)
    foreign = _ours(existing_at(url, storage_options), version, run, worker)
    weights = {name: tensor.detach().contiguous().clone() for name, tensor in model_of(foreign.values).items()}
    temporary = file.with_name(f".tmp-{file.name}")
    try:
        save_file(weights, temporary, metadata={"format": "pt"})
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointFailed(f"{file} cannot be written: {error}") from error
    Output(as_json=as_json).show(
        {"file": str(file), "tensors": len(weights), "bytes": file.stat().st_size},
        f"{file}: {len(weights)} tensors, {file.stat().st_size:,} bytes",
    )


def _check_target(file: Path, *, force: bool) -> None:
    if not file.parent.is_dir():
        raise BadConfiguration(
            f"{file} cannot be written: there is no folder {file.parent}; make it (mkdir -p) or name another one"
        )
    if file.is_dir():
        raise BadConfiguration(f"{file} is a folder: name the file to write in it, such as {file}/model.safetensors")
    if file.exists() and not force:
        raise BadConfiguration(f"{file} exists already and was left alone; --force replaces it, or name another file")


def _pair(text: str) -> tuple[PartName, PartName]:
    old, separator, new = text.partition("=")
    if not (old and separator and new):
        raise BadConfiguration(f"--rename {text!r} is not of the form OLD=NEW")
    return PartName(old), PartName(new)


def _ours(storage: Storage, version: str, run: str, worker: str) -> Foreign:
    step = step_of(storage, version, run)
    if not step.whole or step.num_local_ranks != 1:
        raise CheckpointRejected(f"{step.version} cannot be converted: {step.reason or 'it is cut for several ranks'}")
    saver = step.records[0].manifest.worker.worker_id
    owner = worker_of(worker) or next((w for w in (saver, *step.workers) if w in step.workers), None)
    with ExitStack() as opened:
        owners = [None, owner] if owner is not None else [None]
        return foreign_of(
            [opened.enter_context(open_checkpoint(storage, step.version, worker_id=one)) for one in owners]
        )


def _layout_of(path: Path) -> Layout:
    if is_zeroband(path):
        return Layout.ZEROBAND
    if is_dcp(path):
        return Layout.DCP
    return Layout.COSMOS if is_cosmos(path) else Layout.OURS


def _from_dcp(path: Path, allow_pickle: bool) -> Foreign:
    nested = read_dcp_nested(path, allow_pickle=allow_pickle)
    kept = nested.pop(_KEPT, [])
    values = {PartName(str(name)): value for name, value in nested.items()}
    progress = values.get(PartName("run_progress"))
    step = progress.get("outer_step") if isinstance(progress, dict) else 0
    names = [PartName(str(name)) for name in kept] if isinstance(kept, list) else []
    return Foreign(values=values, outer_step=step if isinstance(step, int) else 0, kept=names)


def _write(
    to: Layout, target: str, foreign: Foreign, run: str, worker: str, lineage: int, local_rank: int, options: str
) -> str:
    if to is Layout.ZEROBAND:
        return str(write_zeroband(Path(target), foreign, local_rank=local_rank))
    if to is Layout.COSMOS:
        return f"{target}/iter_{write_cosmos(Path(target), foreign):09d}.pt"
    if to is Layout.DCP:
        kept = {_KEPT: sorted(foreign.kept)} if foreign.kept else {}
        write_dcp(Path(target), {**{str(name): value for name, value in foreign.values.items()}, **kept})
        return target
    ref = WorkerRef(WorkerId(checked_id("worker id", worker)), Incarnation("convert"))
    source = foreign.source(run_id=RunId(checked_id("run id", run)), worker=ref, lineage=lineage)
    reports = write_checkpoint(storage_at(target, options), [source], records=foreign.side_records)
    return reports[0].url
