"""The coordinator's gRPC faces: the workers' streams and the operators' requests. Thin: the owner's machine decides."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos.recovery.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
)
from recovery.control.advertised import own_hosts, without_loopback
from recovery.control.inputs import OperationRequest
from recovery.control.owner import RunOwner, WorkerStream, spawn
from recovery.control.rpc_errors import abort_details
from recovery.control.wire import from_proto
from recovery.errors import BadConfiguration, RecoveryError, RunRefused

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""A stream without a hello for so long is ended."""


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):
    """One ``Attach`` call a worker process.

    Args:
        owner: Gets the inputs.
        run_id: Hellos of another run are refused here, before anything is known of them.
        silence_seconds: A stream on which nothing came for so long counts as lost. Zero: HTTP/2 keepalive alone
            decides, which also keeps a worker whose interpreter is busy.
    """

    def __init__(self, owner: RunOwner, run_id: str, silence_seconds: float = 0.0) -> None:
        self._owner = owner
        self._run_id = run_id
        self._silence_seconds = silence_seconds

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Keep a worker attached until its stream, or the coordinator, ends."""
        try:
            hello = without_loopback(await self._hello(request_iterator), context.peer(), own_hosts())
            stream = WorkerStream(from_proto(hello.worker))
        except RecoveryError as error:
            await _abort(context, error)
            return
        await self._owner.attach(stream, hello)
        tasks = [
            spawn(self._write(stream, context), f"write-{stream.worker}"),
            spawn(self._read(request_iterator, stream), f"read-{stream.worker}"),
        ]
        reason = "its stream failed"
        try:
            await stream.over.wait()
            reason = stream.end_reason or reason
        except asyncio.CancelledError:
            # gRPC cancels the call when its connection is gone: by a reset, or because no ping was answered.
            reason = stream.end_reason or "its connection is lost: the process is gone, frozen or cut off"
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._owner.detach(stream, reason)
        if stream.broken:
            # Said with a status: what was told before may never have arrived. (A call whose own task is cancelled by
            # anybody but gRPC would stay open at the other end for ever.)
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    async def _write(self, stream: WorkerStream, context: Any) -> None:
        try:
            async for message in stream.outgoing():
                await context.write(message)
        # The servicer's edge: gRPC has no common class for what a write on a dead call raises.
        except Exception as error:  # noqa: BLE001
            logger.info("writing to %s failed: %r", stream.worker, error)
            stream.break_off(f"its stream broke: {error}")
        else:
            stream.over.set()

    async def _hello(self, messages: Any) -> coordinator_pb2.Hello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(messages)
        except TimeoutError:
            raise BadConfiguration(f"no hello came within {HELLO_SECONDS:g} s") from None
        except StopAsyncIteration:
            raise BadConfiguration("the stream ended before its hello") from None
        if first.WhichOneof("kind") != "hello":
            raise BadConfiguration("the first message of a stream has to be a hello")
        if first.hello.run_id != self._run_id:
            raise RunRefused(
                f"this coordinator serves run {self._run_id!r}, not {first.hello.run_id[:200]!r}: "
                "correct the run id or the coordinator's address"
            )
        hello: coordinator_pb2.Hello = first.hello
        return hello

    async def _read(self, messages: Any, stream: WorkerStream) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_seconds or None):
                    message = await anext(messages)
            except StopAsyncIteration:
                # Also what a lost connection looks like from here; a worker that leaves says goodbye first.
                stream.end("its stream ended without a goodbye")
                return
            except TimeoutError:
                stream.break_off(f"nothing came from it for {self._silence_seconds:g} s")
                return
            kind = message.WhichOneof("kind")
            if kind == "hello":
                stream.end("it said hello twice on one stream")
                return
            if kind == "beat":
                stream.tell(coordinator_pb2.CoordinatorMessage(beat=message.beat))
            await self._owner.receive(stream, message)
            if kind == "goodbye":
                stream.end(f"goodbye: {message.goodbye.reason[:500]}" if message.goodbye.reason else "goodbye")
                return


class OperationsServicer(operations_pb2_grpc.OperationsServicer):
    """What operators ask. Each request is one input; its answer may come much later."""

    def __init__(self, owner: RunOwner, run_id: str) -> None:
        self._owner = owner
        self._run_id = run_id

    async def List(self, request: operations_pb2.ListRequest, context: Any) -> Any:
        return await self._operate(request, "", context)

    async def Resync(self, request: operations_pb2.ResyncRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Verify(self, request: operations_pb2.VerifyRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Save(self, request: operations_pb2.SaveRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Drain(self, request: operations_pb2.DrainRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Cancel(self, request: operations_pb2.CancelRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def SetRate(self, request: operations_pb2.SetRateRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Rollback(self, request: operations_pb2.RollbackRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Adopt(self, request: operations_pb2.AdoptRequest, context: Any) -> Any:
        return await self._operate(request, request.request_id, context)

    async def Watch(
        self, request: operations_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[operations_pb2.WatchResponse]:
        try:
            self._check_run(request.run_id)
            async for response in self._owner.watch():
                yield response
        except RecoveryError as error:
            await _abort(context, error)

    async def _operate(self, request: OperationRequest, request_id: str, context: Any) -> Any:
        try:
            self._check_run(request.run_id)
            if len(request_id) > 200:
                raise BadConfiguration("a request id has at most 200 characters")
        except RecoveryError as error:
            return await _abort(context, error)
        answer = await self._owner.operate(request_id or uuid.uuid4().hex, request)
        if isinstance(answer, RecoveryError):
            return await _abort(context, answer)
        return answer

    def _check_run(self, run_id: str) -> None:
        # An operator may leave the run out: a coordinator serves one.
        if run_id and run_id != self._run_id:
            raise RunRefused(
                f"this coordinator serves run {self._run_id!r}, not {run_id[:200]!r}: "
                "correct --run-id or the coordinator's address"
            )


async def _abort(context: Any, error: RecoveryError) -> Any:
    code, details, trailing = abort_details(
        error, grpc.StatusCode.FAILED_PRECONDITION if isinstance(error, RunRefused) else None
    )
    await context.abort(code, details, trailing)
