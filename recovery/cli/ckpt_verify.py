"""Verifying one step of a folder in which a run may save and delete at the same time."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.catalog import Catalog, Step, StepState
from ckpt.layout import REPLICATED_FOLDER, is_manifest_name, step_folder, worker_folder
from ckpt.storage import Storage
from recovery.cli.ckpt_options import shares
from recovery.errors import CheckpointRejected

_TRIES = 3
"""A save that ends, or a worker's that begins, while a step is looked at makes one more look necessary."""


class Finding(enum.Enum):
    """What became of a step; the value is what people read."""

    WHOLE = "every byte is right"
    PRIVATE_ONLY = "every byte is right, but they are private parts only"
    DAMAGED = "damaged"
    BEING_WRITTEN = "being written"
    PRUNED = "pruned meanwhile"


@dataclass(frozen=True, slots=True)
class Verified:
    """The finding about one step, and its reasons."""

    finding: Finding
    problems: tuple[str, ...] = ()


def verify_step(catalog: Catalog, listed: Step, advance: Callable[[int], None]) -> Verified:
    """Read every byte of a step as it is now.

    Args:
        catalog: Where.
        listed: As an earlier listing found it.
        advance: Told each number of bytes that were read.
    """
    step, damage, waiting = listed, list[str](), list[str]()
    for _ in range(_TRIES):
        now = _look(catalog, step)
        if now is None or _gone(catalog.storage, step, now):
            return Verified(Finding.PRUNED)
        step = now
        damage, waiting = _problems(catalog, step, advance)
        if not damage and not waiting:
            if step.state is StepState.PRIVATE:
                return Verified(Finding.PRIVATE_ONLY, (step.reason,))
            return Verified(Finding.WHOLE)
        now = _look(catalog, step)
        if now is None or _gone(catalog.storage, step, now):
            return Verified(Finding.PRUNED)
        if (now.files, now.unfinished) == (step.files, step.unfinished):
            break
    if not damage and _is_busy(catalog.storage, step):
        return Verified(Finding.BEING_WRITTEN, tuple(waiting))
    return Verified(Finding.DAMAGED, (*waiting, *damage))


def _problems(catalog: Catalog, step: Step, advance: Callable[[int], None]) -> tuple[list[str], list[str]]:
    """Return what is wrong, and what only lacks its manifest."""
    damage: list[str] = []
    waiting: list[str] = []
    if not step.whole and step.state is not StepState.PRIVATE:
        (waiting if None in step.unfinished else damage).append(f"{step.state.value}: {step.reason}")
    for worker, reason in step.torn_workers.items():
        (waiting if worker in step.unfinished else damage).append(f"worker {worker}: {reason}")
    try:
        for checkpoint in shares(catalog.storage, step):
            with checkpoint:
                damage += [str(found) for found in checkpoint.damages(advance)]
    except (CheckpointRejected, FileNotFoundError) as error:  # changed since the look, or it cannot be opened
        damage.append(" ".join(str(error).split()))
    return damage, waiting


def _look(catalog: Catalog, step: Step) -> Step | None:
    try:
        return catalog.look(step.version)
    except OSError:
        return step  # what the listing said of it stands


def _gone(storage: Storage, before: Step, now: Step) -> bool:
    """Return whether manifests went and were not replaced: who deletes a step begins with them."""
    lost = {path for path in before.files if is_manifest_name(path.rpartition("/")[2])} - set(now.files)
    return not now.whole and any(storage.num_bytes(path) is None for path in lost)


def _is_busy(storage: Storage, step: Step) -> bool:
    folder = step_folder(step.version)
    workers = [worker_folder(worker) for worker in (*step.torn_workers, *step.workers)]
    return any(storage.being_written(name) for name in _folders(folder, workers))


def _folders(folder: str, workers: list[str]) -> list[str]:
    return [folder, f"{folder}/{REPLICATED_FOLDER}", *(f"{folder}/{name}" for name in workers)]
