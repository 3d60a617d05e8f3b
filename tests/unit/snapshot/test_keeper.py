"""The keeper: when copying ahead is worth it."""

from __future__ import annotations

import pytest

from recovery.errors import BadConfiguration
from recovery.snapshot import SnapshotConfig
from recovery.snapshot.keeper import falls_behind


@pytest.mark.parametrize(
    ("unsaved", "acknowledged", "leased", "elapsed", "phase", "expected"),
    [
        (0, 0, 5.0, 5.0, 10.0, False),  # nothing to copy
        (100, 0, 0.0, 0.0, None, True),  # nobody knows when the outer step comes
        (100, 0, 0.5, 0.5, 60.0, False),  # too early to tell
        (100, 0, 1.0, 1.0, 60.0, True),  # a reader that reads nothing
        (100, 50, 5.0, 5.0, 20.0, False),  # 10 a second, 15 s left: 150
        (100, 50, 5.0, 15.0, 20.0, True),  # 10 a second, 5 s left: 50
        (100, 50, 5.0, 25.0, 20.0, True),  # overdue
        (100, 0, 0.05, 0.05, 0.1, True),  # short phases do not wait a second
    ],
)
def test_copying_ahead_begins_when_readers_fall_behind(
    unsaved: int, acknowledged: int, leased: float, elapsed: float, phase: float | None, expected: bool
) -> None:
    found = falls_behind(
        unsaved_bytes=unsaved,
        acknowledged_bytes=acknowledged,
        leased_seconds=leased,
        elapsed_seconds=elapsed,
        phase_seconds=phase,
    )
    assert found is expected


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("budget_bytes", -1),
        ("grace_seconds", -0.1),
        ("lease_deadline_seconds", 0.0),
        ("digest_timeout_seconds", -1.0),
        ("copy_ahead_share", 0.0),
        ("copy_ahead_share", 1.5),
        ("touch_share", 0.0),
        ("measure_in_step_bytes", -1),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(BadConfiguration, match=setting):
        SnapshotConfig(**{setting: value})  # type: ignore[arg-type]
