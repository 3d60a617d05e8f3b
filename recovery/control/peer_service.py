"""A donor's server: conversations with joiners and probes, on a thread pool of its own.

Payload does not pass here. The server never dials anyone except back to a probe's sender, which has to hold the run's
credentials to be heard at all.
"""

from __future__ import annotations

import itertools
import logging
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent import futures
from types import TracebackType
from typing import Any

import grpc

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control.channel import server_options
from recovery.control.conversation import StreamConversation
from recovery.control.peer_client import Conversation, dial, dial_at_once
from recovery.control.peer_probe import MAX_PROBE_BYTES, ProbeResult, probe, probe_any
from recovery.control.rpc_errors import abort_details
from recovery.control.security import RequireToken, SecurityConfig
from recovery.control.wire import from_proto, to_proto
from recovery.errors import (
    BadConfiguration,
    DonorBusy,
    DonorLost,
    MisuseError,
    PeerUnreachable,
    RecoveryError,
    RunRefused,
)
from recovery.types import Address, RunId, WorkerRef

__all__ = [
    "Conversation",
    "DonorConversation",
    "PeerServer",
    "ProbeResult",
    "dial",
    "dial_at_once",
    "probe",
    "probe_any",
]

logger = logging.getLogger(__name__)

DonorConversation = StreamConversation[peer_pb2.DonorLetter, peer_pb2.JoinerLetter]
"""The donor's end: sends ``DonorLetter``, receives ``JoinerLetter``."""

CLOSE_REASON_KEY = "recovery-close-reason-bin"

_PROBE_THREADS = 2
_GRACE_SECONDS = 0.5
_MAX_DIAL_BACK = 8


class PeerServer:
    """Listens for joiners; hands each conversation to its owner.

    Args:
        host: Interface to bind; the advertised one, so that no other address is ever tried.
        port: TCP port; zero takes a free one.
        on_conversation: Called with each new conversation, on a thread of its own (``donor-conversation-<n>``). It may
            stay for the conversation's life or return at once; the conversation ends by ``close`` or by the joiner. If
            it raises, the conversation is closed with the error's text.
        security: Equal to the joiners'.
        max_conversations: More at once are refused with ``DonorBusy`` before anybody is called. Wants to be above the
            donor's slots, so that the owner itself can refuse with its own reason.
        run_id: Probes of another run are refused; empty: not checked.
        worker: Told to those who probe; None: nothing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_conversation: Callable[[DonorConversation], None],
        security: SecurityConfig,
        *,
        max_conversations: int = 16,
        run_id: RunId | str = "",
        worker: WorkerRef | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._on_conversation = on_conversation
        self._security = security
        self._max_conversations = max_conversations
        self._run_id = run_id
        self._worker = worker
        self._server: grpc.Server | None = None
        self._executor: futures.ThreadPoolExecutor | None = None
        self._servicer: _PeerServicer | None = None
        self._closed = False

    @property
    def address(self) -> Address:
        """Where joiners dial.

        Raises:
            MisuseError: not started.
        """
        if self._server is None:
            raise MisuseError("the peer server is not started")
        return Address(self._host, self._port)

    def start(self) -> PeerServer:
        """Bind and serve.

        Raises:
            BadConfiguration: the address is taken or not this machine's, or the security does not allow it.
            MisuseError: started or closed before.
        """
        if self._server is not None or self._closed:
            raise MisuseError("the peer server was started or closed before")
        if self._host in ("", "0.0.0.0", "::"):
            raise BadConfiguration(f"the peer server cannot advertise {self._host!r}: name one interface's address")
        self._security.check_host(self._host, what="the peer server's address")
        token = self._security.bearer_token()
        self._executor = futures.ThreadPoolExecutor(
            self._max_conversations + _PROBE_THREADS, thread_name_prefix="peer-server"
        )
        server = grpc.server(
            self._executor,
            interceptors=[RequireToken(token)] if token else [],
            options=server_options(),
            # A call that finds no thread is refused instead of waiting in silence.
            maximum_concurrent_rpcs=self._max_conversations + _PROBE_THREADS,
        )
        self._servicer = _PeerServicer(
            self._on_conversation, self._max_conversations, self._security, self._run_id, self._worker
        )
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self._servicer, server)
        wanted = Address(self._host, self._port)
        credentials = self._security.server_credentials()
        try:
            self._port = (
                server.add_insecure_port(str(wanted))
                if credentials is None
                else server.add_secure_port(str(wanted), credentials)
            )
        except RuntimeError as error:
            self._executor.shutdown()
            raise BadConfiguration(
                f"the peer server cannot listen on {wanted}: the port is taken or the address is not this machine's"
            ) from error
        server.start()
        self._server = server
        return self

    def close(self) -> None:
        """End every conversation, the server and its threads; twice without harm."""
        self._closed = True
        if self._server is None or self._executor is None or self._servicer is None:
            return
        self._servicer.close()
        # Conversations have ended above: the grace is for their reasons to arrive.
        self._server.stop(grace=_GRACE_SECONDS).wait()
        self._servicer.join()
        self._executor.shutdown()

    def __enter__(self) -> PeerServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    def __init__(
        self,
        on_conversation: Callable[[DonorConversation], None],
        max_conversations: int,
        security: SecurityConfig,
        run_id: str,
        worker: WorkerRef | None,
    ) -> None:
        self._on_conversation = on_conversation
        self._max_conversations = max_conversations
        self._security = security
        self._run_id = run_id
        self._worker = worker
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, DonorConversation] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False

    def Converse(self, request_iterator: Any, context: Any) -> Iterator[peer_pb2.DonorLetter]:
        conversation: DonorConversation = StreamConversation(f"joiner at {_plain(context.peer())}")
        number = self._admit(conversation, context)
        try:
            # Called by gRPC when the stream is over for any reason: done, cancelled, or its keepalive lost.
            lost = DonorLost(f"the stream of {conversation.peer} ended: its process is gone, frozen or cut off")
            if not context.add_callback(lambda: conversation.end(lost)):
                conversation.end(lost)
            self._spawn(f"donor-letters-{number}", lambda: self._read(request_iterator, conversation))
            self._spawn(f"donor-conversation-{number}", lambda: self._serve(conversation))
            yield from conversation.outgoing()
            reason = conversation.close_reason or "closed"
            context.set_trailing_metadata(((CLOSE_REASON_KEY, reason.encode()[:1024]),))
        finally:
            conversation.end(DonorLost(f"the stream of {conversation.peer} is over"))
            with self._lock:
                self._open.pop(number, None)

    def Probe(self, request: peer_pb2.ProbeRequest, context: Any) -> peer_pb2.ProbeResponse:
        if len(request.payload) > MAX_PROBE_BYTES or len(request.dial_back) > _MAX_DIAL_BACK:
            _abort(context, BadConfiguration("a probe carries at most 1 MiB and 8 addresses"))
        if self._run_id and request.run_id != self._run_id:
            _abort(
                context,
                RunRefused(f"this worker belongs to run {self._run_id!r}, the probe to run {request.run_id[:200]!r}"),
            )
        response = peer_pb2.ProbeResponse(payload=request.payload)
        if self._worker is not None:
            response.receiver.CopyFrom(to_proto(self._worker))
        if request.dial_back:
            try:
                probe_any(
                    [from_proto(address) for address in request.dial_back],
                    self._security,
                    run_id=request.run_id,
                    sender=self._worker,
                    expected=from_proto(request.sender) if request.HasField("sender") else None,
                )
            except RecoveryError as error:
                response.dial_back_failure = str(error)[:2000]
        return response

    def close(self) -> None:
        """Admit nobody any more; end all conversations."""
        with self._lock:
            self._closing = True
            conversations = list(self._open.values())
        for conversation in conversations:
            conversation.close("the donor is closing")

    def join(self) -> None:
        """Wait for the threads of all conversations."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _admit(self, conversation: DonorConversation, context: Any) -> int:
        with self._lock:
            full = len(self._open) >= self._max_conversations
            closing = self._closing
            number = next(self._numbers)
            if not full and not closing:
                self._open[number] = conversation
        if closing:
            _abort(context, PeerUnreachable("the donor is closing"))
        if full:
            _abort(context, DonorBusy(f"this donor already has {self._max_conversations} conversations: ask later"))
        return number

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            # Those that ended need no joining; done here, so that the list is as long as there are conversations.
            self._threads = [known for known in self._threads if known.is_alive()]
            self._threads.append(thread)
            thread.start()

    @staticmethod
    def _read(request_iterator: Iterator[peer_pb2.JoinerLetter], conversation: DonorConversation) -> None:
        try:
            for letter in request_iterator:
                if not conversation.deliver(letter):
                    return
            why = "said that it has no more letters"
        except grpc.RpcError:
            # The callback on the context says the same; whoever is first is right.
            why = "cancelled its stream, or is gone, frozen or cut off"
        conversation.end(DonorLost(f"{conversation.peer} {why}"))

    def _serve(self, conversation: DonorConversation) -> None:
        try:
            self._on_conversation(conversation)
        except Exception as error:  # thread's root: the owner's code failed; its joiner is told, training goes on
            if not isinstance(error, DonorLost):
                logger.exception("the conversation with %s failed", conversation.peer)
            conversation.close(f"{type(error).__name__}: {error}")


def _abort(context: Any, error: RecoveryError) -> None:
    code, details, trailing = abort_details(error)
    context.set_trailing_metadata(trailing)
    context.abort(code, details)


def _plain(peer: str) -> str:
    """Return gRPC's name of a peer ("ipv4:10.0.0.2:4711", "ipv6:%5B::1%5D:4711") as people write it."""
    return urllib.parse.unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:")
