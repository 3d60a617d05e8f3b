"""A joiner's way to a donor: which address answers, how far and how fast it is, and the conversation with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control.channel import open_channel
from recovery.control.conversation import StreamConversation
from recovery.control.rpc_errors import cause, is_overload, told_failure
from recovery.control.security import SecurityConfig, is_loopback
from recovery.control.wire import from_proto, to_proto
from recovery.errors import BadConfiguration, DonorBusy, DonorLost, PeerUnreachable, RecoveryError, Stop
from recovery.types import KIB, MIB, Address, RunId, WorkerRef

Conversation = StreamConversation[peer_pb2.JoinerLetter, peer_pb2.DonorLetter]
"""The joiner's end: sends ``JoinerLetter``, receives ``DonorLetter``."""

DIAL_SECONDS = 3.0
"""How long one address of a peer is tried."""

MAX_PROBE_BYTES = MIB

_LINGER_SECONDS = 1.0

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What a probe saw.

    Attributes:
        address: The one that answered.
        receiver: Who answered; None: it did not say.
        round_trip_seconds: Of an empty call on an open connection.
        bytes_per_second: Of the payload, there and back, without the round trip; a lower bound on short links.
    """

    address: Address
    receiver: WorkerRef | None
    round_trip_seconds: float
    bytes_per_second: float


def probe(
    address: Address,
    security: SecurityConfig,
    *,
    run_id: RunId | str = "",
    sender: WorkerRef | None = None,
    payload_bytes: int = 64 * KIB,
    timeout_seconds: float = DIAL_SECONDS,
    dial_back: Sequence[Address] = (),
) -> ProbeResult:
    """Send bytes to a peer and back, and measure; with ``dial_back`` prove the way from the peer to this process too.

    Args:
        address: The peer's.
        security: Equal to the peer's.
        run_id: The run that both belong to.
        sender: This worker.
        payload_bytes: 0 to 1 MiB.
        timeout_seconds: For each of the three calls; the one with ``dial_back`` gets time for each address on top.
        dial_back: Where this process's own ``PeerServer`` listens.

    Raises:
        PeerUnreachable: nobody answers; or the path is one-way, which the message says.
        RunRefused: the peer belongs to another run, or the credentials are wrong.
        BadConfiguration: ``payload_bytes``, or a plaintext channel beyond loopback.
    """
    result, channel = _probed(address, security, run_id, sender, payload_bytes, timeout_seconds, dial_back)
    channel.close()
    return result


def _probed(
    address: Address,
    security: SecurityConfig,
    run_id: RunId | str,
    sender: WorkerRef | None,
    payload_bytes: int,
    timeout_seconds: float,
    dial_back: Sequence[Address],
) -> tuple[ProbeResult, grpc.Channel]:
    """As ``probe``; also return the channel, still open: over a long path a second one would cost as long again."""
    if not 0 <= payload_bytes <= MAX_PROBE_BYTES:
        raise BadConfiguration(f"a probe carries 0 to {MAX_PROBE_BYTES} bytes, not {payload_bytes}")
    channel = open_channel(address, security, what="the peer")
    try:
        stub = peer_pb2_grpc.PeerServiceStub(channel)
        request = peer_pb2.ProbeRequest(run_id=run_id)
        if sender is not None:
            request.sender.CopyFrom(to_proto(sender))
        response = _answer(address, lambda: stub.Probe(request, timeout=timeout_seconds))
        receiver = from_proto(response.receiver) if response.HasField("receiver") else None
        started = time.monotonic()
        _answer(address, lambda: stub.Probe(request, timeout=timeout_seconds))
        round_trip = time.monotonic() - started
        rate = _payload_rate(stub, request, address, payload_bytes, round_trip, timeout_seconds)
        if dial_back:
            _require_way_back(stub, address, run_id, sender, dial_back, timeout_seconds)
    except BaseException:
        channel.close()
        raise
    result = ProbeResult(address=address, receiver=receiver, round_trip_seconds=round_trip, bytes_per_second=rate)
    return result, channel


def _payload_rate(
    stub: peer_pb2_grpc.PeerServiceStub,
    request: peer_pb2.ProbeRequest,
    address: Address,
    payload_bytes: int,
    round_trip_seconds: float,
    timeout_seconds: float,
) -> float:
    """Return bytes per second of a payload that goes there and back; 0 without one."""
    if not payload_bytes:
        return 0.0
    request.payload = bytes(payload_bytes)
    started = time.monotonic()
    response = _answer(address, lambda: stub.Probe(request, timeout=timeout_seconds))
    took = time.monotonic() - started
    if len(response.payload) != payload_bytes:
        raise PeerUnreachable(
            f"the peer at {address} sent {len(response.payload)} of {payload_bytes} bytes of a probe back"
        )
    return 2 * payload_bytes / max(took - round_trip_seconds, 1e-4)


def probe_any(
    addresses: Sequence[Address],
    security: SecurityConfig,
    *,
    run_id: RunId | str = "",
    sender: WorkerRef | None = None,
    expected: WorkerRef | None = None,
    peer_is_remote: bool = False,
    payload_bytes: int = 0,
    timeout_seconds: float = DIAL_SECONDS,
) -> ProbeResult:
    """Probe a peer's addresses in order and return the first that answers.

    Args:
        addresses: As the peer's hello gave them.
        security: Equal to the peer's.
        run_id: The run that both belong to.
        sender: This worker.
        expected: Who has to answer: an address may have passed to another process. None: whoever does.
        peer_is_remote: True refuses loopback addresses: they would reach this machine instead of the peer.
        payload_bytes: As ``probe``.
        timeout_seconds: For each address and call.

    Raises:
        PeerUnreachable: none answers; the message has the reason for each.
        RunRefused: an address answers and refuses this worker.
    """
    result, channel = _first_that_answers(
        addresses, security, run_id, sender, expected, peer_is_remote, payload_bytes, timeout_seconds
    )
    channel.close()
    return result


def _first_that_answers(
    addresses: Sequence[Address],
    security: SecurityConfig,
    run_id: RunId | str,
    sender: WorkerRef | None,
    expected: WorkerRef | None,
    peer_is_remote: bool,
    payload_bytes: int,
    timeout_seconds: float,
) -> tuple[ProbeResult, grpc.Channel]:
    """As ``probe_any``; also return the channel, still open."""
    reasons: list[str] = []
    for address in addresses:
        if peer_is_remote and is_loopback(address.host):
            reasons.append(f"{address}: is loopback, and the peer is on another machine")
            continue
        try:
            result, channel = _probed(address, security, run_id, sender, payload_bytes, timeout_seconds, ())
        except Stop as refusal:
            # Wrong credentials or another run will be wrong at the next address too, and have to be said.
            if not isinstance(refusal, BadConfiguration):
                raise
            reasons.append(f"{address}: {refusal}")
            continue
        except RecoveryError as error:
            reasons.append(str(error))
            continue
        if expected is not None and result.receiver is not None and result.receiver != expected:
            channel.close()
            reasons.append(f"{address}: is worker {result.receiver} of another incarnation or name, not {expected}")
            continue
        return result, channel
    raise PeerUnreachable(
        f"{expected if expected is not None else 'the peer'} cannot be reached: "
        + ("; ".join(reasons) or "it gave no address")
    )


def dial(
    addresses: Sequence[Address],
    security: SecurityConfig,
    *,
    run_id: RunId | str = "",
    sender: WorkerRef | None = None,
    expected: WorkerRef | None = None,
    peer_is_remote: bool = False,
    timeout_seconds: float = DIAL_SECONDS,
) -> Conversation:
    """Begin a conversation with a donor at the first of its addresses that answers a probe. Arguments as ``probe_any``.

    The first letter is the caller's; ``close`` ends the conversation and its thread.

    Raises:
        PeerUnreachable: no address answers within ``timeout_seconds`` each; names every one and why.
        RunRefused: the donor refuses this worker's credentials or run.
    """
    found, channel = _first_that_answers(
        addresses, security, run_id, sender, expected, peer_is_remote, 0, timeout_seconds
    )
    name = f"donor {found.receiver} at {found.address}" if found.receiver is not None else f"donor at {found.address}"
    conversation = _converse(channel, name)
    conversation.round_trip_seconds = found.round_trip_seconds
    return conversation


def _converse(channel: grpc.Channel, name: str) -> Conversation:
    conversation: Conversation = StreamConversation(name)
    call: Any = peer_pb2_grpc.PeerServiceStub(channel).Converse(conversation.outgoing())

    def read() -> None:
        try:
            for letter in call:
                if not conversation.deliver(letter):
                    break
            else:
                conversation.end(DonorLost(f"{name} closed the conversation: {_close_reason(call)}"))
        except grpc.RpcError as error:
            conversation.end(_lost(name, error))
        finally:
            call.cancel()
            channel.close()

    reader = threading.Thread(target=read, name=f"donor-letters-{name}", daemon=True)

    def close() -> None:
        # What was sent before is delivered by then, unless the donor takes nothing any more.
        if threading.current_thread() is not reader:
            reader.join(_LINGER_SECONDS)
            call.cancel()
            reader.join()

    conversation.on_close(close)
    reader.start()
    return conversation


def _lost(name: str, error: grpc.RpcError) -> RecoveryError:
    told = told_failure(error)
    if told is not None:
        return told
    if is_overload(error):
        return DonorBusy(f"{name} has no thread left for another conversation")
    return DonorLost(f"{name} is lost: {cause(error)}")


def _close_reason(call: Any) -> str:
    for key, value in call.trailing_metadata() or ():
        if key == "recovery-close-reason-bin" and isinstance(value, bytes):
            return value.decode(errors="replace")
    return "no reason given"


def _require_way_back(
    stub: peer_pb2_grpc.PeerServiceStub,
    address: Address,
    run_id: str,
    sender: WorkerRef | None,
    dial_back: Sequence[Address],
    timeout_seconds: float,
) -> None:
    request = peer_pb2.ProbeRequest(run_id=run_id, dial_back=[to_proto(back) for back in dial_back])
    if sender is not None:
        request.sender.CopyFrom(to_proto(sender))
    patience = timeout_seconds + DIAL_SECONDS * len(dial_back)
    response = _answer(address, lambda: stub.Probe(request, timeout=patience))
    if response.dial_back_failure:
        raise PeerUnreachable(
            f"one-way path: {sender if sender is not None else 'this worker'} reaches the peer at {address}, "
            f"but not the other way: {response.dial_back_failure}"
        )


def _answer(address: Address, call: Any) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        told = told_failure(error)
        if told is not None:
            raise told from error
        if is_overload(error):
            raise DonorBusy(f"the peer at {address} has no thread left for a probe") from error
        raise PeerUnreachable(f"{address}: {cause(error)}") from error
