"""Names of parameters: what keys optimizer state, so that order and position never decide whose moments are whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from recovery.errors import BadConfiguration


def name_outer_params(
    params: Mapping[str, Tensor] | Iterable[Tensor] | nn.Module, live: nn.Module | None
) -> dict[str, Tensor]:
    """Return ``params`` by name.

    A mapping or module keeps its names. A sequence is named by ``live.named_parameters()``: by all of them, or by the
    trainable ones where only their number fits (an offloaded list without the frozen parameters).

    Raises:
        BadConfiguration: a sequence without ``live``, or its length fits neither; both counts are named.
    """
    if isinstance(params, Mapping):
        return dict(params)
    if isinstance(params, nn.ParameterDict):
        return dict(params.items())
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        return dict(params.named_parameters())
    tensors = list(params)
    if live is None:
        raise BadConfiguration("outer_params is a sequence: give live=, which names it, or a mapping of names")
    every = dict(live.named_parameters())
    trainable = [name for name, parameter in every.items() if parameter.requires_grad]
    for names in (list(every), trainable):
        if len(names) == len(tensors):
            return _checked(dict(zip(names, tensors, strict=True)), every)
    raise BadConfiguration(
        f"outer_params has {len(tensors)} tensors, but live has {len(every)} parameters, {len(trainable)} of them "
        "trainable: give a mapping of names to tensors"
    )


def _checked(named: dict[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wrong = [
        f"{name}: {tuple(tensor.shape)} against {tuple(live[name].shape)} in live"
        for name, tensor in named.items()
        if tensor.shape != live[name].shape
    ]
    if wrong:
        raise BadConfiguration(
            "outer_params, in the order given, does not fit live's parameters (give a mapping of names): "
            + "; ".join(wrong[:5])
        )
    return named


class ParameterNames:
    """Finds the name of a parameter by its identity."""

    def __init__(self, *sources: Mapping[str, Tensor]) -> None:
        self._names: dict[int, str] = {}
        for source in sources:
            for name, tensor in source.items():
                self._names.setdefault(id(tensor), name)

    def of(self, optimizer: Optimizer) -> list[list[tuple[str, Tensor]]]:
        """Return for each group its parameters with their names, in the optimizer's order.

        A parameter that no source names takes its name from the group's ``param_names``, else ``group<g>.<i>``.
        """
        taken: set[str] = set()
        groups = []
        for g, group in enumerate(optimizer.param_groups):
            own = group.get("param_names")
            named = []
            for i, parameter in enumerate(group["params"]):
                name = self._names.get(id(parameter)) or (own[i] if own else f"group{g}.{i}")
                if name in taken:
                    name = f"group{g}.{i}"
                taken.add(name)
                named.append((name, parameter))
            groups.append(named)
        return groups
