"""The operator's commands: one function each, one request each, one deadline each."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from typing import Annotated

import typer

from protos.recovery.v1.operations_pb2 import WatchResponse
from recovery.cli import view
from recovery.cli.connection import RequestId, Timeout, connected
from recovery.cli.output import Output, plain
from recovery.control.operator_client import ANSWER_SECONDS, OperatorClient
from recovery.control.wire import from_proto, timestamp
from recovery.errors import BadConfiguration, CoordinatorUnreachable
from recovery.types import Version

DIFFERS = 3
"""Exit code of ``verify`` when tensors differ; 1 stays for "could not be found out"."""

WATCH_AGAIN_SECONDS = 0.5
"""Pause of ``watch`` between two looks for a coordinator that is away."""

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id.")]

_VERSION = re.compile(r"L?(\d+)\.k?(\d+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kMG])(|B|B/s)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def register(app: typer.Typer) -> None:
    """Add every operator's command to ``app``."""
    for command in (status, verify, resync, save, drain, cancel, rate, rollback, adopt, watch):
        app.command(command.__name__)(connected(command))


def status(client: OperatorClient, output: Output, *, timeout: Timeout = ANSWER_SECONDS) -> None:
    """Show who is in the run, what each holds and waits for, and the run's lineages."""
    answer = client.list(timeout_seconds=timeout)
    output.show(plain(answer), view.status(answer))


def verify(
    client: OperatorClient,
    output: Output,
    worker: WorkerArgument,
    *,
    timeout: Timeout = 120.0,
    request_id: RequestId = "",
) -> None:
    """Hash a worker's memory again and name the tensors that differ from the sealed version. Moves nothing.

    Exit code 0: equal. 3: they differ. 1: it could not be found out.
    """
    answer = client.verify(worker, timeout_seconds=timeout, request_id=request_id)
    differs = bool(answer.different) or answer.fingerprint != answer.expected_fingerprint
    version = from_proto(answer.version)
    if not differs:
        text = [f"{worker} equals the sealed state of {version}, fingerprint {view.short(answer.fingerprint)}"]
    else:
        text = [
            f"{worker} differs from the sealed state of {version}: fingerprint {view.short(answer.fingerprint)}, "
            f"expected {view.short(answer.expected_fingerprint)}; {len(answer.different)} tensors differ:",
            *(f"  {name}" for name in answer.different),
            f"to heal it: recovery resync {worker}",
        ]
    output.show({"worker": worker, "equal": not differs, **plain(answer)}, *text)
    if differs:
        raise typer.Exit(DIFFERS)


def resync(
    client: OperatorClient,
    output: Output,
    worker: WorkerArgument,
    *,
    from_worker: Annotated[str, typer.Option("--from", help="The donor to take the state from. Empty: any.")] = "",
    timeout: Timeout = 600.0,
    request_id: RequestId = "",
) -> None:
    """Have a live worker take its state from its peers again."""
    answer = client.resync(worker, from_worker_id=from_worker, timeout_seconds=timeout, request_id=request_id)
    output.show(
        {"worker": worker, **plain(answer)},
        f"{worker} holds {from_proto(answer.version)}, fingerprint {view.short(answer.fingerprint)}"
        + (f": {answer.detail}" if answer.detail else ""),
    )


def save(
    client: OperatorClient,
    output: Output,
    *,
    worker: Annotated[str, typer.Option("--worker", help="Who saves. Empty: the coordinator names one.")] = "",
    timeout: Timeout = 600.0,
    request_id: RequestId = "",
) -> None:
    """Save a checkpoint now; returns when it is verified on disk."""
    answer = client.save(worker, timeout_seconds=timeout, request_id=request_id)
    output.show(plain(answer), f"saved {from_proto(answer.version)}" + (f": {answer.detail}" if answer.detail else ""))


def drain(
    client: OperatorClient,
    output: Output,
    worker: WorkerArgument,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let it be chosen as donor again.")] = False,
    timeout: Timeout = ANSWER_SECONDS,
    request_id: RequestId = "",
) -> None:
    """Do not choose a worker as donor any more; its training goes on."""
    answer = client.drain(worker, drained=not undo, timeout_seconds=timeout, request_id=request_id)
    output.show(
        {"worker": worker, "drained": not undo, "obeyed": answer.obeyed},
        (f"{worker} may be chosen as donor again" if undo else f"{worker} is not chosen as donor any more")
        + ("" if answer.obeyed else "; the worker itself has not said that it knows"),
    )


def cancel(
    client: OperatorClient,
    output: Output,
    transfer: Annotated[
        str, typer.Argument(metavar="TRANSFER", help="The transfer's id, as `recovery watch` shows it.")
    ],
    *,
    timeout: Timeout = ANSWER_SECONDS,
    request_id: RequestId = "",
) -> None:
    """End a transfer."""
    answer = client.cancel(transfer, timeout_seconds=timeout, request_id=request_id)
    output.show(
        {"transfer": transfer, "cancelled": True, "detail": answer.detail},
        f"transfer {transfer} is cancelled: {answer.detail}",
    )


def rate(
    client: OperatorClient,
    output: Output,
    worker: WorkerArgument,
    limit: Annotated[
        str, typer.Argument(metavar="RATE", help="Bytes per second, such as 500k, 20M or 1.5G; 0: no cap.")
    ],
    *,
    timeout: Timeout = ANSWER_SECONDS,
    request_id: RequestId = "",
) -> None:
    """Cap what a worker's transfers use together."""
    bytes_per_second = parse_rate(limit)
    client.set_rate(worker, bytes_per_second, timeout_seconds=timeout, request_id=request_id)
    output.show(
        {"worker": worker, "bytes_per_second": bytes_per_second},
        f"{worker} sends at most {bytes_per_second:,} bytes per second" if bytes_per_second else f"{worker} has no cap",
    )


def rollback(
    client: OperatorClient,
    output: Output,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Lineage and outer step, such as L1.k40 or 1.40.")],
    *,
    worker: Annotated[str, typer.Option("--worker", help="The worker that holds it. Empty: from disk.")] = "",
    timeout: Timeout = 120.0,
    request_id: RequestId = "",
) -> None:
    """Begin a new lineage at an earlier version. Steps after it are lost to the run; they stay in its history."""
    wanted = parse_version(version)
    answer = client.rollback(wanted, worker_id=worker, timeout_seconds=timeout, request_id=request_id)
    output.show(plain(answer), f"the run goes on from {wanted} as {from_proto(answer.version)}")


def adopt(
    client: OperatorClient,
    output: Output,
    *,
    worker: Annotated[
        str, typer.Option("--worker", help="Who holds the truth. Empty: the newest version that a majority holds.")
    ] = "",
    timeout: Timeout = 120.0,
    request_id: RequestId = "",
) -> None:
    """Let a coordinator without history take over a run whose workers have one."""
    answer = client.adopt(worker, timeout_seconds=timeout, request_id=request_id)
    output.show(
        plain(answer),
        f"the run goes on from {from_proto(answer.version)}, fingerprint {view.short(answer.fingerprint)}",
    )


def watch(client: OperatorClient, output: Output, *, timeout: Timeout = ANSWER_SECONDS) -> None:
    """Show events as they happen, until Ctrl-C; a coordinator that ends is waited for.

    The deadline is for the coordinator's first answer.
    """
    client.list(timeout_seconds=timeout)  # a wrong address, run or credential ends it here
    lost = False
    while True:
        try:
            if lost:
                client.list(timeout_seconds=timeout)
                lost = False
                _say_of_watch(
                    output, "WatchResumed", "the coordinator answers again; what happened meanwhile is not shown"
                )
            with closing(client.watch(connect_seconds=timeout)) as responses:  # type: ignore[type-var]
                for response in responses:
                    output.show(view.event_object(response), view.event_line(response))
            reason = "the coordinator ended"
        except CoordinatorUnreachable as error:
            reason = str(error)
        if not lost:
            _say_of_watch(output, "WatchInterrupted", f"{reason}; waiting for it")
        lost = True
        time.sleep(WATCH_AGAIN_SECONDS)


def _say_of_watch(output: Output, name: str, reason: str) -> None:
    """Show what becomes of the watch itself, in the form of an event."""
    happened = WatchResponse(at=timestamp(time.time()), event=name, fields_json=json.dumps({"reason": reason}))
    output.show(view.event_object(happened), view.event_line(happened))


def parse_version(text: str) -> Version:
    """Return the version written as ``L1.k40`` or ``1.40``.

    Raises:
        BadConfiguration: another form.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise BadConfiguration(f"version {text!r} is not of the form L1.k40 (lineage 1, outer step 40)")
    return Version(int(found[1]), int(found[2]))


def parse_rate(text: str) -> int:
    """Return the bytes per second written as a number with k, M or G (powers of ten) and B or B/s, if wanted.

    Raises:
        BadConfiguration: another form.
    """
    found = _RATE.fullmatch(text)
    if found is None:
        raise BadConfiguration(f"rate {text!r} is not a number of bytes per second, such as 500k, 20M or 1.5G")
    return round(float(found[1]) * _FACTORS[found[2]])
