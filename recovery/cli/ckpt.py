"""``recovery ckpt``: what is on disk, whether it is right, and moving it elsewhere or into other layouts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from ckpt.catalog import Catalog, Step
from ckpt.retention import Retention, RetentionPolicy
from ckpt.transfer import copy_step
from recovery.cli.ckpt_convert import convert, export
from recovery.cli.ckpt_options import (
    Json,
    Options,
    Run,
    Url,
    VersionText,
    Worker,
    existing_at,
    opened,
    progress,
    run_of,
    step_of,
    storage_at,
)
from recovery.cli.ckpt_verify import Finding, verify_step
from recovery.cli.output import Output
from recovery.errors import CheckpointRejected
from recovery.state.compare import compare
from recovery.types import RunId

DAMAGED = 3
"""Exit code of ``verify`` when something is damaged, and of ``diff`` when something differs."""

app = typer.Typer(
    help="Look at, verify, copy and convert checkpoints on disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(convert)
app.command()(export)


@app.command("list")
def list_steps(url: Url, run: Run = "", storage_options: Options = "", as_json: Json = False) -> None:
    """List every step, newest first, and whether it is whole."""
    steps = Catalog(existing_at(url, storage_options), run_of(run)).steps()
    table = Table("step", "state", "run", "saved", "bytes", "saver", "private parts of", "why")
    output = Output(as_json=as_json)
    for step in steps:
        row = _plain(step)
        if as_json:
            output.show(row)
        table.add_row(
            str(step.version),
            step.state.value,
            str(row["run"] or ""),
            str(row["saved_at"] or ""),
            f"{step.num_bytes:,}",
            str(row["saver"] or ""),
            ", ".join(step.workers),
            step.reason or (f"kept: {step.kept}" if step.kept else ""),
        )
    if not as_json:
        output.show({}, table if steps else f"{url} holds no steps")


@app.command()
def show(
    url: Url,
    version: VersionText = "newest",
    run: Run = "",
    worker: Worker = "",
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Show what one checkpoint holds: parts, tensors, digests, records."""
    with opened(existing_at(url, storage_options), version, run, worker) as checkpoint:
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
    """Read every byte and compare it with the manifests. Exit code 0: all right. 3: something is damaged.

    A run may save and delete meanwhile: steps that are being written, or go while they are read, are no damage.
    """
    storage = existing_at(url, storage_options)
    catalog = Catalog(storage, run_of(run))
    steps = [step_of(storage, version, run)] if version else catalog.steps()
    if not steps:
        raise CheckpointRejected(f"{storage.url} holds no checkpoint to verify: is this the right folder, and run id?")
    output, damaged = Output(as_json=as_json), False
    with progress("verifying", sum(step.num_bytes for step in steps), quiet=as_json) as advance:
        for step in steps:
            found = verify_step(catalog, step, advance)
            bad = found.finding is Finding.DAMAGED
            damaged |= bad
            output.show(
                {
                    "step": str(step.version),
                    "ok": not bad,
                    "finding": found.finding.name.lower(),
                    "problems": list(found.problems),
                },
                "\n".join([f"{step.version}: {found.finding.value}", *(f"  {p}" for p in found.problems)]),
            )
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
        opened(existing_at(url, storage_options), version, "", worker) as one,
        opened(existing_at(other_url, storage_options), other_version, "", worker) as other,
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
    marked: Annotated[bool, typer.Option("--marked", help="Also those that were saved by order to be kept.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    storage_options: Options = "",
    as_json: Json = False,
) -> None:
    """Delete steps that enough newer verified ones make superfluous. Never what is read, not ours, or the last."""
    retention = Retention(
        existing_at(url, storage_options),
        RunId(run),
        RetentionPolicy(keep_newest=keep, keep_every=every, keep_marked=not marked),
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
    storage = existing_at(url, storage_options)
    step = step_of(storage, version, run)
    with progress("copying", 2 * step.num_bytes, quiet=as_json) as advance:
        there = storage_at(target, storage_options)
        report = copy_step(storage, there, step.version, run_id=run_of(run), progress=advance)
    Output(as_json=as_json).show(
        {"url": report.url, "bytes": report.num_bytes, "moved": report.moved_bytes, "reused": report.reused_bytes},
        f"{report.url}: {report.num_bytes:,} bytes, {report.reused_bytes:,} of them were there already",
    )


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
        "kept": step.kept,
        "workers": list(step.workers),
        "torn_workers": dict(step.torn_workers),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
