"""Keys and values through which the ranks of one short-lived group find each other; forgotten when the group ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from protos.recovery.v1 import rendezvous_pb2, rendezvous_pb2_grpc
from recovery.clock import Clock
from recovery.control.channel import MAX_MESSAGE_BYTES
from recovery.control.rpc_errors import abort_details
from recovery.control.wire import seconds
from recovery.errors import BadConfiguration, DonorBusy, PeerUnreachable, RecoveryError
from recovery.types import KIB, MIB

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousLimits:
    """Caps, checked before anything is stored.

    Attributes:
        max_value_bytes: Of one value.
        max_name_bytes: Of a scope's or key's name, in UTF-8.
        max_keys: Of one scope, and in one request.
        max_scopes: At once; one more is refused.
        max_total_bytes: Of all values together.
        max_wait_seconds: Longest wait of one request.
        idle_seconds: A scope that nobody used for so long is forgotten.
        remembered_ends: Ended scopes that are refused by name instead of being begun again.
    """

    max_value_bytes: int = 64 * KIB
    max_name_bytes: int = 512
    max_keys: int = 4096
    max_scopes: int = 4096
    max_total_bytes: int = 64 * MIB
    max_wait_seconds: float = 600.0
    idle_seconds: float = 900.0
    remembered_ends: int = 8192


@dataclass(slots=True)
class _Scope:
    last_used: float
    values: dict[str, bytes] = field(default_factory=dict)
    # Resolved and replaced whenever a key is set, so that waiters look again.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiters: int = 0
    ended: bool = False


class RendezvousTable:
    """All scopes of one run, in memory: a coordinator that restarts begins with none, and groups form anew.

    Belongs to one event loop; only ``get`` waits.
    """

    def __init__(self, clock: Clock, limits: RendezvousLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or RendezvousLimits()
        self._scopes: dict[str, _Scope] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._total_bytes = 0

    @property
    def num_scopes(self) -> int:
        return len(self._scopes)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def set(self, scope: str, key: str, value: bytes) -> None:
        """Store a value, replacing what was there.

        Raises:
            DonorBusy: over a cap.
            PeerUnreachable: the scope has ended.
        """
        found = self._open(scope)
        self._check_name("key", key)
        if len(value) > self._limits.max_value_bytes:
            raise DonorBusy(
                f"the value of {key} in scope {scope} has {len(value)} bytes, more than {self._limits.max_value_bytes}"
            )
        old = found.values.get(key)
        if old is None and len(found.values) >= self._limits.max_keys:
            raise DonorBusy(f"scope {scope} already holds {self._limits.max_keys} keys")
        total = self._total_bytes - len(old or b"") + len(value)
        if total > self._limits.max_total_bytes:
            raise DonorBusy(f"the rendezvous holds {self._total_bytes} bytes; no room for {len(value)} more")
        found.values[key] = value
        self._total_bytes = total
        found.changed.set()
        found.changed = asyncio.Event()

    async def get(self, scope: str, keys: Sequence[str], timeout_seconds: float) -> tuple[dict[str, bytes], list[str]]:
        """Return the values that exist and the keys that do not, waiting until none is missing or time is up.

        Raises:
            DonorBusy: too many keys, or too many scopes.
            PeerUnreachable: the scope has ended, before or meanwhile.
        """
        if len(keys) > self._limits.max_keys:
            raise DonorBusy(f"{len(keys)} keys in one request; at most {self._limits.max_keys} are looked up")
        found = self._open(scope)
        deadline = self._clock.monotonic() + min(timeout_seconds, self._limits.max_wait_seconds)
        found.num_waiters += 1
        try:
            while True:
                missing = [key for key in keys if key not in found.values]
                remaining = deadline - self._clock.monotonic()
                if not missing or remaining <= 0:
                    return {key: found.values[key] for key in keys if key in found.values}, missing
                try:
                    async with asyncio.timeout(remaining):
                        await found.changed.wait()
                except TimeoutError:
                    continue
                if found.ended:
                    raise _ended(scope)
        finally:
            found.num_waiters -= 1
            found.last_used = self._clock.monotonic()

    def add(self, scope: str, key: str, amount: int) -> int:
        """Add to an integer that starts at zero, stored as decimal text; return the sum.

        Raises:
            BadConfiguration: the value there is no integer, or the sum has more than 63 bits.
            DonorBusy, PeerUnreachable: as ``set``.
        """
        old = self._open(scope).values.get(key, b"0")
        try:
            total = int(old[:32]) + amount
        except ValueError:
            raise BadConfiguration(f"key {key} in scope {scope} holds no integer to add to") from None
        if not -(2**63) <= total < 2**63:
            raise BadConfiguration(f"key {key} in scope {scope}: the sum does not fit into 64 bits")
        self.set(scope, key, str(total).encode())
        return total

    def compare_set(self, scope: str, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value equals ``expected`` (empty: the key is absent); return what is stored then.

        Raises:
            DonorBusy, PeerUnreachable: as ``set``.
        """
        current = self._open(scope).values.get(key, b"")
        if current != expected:
            return current
        self.set(scope, key, desired)
        return desired

    def delete(self, scope: str, key: str) -> bool:
        """Remove a key; return whether it existed.

        Raises:
            PeerUnreachable: the scope has ended.
        """
        old = self._open(scope).values.pop(key, None)
        self._total_bytes -= len(old or b"")
        return old is not None

    def end(self, scope: str) -> None:
        """Forget a scope and every one below it (``scope/...``), free who waits there, and refuse the names."""
        for name in [name for name in self._scopes if name == scope or name.startswith(scope + "/")]:
            self._forget(name)
        self._remember_end(scope)

    def expire(self) -> None:
        """Forget scopes that nobody used for ``idle_seconds``; to be called now and then."""
        horizon = self._clock.monotonic() - self._limits.idle_seconds
        for name, scope in list(self._scopes.items()):
            if scope.num_waiters == 0 and scope.last_used < horizon:
                self._forget(name)

    def _open(self, name: str) -> _Scope:
        self._check_name("scope", name)
        if self._is_ended(name):
            raise _ended(name)
        scope = self._scopes.get(name)
        if scope is None:
            if len(self._scopes) >= self._limits.max_scopes:
                raise DonorBusy(f"the rendezvous holds {len(self._scopes)} scopes already; {name} has no room")
            scope = self._scopes[name] = _Scope(self._clock.monotonic())
        scope.last_used = self._clock.monotonic()
        return scope

    def _is_ended(self, name: str) -> bool:
        # A scope ends with the one above it: "transfer/7" takes "transfer/7/1/w2" along.
        while name:
            if name in self._ended:
                return True
            name = name.rpartition("/")[0]
        return False

    def _forget(self, name: str) -> None:
        scope = self._scopes.pop(name)
        scope.ended = True
        self._total_bytes -= sum(len(value) for value in scope.values.values())
        scope.changed.set()

    def _remember_end(self, name: str) -> None:
        self._ended[name] = None
        while len(self._ended) > self._limits.remembered_ends:
            self._ended.popitem(last=False)

    def _check_name(self, what: str, name: str) -> None:
        if not name or len(name.encode()) > self._limits.max_name_bytes:
            raise BadConfiguration(f"a {what}'s name has 1 to {self._limits.max_name_bytes} bytes, not {len(name)}")


class RendezvousServicer(rendezvous_pb2_grpc.RendezvousServicer):
    """The gRPC face of a table, on the event loop that owns it."""

    def __init__(self, table: RendezvousTable) -> None:
        self._table = table

    async def Set(self, request: rendezvous_pb2.SetRequest, context: Any) -> Any:
        await _told(context, lambda: self._table.set(request.scope, request.key, request.value))
        return rendezvous_pb2.SetResponse()

    async def Get(self, request: rendezvous_pb2.GetRequest, context: Any) -> Any:
        wait = seconds(request.timeout)
        try:
            values, missing = await self._table.get(request.scope, request.keys, wait)
        except RecoveryError as error:
            return await _abort(context, error)
        if missing and wait > 0:
            names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            late = PeerUnreachable(f"nobody set {names} in scope {request.scope}")
            code, details, trailing = abort_details(late, grpc.StatusCode.DEADLINE_EXCEEDED)
            await context.abort(code, details, trailing)
        if request.only_wait:
            return rendezvous_pb2.GetResponse(missing=missing)
        response = rendezvous_pb2.GetResponse(values=[values.get(key, b"") for key in request.keys], missing=missing)
        if response.ByteSize() > MAX_MESSAGE_BYTES:
            keys = len(request.keys)
            return await _abort(
                context, DonorBusy(f"the values of {keys} keys are too long for one answer: ask for fewer")
            )
        return response

    async def Add(self, request: rendezvous_pb2.AddRequest, context: Any) -> Any:
        total = await _told(context, lambda: self._table.add(request.scope, request.key, request.amount))
        return rendezvous_pb2.AddResponse(value=total)

    async def CompareSet(self, request: rendezvous_pb2.CompareSetRequest, context: Any) -> Any:
        value = await _told(
            context,
            lambda: self._table.compare_set(request.scope, request.key, request.expected, request.desired),
        )
        return rendezvous_pb2.CompareSetResponse(value=value)

    async def Delete(self, request: rendezvous_pb2.DeleteRequest, context: Any) -> Any:
        existed = await _told(context, lambda: self._table.delete(request.scope, request.key))
        return rendezvous_pb2.DeleteResponse(existed=existed)


async def _told(context: Any, act: Callable[[], R]) -> R:
    try:
        return act()
    except RecoveryError as error:
        return await _abort(context, error)  # type: ignore[no-any-return]


async def _abort(context: Any, error: RecoveryError) -> Any:
    code, details, trailing = abort_details(
        error, grpc.StatusCode.NOT_FOUND if isinstance(error, PeerUnreachable) else None
    )
    await context.abort(code, details, trailing)


def _ended(scope: str) -> PeerUnreachable:
    return PeerUnreachable(f"rendezvous scope {scope} has ended: its transfer or epoch is over")
