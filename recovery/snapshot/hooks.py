"""Step hooks on the user's optimizers: they tell when a step is about to begin and when the last one has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from recovery.errors import BadConfiguration

SILENT_STEPS = 32
"""An optimizer that steps in none of so many inner steps is not the one that trains."""


class OptimizerHooks:
    """Watches the inner and outer optimizers. All calls come from the training thread.

    An inner step is over when every inner optimizer has stepped since the last time it was over. An optimizer that
    steps again before the others did begins a new inner step: the old one never had an end that could be seen (a step
    raised, a gradient scaler skipped it, or the optimizers take turns).

    Args:
        before_inner_step: Called before any inner optimizer steps.
        after_inner_step: Called after the last inner optimizer of an inner step.
        before_outer_step: Called before any outer optimizer steps.
    """

    def __init__(
        self,
        before_inner_step: Callable[[], None],
        after_inner_step: Callable[[], None],
        before_outer_step: Callable[[], None],
    ) -> None:
        self._before_inner_step = before_inner_step
        self._after_inner_step = after_inner_step
        self._before_outer_step = before_outer_step
        self._inner: list[Optimizer] = []
        self._outer: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self._stepped: set[int] = set()
        self._seen: set[int] = set()
        self._silent_steps: dict[int, int] = {}

    @property
    def sees_inner_steps(self) -> bool:
        """Whether any inner optimizer is watched."""
        return bool(self._inner)

    def watch(self, inner: Sequence[Optimizer], outer: Sequence[Optimizer]) -> None:
        """Exactly these optimizers are watched from now on. Cheap if they are those of the last call."""
        if _same(self._inner, inner) and _same(self._outer, outer):
            return
        self.remove()
        for optimizer in (*inner, *outer):
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                raise BadConfiguration(
                    f"a {type(optimizer).__name__} takes no step hooks (it does not call Optimizer.__init__): register "
                    "the optimizer that it wraps, or run without hooks and call inner_boundary after each inner step"
                )
        self._inner, self._outer = list(inner), list(outer)
        for optimizer in self._inner:
            self._handles.append(optimizer.register_step_pre_hook(self._inner_begins))
            self._handles.append(optimizer.register_step_post_hook(self._inner_ended))
        for optimizer in self._outer:
            self._handles.append(optimizer.register_step_pre_hook(self._outer_begins))

    def count(self, num_steps: int) -> None:
        """The worker took ``num_steps`` inner steps since the last call."""
        for optimizer in self._inner:
            known = self._silent_steps.get(id(optimizer), 0)
            self._silent_steps[id(optimizer)] = 0 if id(optimizer) in self._seen else known + num_steps
        self._seen.clear()

    def silent(self) -> list[Optimizer]:
        """Return the inner optimizers that did not step in any of the last ``SILENT_STEPS`` inner steps or more.

        A gradient scaler may skip several steps in a row, so a few tell nothing.
        """
        return [one for one in self._inner if self._silent_steps.get(id(one), 0) >= SILENT_STEPS]

    def remove(self) -> None:
        """Nothing is watched. Safe twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inner, self._outer = [], []
        self._stepped.clear()
        self._seen.clear()
        self._silent_steps.clear()

    def _inner_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        self._before_inner_step()

    def _inner_ended(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._seen.add(id(optimizer))
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len({id(watched) for watched in self._inner}):
            self._stepped.clear()
            self._after_inner_step()

    def _outer_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._before_outer_step()


def _same(old: Sequence[Optimizer], new: Sequence[Optimizer]) -> bool:
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
