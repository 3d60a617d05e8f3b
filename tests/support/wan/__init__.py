"""Emulated wide-area links between network namespaces of this machine; see the README beside this file."""

from __future__ import annotations

from tests.support.wan.config import WanConfig
from tests.support.wan.control import PUNCTUAL_MICROSECONDS, HostStats, Late, LinkCount, Stats
from tests.support.wan.errors import WanError
from tests.support.wan.network import Wan, emulated
from tests.support.wan.permission import why_not_permitted

__all__ = [
    "PUNCTUAL_MICROSECONDS",
    "HostStats",
    "Late",
    "LinkCount",
    "Stats",
    "Wan",
    "WanConfig",
    "WanError",
    "emulated",
    "why_not_permitted",
]
