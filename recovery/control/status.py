"""The answer to "why is this worker not training?", for each worker, and the run's three numbers."""

from __future__ import annotations

from protos.recovery.v1 import operations_pb2
from recovery.control.membership import Member, Standing
from recovery.control.run_state import RunState
from recovery.control.wire import duration, seconds, timestamp, to_proto
from recovery.types import NO_VERSION


def status_of(run: RunState, now: float) -> operations_pb2.ListResponse:
    """Return the run as operators see it. ``alive``, ``ready`` and ``participating`` are three numbers."""
    record = run.record
    members = [member for _, member in sorted(run.members.items())]
    newest = record.epochs.get(record.last_epoch)
    response = operations_pb2.ListResponse(
        run_id=run.policy.run_id,
        sealed_fingerprint=record.sealed_fingerprint,
        alive=sum(member.alive for member in members),
        ready=sum(member.alive and member.standing in (Standing.READY, Standing.APPLIED) for member in members),
        participating=len(newest.members) if newest is not None else 0,
        epoch=record.last_epoch,
        aborted_epochs=record.num_aborted,
        committed_epochs=record.num_committed,
        paused=record.paused,
        gone=run.num_gone,
        workers=[_worker(run, member, now) for member in members],
    )
    if record.sealed != NO_VERSION:
        response.sealed.CopyFrom(to_proto(record.sealed))
    for begun in record.lineages:
        response.lineages.add(
            lineage=begun.version.lineage,
            cause=begun.cause,
            parent=to_proto(begun.parent),
            lost_steps=begun.lost_steps,
            started=timestamp(begun.started_wall_seconds),
        )
    return response


def _worker(run: RunState, member: Member, now: float) -> operations_pb2.WorkerStatus:
    told = member.advertisement
    waiting_for, since = waiting_line(run, member, now)
    status = operations_pb2.WorkerStatus(
        worker=to_proto(member.ref),
        alive=member.alive,
        ready=member.alive and member.standing in (Standing.READY, Standing.APPLIED),
        # A joiner without a version never had a state: what it waits for says how far it is.
        poisoned=member.poisoned and member.held != NO_VERSION,
        stalled=member.alive and member.stalled,
        drained=member.worker_id in run.record.drained,
        fingerprint=member.fingerprint,
        donor_slots=member.hello.donor_slots,
        free_slots=member.hello.donor_slots - _taken(run, member.worker_id),
        inner_step=told.inner_step,
        inner_steps_per_phase=told.inner_steps_per_phase,
        waiting_for=waiting_for,
        waited=duration(max(0.0, now - since) if waiting_for else 0.0),
        hostname=member.hello.hostname,
        process_id=member.hello.process_id,
        last_seen=timestamp(member.last_seen + run.wall_offset_seconds),
        numerics_id=member.hello.numerics_id,
        training_thread_stalled=told.training_thread_stalled,
        trouble=told.trouble if member.alive else "",
    )
    if member.held != NO_VERSION:
        status.version.CopyFrom(to_proto(member.held))
    if member.hello.peer_addresses:
        status.peer_address.CopyFrom(member.hello.peer_addresses[0])
    return status


def _taken(run: RunState, donor: str) -> int:
    joiners = run.live_in(Standing.JOINING)
    taken = sum(donor in joiner.transfer.donors for joiner in joiners if joiner.transfer is not None)
    return min(taken, run.members[donor].hello.donor_slots)


def waiting_line(run: RunState, member: Member, now: float) -> tuple[str, float]:
    """Return what a worker waits for, in one line, and since when; an empty line: it trains."""
    record = run.record
    if not member.alive:
        return f"it is gone: {member.lost_reason}", member.lost_at
    match member.standing:
        case Standing.IDLE if member.advertisement.waiting_for:
            return member.advertisement.waiting_for, member.since
        case Standing.AWAITING | Standing.QUEUED | Standing.IDLE | Standing.FOREIGN:
            if member.last_no_donor is not None:
                return member.last_no_donor.reason, member.since
            return run.outlook or member.standing.value, member.since
        case Standing.ORIGIN:
            version = run.beginning.version if run.beginning is not None else NO_VERSION
            return f"its own report of {version}, which it was told to begin", member.since
        case Standing.JOINING:
            transfer = member.transfer
            if transfer is None:
                return "a ticket", member.since
            donors = ", ".join(transfer.donors)
            attempt = f"transfer {transfer.transfer_id}, attempt {transfer.attempt}"
            says = member.advertisement.waiting_for
            now_at = f": {says}" if says and not says.startswith("state from") else ""
            return f"state of {transfer.version} from {donors} ({attempt}){now_at}", member.since
        case Standing.APPLYING:
            return f"itself to apply {record.committed}, which is committed", member.since
    return _at_boundary(run, member, now)


def _at_boundary(run: RunState, member: Member, now: float) -> tuple[str, float]:
    record, epoch, gather = run.record, run.epoch, run.gather
    if record.paused:
        return f"an operator: {record.paused}", member.since
    if gather is not None and member.worker_id in gather.arrivals:
        since = gather.arrivals[member.worker_id].at
        if record.committed > record.sealed:
            late = [other.worker_id for other in run.live_in(Standing.APPLYING)]
            return f"the seal of {record.committed}: reports of {', '.join(late) or 'a majority'}", since
        absent = sorted(set(gather.deadlines) - set(gather.arrivals))
        if run.started_at is not None and now < run.gathering_returns_until:
            absent += sorted(run.returning - set(gather.arrivals))
        if absent:
            return f"{', '.join(absent)} at the boundary of {gather.version}", since
        short = run.policy.min_participants - len(gather.arrivals)
        if short > 0:
            return f"{short} more participants at the boundary of {gather.version}: no live worker is ready", since
        return f"the roster of the boundary of {gather.version}", since
    if epoch is not None and member.voter in epoch.members:
        if member.voter in epoch.votes:
            late = [name for name, incarnation in epoch.members if (name, incarnation) not in epoch.votes]
            return f"votes of {', '.join(late) or 'nobody'} in epoch {epoch.epoch}", epoch.issued_at
        return f"the averaging of epoch {epoch.epoch}", epoch.issued_at
    if member.stalled:
        return f"its own inner step, which stands still at {member.advertisement.inner_step}", member.progress_at
    told = member.advertisement
    if told.waiting_for:
        return told.waiting_for, (member.advertised_at or now) - seconds(told.waited)
    return "", now
