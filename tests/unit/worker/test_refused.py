"""What a worker says when it is refused, and when it goes: that, and nothing that it did not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.errors import RunRefused
from recovery.events import Recorder
from recovery.worker import Agent, AgentConfig
from tests.support.coordinators import coordinator
from tests.support.toy import Toy


def test_a_worker_that_was_never_attached_does_not_say_that_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with coordinator(tmp_path) as server:
        config = AgentConfig(coordinator=str(server.address), run_id="other", worker_id="w0", inner_steps_per_phase=1)
        with pytest.raises(RunRefused, match="not 'other'"):
            Agent(Toy(8, 0).state, config, events=Recorder()).start()
    assert "goes on without it" not in caplog.text


class Going(Agent):
    """Remembers the reason with which it was closed."""

    reasons: list[str]

    def close(self, reason: str = "closed") -> None:
        self.reasons = [*getattr(self, "reasons", []), reason]
        super().close(reason)


def test_an_error_without_a_message_is_named_without_a_colon() -> None:
    config = AgentConfig(coordinator="127.0.0.1:9", run_id="run", worker_id="w0", inner_steps_per_phase=1)
    for error, reason in ((KeyboardInterrupt(), "KeyboardInterrupt"), (ValueError("bad: "), "ValueError: bad: ")):
        agent = Going(Toy(8, 0).state, config, events=Recorder())
        agent.__exit__(type(error), error, None)
        assert agent.reasons == [reason]
