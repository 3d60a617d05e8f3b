"""A worker's state as named parts, each read at the moment it is asked for.

``WorkerState`` fits the ways in which DiLoCo is written: an offloaded list of parameters with an outer optimizer over
it; an outer optimizer over the live module's own parameters beside a list of last-synchronised tensors that is replaced
at each step; fragments, each with backup copies and an outer optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import blake3
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from protos.recovery.v1 import manifest_pb2
from recovery.errors import BadConfiguration, MisuseError
from recovery.state.extra_part import LocalProgress, ProgressPart, RunProgress, Stateful, StatefulPart, TreePart
from recovery.state.layout import build_layout
from recovery.state.live_part import LivePart, describe, live_part
from recovery.state.naming import ParameterNames, name_outer_params
from recovery.state.optimizer_part import OptimizerPart
from recovery.state.part import Part
from recovery.state.scheduler_part import SchedulerPart, schedules
from recovery.state.tensors_part import TensorsPart
from recovery.types import PartClass, PartName, checked_id

__all__ = [
    "BUFFERS",
    "FROZEN_PARAMS",
    "LIVE_PARAMS",
    "LOCAL_PARAMS",
    "LOCAL_PROGRESS",
    "OUTER_PARAMS",
    "RUN_PROGRESS",
    "Fragment",
    "LivePart",
    "LocalProgress",
    "RunProgress",
    "Stateful",
    "WorkerState",
    "describe",
]

OUTER_PARAMS = PartName("outer_params")
FROZEN_PARAMS = PartName("frozen_params")
LOCAL_PARAMS = PartName("local_params")
LIVE_PARAMS = PartName("live_params")
OUTER_OPTIMIZER = "outer_optimizer"
INNER_OPTIMIZER = "inner_optimizer"
SCHEDULER = "scheduler"
RUN_PROGRESS = PartName("run_progress")
LOCAL_PROGRESS = PartName("local_progress")
BUFFERS = PartName("buffers")

T = TypeVar("T")
Params = Mapping[str, Tensor] | Iterable[Tensor] | nn.Module


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model that is synchronised by itself.

    Attributes:
        name: Unique among the fragments.
        params: The backup copies by the live module's parameter names: what the fragment was at its last outer step.
            A mapping, or a function that returns one (called at every read).
        outer_optimizer: The fragment's own; None if one outer optimizer serves several fragments.
    """

    name: str
    params: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
    outer_optimizer: Optimizer | None = None

    def read(self) -> dict[str, Tensor]:
        """Return the backup copies as they are now."""
        return dict(self.params() if callable(self.params) else self.params)


class WorkerState:
    """The named parts of one worker (of one local rank).

    Built-in parts, in this order, as far as the worker has them: ``outer_params``, ``frozen_params`` (parameters of
    ``live`` that are not trained and not among the outer ones), ``outer_optimizer`` or ``outer_optimizer.<fragment>``,
    ``run_progress``; ``local_params`` (trained, but never synchronised), ``live_params`` (only with fragments: one that
    did not step at the last boundary is in the middle of its inner training there), ``inner_optimizer``, ``scheduler``,
    ``local_progress``, ``buffers``. Extras follow by ``add``.

    All methods belong to the thread that trains.
    """

    def __init__(
        self,
        *,
        live: nn.Module | None = None,
        outer_params: Params | Callable[[], Params] | None = None,
        outer_optimizer: Optimizer | None = None,
        fragments: Sequence[Fragment] = (),
        inner_optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler] | None = None,
        buffers: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | str | None = "auto",
        replicated_buffers: bool = False,
        frozen_params: PartClass = PartClass.REPLICATED,
    ) -> None:
        """Describe the worker's objects; nothing is copied.

        Args:
            live: The module that trains. Restoring writes the outer parameters into it as well.
            outer_params: The parameters as of the last outer step: a mapping of ``live``'s names to tensors, a second
                module of the same names, a sequence in the order of ``live.named_parameters()`` (all, or the trainable
                ones), or a function that returns one of these. Give a function wherever the tensors are replaced
                rather than written; it must hand out the tensors themselves, not copies.
            outer_optimizer: Steps at the boundary, over the outer or over the live parameters.
            fragments: Instead of ``outer_params``.
            inner_optimizer: One, or several by name.
            scheduler: One, or several by name. A scheduler of an outer optimizer is replicated.
            buffers: ``"auto"``: those of ``live``, persistent or not. None: none. Else what to take instead.
            replicated_buffers: The training code makes buffers equal on all workers at each outer step.
            frozen_params: Class of the parameters of ``live`` that do not require gradients and that no outer parameter
                mirrors. Private-copied if each worker changes them after all (a teacher that follows the model).

        Raises:
            BadConfiguration: the objects do not fit together; names what does not.
        """
        self._live = live
        self._fragments = tuple(fragments)
        # An iterator (module.parameters()) could be read once only; a list is kept, so that its items may be replaced.
        self._outer_params = list(outer_params) if isinstance(outer_params, Iterator) else outer_params
        self._check_arguments(outer_optimizer)
        self._parts: dict[PartName, Part] = {}
        self.run_progress = RunProgress()
        self.local_progress = LocalProgress()
        replicated, copied = PartClass.REPLICATED, PartClass.PRIVATE_COPIED

        outer = self.read_outer_params()
        if self._has_outer:
            self._register(TensorsPart(OUTER_PARAMS, replicated, self.read_outer_params))
        frozen, local_only = self._uncovered(outer)
        if frozen:
            self._register(TensorsPart(FROZEN_PARAMS, frozen_params, lambda: self._live_params(frozen)))
        outer_optimizers = _by_part(OUTER_OPTIMIZER, outer_optimizer) | {
            PartName(f"{OUTER_OPTIMIZER}.{fragment.name}"): fragment.outer_optimizer
            for fragment in self._fragments
            if fragment.outer_optimizer is not None
        }
        for name, optimizer in outer_optimizers.items():
            self._register(OptimizerPart(name, replicated, optimizer, self._names))
        schedulers = _by_part(SCHEDULER, scheduler)
        outer_schedulers = {
            name: one for name, one in schedulers.items() if schedules(one) in outer_optimizers.values()
        }
        for name, one in outer_schedulers.items():
            self._register(SchedulerPart(name, replicated, one))
        self._register(ProgressPart(RUN_PROGRESS, replicated, self.run_progress))
        if local_only:
            self._register(TensorsPart(LOCAL_PARAMS, copied, lambda: self._live_params(local_only)))
        if self._fragments and live is not None:
            mirrored = [name for name, _, _ in self.live_copies()]
            self._register(TensorsPart(LIVE_PARAMS, copied, lambda: self._live_params(mirrored)))
        for name, optimizer in _by_part(INNER_OPTIMIZER, inner_optimizer).items():
            self._register(OptimizerPart(name, copied, optimizer, self._names))
        for name, one in schedulers.items():
            if name not in outer_schedulers:
                self._register(SchedulerPart(name, copied, one))
        self._register(ProgressPart(LOCAL_PROGRESS, copied, self.local_progress))
        self._register_buffers(buffers, replicated if replicated_buffers else copied)

    def add(
        self,
        name: str,
        stateful_or_getter: Stateful | Callable[[], object],
        part_class: PartClass,
        *,
        changes_in_forward: bool = False,
    ) -> None:
        """Register one more part.

        Args:
            name: Unique; letters, digits, ``.``, ``_`` and ``-``.
            stateful_or_getter: An object with ``state_dict`` and ``load_state_dict``, or a function that returns a
                tree of live tensors, arrays and containers, which restoring writes in place.
            part_class: Who decides its content when a worker joins.
            changes_in_forward: The part changes in forward or backward, not only in optimizer steps (EMA teachers
                used as running statistics, observers, a gradient scaler that is updated before the step).

        Raises:
            BadConfiguration: the name is taken or not usable, or the object is neither of the two.
        """
        part_name = PartName(checked_id("part name", name))
        if isinstance(stateful_or_getter, Stateful):
            part: Part = StatefulPart(part_name, part_class, stateful_or_getter, changes_in_forward=changes_in_forward)
        elif callable(stateful_or_getter):
            part = TreePart(part_name, part_class, stateful_or_getter, changes_in_forward=changes_in_forward)
        else:
            raise BadConfiguration(
                f"part {name!r}: a {type(stateful_or_getter).__name__} has no state_dict and load_state_dict and is no "
                "function that returns tensors"
            )
        self._register(part)

    @property
    def part_names(self) -> list[PartName]:
        """All parts, in the order of registration."""
        return list(self._parts)

    @property
    def replicated_names(self) -> list[PartName]:
        """Parts that are equal on every worker at the same version."""
        return self._of_class(PartClass.REPLICATED)

    @property
    def private_copied_names(self) -> list[PartName]:
        """Parts of which a joiner takes a donor's."""
        return self._of_class(PartClass.PRIVATE_COPIED)

    @property
    def private_kept_names(self) -> list[PartName]:
        """Parts that no donor's ever overwrite."""
        return self._of_class(PartClass.PRIVATE_KEPT)

    def part_class(self, name: PartName) -> PartClass:
        """Return the class of part ``name``."""
        return self.part(name).part_class

    def changes_in_forward(self, name: PartName) -> bool:
        """Return whether the part changes outside of optimizer steps, so that it must be copied between two."""
        return self.part(name).changes_in_forward

    def part(self, name: PartName) -> Part:
        """Return the registered part.

        Raises:
            MisuseError: there is none of this name.
        """
        if name not in self._parts:
            raise MisuseError(f"no part {name!r} is registered; there are: {', '.join(self._parts)}")
        return self._parts[name]

    def read_part(self, name: PartName) -> LivePart:
        """Return the part as it is now: its tree, and references to its live tensors.

        Raises:
            UnsupportedLeaf: it holds a value that has no exact form.
            MisuseError: an optimizer has lost state since an earlier read.
        """
        part = self.part(name)
        return live_part(name, part.part_class, part.read())

    @property
    def outer_optimizers(self) -> list[Optimizer]:
        """The optimizers that step at a boundary."""
        return self._optimizers(PartClass.REPLICATED)

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """The optimizers that step between boundaries, in the order given."""
        return self._optimizers(PartClass.PRIVATE_COPIED)

    def expect_fewer_states(self, name: PartName) -> None:
        """Say that an optimizer's state was dropped on purpose (a reset): the next snapshot may hold less of it."""
        part = self.part(name)
        if not isinstance(part, OptimizerPart):
            raise MisuseError(f"part {name!r} is no optimizer")
        part.expect_fewer_states()

    def layout(self) -> manifest_pb2.Layout:
        """Return what must agree between two workers before a byte of state moves."""
        live = {} if self._live is None else dict(self._live.named_parameters(remove_duplicate=False))
        fragments = {fragment.name: list(fragment.read()) for fragment in self._fragments}
        return build_layout(list(self._parts.values()), live, fragments)

    def layout_digest(self) -> bytes:
        """Return BLAKE3 over the canonical layout, 32 bytes."""
        return blake3.blake3(self.layout().SerializeToString(deterministic=True)).digest()

    def read_outer_params(self) -> dict[str, Tensor]:
        """Return the outer parameters by name, as they are now."""
        if self._fragments:
            return {name: tensor for fragment in self._fragments for name, tensor in fragment.read().items()}
        params = self._outer_params
        if not isinstance(params, nn.Module) and callable(params):
            params = params()
        return {} if params is None else name_outer_params(params, self._live)

    def live_copies(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, outer parameter, live parameter) for each live parameter that is a copy of an outer one."""
        outer = self.read_outer_params()
        if self._live is None:
            return []
        return [
            (name, outer[name], parameter)
            for name, parameter in self._live.named_parameters(remove_duplicate=False)
            if name in outer and outer[name] is not parameter
        ]

    @property
    def _has_outer(self) -> bool:
        return bool(self._fragments) or self._outer_params is not None

    def _check_arguments(self, outer_optimizer: Optimizer | None) -> None:
        if self._fragments and self._outer_params is not None:
            raise BadConfiguration("give outer_params or fragments, not both: fragments name their own parameters")
        if self._live is not None and not self._has_outer:
            raise BadConfiguration(
                "live= without outer_params= or fragments=: nothing says what the model was at the last outer step"
            )
        names = [checked_id("fragment name", fragment.name) for fragment in self._fragments]
        if len(set(names)) != len(names):
            raise BadConfiguration(f"fragment names are not unique: {', '.join(names)}")
        seen: dict[str, str] = {}
        for fragment in self._fragments:
            for name in fragment.read():
                if name in seen:
                    raise BadConfiguration(f"parameter {name} is in the fragments {seen[name]} and {fragment.name}")
                seen[name] = fragment.name

    def _uncovered(self, outer: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Return the names of live parameters that no outer parameter mirrors: frozen ones, trained ones."""
        if self._live is None:
            return [], []
        every = dict(self._live.named_parameters(remove_duplicate=False))
        for name, tensor in outer.items():
            if name not in every:
                raise BadConfiguration(
                    f"outer parameter {name!r} is no parameter of live, which has {', '.join(list(every)[:5])}, ...: "
                    "name them as live.named_parameters() does"
                )
            if tensor.shape != every[name].shape:
                raise BadConfiguration(
                    f"outer parameter {name!r} is {list(tensor.shape)}, live's is {list(every[name].shape)}"
                )
        covered = {id(every[name]) for name in outer}
        rest = {name: p for name, p in self._live.named_parameters() if id(p) not in covered}
        frozen = [name for name, parameter in rest.items() if not parameter.requires_grad]
        return frozen, [name for name in rest if name not in set(frozen)]

    def _live_params(self, names: Sequence[str]) -> dict[str, Tensor]:
        assert self._live is not None
        return {name: self._live.get_parameter(name) for name in names}

    def _register_buffers(
        self, buffers: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | str | None, part_class: PartClass
    ) -> None:
        if isinstance(buffers, str):
            if buffers != "auto":
                raise BadConfiguration(f'buffers={buffers!r}: give a mapping, a function, None or "auto"')
            live = self._live
            if live is None or not any(True for _ in live.named_buffers()):
                return
            getter: Callable[[], Mapping[str, Tensor]] = lambda: dict(live.named_buffers())  # noqa: E731
        elif buffers is None:
            return
        else:
            getter = buffers if callable(buffers) else lambda: buffers
        self._register(TensorsPart(BUFFERS, part_class, getter, changes_in_forward=True))

    def _register(self, part: Part) -> None:
        if part.name in self._parts:
            raise BadConfiguration(f"two parts are named {part.name!r}")
        self._parts[part.name] = part

    def _names(self) -> ParameterNames:
        live = {} if self._live is None else dict(self._live.named_parameters())
        return ParameterNames(live, self.read_outer_params())

    def _of_class(self, part_class: PartClass) -> list[PartName]:
        return [name for name, part in self._parts.items() if part.part_class is part_class]

    def _optimizers(self, part_class: PartClass) -> list[Optimizer]:
        parts = (part for part in self._parts.values() if part.part_class is part_class)
        return [part.optimizer for part in parts if isinstance(part, OptimizerPart)]


def _by_part(what: str, one_or_more: T | Mapping[str, T] | None) -> dict[PartName, T]:
    if one_or_more is None:
        return {}
    if isinstance(one_or_more, Mapping):
        return {PartName(checked_id("part name", f"{what}.{name}")): item for name, item in one_or_more.items()}
    return {PartName(what): one_or_more}
