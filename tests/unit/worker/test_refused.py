"""What a worker says when it is refused, and when it goes: that, and nothing that it did not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.control.policy import RunPolicy
from recovery.control.server import CoordinatorConfig, CoordinatorServer
from recovery.errors import RunRefused, UnsupportedLeaf
from recovery.events import Recorder
from recovery.worker import Agent, AgentConfig
from tests.support.coordinators import LOOPBACK, RUN, coordinator
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


def test_state_that_cannot_travel_is_refused_after_the_first_step_not_at_the_first_join(tmp_path: Path) -> None:
    toy = Toy(8, 0)
    run = CoordinatorConfig(policy=RunPolicy(run_id=RUN), listen=LOOPBACK, state_dir=tmp_path, new_run=True)
    with CoordinatorServer(run, events=Recorder()) as server:
        config = AgentConfig(coordinator=str(server.address), run_id=RUN, worker_id="w0", inner_steps_per_phase=3)
        with Agent(toy.state, config, events=Recorder()) as agent:
            taken = 0
            with pytest.raises(UnsupportedLeaf, match=r"inner_optimizer.*object"):
                for _ in agent.phase():
                    toy.inner_step()
                    for held in toy.inner.state.values():
                        held["cache"] = object()
                    taken += 1
            assert taken == 1
