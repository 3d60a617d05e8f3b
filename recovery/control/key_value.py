"""``recovery.types.KeyValue`` over the coordinator's Rendezvous service: how ranks of one group find each other."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from protos.recovery.v1 import rendezvous_pb2, rendezvous_pb2_grpc
from recovery.control.rpc_errors import cause, status_code, told_failure
from recovery.control.wire import duration
from recovery.errors import PeerUnreachable

T = TypeVar("T")

WAIT_SLICE_SECONDS = 2.0
"""A long wait is made of short calls: a coordinator that was restarted is asked again instead of waited for."""

CALL_SECONDS = 5.0
"""How long one call that does not wait may take, reconnecting included."""

_AGAIN_SECONDS = 0.1


class RendezvousKeyValue:
    """Keys and values of short-lived groups. All methods may be called from several threads at once.

    ``close()`` ends every wait within milliseconds.
    """

    def __init__(self, channel: grpc.Channel, where: str) -> None:
        self._channel = channel
        self._stub = rendezvous_pb2_grpc.RendezvousStub(channel)
        self._where = where
        self._closed = threading.Event()

    def set(self, scope: str, key: str, value: bytes) -> None:
        request = rendezvous_pb2.SetRequest(scope=scope, key=key, value=value)
        self._repeatable(scope, lambda seconds: self._stub.Set(request, timeout=seconds))

    def get(self, scope: str, keys: list[str], timeout_seconds: float) -> list[bytes]:
        return list(self._await(scope, keys, timeout_seconds, only_wait=False).values)

    def wait(self, scope: str, keys: list[str], timeout_seconds: float) -> None:
        self._await(scope, keys, timeout_seconds, only_wait=True)

    def exists(self, scope: str, keys: list[str]) -> bool:
        request = rendezvous_pb2.GetRequest(scope=scope, keys=keys, only_wait=True)
        return not self._repeatable(scope, lambda seconds: self._stub.Get(request, timeout=seconds)).missing

    def add(self, scope: str, key: str, amount: int) -> int:
        request = rendezvous_pb2.AddRequest(scope=scope, key=key, amount=amount)
        return self._once(scope, lambda seconds: self._stub.Add(request, timeout=seconds)).value

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        request = rendezvous_pb2.CompareSetRequest(scope=scope, key=key, expected=expected, desired=desired)
        return self._once(scope, lambda seconds: self._stub.CompareSet(request, timeout=seconds)).value

    def delete(self, scope: str, key: str) -> bool:
        request = rendezvous_pb2.DeleteRequest(scope=scope, key=key)
        return self._repeatable(scope, lambda seconds: self._stub.Delete(request, timeout=seconds)).existed

    def close(self) -> None:
        """End all waits and the channel; twice without harm."""
        self._closed.set()
        self._channel.close()

    def _await(
        self, scope: str, keys: list[str], timeout_seconds: float, *, only_wait: bool
    ) -> rendezvous_pb2.GetResponse:
        started = time.monotonic()
        why = "the rendezvous was not reached"
        while True:
            remaining = timeout_seconds - (time.monotonic() - started)
            if remaining <= 0:
                raise PeerUnreachable(f"{why} (waited {timeout_seconds:g} s)")
            wait = min(remaining, WAIT_SLICE_SECONDS)
            request = rendezvous_pb2.GetRequest(scope=scope, keys=keys, timeout=duration(wait), only_wait=only_wait)
            try:
                return self._call(functools.partial(self._stub.Get, request, timeout=wait + CALL_SECONDS))
            except grpc.RpcError as error:
                told = told_failure(error)
                if told is not None and status_code(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise told from error
                if not self._may_come_back(error) and told is None:
                    raise self._lost(scope, error) from error
                why = str(told) if told is not None else str(self._lost(scope, error))
                if told is None and self._closed.wait(min(_AGAIN_SECONDS, remaining)):
                    raise self._lost(scope, error) from error

    def _repeatable(self, scope: str, call: Callable[[float], T]) -> T:
        """Make a call whose repetition changes nothing, again and again while the coordinator is away."""
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return self._call(lambda: call(max(0.1, deadline - time.monotonic())))
            except grpc.RpcError as error:
                told = told_failure(error)
                if told is not None:
                    raise told from error
                late = time.monotonic() + _AGAIN_SECONDS >= deadline
                if late or not self._may_come_back(error) or self._closed.wait(_AGAIN_SECONDS):
                    raise self._lost(scope, error) from error

    def _once(self, scope: str, call: Callable[[float], T]) -> T:
        try:
            return self._call(lambda: call(CALL_SECONDS))
        except grpc.RpcError as error:
            raise (told_failure(error) or self._lost(scope, error)) from error

    def _call(self, call: Callable[[], T]) -> T:
        if self._closed.is_set():
            raise PeerUnreachable(f"the rendezvous at {self._where} was closed by this process")
        try:
            return call()
        except ValueError as error:
            # What gRPC raises when the channel was closed by another thread just before the call.
            if not self._closed.is_set():
                raise
            raise PeerUnreachable(f"the rendezvous at {self._where} was closed by this process") from error

    def _may_come_back(self, error: grpc.RpcError) -> bool:
        code = status_code(error)
        return not self._closed.is_set() and code in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        )

    def _lost(self, scope: str, error: grpc.RpcError) -> PeerUnreachable:
        if self._closed.is_set():
            return PeerUnreachable(f"the rendezvous at {self._where} was closed by this process")
        return PeerUnreachable(f"the rendezvous at {self._where} for {scope} does not answer: {cause(error)}")
