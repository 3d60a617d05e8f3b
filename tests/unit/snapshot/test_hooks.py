"""Step hooks: when an inner step begins and ends, with several optimizers, errors, and optimizers that change."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Optimizer

from recovery.snapshot.hooks import OptimizerHooks


class Seen:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hooks = OptimizerHooks(
            lambda: self.calls.append("begins"), lambda: self.calls.append("ended"), lambda: self.calls.append("outer")
        )

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def optimizer() -> Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return SGD([parameter], lr=0.1)


def test_an_inner_step_is_over_when_every_optimizer_has_stepped() -> None:
    seen, a, b, outer = Seen(), optimizer(), optimizer(), optimizer()
    seen.hooks.watch([a, b], [outer])
    assert seen.hooks.sees_inner_steps
    for _ in range(2):
        a.step()
        assert seen.take() == ["begins"]
        b.step()
        assert seen.take() == ["begins", "ended"]
    outer.step()
    assert seen.take() == ["outer"]


def test_an_optimizer_that_steps_twice_begins_a_new_inner_step() -> None:
    seen, a, b = Seen(), optimizer(), optimizer()
    seen.hooks.watch([a, b], [])
    for step, expected in ((a.step, ["begins"]), (a.step, ["begins"]), (b.step, ["begins", "ended"])):
        step()
        assert seen.take() == expected


def test_a_step_that_raises_has_no_end() -> None:
    seen, a = Seen(), optimizer()

    class Broken(SGD):
        fails = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.fails:
                raise RuntimeError("out of memory")
            super().step()

    broken = Broken([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    seen.hooks.watch([a, broken], [])
    a.step()
    with pytest.raises(RuntimeError):
        broken.step()
    assert "ended" not in seen.take()
    broken.fails = False
    a.step()
    broken.step()
    assert seen.take().count("ended") == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_hook_that_raises_leaves_ours_consistent(when: str) -> None:
    seen, a = Seen(), optimizer()
    fails = True

    def users(*args: object) -> None:
        if fails:
            raise RuntimeError("the user's hook")

    if when == "before":
        a.register_step_post_hook(users)
        seen.hooks.watch([a], [])
    else:
        seen.hooks.watch([a], [])
        a.register_step_post_hook(users)
    with pytest.raises(RuntimeError):
        a.step()
    assert seen.take() == (["begins"] if when == "before" else ["begins", "ended"])
    fails = False
    a.step()
    assert seen.take() == ["begins", "ended"]


def test_a_replaced_optimizer_is_watched_and_the_old_one_is_not() -> None:
    seen, old, new = Seen(), optimizer(), optimizer()
    seen.hooks.watch([old], [])
    seen.hooks.watch([old], [])
    old.step()
    assert seen.take() == ["begins", "ended"], "once only"
    seen.hooks.watch([new], [])
    old.step()
    assert seen.take() == []
    new.step()
    assert seen.take() == ["begins", "ended"]
    seen.hooks.remove()
    seen.hooks.remove()
    new.step()
    assert seen.take() == []
    assert not seen.hooks.sees_inner_steps


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_a_compiled_step_keeps_its_hooks() -> None:
    seen, a = Seen(), optimizer()
    seen.hooks.watch([a], [])
    step = torch.compile(a.step, backend="eager")
    for _ in range(3):
        step()
    assert seen.take() == ["begins", "ended"] * 3
