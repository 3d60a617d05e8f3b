"""What every part of an agent works with: made once by ``Agent``, passed to its parts."""

from __future__ import annotations

from dataclasses import dataclass

from recovery.clock import Clock
from recovery.control.client import CoordinatorClient
from recovery.events import EventSink
from recovery.snapshot import Snapshots
from recovery.state import WorkerState
from recovery.types import WorkerRef
from recovery.worker.config import AgentConfig
from recovery.worker.inbox import Inbox
from recovery.worker.standing import Standing


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One worker process: its state, its name, and its lines to the rest of the run."""

    state: WorkerState
    config: AgentConfig
    worker: WorkerRef
    host: str
    """Interface address that this process binds and advertises."""
    clock: Clock
    events: EventSink
    standing: Standing
    inbox: Inbox
    client: CoordinatorClient
    snapshots: Snapshots
