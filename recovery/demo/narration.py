"""The words in which the demo tells what happened: one line an event, with bytes, seconds, rates and who waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recovery.demo.reports import COORDINATOR, Entry

MEGABYTE = 1e6
GIGABYTE = 1e9
NOTEWORTHY_WAIT_SECONDS = 0.1
"""Shorter waits at a boundary are not told: they would drown the rest."""


def narrate(entry: Entry) -> str | None:
    """Return the line that tells ``entry`` to a person; None if it is not worth one."""
    teller = _TELLERS.get(entry.kind)
    if entry.kind in _TOLD_BY_COORDINATOR and entry.source != COORDINATOR:
        return None
    if entry.kind in _TOLD_BY_WORKERS and entry.source == COORDINATOR:
        return None
    told = None if teller is None else teller(entry)
    return None if told is None else f"[{entry.seconds:6.1f}s] {told}"


def rate(num_bytes: float, seconds: float) -> str:
    """Return bytes, seconds and GB/s in words."""
    speed = f"{num_bytes / seconds / GIGABYTE:.3f} GB/s" if seconds > 0 else "at once"
    return f"{num_bytes / MEGABYTE:.2f} MB in {seconds:.3f} s, {speed}"


def megabytes(entry: Entry, field: str) -> str:
    """Return the bytes in ``field`` in words."""
    return f"{entry.number(field) / MEGABYTE:.2f} MB"


def _disk_rate(entry: Entry) -> str:
    return rate(entry.number("num_bytes"), entry.number("took_seconds"))


def _who(entry: Entry) -> str:
    return entry.text("worker_id") or entry.source


def _transfer_ended(entry: Entry) -> str:
    if entry.text("failure"):
        return f"{_who(entry)}: attempt {entry.text('attempt')} of its transfer failed: {entry.text('failure')}"
    reused = entry.number("reused_bytes")
    again = f"; {megabytes(entry, 'reused_bytes')} it already had" if reused else ""
    received = rate(entry.number("payload_bytes"), entry.number("took_seconds"))
    return f"{_who(entry)} received {received}{again}, cut {entry.text('cut')}"


def _roster(entry: Entry) -> str | None:
    missing = entry.texts("missing")
    waited = entry.number("waited_seconds")
    if waited < NOTEWORTHY_WAIT_SECONDS and not missing:
        return None
    for_whom = f"; not there: {', '.join(missing)}" if missing else ""
    return f"boundary {entry.text('version')}: {len(entry.texts('members'))} members waited {waited:.2f} s{for_whom}"


def _epoch(entry: Entry) -> str | None:
    if "aborted" not in entry.text("verdict").lower():
        return None
    return f"epoch {entry.text('epoch')} aborted: {entry.text('reason')}; all average again"


def _guard(entry: Entry) -> str | None:
    if not entry.number("copied_bytes"):
        return None
    return (
        f"{_who(entry)} copied {megabytes(entry, 'copied_bytes')} before its outer step, because a joiner still reads: "
        f"{entry.number('training_thread_seconds') * 1e3:.1f} ms of its training thread"
    )


def _captured(entry: Entry) -> str:
    return (
        f"{_who(entry)} captured {megabytes(entry, 'num_bytes')} at {entry.text('cut')}: "
        f"{entry.number('training_thread_seconds') * 1e3:.1f} ms of its training thread"
    )


def _waited(entry: Entry) -> str | None:
    seconds = entry.number("waited_seconds")
    if seconds < NOTEWORTHY_WAIT_SECONDS:
        return None
    return f"{_who(entry)} waited {seconds:.2f} s for {entry.text('for_whom') or 'nobody'} ({entry.text('what')})"


def _sealed(entry: Entry) -> str:
    reporters = ", ".join(entry.texts("reporters"))
    return f"sealed {entry.text('version')}  {entry.text('fingerprint')[:12]}  by {reporters}"


def _lineage(entry: Entry) -> str:
    lost = entry.number("lost_steps")
    parent = f" of {entry.text('parent')}, {lost:.0f} step(s) lost" if entry.text("cause") != "origin" else ""
    return f"lineage begins at {entry.text('version')}: {entry.text('cause')}{parent}"


def _verified(entry: Entry) -> str:
    different = ", ".join(entry.texts("different")) or "every tensor as sealed"
    return f"verify {entry.text('worker')} by RPC ({entry.text('when')}): {different}"


_TELLERS: dict[str, Callable[[Entry], str | None]] = {
    "act": lambda e: f"== {e.text('what')}",
    "started": lambda e: f"{e.source} started, process {e.text('pid')}",
    "killed": lambda e: f"{e.source} (process {e.text('pid')}) killed",
    "error": lambda e: f"{e.source}: {e.text('kind')}: {e.text('message')}",
    "held": lambda e: f"{e.source} stands in the boundary of {e.text('version')}, {e.text('stage')}",
    "flipped": lambda e: f"{e.source} inverted one bit in each of {', '.join(e.texts('names'))}",
    "verified": _verified,
    "resynced": lambda e: f"resync of {e.text('worker')} done {e.text('detail')}".rstrip(),
    "WorkerLost": lambda e: f"coordinator lost {e.text('worker_id')}: {e.text('reason')}",
    "WorkerLeft": lambda e: f"{e.text('worker_id')} left: {e.text('reason')}",
    "WorkerRejected": lambda e: f"{e.text('worker_id')} refused: {e.text('reason')}",
    "LineageStarted": _lineage,
    "RosterIssued": _roster,
    "EpochEnded": _epoch,
    "VersionSealed": _sealed,
    "FingerprintDiverged": lambda e: f"{_who(e)} diverged at {e.text('version')}",
    "RunPausedEvent": lambda e: f"the run is paused: {e.text('reason')}",
    "TransferStarted": lambda e: (
        f"{_who(e)} gets {e.text('version')} from {', '.join(e.texts('donors'))} ({e.text('reason')})"
    ),
    "TransferEnded": _transfer_ended,
    "ChunkRefetched": lambda e: (
        f"{_who(e)} asks again for chunk {e.text('chunk')} of {e.text('part')}: "
        f"bad from {e.text('donor')} ({e.text('blame')})"
    ),
    "DonorFailed": lambda e: f"{_who(e)}: donor {e.text('donor')} failed: {e.text('reason')}",
    "StateRestored": lambda e: (
        f"{_who(e)} begins the run at {e.text('version')} with its own initial state"
        if e.text("source") == "origin"
        else f"{_who(e)} holds {e.text('version')} from {e.text('source')}, {megabytes(e, 'num_bytes')} verified"
    ),
    "BaseRestored": lambda e: f"{_who(e)} holds {e.text('version')} and catches up from there",
    "CommitReplayed": lambda e: f"{_who(e)} replayed the commit of {e.text('version')}",
    "ScalarsRefreshed": lambda e: f"{_who(e)} took learning rates and progress once more, at {e.text('cut')}",
    "CatchUpRebased": lambda e: f"{_who(e)} needs a newer base than {e.text('version')}: {e.text('reason')}",
    "SnapshotCaptured": _captured,
    "GuardCopied": _guard,
    "TrainingThreadWaited": _waited,
    "CheckpointSaved": lambda e: f"{_who(e)} saved {e.text('cut')}: {_disk_rate(e)}",
    "CheckpointSaveFailed": lambda e: f"{_who(e)} could not save: {e.text('reason')}",
    "CheckpointLoaded": lambda e: f"{_who(e)} loaded {e.text('cut')}: {_disk_rate(e)}",
    "CheckpointSkipped": lambda e: f"{_who(e)} skipped {e.text('url')}: {e.text('reason')}",
}


# Both ends tell of a transfer: its beginning is told once, by who ordered it, its end by who measured it.
_TOLD_BY_COORDINATOR = frozenset({"TransferStarted"})
_TOLD_BY_WORKERS = frozenset({"TransferEnded", "DonorFailed"})


def stalls(entries: Sequence[Entry]) -> str:
    """Return in one line how long training threads stood still so that others could have their state."""
    spent = [e.number("training_thread_seconds") for e in entries if e.kind in ("SnapshotCaptured", "GuardCopied")]
    copied = sum(e.number("copied_bytes") + e.number("copied_on_training_thread_bytes") for e in entries)
    if not spent:
        return "No training thread gave any time to a transfer or a checkpoint."
    return (
        f"Training threads gave {sum(spent) * 1e3:.0f} ms in all to transfers and checkpoints, "
        f"at most {max(spent) * 1e3:.1f} ms at once, and copied {copied / MEGABYTE:.2f} MB for them."
    )
