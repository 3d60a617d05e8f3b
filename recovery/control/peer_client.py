"""A joiner's way to a donor: the conversation with it, at whichever of its addresses answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import grpc

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control.channel import open_channel
from recovery.control.conversation import StreamConversation
from recovery.control.peer_probe import (
    DIAL_SECONDS,
    answer_of,
    check_way_back,
    first_that_answers,
    handshake_seconds,
    probe_request,
)
from recovery.control.rpc_errors import cause, is_overload, told_failure
from recovery.control.security import SecurityConfig, is_loopback
from recovery.control.wire import from_proto, to_proto
from recovery.errors import DonorBusy, DonorLost, PeerUnreachable, RecoveryError, Stop
from recovery.types import Address, RunId, WorkerRef

Conversation = StreamConversation[peer_pb2.JoinerLetter, peer_pb2.DonorLetter]
"""The joiner's end: sends ``JoinerLetter``, receives ``DonorLetter``."""

_LINGER_SECONDS = 1.0

logger = logging.getLogger(__name__)


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
    found, channel = first_that_answers(
        addresses, security, run_id, sender, expected, peer_is_remote, 0, timeout_seconds
    )
    name = f"donor {found.receiver} at {found.address}" if found.receiver is not None else f"donor at {found.address}"
    conversation = _converse(channel, name)
    conversation.round_trip_seconds = found.round_trip_seconds
    return conversation


def dial_at_once(
    addresses: Sequence[Address],
    security: SecurityConfig,
    *,
    run_id: RunId | str = "",
    sender: WorkerRef | None = None,
    expected: WorkerRef | None = None,
    peer_is_remote: bool = False,
    dial_back: Sequence[Address] = (),
    timeout_seconds: float = DIAL_SECONDS,
) -> Conversation:
    """As ``dial``, two round trips sooner where there is one address: what a probe asks is asked beside the letters.

    If another worker or run answers, or the way from the peer to ``dial_back`` is closed, the conversation ends with
    the error that says so, as it ends if nobody answers at all.

    Args:
        addresses: As ``probe_any``, and the others likewise.
        security: Equal to the peer's.
        run_id: The run that both belong to.
        sender: This worker.
        expected: Who has to answer.
        peer_is_remote: True refuses loopback addresses.
        dial_back: Where this process's own ``PeerServer`` listens; empty: the way back is not tried.
        timeout_seconds: For each address and call.
    """
    usable = [address for address in addresses if not (peer_is_remote and is_loopback(address.host))]
    if len(usable) != 1:
        conversation = dial(
            addresses,
            security,
            run_id=run_id,
            sender=sender,
            expected=expected,
            peer_is_remote=peer_is_remote,
            timeout_seconds=timeout_seconds,
        )
        return conversation
    (address,) = usable
    channel = open_channel(address, security, what="the peer")
    request = probe_request(run_id, sender)
    request.dial_back.extend(to_proto(back) for back in dial_back)
    patience = timeout_seconds + DIAL_SECONDS * len(dial_back)
    check = peer_pb2_grpc.PeerServiceStub(channel).Probe.future(request, timeout=patience)
    name = f"donor {expected} at {address}" if expected is not None else f"donor at {address}"
    conversation = _converse(channel, name)
    check.add_done_callback(lambda done: _judge(done, conversation, address, sender, expected))
    conversation.round_trip_seconds = handshake_seconds(address)
    return conversation


def _judge(
    done: Any, conversation: Conversation, address: Address, sender: WorkerRef | None, expected: WorkerRef | None
) -> None:
    """End a conversation whose probe shows that it is with somebody else, or that the path is one-way."""
    if done.cancelled() or conversation.ended is not None:
        return
    try:
        response = answer_of(address, done.result)
        receiver = from_proto(response.receiver) if response.HasField("receiver") else None
        if expected is not None and receiver is not None and receiver != expected:
            raise PeerUnreachable(f"{address}: is worker {receiver} of another incarnation or name, not {expected}")
        check_way_back(response, address, sender)
    except Stop as refusal:
        conversation.end(refusal)
    except PeerUnreachable as error:
        # A probe that got no answer says nothing that the conversation does not say better.
        if done.exception() is None:
            conversation.end(error)
    except RecoveryError as error:
        logger.info("the probe of %s: %s", conversation.peer, error)


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
