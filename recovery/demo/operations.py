"""The demo as operator: the coordinator's operations, asked through the client that ``recovery verify`` uses too."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from recovery.control.operator_client import OperatorClient
from recovery.control.security import SecurityConfig
from recovery.control.wire import from_proto
from recovery.errors import RecoveryError
from recovery.types import Address


class RpcOperator:
    """Asks one coordinator; see ``scenario.Operator``."""

    def __init__(self, address: str, run_id: str) -> None:
        self._address = Address.parse(address)
        self._run_id = run_id
        self._client = self._connect()

    def _connect(self) -> OperatorClient:
        return OperatorClient(self._address, SecurityConfig(), run_id=self._run_id)

    def status(self) -> Mapping[str, object]:
        """Return what ``recovery status`` shows of the run as a whole, as plain values."""
        found = self._client.list()
        return {
            "sealed": str(from_proto(found.sealed)),
            "alive": found.alive,
            "ready": found.ready,
            "participating": found.participating,
            "committed_epochs": found.committed_epochs,
            "aborted_epochs": found.aborted_epochs,
            "paused": found.paused,
        }

    def verify(self, worker_id: str, timeout_seconds: float) -> Sequence[str]:
        """Return the names of a worker's tensors that differ from the sealed version."""
        return list(self._client.verify(worker_id, timeout_seconds=timeout_seconds).different)

    def resync(self, worker_id: str, timeout_seconds: float) -> str:
        """Order a worker to take its state from peers again; return at which version it then stands."""
        answer = self._client.resync(worker_id, timeout_seconds=timeout_seconds)
        return " ".join(filter(None, (f"at {from_proto(answer.version)}", answer.detail)))

    @contextlib.contextmanager
    def watch(
        self, on_event: Callable[[str, Mapping[str, object]], None], on_lost: Callable[[str], None]
    ) -> Iterator[None]:
        """Call ``on_event`` for each event of the coordinator until the block ends; ``on_lost`` if that breaks off.

        Both are called on a thread of this context's own.
        """
        client = self._connect()
        ending = threading.Event()

        def follow() -> None:
            try:
                for response in client.watch():
                    on_event(response.event, json.loads(response.fields_json))
                reason = "the coordinator ended the stream of events"
            except RecoveryError as error:
                reason = str(error)
            if not ending.is_set():
                on_lost(reason)

        thread = threading.Thread(target=follow, name="demo-watch")
        thread.start()
        try:
            yield
        finally:
            ending.set()
            client.close()
            thread.join()

    def close(self) -> None:
        """Close the connection; twice without harm."""
        self._client.close()


def connect(run_id: str) -> Callable[[str], contextlib.AbstractContextManager[RpcOperator]]:
    """Return the function that connects to a coordinator's address as operator of ``run_id``."""

    def open_operator(address: str) -> contextlib.AbstractContextManager[RpcOperator]:
        return contextlib.closing(RpcOperator(address, run_id))

    return open_operator
