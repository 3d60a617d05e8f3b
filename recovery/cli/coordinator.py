"""The command ``recovery coordinator``."""

from __future__ import annotations

import datetime
import enum
import json
import logging
import queue
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from recovery.cli.connection import DEFAULT_ADDRESS, SECURITY_OPTIONS, JsonOption, security_from, with_options
from recovery.cli.output import Output
from recovery.control.channel import PING_TIMEOUT_SECONDS
from recovery.control.policy import REFUSE, RESUME, RunPolicy
from recovery.control.server import CoordinatorConfig, run_coordinator
from recovery.events import Event, to_json
from recovery.types import Address

logger = logging.getLogger(__name__)


class OnAllGone(enum.StrEnum):
    """What becomes of a run with no worker left that holds its history."""

    RESUME = RESUME
    REFUSE = REFUSE


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""

    def wrapper(**options: Any) -> None:
        security = security_from(options)
        coordinator(security, Output(as_json=options.pop("as_json")), **options)

    app.command("coordinator")(
        with_options(wrapper, coordinator, {"as_json": JsonOption, **SECURITY_OPTIONS}, num_given=2)
    )


def coordinator(
    security: Any,
    output: Output,
    *,
    run_id: Annotated[str, typer.Option("--run-id", envvar="RECOVERY_RUN_ID", help="The run to serve.")],
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="Folder of the run's history; one coordinator at a time holds it.")
    ],
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Create the run. Left out, the folder has to hold its history.")
    ] = False,
    listen: Annotated[
        str, typer.Option("--listen", help="Address to bind, host:port; port 0 takes a free one.")
    ] = DEFAULT_ADDRESS,
    port_file: Annotated[
        Path | None, typer.Option("--port-file", help="File that gets host:port once workers can attach.")
    ] = None,
    min_participants: Annotated[
        int, typer.Option(help="A boundary commits with at least so many votes, never with fewer.")
    ] = 1,
    expected_workers: Annotated[
        int, typer.Option(help="The origin is chosen once so many workers attached; 0: after a short wait.")
    ] = 0,
    inner_steps: Annotated[
        int, typer.Option(help="Inner steps of one phase; 0: as many as the first worker takes.")
    ] = 0,
    gather_max_wait: Annotated[
        float, typer.Option(help="Seconds that a boundary waits for ready workers that have not arrived.")
    ] = 120.0,
    gather_min_wait: Annotated[
        float, typer.Option(help="Seconds that a boundary waits at least for each of them, however slow it seems.")
    ] = 1.0,
    stall_after: Annotated[
        float, typer.Option(help="Seconds without an inner step after which a worker is not waited for.")
    ] = 60.0,
    on_all_gone: Annotated[
        OnAllGone,
        typer.Option(
            help="With no worker left that holds the history: resume from the newest checkpoint, or refuse workers.",
        ),
    ] = OnAllGone.RESUME,
    save_every: Annotated[
        int, typer.Option(help="A saver is named for every so many sealed outer steps; 0: never.")
    ] = 1,
    expected_return: Annotated[
        float, typer.Option(help="Seconds for which lost holders of the history are expected back.")
    ] = 30.0,
    return_wait: Annotated[
        float, typer.Option(help="Seconds that a boundary waits, after a restart, for members that are not back yet.")
    ] = 4.0,
    ping_timeout: Annotated[
        float, typer.Option(help="Seconds for which a worker may leave a keepalive ping unanswered.")
    ] = PING_TIMEOUT_SECONDS,
    silence: Annotated[
        float, typer.Option(help="Behind a proxy: seconds without any message after which a worker is lost; 0: off.")
    ] = 0.0,
    metrics_port: Annotated[
        int, typer.Option(help="TCP port that serves /metrics in Prometheus' format; 0: none.")
    ] = 0,
    metrics_host: Annotated[str, typer.Option(help="Interface to bind for metrics.")] = "127.0.0.1",
) -> None:
    """Serve a run: membership, matching, votes, orders. Carries no tensors. Ends on SIGTERM or Ctrl-C."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    policy = RunPolicy(
        run_id=run_id,
        min_participants=min_participants,
        expected_workers=expected_workers,
        inner_steps_per_phase=inner_steps,
        gather_max_wait_seconds=gather_max_wait,
        gather_min_wait_seconds=min(gather_min_wait, gather_max_wait),
        stall_after_seconds=stall_after,
        on_all_gone=on_all_gone.value,
        save_every_steps=save_every,
        expected_return_seconds=expected_return,
        return_wait_seconds=return_wait,
    )
    config = CoordinatorConfig(
        policy=policy,
        listen=Address.parse(listen),
        state_dir=state_dir,
        new_run=new_run,
        port_file=port_file,
        security=security,
        ping_timeout_seconds=ping_timeout,
        silence_seconds=silence,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )

    def announce(address: Address) -> None:
        output.show(
            {"listening": str(address), "run_id": run_id},
            f"coordinator of run {run_id} listens on {address}",
        )

    with EventPrinter(output) as printer:
        run_coordinator(config, announce=announce, events=printer)


class EventPrinter:
    """Prints events on a thread of its own: a reader that stalls must not hold the run's event loop.

    Events that find ``MAX_WAITING`` unprinted are dropped; ``recovery watch`` and the workers see them all the same.
    """

    MAX_WAITING = 10_000

    def __init__(self, output: Output) -> None:
        self._output = output
        self._events: queue.Queue[tuple[datetime.datetime, Event] | None] = queue.Queue(self.MAX_WAITING)
        self._thread = threading.Thread(target=self._root, name="coordinator-output", daemon=True)

    def __call__(self, event: Event, /) -> None:
        with suppress(queue.Full):
            self._events.put_nowait((datetime.datetime.now(datetime.UTC), event))

    def __enter__(self) -> EventPrinter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Bounded: a reader that takes nothing cannot keep the process from ending.
        with suppress(queue.Full):
            self._events.put(None, timeout=1.0)
        self._thread.join(1.0)

    def _root(self) -> None:
        try:
            while (happened := self._events.get()) is not None:
                at, event = happened
                fields, name = to_json(event), type(event).__name__
                self._output.show(
                    {"event": name, "at": at.isoformat(), "fields": json.loads(fields)},
                    Text(f"{at.isoformat(timespec='milliseconds')} {name} {fields}"),
                )
        except OSError as error:
            # The reader is gone: the coordinator goes on without one.
            logger.warning("events are not printed any more: %s", error)
