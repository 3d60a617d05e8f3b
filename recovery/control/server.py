"""The coordinator's process: history, machine and gRPC server, started and ended in the right order."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.recovery.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
)
from recovery.clock import Clock, SystemClock
from recovery.control.channel import PING_TIMEOUT_SECONDS, server_options
from recovery.control.history import History
from recovery.control.listening import check_free, write_port_file
from recovery.control.metrics import ServedMetrics
from recovery.control.owner import Machine, RunOwner, spawn
from recovery.control.policy import RunPolicy
from recovery.control.record import HistoryRecord
from recovery.control.rendezvous import RendezvousLimits, RendezvousServicer, RendezvousTable
from recovery.control.run import RunMachine
from recovery.control.security import RequireTokenAsync, SecurityConfig
from recovery.control.service import CoordinatorServicer, OperationsServicer
from recovery.errors import BadConfiguration, MisuseError
from recovery.events import EventSink, Fanout, LogSink
from recovery.types import Address

logger = logging.getLogger(__name__)

EXPIRY_SECONDS = 30.0
MAX_CALLS = 16_384
"""Streams, requests and waits at once; more are refused."""
GRACE_SECONDS = 1.0
"""For answers under way when the coordinator ends; requests that nobody answers any more are cut off."""

_SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (coordinator_pb2, "Coordinator"),
        (operations_pb2, "Operations"),
        (rendezvous_pb2, "Rendezvous"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """What a coordinator serves, where, and how it is secured.

    Attributes:
        policy: The run's; names the run.
        listen: Address to bind; port 0 takes a free one.
        state_dir: Folder of the run's history; held exclusively.
        new_run: Create the run. Without it a state folder that holds none is an error: a coordinator never begins a
            history by accident.
        port_file: Where the address is written once the server listens; None: nowhere.
        security: Equal to the workers' and operators'.
        ping_timeout_seconds: How long a worker may leave a keepalive ping unanswered; it is lost up to half a second
            later. Raise it where transfers saturate the workers' links.
        silence_seconds: A stream on which nothing came for so long counts as lost; zero: HTTP/2 keepalive decides.
        rendezvous: Caps of the key-value store.
        metrics_host: Interface on which metrics are served.
        metrics_port: TCP port of ``/metrics``; 0: none are served.
    """

    policy: RunPolicy
    listen: Address
    state_dir: Path
    new_run: bool = False
    port_file: Path | None = None
    security: SecurityConfig = field(default_factory=SecurityConfig)
    ping_timeout_seconds: float = PING_TIMEOUT_SECONDS
    silence_seconds: float = 0.0
    rendezvous: RendezvousLimits = field(default_factory=RendezvousLimits)
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0

    def __post_init__(self) -> None:
        if not 0.1 <= self.ping_timeout_seconds <= 600:
            raise BadConfiguration(f"ping_timeout_seconds is {self.ping_timeout_seconds}: take 0.1 to 600")
        if self.silence_seconds < 0:
            raise BadConfiguration(f"silence_seconds is {self.silence_seconds}: take zero or more")
        if not 0 <= self.metrics_port <= 65_535:
            raise BadConfiguration(f"metrics_port is {self.metrics_port}: take 1 to 65535, or 0 to serve none")


MachineFactory = Callable[[RunPolicy, HistoryRecord, float], Machine]
"""Makes what decides, of the policy, the loaded history, and the wall clock minus the monotonic clock in seconds."""


class _Coordinator:
    """One coordinator on the running event loop: ``start``, ``wait`` until something ends it, ``stop``."""

    def __init__(
        self, config: CoordinatorConfig, events: EventSink, clock: Clock, make_machine: MachineFactory
    ) -> None:
        self._config = config
        self._metrics = (
            ServedMetrics(config.policy.run_id, config.metrics_host, config.metrics_port)
            if config.metrics_port
            else None
        )
        self._events = Fanout(events, self._metrics) if self._metrics is not None else events
        self._clock = clock
        self._make_machine = make_machine
        self._history = History(config.state_dir)
        self._owner: RunOwner | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Address:
        """Load the history, bind and serve; return the bound address.

        Raises:
            BadConfiguration: the state folder, the address or the security cannot be used; nothing is left behind.
        """
        config = self._config
        config.security.check_host(config.listen.host, what="the coordinator's address")
        token = config.security.bearer_token()
        credentials = config.security.server_credentials()
        check_free(config.listen)
        if self._metrics is not None:
            self._metrics.start()
        self._history.start()
        if config.new_run:
            self._history.create(config.policy.run_id)
        record = self._history.load(config.policy.run_id)
        policy = config.policy
        if not policy.ticket_secret:
            policy = dataclasses.replace(policy, ticket_secret=secrets.token_bytes(32))
        table = RendezvousTable(self._clock, config.rendezvous)
        self._owner = owner = RunOwner(
            self._make_machine(policy, record, self._clock.wall() - self._clock.monotonic()),
            self._history.apply,
            table.end,
            self._clock,
            self._events,
        )
        server = grpc.aio.server(
            interceptors=[RequireTokenAsync(token)] if token else [],
            options=server_options(config.ping_timeout_seconds),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        if self._metrics is not None:
            self._metrics.ask(owner)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(
            CoordinatorServicer(owner, policy.run_id, config.silence_seconds), server
        )
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsServicer(owner, policy.run_id), server)
        rendezvous_pb2_grpc.add_RendezvousServicer_to_server(RendezvousServicer(table), server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = (
                server.add_insecure_port(str(config.listen))
                if credentials is None
                else server.add_secure_port(str(config.listen), credentials)
            )
        except RuntimeError as error:
            raise BadConfiguration(f"the coordinator cannot listen on {config.listen}") from error
        await server.start()
        self._server = server
        self._tasks = [spawn(owner.run(), "run-owner"), spawn(_expire(table), "rendezvous-expiry")]
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        address = Address(config.listen.host, port)
        if config.port_file is not None:
            write_port_file(config.port_file, address)
        return address

    async def wait(self, stopped: asyncio.Event) -> None:
        """Return when ``stopped`` is set; raise what ended the run's owner otherwise."""
        stop = spawn(_wait_for(stopped), "wait-for-stop")
        try:
            await asyncio.wait([stop, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            stop.cancel()

    async def stop(self) -> None:
        """End the owner, then the streams and the server, then the history; twice without harm."""
        if self._metrics is not None:
            await self._metrics.stop()
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        # The owner first: workers that are sent away because the coordinator ends are not lost to the run.
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, Exception):  # raised by wait() already, if it was an error
                await task
        if self._owner is not None:
            self._owner.end_streams("the coordinator is ending")
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)
        self._history.close()


def run_coordinator(
    config: CoordinatorConfig,
    *,
    announce: Callable[[Address], None] = lambda address: None,
    events: EventSink | None = None,
    clock: Clock | None = None,
    make_machine: MachineFactory = RunMachine,
) -> None:
    """Serve until SIGTERM or SIGINT, then end cleanly. Main thread only.

    Args:
        config: What to serve.
        announce: Called with the bound address once workers can attach.
        events: Where events go; the log if None.
        clock: Time.
        make_machine: Production's by default; tests script one.

    Raises:
        BadConfiguration: see ``CoordinatorConfig``; nothing was changed.
        Exception: what ended the run's owner: a disk that refused, or a defect. Nobody was told of what failed.
    """

    async def serve() -> None:
        coordinator = _Coordinator(config, events or LogSink(), clock or SystemClock(), make_machine)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        try:
            announce(await coordinator.start())
            await coordinator.wait(stopped)
        finally:
            await coordinator.stop()

    asyncio.run(serve())


class CoordinatorServer:
    """A coordinator inside this process, on a thread and an event loop of its own: for tests and small tools."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        events: EventSink | None = None,
        clock: Clock | None = None,
        make_machine: MachineFactory = RunMachine,
    ) -> None:
        self._config = config
        self._events = events or LogSink()
        self._clock = clock or SystemClock()
        self._make_machine = make_machine
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._ready = threading.Event()
        self._address: Address | None = None
        self._error: BaseException | None = None

    def start(self) -> CoordinatorServer:
        """Return once workers can attach.

        Raises:
            BadConfiguration: as ``run_coordinator``.
            MisuseError: started before.
        """
        if self._thread is not None:
            raise MisuseError("the coordinator was started before")
        self._thread = threading.Thread(target=self._root, name="coordinator", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._address is None:
            self._thread.join()
            self._raise_error()
        return self

    def stop(self) -> None:
        """End the coordinator and its thread; twice without harm.

        Raises:
            Exception: what ended the run's owner, if it ended by itself.
        """
        if self._thread is None:
            return
        if self._loop is not None and self._stopped is not None:
            # RuntimeError: the loop is closed already, because the owner ended by itself.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._raise_error()

    @property
    def address(self) -> Address:
        """Where it listens.

        Raises:
            MisuseError: not started.
        """
        if self._address is None:
            raise MisuseError("the coordinator is not started")
        return self._address

    @property
    def port(self) -> int:
        """The bound port."""
        return self.address.port

    def __enter__(self) -> CoordinatorServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _root(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - thread's root: kept, and raised by start() or stop()
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        coordinator = _Coordinator(self._config, self._events, self._clock, self._make_machine)
        try:
            self._address = await coordinator.start()
            self._ready.set()
            await coordinator.wait(self._stopped)
        finally:
            await coordinator.stop()


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def _expire(table: RendezvousTable) -> None:
    while True:
        await asyncio.sleep(EXPIRY_SECONDS)
        table.expire()
