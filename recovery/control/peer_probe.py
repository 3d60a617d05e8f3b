"""Probes of a worker's peer service: which address answers and who, how far and how fast it is, and the way back."""

from __future__ import annotations

import functools
import queue
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control.channel import open_channel
from recovery.control.rpc_errors import cause, is_overload, told_failure
from recovery.control.security import SecurityConfig, is_loopback
from recovery.control.wire import from_proto, to_proto
from recovery.errors import BadConfiguration, DonorBusy, PeerUnreachable, RecoveryError, Stop
from recovery.types import KIB, MIB, Address, RunId, WorkerRef

DIAL_SECONDS = 3.0
"""How long one address of a peer is tried."""

MAX_PROBE_BYTES = MIB

_HANDSHAKE_SECONDS = 0.9
"""Longer takes only one whose first packet was lost: it is sent again after a second."""

_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_RTT_OFFSET = 68
"""Of ``tcpi_rtt``, in microseconds, in Linux's ``struct tcp_info``."""


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
    if not 0 <= payload_bytes <= MAX_PROBE_BYTES:
        raise BadConfiguration(f"a probe carries 0 to {MAX_PROBE_BYTES} bytes, not {payload_bytes}")
    channel = open_channel(address, security, what="the peer")
    try:
        stub = peer_pb2_grpc.PeerServiceStub(channel)
        request = probe_request(run_id, sender)
        response = answer_of(address, lambda: stub.Probe(request, timeout=timeout_seconds))
        receiver = from_proto(response.receiver) if response.HasField("receiver") else None
        result = _measured(channel, address, receiver, request, payload_bytes, timeout_seconds)
        if dial_back:
            _require_way_back(stub, address, run_id, sender, dial_back, timeout_seconds)
    finally:
        channel.close()
    return result


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
    """Probe all of a peer's addresses at once and return the first that answers.

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
    result, channel = first_that_answers(
        addresses, security, run_id, sender, expected, peer_is_remote, payload_bytes, timeout_seconds
    )
    channel.close()
    return result


def first_that_answers(
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
    if not 0 <= payload_bytes <= MAX_PROBE_BYTES:
        raise BadConfiguration(f"a probe carries 0 to {MAX_PROBE_BYTES} bytes, not {payload_bytes}")
    request = probe_request(run_id, sender)
    reasons: list[str] = []
    answers: queue.SimpleQueue[tuple[Address, Any]] = queue.SimpleQueue()
    channels: dict[Address, grpc.Channel] = {}
    try:
        # All at once: an address that leads nowhere costs its whole timeout.
        for address in dict.fromkeys(addresses):
            if peer_is_remote and is_loopback(address.host):
                reasons.append(f"{address}: is loopback, and the peer is on another machine")
                continue
            try:
                channels[address] = channel = open_channel(address, security, what="the peer")
            except BadConfiguration as refusal:
                reasons.append(f"{address}: {refusal}")
                continue
            call = peer_pb2_grpc.PeerServiceStub(channel).Probe.future(request, timeout=timeout_seconds)
            call.add_done_callback(functools.partial(_hand_in, answers, address))
        for _ in range(len(channels)):
            address, done = answers.get()
            try:
                response = answer_of(address, done.result)
                receiver = from_proto(response.receiver) if response.HasField("receiver") else None
                if expected is not None and receiver is not None and receiver != expected:
                    reasons.append(f"{address}: is worker {receiver} of another incarnation or name, not {expected}")
                    continue
                result = _measured(channels[address], address, receiver, request, payload_bytes, timeout_seconds)
            except Stop:
                # Wrong credentials or another run will be wrong at the next address too, and have to be said.
                raise
            except RecoveryError as error:
                reasons.append(str(error))
                continue
            return result, channels.pop(address)
    finally:
        for channel in channels.values():
            channel.close()
    raise PeerUnreachable(
        f"{expected if expected is not None else 'the peer'} cannot be reached: "
        + ("; ".join(reasons) or "it gave no address")
    )


def _hand_in(answers: queue.SimpleQueue[tuple[Address, Any]], address: Address, done: Any) -> None:
    answers.put((address, done))


def probe_request(run_id: RunId | str, sender: WorkerRef | None) -> peer_pb2.ProbeRequest:
    request = peer_pb2.ProbeRequest(run_id=run_id)
    if sender is not None:
        request.sender.CopyFrom(to_proto(sender))
    return request


def _measured(
    channel: grpc.Channel,
    address: Address,
    receiver: WorkerRef | None,
    request: peer_pb2.ProbeRequest,
    payload_bytes: int,
    timeout_seconds: float,
) -> ProbeResult:
    """Measure round trip and rate on a channel that is connected."""
    stub = peer_pb2_grpc.PeerServiceStub(channel)
    started = time.monotonic()
    answer_of(address, lambda: stub.Probe(request, timeout=timeout_seconds))
    round_trip = time.monotonic() - started
    rate = _payload_rate(stub, request, address, payload_bytes, round_trip, timeout_seconds)
    return ProbeResult(address=address, receiver=receiver, round_trip_seconds=round_trip, bytes_per_second=rate)


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
    response = answer_of(address, lambda: stub.Probe(request, timeout=timeout_seconds))
    took = time.monotonic() - started
    if len(response.payload) != payload_bytes:
        raise PeerUnreachable(
            f"the peer at {address} sent {len(response.payload)} of {payload_bytes} bytes of a probe back"
        )
    return 2 * payload_bytes / max(took - round_trip_seconds, 1e-4)


def handshake_seconds(address: Address) -> float | None:
    """Return how long a TCP handshake with ``address`` takes, by connections that carry nothing; None: unknown.

    Two at once: one whose first packet is lost says nothing for a second.
    """
    trials: list[socket.socket] = []
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        started = time.monotonic()
        for _ in range(2):
            trial = socket.socket(family, kind, protocol)
            trials.append(trial)
            trial.setblocking(False)
            trial.connect_ex(target)
        _, connected, _ = select.select([], trials, [], _HANDSHAKE_SECONDS)
        took = time.monotonic() - started
        for trial in connected:
            if trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                continue
            info = trial.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256) if sys.platform == "linux" else b""
            # The system's measure does not contain what this process waited for its processor.
            return struct.unpack_from("=I", info, _RTT_OFFSET)[0] / 1e6 if len(info) > _RTT_OFFSET + 4 else took
        return None
    except OSError:
        return None  # the conversation's own connection says why
    finally:
        for trial in trials:
            trial.close()


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
    response = answer_of(address, lambda: stub.Probe(request, timeout=patience))
    check_way_back(response, address, sender)


def check_way_back(response: peer_pb2.ProbeResponse, address: Address, sender: WorkerRef | None) -> None:
    if response.dial_back_failure:
        raise PeerUnreachable(
            f"one-way path: {sender if sender is not None else 'this worker'} reaches the peer at {address}, "
            f"but not the other way: {response.dial_back_failure}"
        )


def answer_of(address: Address, call: Any) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        told = told_failure(error)
        if told is not None:
            raise told from error
        if is_overload(error):
            raise DonorBusy(f"the peer at {address} has no thread left for a probe") from error
        raise PeerUnreachable(f"{address}: {cause(error)}") from error
