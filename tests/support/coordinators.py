"""Coordinators and clients for tests: real sockets on loopback, a scripted machine, everything closed at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.recovery.v1 import coordinator_pb2
from recovery.control.client import ClientConfig, CoordinatorClient
from recovery.control.policy import RunPolicy
from recovery.control.security import SecurityConfig
from recovery.control.server import CoordinatorConfig, CoordinatorServer
from recovery.events import Recorder
from recovery.types import Address
from tests.support.scripted_machine import ScriptedMachine, hello

RUN = "run"
LOOPBACK = Address("127.0.0.1", 0)
PLAIN = SecurityConfig()


@contextmanager
def coordinator(
    folder: Path,
    machine: ScriptedMachine | None = None,
    *,
    security: SecurityConfig = PLAIN,
    listen: Address = LOOPBACK,
    silence_seconds: float = 0.0,
) -> Iterator[CoordinatorServer]:
    """A coordinator of run ``run`` whose decisions ``machine`` scripts; its history lies in ``folder``."""
    chosen = machine or ScriptedMachine()
    config = CoordinatorConfig(
        policy=RunPolicy(run_id=RUN),
        listen=listen,
        state_dir=folder,
        new_run=not (folder / "history.sqlite").exists(),
        security=security,
        silence_seconds=silence_seconds,
    )
    with CoordinatorServer(config, events=Recorder(), make_machine=lambda *_: chosen) as server:
        yield server


class RecordingClient:
    """A ``CoordinatorClient`` that remembers what it was told."""

    def __init__(
        self,
        address: Address,
        *,
        worker_id: str = "w0",
        run_id: str = RUN,
        incarnation: str = "i1",
        security: SecurityConfig = PLAIN,
        config: ClientConfig | None = None,
        say_hello: Callable[[], coordinator_pb2.Hello] | None = None,
    ) -> None:
        self.messages: list[coordinator_pb2.CoordinatorMessage] = []
        self.detachments: list[str] = []
        self._changed = threading.Condition()
        self.client = CoordinatorClient(
            address,
            security,
            say_hello or (lambda: hello(worker_id, run_id, incarnation)),
            self._on_message,
            self._on_detached,
            config=config,
        )

    def __enter__(self) -> RecordingClient:
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close("the test is over")

    def kinds(self) -> list[str | None]:
        with self._changed:
            return [message.WhichOneof("kind") for message in self.messages]

    def wait_message(self, kind: str, count: int = 1) -> None:
        """Return once ``count`` messages of ``kind`` came."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(message.WhichOneof("kind") == kind for message in self.messages) >= count, 30.0
            ), self.messages

    def wait_detached(self, count: int = 1) -> str:
        """Return the reason of the ``count``-th detachment."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.detachments) >= count, 30.0)
            return self.detachments[count - 1]

    def _on_message(self, message: coordinator_pb2.CoordinatorMessage) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def _on_detached(self, reason: str) -> None:
        with self._changed:
            self.detachments.append(reason)
            self._changed.notify_all()
