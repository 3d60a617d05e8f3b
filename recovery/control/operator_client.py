"""What an operator's tool calls: one method a request, each with a deadline, each raising the project's errors."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

import grpc

from protos.recovery.v1 import operations_pb2, operations_pb2_grpc
from recovery.control.channel import open_channel
from recovery.control.rpc_errors import cause, details_of, status_code, told_failure
from recovery.control.security import SecurityConfig
from recovery.control.wire import duration, to_proto
from recovery.errors import CoordinatorUnreachable, RecoveryError, RunRefused
from recovery.types import Address, Version

R = TypeVar("R")

ANSWER_SECONDS = 10.0
"""How long a request that needs no worker's work may take."""

_MARGIN_SECONDS = 1.0


class OperatorClient:
    """Requests to one coordinator. Every method blocks until the answer or its deadline; several threads may call.

    Each call that acts has a ``request_id``: the same id again returns the first answer instead of acting twice. Left
    out, every call is a new one.

    All methods raise ``CoordinatorUnreachable`` (nobody answers there, or not in time; the message says which),
    ``RunRefused`` (another run, or wrong credentials), or the error that the operation ended with.
    """

    def __init__(self, address: Address | str, security: SecurityConfig, *, run_id: str = "") -> None:
        self._address = address if isinstance(address, Address) else Address.parse(address)
        self._run_id = run_id
        self._security = security
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; twice without harm."""
        if self._channel is not None:
            self._channel.close()

    def list(self, *, timeout_seconds: float = ANSWER_SECONDS) -> operations_pb2.ListResponse:
        """Return who is in the run and where it stands."""
        request = operations_pb2.ListRequest(run_id=self._run_id)
        return self._call("list", timeout_seconds, lambda stub, seconds: stub.List(request, timeout=seconds))

    def resync(
        self, worker_id: str, *, from_worker_id: str = "", timeout_seconds: float = 600.0, request_id: str = ""
    ) -> operations_pb2.ResyncResponse:
        """Have a live worker take its state from peers again; returns when it has."""
        request = operations_pb2.ResyncRequest(
            request_id=request_id or _new_id(),
            run_id=self._run_id,
            worker_id=worker_id,
            from_worker_id=from_worker_id,
            timeout=duration(timeout_seconds),
        )
        return self._call(
            f"resync {worker_id}",
            timeout_seconds + _MARGIN_SECONDS,
            lambda stub, seconds: stub.Resync(request, timeout=seconds),
        )

    def verify(
        self, worker_id: str, *, timeout_seconds: float = 120.0, request_id: str = ""
    ) -> operations_pb2.VerifyResponse:
        """Hash a worker's memory again; returns the names of the tensors that differ. Moves nothing."""
        request = operations_pb2.VerifyRequest(
            request_id=request_id or _new_id(),
            run_id=self._run_id,
            worker_id=worker_id,
            timeout=duration(timeout_seconds),
        )
        return self._call(
            f"verify {worker_id}",
            timeout_seconds + _MARGIN_SECONDS,
            lambda stub, seconds: stub.Verify(request, timeout=seconds),
        )

    def save(
        self, worker_id: str = "", *, timeout_seconds: float = 600.0, request_id: str = ""
    ) -> operations_pb2.SaveResponse:
        """Have a worker (empty: one that the coordinator names) save a checkpoint; returns when it is on disk."""
        request = operations_pb2.SaveRequest(
            request_id=request_id or _new_id(),
            run_id=self._run_id,
            worker_id=worker_id,
            timeout=duration(timeout_seconds),
        )
        return self._call(
            "save", timeout_seconds + _MARGIN_SECONDS, lambda stub, seconds: stub.Save(request, timeout=seconds)
        )

    def drain(
        self, worker_id: str, *, drained: bool = True, timeout_seconds: float = ANSWER_SECONDS, request_id: str = ""
    ) -> operations_pb2.DrainResponse:
        """Choose a worker no longer as donor; ``drained=False`` takes that back. Says whether the worker knows it."""
        request = operations_pb2.DrainRequest(
            request_id=request_id or _new_id(), run_id=self._run_id, worker_id=worker_id, drained=drained
        )
        return self._call(
            f"drain {worker_id}", timeout_seconds, lambda stub, seconds: stub.Drain(request, timeout=seconds)
        )

    def cancel(
        self, transfer_id: str, *, timeout_seconds: float = ANSWER_SECONDS, request_id: str = ""
    ) -> operations_pb2.CancelResponse:
        """End a transfer; returns once the joiner obeys."""
        request = operations_pb2.CancelRequest(
            request_id=request_id or _new_id(), run_id=self._run_id, transfer_id=transfer_id
        )
        return self._call(
            f"cancel {transfer_id}", timeout_seconds, lambda stub, seconds: stub.Cancel(request, timeout=seconds)
        )

    def set_rate(
        self,
        worker_id: str,
        bytes_per_second: int,
        *,
        timeout_seconds: float = ANSWER_SECONDS,
        request_id: str = "",
    ) -> None:
        """Cap what a worker's transfers use together, in bytes per second; zero: no cap. Returns once it does."""
        request = operations_pb2.SetRateRequest(
            request_id=request_id or _new_id(),
            run_id=self._run_id,
            worker_id=worker_id,
            bytes_per_second=bytes_per_second,
        )
        self._call(f"rate {worker_id}", timeout_seconds, lambda stub, seconds: stub.SetRate(request, timeout=seconds))

    def rollback(
        self,
        version: Version,
        *,
        worker_id: str = "",
        timeout_seconds: float = 120.0,
        request_id: str = "",
    ) -> operations_pb2.RollbackResponse:
        """Begin a new lineage at an earlier version, held by ``worker_id`` or (empty) on disk."""
        request = operations_pb2.RollbackRequest(
            request_id=request_id or _new_id(), run_id=self._run_id, version=to_proto(version), worker_id=worker_id
        )
        return self._call(
            f"rollback to {version}", timeout_seconds, lambda stub, seconds: stub.Rollback(request, timeout=seconds)
        )

    def adopt(
        self, worker_id: str = "", *, timeout_seconds: float = 120.0, request_id: str = ""
    ) -> operations_pb2.AdoptResponse:
        """Let a coordinator without history take over a run whose workers have one; ``worker_id`` holds the truth."""
        request = operations_pb2.AdoptRequest(
            request_id=request_id or _new_id(), run_id=self._run_id, worker_id=worker_id
        )
        return self._call("adopt", timeout_seconds, lambda stub, seconds: stub.Adopt(request, timeout=seconds))

    def watch(self, *, connect_seconds: float = ANSWER_SECONDS) -> Iterator[operations_pb2.WatchResponse]:
        """Yield events from now on, until the coordinator ends or the iterator is closed.

        Args:
            connect_seconds: How long the coordinator may take to answer at all.
        """
        # A List first: it proves address, run and credentials within a deadline, which an endless stream has not.
        self.list(timeout_seconds=connect_seconds)
        call = self._stub().Watch(operations_pb2.WatchRequest(run_id=self._run_id))
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._error("watch", None, error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _stub(self) -> operations_pb2_grpc.OperationsStub:
        if self._channel is None:
            self._security.check_files()
            self._channel = open_channel(self._address, self._security, what="the coordinator")
        return operations_pb2_grpc.OperationsStub(self._channel)

    def _call(
        self, what: str, timeout_seconds: float, call: Callable[[operations_pb2_grpc.OperationsStub, float], R]
    ) -> R:
        stub = self._stub()
        try:
            return call(stub, timeout_seconds)
        except grpc.RpcError as error:
            raise self._error(what, timeout_seconds, error) from error

    def _error(self, what: str, timeout_seconds: float | None, error: grpc.RpcError) -> RecoveryError:
        told = told_failure(error)
        if told is not None:
            return told
        code = status_code(error)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CoordinatorUnreachable(
                f"{what}: the coordinator at {self._address} gave no answer within {timeout_seconds:g} s; "
                "`recovery status` shows who waits for what"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return RunRefused(f"{self._address} is a gRPC server, but not a coordinator of this release")
        if code is grpc.StatusCode.UNAVAILABLE:
            trouble = self._security.handshake_trouble(details_of(error))
            if trouble:
                return CoordinatorUnreachable(f"no connection to the coordinator at {self._address}: {trouble}")
            return CoordinatorUnreachable(
                f"no coordinator at {self._address}: {cause(error)}; is `recovery coordinator` running, and is this "
                "its address (--coordinator, RECOVERY_COORDINATOR)?"
            )
        return CoordinatorUnreachable(f"{what}: the coordinator at {self._address} failed: {cause(error)}")


def _new_id() -> str:
    return uuid.uuid4().hex
