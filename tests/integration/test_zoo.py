"""Every inhabitant of the zoo, restored in another process over a real transfer, goes on exactly as its donor does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.zoo_cases import all_cases

pytestmark = pytest.mark.timeout(240)
NAMES = [case.name for case in all_cases()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, object]]]:
    """One pair of processes serves all cases."""
    folder = tmp_path_factory.mktemp("zoo")
    result = folder / "joiner.jsonl"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for role in ("donor", "joiner"):
            arguments = [role, str(folder / "rendezvous"), str(result if role == "joiner" else folder / "donor.jsonl")]
            with (folder / f"{role}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.zoo_process", *arguments],
                        cwd=Path(__file__).parents[2],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(timeout=230) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    logs = "\n".join((folder / f"{role}.log").read_text() for role in ("donor", "joiner"))
    assert codes == [0, 0], logs
    yield {found["case"]: found for found in map(json.loads, result.read_text().splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_a_joiner_goes_on_exactly_as_its_donor(results: dict[str, dict[str, object]], name: str) -> None:
    found = results[name]
    assert "error" not in found, found["error"]
    assert found["damaged"] == 0
    assert found["differences"] == []
    assert found["same_rates"]
    assert found["moved"] == []
    assert not found["prepare_drew_random_numbers"]
    assert found["payload_bytes"] == found["logical_bytes"]


def test_every_optimizer_and_scheduler_of_torch_is_there() -> None:
    def inside(module: ModuleType, base: type) -> set[str]:
        own = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
        return {name for name, thing in own.items() if isinstance(thing, type) and issubclass(thing, base)}

    optimizers = inside(torch.optim, torch.optim.Optimizer) - {"Optimizer"}
    schedulers = inside(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler) - {"LRScheduler"}
    assert optimizers == {name for name in optimizers if any(case.startswith(name) for case in NAMES)}
    assert schedulers == {name for name in schedulers if any(case.startswith(f"schedule-{name}") for case in NAMES)}


def test_every_case_ran(results: dict[str, dict[str, object]]) -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(results) == set(NAMES)
    created, removed = ([name for name, found in results.items() if found[what]] for what in ("created", "removed"))
    assert created and removed  # lazily made state was missing here and surplus there, in some cases each
