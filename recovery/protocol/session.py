"""The two sessions that carry a transfer out, and what their owner passes in and gets back."""

from __future__ import annotations

from recovery.protocol.donor import DonorConfig
from recovery.protocol.donor_session import DonorResult, DonorSession
from recovery.protocol.joiner_config import JoinerConfig
from recovery.protocol.joiner_session import JoinerSession, TransferResult
from recovery.protocol.ledger import ChunkLedger
from recovery.protocol.planner import PlannerConfig
from recovery.protocol.ports import JOURNAL, OUTER, PRIVATE, SCALARS, Attempt, DonorPeer, Role
from recovery.protocol.rate import RateLimiter
from recovery.protocol.spool import ChunkSpool

__all__ = [
    "JOURNAL",
    "OUTER",
    "PRIVATE",
    "SCALARS",
    "Attempt",
    "ChunkLedger",
    "ChunkSpool",
    "DonorConfig",
    "DonorPeer",
    "DonorResult",
    "DonorSession",
    "JoinerConfig",
    "JoinerSession",
    "PlannerConfig",
    "RateLimiter",
    "Role",
    "TransferResult",
]
