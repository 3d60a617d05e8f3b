"""Settings from the environment: explicit wins, unknown names and impossible values are errors by name."""

from __future__ import annotations

import pytest

from recovery.config import from_environment
from recovery.control.security import SecurityConfig
from recovery.errors import BadConfiguration
from recovery.worker import AgentConfig

NEEDED = {"coordinator": "127.0.0.1:1", "run_id": "run", "worker_id": "w", "inner_steps_per_phase": 10}


def test_environment_fills_what_was_not_given() -> None:
    config = from_environment(
        AgentConfig,
        {"RECOVERY_COORDINATOR": "10.0.0.1:7440", "RECOVERY_DONOR_SLOTS": "5", "RECOVERY_VERIFY_BEFORE_AVERAGE": "no"},
        **{**NEEDED, "coordinator": None},
    )
    assert config.coordinator == "10.0.0.1:7440"
    assert config.donor_slots == 5
    assert config.verify_before_average is False


def test_explicit_wins() -> None:
    assert from_environment(AgentConfig, {"RECOVERY_RUN_ID": "other"}, **NEEDED).run_id == "run"


def test_nested_settings_are_read_from_the_same_environment() -> None:
    config = from_environment(AgentConfig, {"RECOVERY_TOKEN": "long-enough-token"}, **NEEDED)
    assert config.security.token == "long-enough-token"
    given = from_environment(AgentConfig, {"RECOVERY_TOKEN": "ignored-here"}, **NEEDED, security=SecurityConfig())
    assert given.security.token == ""


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    """Field report: pytorch/torchtitan#2899, days spent on settings that nothing read."""
    with pytest.raises(
        BadConfiguration, match=r"RECOVERY_DONOR_SLOT is set but nothing reads it.*RECOVERY_DONOR_SLOTS"
    ):
        from_environment(AgentConfig, {"RECOVERY_DONOR_SLOT": "5"}, **NEEDED)


@pytest.mark.parametrize(
    ("name", "value"), [("DONOR_SLOTS", "many"), ("PROGRESS_TIMEOUT_SECONDS", "soon"), ("VERIFY_BEFORE_AVERAGE", "2")]
)
def test_an_impossible_value_is_named(name: str, value: str) -> None:
    with pytest.raises(BadConfiguration, match=f"RECOVERY_{name}='{value}'"):
        from_environment(AgentConfig, {f"RECOVERY_{name}": value}, **NEEDED)


@pytest.mark.parametrize(
    ("field", "value", "needle"),
    [
        ("coordinator", "nowhere", "host:port"),
        ("worker_id", "a/b", "worker id"),
        ("inner_steps_per_phase", 0, "inner_steps_per_phase=0"),
        ("peer_port", -1, "peer_port=-1"),
        ("progress_timeout_seconds", 4000.0, "no second donor"),
        ("spool_path", "/no/such/folder/spool", "its folder does not exist"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_construction(field: str, value: object, needle: str) -> None:
    """Field report: pytorch/torchtitan#2899, a bad order of timeouts shows only as a hang."""
    with pytest.raises(BadConfiguration, match=needle):
        AgentConfig(**{**NEEDED, field: value})  # type: ignore[arg-type]


def test_settings_that_nobody_gave_are_named_with_both_places_for_them() -> None:
    with pytest.raises(BadConfiguration, match="set RECOVERY_COORDINATOR or give coordinator=") as caught:
        from_environment(AgentConfig, {}, **{**NEEDED, "coordinator": None, "worker_id": None})
    assert "set RECOVERY_WORKER_ID or give worker_id=" in str(caught.value)
