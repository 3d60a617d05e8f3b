"""Step hooks on the user's optimizers: they tell when a step is about to begin and when the last one has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


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

    @property
    def sees_inner_steps(self) -> bool:
        """Whether any inner optimizer is watched."""
        return bool(self._inner)

    def watch(self, inner: Sequence[Optimizer], outer: Sequence[Optimizer]) -> None:
        """Exactly these optimizers are watched from now on. Cheap if they are those of the last call."""
        if _same(self._inner, inner) and _same(self._outer, outer):
            return
        self.remove()
        self._inner, self._outer = list(inner), list(outer)
        for optimizer in self._inner:
            self._handles.append(optimizer.register_step_pre_hook(self._inner_begins))
            self._handles.append(optimizer.register_step_post_hook(self._inner_ended))
        for optimizer in self._outer:
            self._handles.append(optimizer.register_step_pre_hook(self._outer_begins))

    def remove(self) -> None:
        """Nothing is watched. Safe twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inner, self._outer = [], []
        self._stepped.clear()

    def _inner_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        self._before_inner_step()

    def _inner_ended(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len({id(watched) for watched in self._inner}):
            self._stepped.clear()
            self._after_inner_step()

    def _outer_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._before_outer_step()


def _same(old: Sequence[Optimizer], new: Sequence[Optimizer]) -> bool:
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
