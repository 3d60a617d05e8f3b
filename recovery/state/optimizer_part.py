"""Optimizers as parts: state keyed by parameter name, groups with their options, written without ``load_state_dict``.

``Optimizer.load_state_dict`` is not used: it casts floating state to the parameter's dtype, keys by position, and
keeps references to the tensors it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer

from protos.recovery.v1 import manifest_pb2
from recovery.errors import MisuseError, UnsupportedLeaf
from recovery.state.naming import ParameterNames
from recovery.state.part import Owner, Part, qualified_name, slots
from recovery.types import PartClass, PartName

RUNTIME_FLAGS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options that choose an implementation, not a result: each worker keeps its own, and they are part of no digest."""


class OptimizerPart(Part):
    """One optimizer.

    The tree is ``{"class", "state": {parameter: {key: leaf}}, "param_groups": [{options, "params": [names]}]}``;
    options are sorted by name. State that an optimizer keys by a string, not a parameter, is in ``"other_state"``;
    numbers and tensors that one from outside of torch keeps as attributes of its own are in ``"attributes"``.
    """

    def __init__(
        self, name: PartName, part_class: PartClass, optimizer: Optimizer, names: Callable[[], ParameterNames]
    ) -> None:
        super().__init__(name, part_class)
        self.optimizer = optimizer
        self._names = names
        self._named: list[list[tuple[str, Tensor]]] = []
        self._num_states = 0
        _refuse_state_elsewhere(name, optimizer)

    def read(self) -> dict[str, object]:
        """Return the tree.

        Raises:
            MisuseError: fewer parameters have state than at an earlier read, and nobody said that this is meant.
            UnsupportedLeaf: state is keyed by something else than parameters and strings.
        """
        state: dict[str, object] = {}
        for group in self._named_groups():
            for name, parameter in group:
                entries = self.optimizer.state.get(parameter)
                if entries:  # optimizers treat an empty entry as none, and a mere look at a defaultdict makes one
                    state[name] = dict(entries) if isinstance(entries, Mapping) else entries
        self._refuse_fewer(len(state))
        tree: dict[str, object] = {
            "class": qualified_name(self.optimizer),
            "state": state,
            "param_groups": [
                {key: group[key] for key in _option_names(group)} | {"params": [name for name, _ in named]}
                for group, named in zip(self.optimizer.param_groups, self._named_groups(), strict=True)
            ],
        }
        keyed: Mapping[object, object] = self.optimizer.state  # type: ignore[assignment]
        other = {key: value for key, value in keyed.items() if not isinstance(key, Tensor)}
        if wrong := [key for key in other if not isinstance(key, str)]:
            raise UnsupportedLeaf(f"{self.name}: state is keyed by {type(wrong[0]).__name__} {wrong[0]!r}")
        attributes = self._attributes()
        return tree | ({"other_state": other} if other else {}) | ({"attributes": attributes} if attributes else {})

    def differences(self, donor: object, own: object) -> Iterator[str]:
        assert isinstance(own, dict)
        if not _is_optimizer(donor):
            yield f"{self.name}: the donor's is not an optimizer"
            return
        assert isinstance(donor, dict)
        for key in donor.get("attributes", {}):
            if hasattr(type(self.optimizer), key) or key.startswith("_"):
                yield f"{self.name}/attributes/{key}: the donor's is no number that an optimizer keeps"
        if donor["class"] != own["class"]:
            yield f"{self.name}: the donor's is a {donor['class']}, this worker's a {own['class']}"
        theirs, ours = donor["param_groups"], own["param_groups"]
        if len(theirs) != len(ours):
            yield f"{self.name}: the donor has {len(theirs)} parameter groups, this worker {len(ours)}"
        for g, (their, our) in enumerate(zip(theirs, ours, strict=False)):
            yield from self._group_differences(g, their, our)
        known = {name for our in ours for name in our["params"]}
        for name in donor["state"]:
            if name not in known:
                yield f"{self.name}/state/{name}: the donor has state for it, this worker's optimizer no such parameter"

    def _group_differences(self, g: int, their: Mapping[str, object], our: Mapping[str, object]) -> Iterator[str]:
        at = f"{self.name}/param_groups/{g}"
        theirs, ours = their["params"], our["params"]
        assert isinstance(theirs, list)
        assert isinstance(ours, list)
        if theirs != ours:
            if set(theirs) == set(ours):
                i = next(i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1])
                yield f"{at}: another order of parameters: the donor has {theirs[i]} where this worker has {ours[i]}"
            else:
                for name in theirs:
                    if name not in ours:
                        yield f"{at}: the donor's holds {name}, this worker's does not"
                for name in ours:
                    if name not in theirs:
                        yield f"{at}: this worker's holds {name}, the donor's does not"
        for key in self._declared_options(g):
            if key not in their:
                yield f"{at}: this worker's has the option {key}, the donor's does not"

    def owners(self, donor: object) -> Mapping[int, Owner]:
        assert isinstance(donor, dict)
        found = {}
        for group, named in zip(self.optimizer.param_groups, self._named_groups(), strict=True):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for name, parameter in named:
                for slot in slots(donor["state"].get(name)):
                    found[slot.index] = Owner(parameter, on_device)
        return found

    def attach(self, value: object) -> int:
        assert isinstance(value, dict)
        removed = 0
        by_name = {name: parameter for group in self._named_groups() for name, parameter in group}
        state: dict[object, object] = self.optimizer.state  # type: ignore[assignment]
        keep = {id(by_name[name]) for name in value["state"]}
        for key in list(state):
            kept = id(key) in keep if isinstance(key, Tensor) else key in value.get("other_state", {})
            if not kept:
                removed += _num_tensors(state.pop(key))
        for name, entries in value["state"].items():
            parameter = by_name[name]
            old = state.get(parameter)
            if isinstance(old, dict):
                removed += sum(_num_tensors(item) for key, item in old.items() if key not in entries)
                old.clear()
                old.update(entries)
            else:
                state[parameter] = entries
        state.update(value.get("other_state", {}))
        for group, options in zip(self.optimizer.param_groups, value["param_groups"], strict=True):
            for key in _option_names(group):
                if key not in options:
                    removed += _num_tensors(group.pop(key))
            group.update((key, option) for key, option in options.items() if key != "params")
        attributes = value.get("attributes", {})
        for key in self._attributes().keys() - attributes.keys():
            removed += _num_tensors(self.optimizer.__dict__.pop(key))
        self.optimizer.__dict__.update(attributes)
        return removed

    def add_layout(self, layout: manifest_pb2.Layout) -> None:
        layout.optimizers.append(
            manifest_pb2.LayoutOptimizer(
                part=self.name,
                class_name=qualified_name(self.optimizer),
                groups=[
                    manifest_pb2.LayoutGroup(parameters=[name for name, _ in named], options=self._declared_options(g))
                    for g, named in enumerate(self._named_groups())
                ],
            )
        )

    def expect_fewer_states(self) -> None:
        """Accept that state was dropped on purpose: the next read may find fewer parameters with state."""
        self._num_states = 0

    def restored(self) -> None:
        self.expect_fewer_states()

    def _declared_options(self, g: int) -> list[str]:
        # Options beyond the defaults come and go (schedulers and third-party steps add some): they are content.
        group = self.optimizer.param_groups[g]
        return sorted(key for key in self.optimizer.defaults if key in group and key not in RUNTIME_FLAGS)

    def _attributes(self) -> dict[str, object]:
        if type(self.optimizer).__module__.startswith("torch."):
            return {}
        return {
            key: value
            for key, value in sorted(self.optimizer.__dict__.items())
            if isinstance(value, bool | int | float | Tensor) and not key.startswith("_") and key not in RUNTIME_FLAGS
        }

    def _named_groups(self) -> list[list[tuple[str, Tensor]]]:
        groups = self.optimizer.param_groups
        # Names are looked up again as soon as any parameter is another object; the cached list keeps them all alive,
        # so that an identity cannot be reused.
        fresh = len(groups) == len(self._named) and all(
            len(group["params"]) == len(named) and all(p is q for p, (_, q) in zip(group["params"], named, strict=True))
            for group, named in zip(groups, self._named, strict=True)
        )
        if not fresh:
            self._named = self._names().of(self.optimizer)
        return self._named

    def _refuse_fewer(self, num_states: int) -> None:
        if num_states < self._num_states:
            raise MisuseError(
                f"{self.name}: {num_states} parameters have optimizer state, earlier ones were {self._num_states}: "
                "a snapshot would silently drop moments; if the reset is meant, call "
                f"WorkerState.expect_fewer_states({self.name!r}) first"
            )
        self._num_states = num_states


def _is_optimizer(tree: object) -> bool:
    """Return whether a tree from outside has the structure that ``read`` makes; what it holds is checked elsewhere."""
    if not isinstance(tree, dict) or not isinstance(tree.get("class"), str):
        return False
    state, groups = tree.get("state"), tree.get("param_groups")
    named = (state, tree.get("other_state", {}), tree.get("attributes", {}))
    return (
        all(isinstance(part, dict) and all(isinstance(key, str) for key in part) for part in named)
        and all(isinstance(entries, dict) for entries in state.values())  # type: ignore[union-attr]
        and isinstance(groups, list)
        and all(isinstance(group, dict) and _is_names(group.get("params")) for group in groups)
    )


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _option_names(group: Mapping[str, object]) -> list[str]:
    return sorted(key for key in group if key != "params" and key not in RUNTIME_FLAGS)


def _num_tensors(value: object) -> int:
    if isinstance(value, Tensor):
        return 1
    if isinstance(value, Mapping):
        return sum(_num_tensors(item) for item in value.values())
    return sum(_num_tensors(item) for item in value) if isinstance(value, list | tuple) else 0


def _refuse_state_elsewhere(name: str, optimizer: Optimizer) -> None:
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    extra = optimizer.state_dict().keys() - {"state", "param_groups"}
    if extra:
        raise UnsupportedLeaf(
            f"{name}: {qualified_name(optimizer)} keeps state outside of state and param_groups ({sorted(extra)}): "
            "register it as a Stateful extra, and the optimizer that it wraps as inner or outer optimizer"
        )
