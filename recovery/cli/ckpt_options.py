"""What the commands of ``recovery ckpt`` share: their options, opening what a person named, progress bars."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ckpt.catalog import Catalog, Step
from ckpt.layout import step_folder
from ckpt.local import LocalStorage
from ckpt.objects import open_storage
from ckpt.reader import Checkpoint, open_checkpoint
from ckpt.storage import Storage
from recovery.errors import BadConfiguration, CheckpointRejected
from recovery.types import RunId, Version, WorkerId, checked_id

_VERSION = re.compile(r"(?:step_|L)?([1-9][0-9]*)(?:_|\.k?)([0-9]+)")

Url = Annotated[str, typer.Argument(metavar="URL", help="A folder, or a URL such as s3://bucket/prefix.")]
VersionText = Annotated[str, typer.Argument(metavar="STEP", help="L1.k20, 1.20, step_1_20, or 'newest'.")]
Run = Annotated[str, typer.Option("--run", help="Only this run's steps.")]
Worker = Annotated[str, typer.Option("--worker", help="This worker's private parts instead of the replicated ones.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Options = Annotated[str, typer.Option("--storage-options", help="JSON for the storage's client, e.g. an endpoint.")]


def parse_version(text: str) -> Version:
    """Return the version that a person wrote.

    Raises:
        BadConfiguration: it is none of the forms, or no step can have that number.
    """
    match = _VERSION.fullmatch(text)
    if not match:
        raise BadConfiguration(f"step {text!r} is not of the form L1.k20, 1.20, step_1_20 or 'newest'")
    version = Version(int(match[1]), int(match[2]))
    try:
        step_folder(version)
    except ValueError as error:
        raise BadConfiguration(f"step {text!r}: {error}") from error
    return version


def storage_at(url: str, options: str) -> Storage:
    """Return the storage that a person named.

    Raises:
        BadConfiguration: the options are no JSON object, or nothing can open such a URL.
    """
    try:
        parsed = json.loads(options) if options else {}
    except ValueError as error:
        raise BadConfiguration(f"--storage-options {options!r} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadConfiguration(f"--storage-options {options!r} is not a JSON object")
    return open_storage(url, parsed)


def existing_at(url: str, options: str) -> Storage:
    """Return the storage that a person named to read from.

    Raises:
        BadConfiguration: as ``storage_at``, or it is a folder that does not exist. A prefix of a bucket exists always.
    """
    storage = storage_at(url, options)
    if isinstance(storage, LocalStorage):
        try:
            is_folder = stat.S_ISDIR(storage.root.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            raise BadConfiguration(
                f"the folder {storage.root} does not exist: name the one that the run saves to"
            ) from None
        if not is_folder:
            raise BadConfiguration(f"{storage.root} is no folder: name the one that holds the steps")
    return storage


def run_of(run: str) -> RunId | None:
    """Return the run that a person named; None for every run."""
    return RunId(checked_id("run id", run)) if run else None


def worker_of(worker: str) -> WorkerId | None:
    """Return the worker that a person named, or None."""
    return WorkerId(checked_id("worker id", worker)) if worker else None


def step_of(storage: Storage, version: str, run: str) -> Step:
    """Return the step that a person named, whole or not.

    Raises:
        BadConfiguration: it is not there.
        CheckpointRejected: the newest was asked for and there is none.
    """
    catalog = Catalog(storage, run_of(run))
    if version == "newest":
        newest = catalog.newest()
        if newest is None:
            raise CheckpointRejected(f"{storage.url} holds no whole step")
        return newest
    wanted = parse_version(version)
    return catalog.look(wanted) or catalog.get(wanted)


def opened(storage: Storage, version: str, run: str, worker: str) -> Checkpoint:
    """Return the replicated parts of a step, or a worker's private ones, open for reading."""
    step = step_of(storage, version, run)
    owner = worker_of(worker)
    num_ranks = step.num_local_ranks if owner is None else step.local_ranks_of.get(owner, 1)
    return open_checkpoint(storage, step.version, run_id=run_of(run), worker_id=owner, num_local_ranks=num_ranks)


def shares(storage: Storage, step: Step) -> Iterator[Checkpoint]:
    """Yield every checkpoint of a step, replicated parts first. Who takes one closes it."""
    owners: list[WorkerId | None] = [None] if step.whole else []
    for owner in [*owners, *step.workers]:
        num_ranks = step.num_local_ranks if owner is None else step.local_ranks_of[owner]
        for rank in range(num_ranks):
            yield open_checkpoint(storage, step.version, worker_id=owner, local_rank=rank, num_local_ranks=num_ranks)


@contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Any]:
    """Show a bar on standard error while bytes go by, if a person is looking."""
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
