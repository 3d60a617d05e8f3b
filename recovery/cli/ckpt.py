"""``recovery ckpt``: what is on disk, whether it is right, and moving it elsewhere or into other layouts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from safetensors.torch import save_file

from ckpt.catalog import Catalog, Step
from ckpt.interop.cosmos import is_cosmos, read_cosmos, write_cosmos
from ckpt.interop.dcp import is_dcp, read_dcp_nested, write_dcp
from ckpt.interop.foreign import Foreign, foreign_of, model_of
from ckpt.interop.zeroband import is_zeroband, read_zeroband, write_zeroband
from ckpt.objects import open_storage
from ckpt.reader import Checkpoint, open_checkpoint
from ckpt.retention import Retention, RetentionPolicy
from ckpt.storage import Storage
from ckpt.transfer import copy_step
from ckpt.writer import write_checkpoint
from recovery.cli.output import Output
from recovery.errors import BadConfiguration, CheckpointFailed, CheckpointRejected
from recovery.state.compare import compare
from recovery.types import Incarnation, PartName, RunId, Version, WorkerId, WorkerRef

DAMAGED = 3
"""Exit code of ``verify`` when something is damaged, and of ``diff`` when something differs."""

app = typer.Typer(
    help="Look at, verify, copy and convert checkpoints on disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_KEPT = "kept_parts"
"""Entry of a DCP folder of ours that names the parts that belong to one worker alone."""

_VERSION = re.compile(r"(?:step_|L)?([1-9][0-9]*)(?:_|\.k?)([0-9]+)")

Url = Annotated[str, typer.Argument(metavar="URL", help="A folder, or a URL such as s3://bucket/prefix.")]
VersionText = Annotated[str, typer.Argument(metavar="STEP", help="L1.k20, 1.20, step_1_20, or 'newest'.")]
Run = Annotated[str, typer.Option("--run", help="Only this run's steps.")]
Worker = Annotated[str, typer.Option("--worker", help="This worker's private parts instead of the replicated ones.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Options = Annotated[str, typer.Option("--storage-options", help="JSON for the storage's client, e.g. an endpoint.")]


class Layout(StrEnum):
    """Whose folder a checkpoint is in."""

    OURS = "ours"
    ZEROBAND = "zeroband"
    COSMOS = "cosmos"
    DCP = "dcp"


@app.command("list")
def list_steps(url: Url, run: Run = "", storage_options: Options = "", as_json: Json = False) -> None:
    """List every step, newest first, and whether it is whole."""
    steps = Catalog(_storage(url, storage_options), _run(run)).steps()
    table = Table("step", "state", "saved", "bytes", "saver", "private parts of", "why")
    output = Output(as_json=as_json)
    for step in steps:
        row = _plain(step)
        if as_json:
            output.show(row)
        table.add_row(
            str(step.version),
            step.state.value,
            str(row["saved_at"] or ""),
            f"{step.num_bytes:,}",
            str(row["saver"] or ""),
            ", ".join(step.workers),
            step.reason,
        )
    if not as_json:
        output.show({}, table if steps else f"{url} holds no steps")


@app.command()
def show(
    url: Url,
    version: VersionText,
    run: Run = "",
    worker: Worker = "",
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Show what one checkpoint holds: parts, tensors, digests, records."""
    with _opened(_storage(url, storage_options), version, run, worker) as checkpoint:
        manifest = checkpoint.manifest
        facts: dict[str, Any] = {
            "url": checkpoint.url,
            "run": manifest.run_id,
            "cut": str(manifest.cut),
            "worker": str(manifest.worker),
            "numerics": manifest.numerics_id,
            "fingerprint": manifest.fingerprint.hex(),
            "digests": manifest.digest_algorithm.value,
            "torch": checkpoint.record.torch_version,
            "package": checkpoint.record.package_version,
            "saved_at": _time(checkpoint.record.saved_at),
            "records": dict(checkpoint.record.records),
            "parts": [
                {
                    "name": part.name,
                    "class": part.part_class.value,
                    "bytes": part.num_bytes,
                    "tensors": len(part.tensors),
                    "chunks": len(part.chunks),
                    "file": checkpoint.record.file(part.name).path,
                }
                for part in manifest.parts
            ],
        }
        table = Table("part", "class", "bytes", "tensors", "chunks", "file")
        for part in facts["parts"]:
            table.add_row(
                part["name"],
                part["class"],
                f"{part['bytes']:,}",
                str(part["tensors"]),
                str(part["chunks"]),
                part["file"],
            )
        lines = [f"{key}: {value}" for key, value in facts.items() if key != "parts"]
        Output(as_json=as_json).show(facts, "\n".join(lines), table)


@app.command()
def verify(
    url: Url,
    version: Annotated[str, typer.Argument(metavar="STEP", help="One step; without it, every step.")] = "",
    run: Run = "",
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Read every byte and compare it with the manifests. Exit code 0: all right. 3: something is damaged."""
    storage = _storage(url, storage_options)
    catalog = Catalog(storage, _run(run))
    steps = [_step(storage, version, run)] if version else catalog.steps()
    if not steps:
        raise CheckpointRejected(f"{storage.url} holds no checkpoint to verify: is this the right folder, and run id?")
    output, damaged = Output(as_json=as_json), False
    with _progress("verifying", sum(step.num_bytes for step in steps), quiet=as_json) as advance:
        for step in steps:
            problems = [] if step.whole else [f"{step.state.value}: {step.reason}"]
            problems += [f"worker {worker}: {reason}" for worker, reason in step.torn_workers.items()]
            for checkpoint in _shares(storage, step):
                with checkpoint:
                    problems += [str(damage) for damage in checkpoint.damages(advance)]
            damaged |= bool(problems)
            lines = [
                f"{step.version}: {'damaged' if problems else 'every byte is right'}",
                *(f"  {p}" for p in problems),
            ]
            output.show({"step": str(step.version), "ok": not problems, "problems": problems}, "\n".join(lines))
    if damaged:
        raise typer.Exit(DAMAGED)


@app.command()
def diff(
    url: Url,
    version: VersionText,
    other_url: Annotated[str, typer.Argument(metavar="URL2")],
    other_version: Annotated[str, typer.Argument(metavar="STEP2")],
    worker: Worker = "",
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Name every leaf that differs between two checkpoints, from their manifests alone. Exit code 3: they differ."""
    with (
        _opened(_storage(url, storage_options), version, "", worker) as one,
        _opened(_storage(other_url, storage_options), other_version, "", worker) as other,
    ):
        differences = [str(difference) for difference in compare(one.manifest, other.manifest)]
    Output(as_json=as_json).show(
        {"equal": not differences, "differences": differences},
        "\n".join(differences) if differences else "they hold the same bits",
    )
    if differences:
        raise typer.Exit(DAMAGED)


@app.command()
def prune(
    url: Url,
    run: Annotated[str, typer.Option("--run", help="The run whose steps may go.")],
    keep: Annotated[int, typer.Option("--keep", help="Newest verified steps that stay.")] = 3,
    every: Annotated[int, typer.Option("--every", help="Outer steps that are multiples of this stay for ever.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Delete steps that enough newer verified ones make superfluous. Never what is read, not ours, or the last."""
    retention = Retention(
        _storage(url, storage_options), RunId(run), RetentionPolicy(keep_newest=keep, keep_every=every)
    )
    output = Output(as_json=as_json)
    for verdict in retention.plan() if dry_run else retention.run():
        word = ("would go" if dry_run else "gone") if verdict.delete else "stays"
        output.show(
            {"step": str(verdict.version), "deleted": verdict.delete and not dry_run, "reason": verdict.reason},
            f"{verdict.version} {word}: {verdict.reason}",
        )


@app.command()
def copy(
    url: Url,
    version: VersionText,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Another folder or URL.")],
    run: Run = "",
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Copy a step, every byte verified when it is read and again where it arrives."""
    storage = _storage(url, storage_options)
    step = _step(storage, version, run)
    with _progress("copying", 2 * step.num_bytes, quiet=as_json) as advance:
        report = copy_step(storage, _storage(target, storage_options), step.version, run_id=_run(run), progress=advance)
    Output(as_json=as_json).show(
        {"url": report.url, "bytes": report.num_bytes, "moved": report.moved_bytes, "reused": report.reused_bytes},
        f"{report.url}: {report.num_bytes:,} bytes, {report.reused_bytes:,} of them were there already",
    )


@app.command()
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
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Unpickle what is not plain data. Runs its writer's code!")
    ] = False,
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Convert between our layout, zeroband's, Cosmos's and torch DCP. The source's layout is recognised."""
    path = Path(source)
    found = _layout_of(path)
    listed = Path(names).read_text().split() if names else None
    if found is Layout.OURS:
        foreign = _ours(_storage(source, storage_options), step, run, worker)
    elif found is Layout.ZEROBAND:
        foreign = read_zeroband(path, local_rank=local_rank, allow_pickle=allow_pickle)
    elif found is Layout.COSMOS:
        foreign = read_cosmos(path, parameter_names=listed, allow_pickle=allow_pickle)
    else:
        foreign = _from_dcp(path, allow_pickle)
    written = _write(to, target, foreign, run, worker, lineage, local_rank, storage_options)
    parts = sorted(foreign.values)
    Output(as_json=as_json).show(
        {"from": found.value, "to": to.value, "written": written, "parts": parts},
        f"{found.value} -> {to.value}: {written} ({', '.join(parts)})",
    )


@app.command()
def export(
    url: Url,
    version: VersionText,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file to write.")],
    run: Run = "",
    worker: Annotated[str, typer.Option("--worker", help="Whose buffers to add; without it, the saver's.")] = "",
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Write a step's weights, and buffers if any, as one plain safetensors file. Every byte is verified."""
    foreign = _ours(_storage(url, storage_options), version, run, worker)
    weights = {name: tensor.detach().contiguous().clone() for name, tensor in model_of(foreign.values).items()}
    temporary = file.with_name(f".tmp-{file.name}")
    try:
        save_file(weights, temporary, metadata={"format": "pt"})
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointFailed(f"{file} cannot be written: {error}") from error
    Output(as_json=as_json).show(
        {"file": str(file), "tensors": len(weights), "bytes": file.stat().st_size},
        f"{file}: {len(weights)} tensors, {file.stat().st_size:,} bytes",
    )


def parse_version(text: str) -> Version:
    """Return the version that a person wrote.

    Raises:
        BadConfiguration: it is none of the forms.
    """
    match = _VERSION.fullmatch(text)
    if not match:
        raise BadConfiguration(f"step {text!r} is not of the form L1.k20, 1.20, step_1_20 or 'newest'")
    return Version(int(match[1]), int(match[2]))


def _storage(url: str, options: str) -> Storage:
    try:
        parsed = json.loads(options) if options else {}
    except ValueError as error:
        raise BadConfiguration(f"--storage-options {options!r} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadConfiguration(f"--storage-options {options!r} is not a JSON object")
    return open_storage(url, parsed)


def _run(run: str) -> RunId | None:
    return RunId(run) if run else None


def _step(storage: Storage, version: str, run: str) -> Step:
    catalog = Catalog(storage, _run(run))
    if version == "newest":
        newest = catalog.newest()
        if newest is None:
            raise CheckpointRejected(f"{storage.url} holds no whole step")
        return newest
    wanted = parse_version(version)
    return catalog.look(wanted) or catalog.get(wanted)


def _opened(storage: Storage, version: str, run: str, worker: str) -> Checkpoint:
    step = _step(storage, version, run)
    owner = WorkerId(worker) if worker else None
    num_ranks = step.num_local_ranks if owner is None else step.local_ranks_of.get(owner, 1)
    return open_checkpoint(storage, step.version, run_id=_run(run), worker_id=owner, num_local_ranks=num_ranks)


def _shares(storage: Storage, step: Step) -> Iterator[Checkpoint]:
    owners: list[WorkerId | None] = [None] if step.whole else []
    for owner in [*owners, *step.workers]:
        num_ranks = step.num_local_ranks if owner is None else step.local_ranks_of[owner]
        for rank in range(num_ranks):
            yield open_checkpoint(storage, step.version, worker_id=owner, local_rank=rank, num_local_ranks=num_ranks)


def _ours(storage: Storage, version: str, run: str, worker: str) -> Foreign:
    step = _step(storage, version, run)
    if not step.whole or step.num_local_ranks != 1:
        raise CheckpointRejected(f"{step.version} cannot be converted: {step.reason or 'it is cut for several ranks'}")
    saver = step.records[0].manifest.worker.worker_id
    owner = WorkerId(worker) if worker else next((w for w in (saver, *step.workers) if w in step.workers), None)
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
    if not run or not worker:
        raise BadConfiguration("converting to our layout needs --run and --worker: whose checkpoint shall it be?")
    ref = WorkerRef(WorkerId(worker), Incarnation("convert"))
    source = foreign.source(run_id=RunId(run), worker=ref, lineage=lineage)
    reports = write_checkpoint(_storage(target, options), [source], records=foreign.records)
    return reports[0].url


def _plain(step: Step) -> dict[str, Any]:
    first = step.records[0] if step.records else None
    return {
        "step": str(step.version),
        "lineage": step.version.lineage,
        "outer_step": step.version.outer_step,
        "state": step.state.value,
        "reason": step.reason,
        "bytes": step.num_bytes,
        "run": first.manifest.run_id if first else None,
        "saver": first.manifest.worker.worker_id if first else None,
        "saved_at": _time(first.saved_at) if first else None,
        "fingerprint": first.manifest.fingerprint.hex() if first else None,
        "workers": list(step.workers),
        "torn_workers": dict(step.torn_workers),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Any]:
    """Show a bar on standard error while bytes go by, if a person is looking."""
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
