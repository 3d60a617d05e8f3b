"""Reports from the field about state that did not come back, each as a check that raises if it comes true here.

``tests/unit/state/test_field_reports.py`` runs them; ``tests/house/test_mutations_state.py`` removes each protection
and proves that its check notices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from recovery.errors import LayoutMismatch, MisuseError, StateMismatch
from recovery.state.agreement import layout_differences
from recovery.state.leaf import ShardSpec
from recovery.state.restore import Restoration, RestoreMode
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.report_registry import ADAMW, inner, pair, report
from tests.support.state_lab import contents, describe_state, fill, same_bits, transfer
from tests.support.zoo import Case, Worker, next_learning_rates, one


@report("29", "pytorch/torchtitan#4598")
def learning_rate_comes_back() -> None:
    """A joiner stepped with a wrong rate although the scheduler reported the right one."""
    case = Case("lr", one(optim.SGD, lr=1.0), schedule=lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step))
    donor, joiner = pair(case, 1)
    assert inner(donor).param_groups[0]["lr"] == 0.5**5
    transfer(donor.state, joiner.state)
    assert inner(joiner).param_groups[0]["lr"] == 0.5**5
    assert next_learning_rates(joiner) == next_learning_rates(donor)


@report("30", "pytorch/torchtitan#4422")
def nothing_is_cached() -> None:
    """Joiners received the optimizer state of the first moment at which it was read."""
    donor, joiner = pair(Case("cache", ADAMW), 1)
    transfer(donor.state, joiner.state)
    before = contents(joiner.state)
    donor.train(1)
    transfer(donor.state, joiner.state)
    after = contents(joiner.state)
    assert after == contents(donor.state)
    assert all(before[name] != after[name] for name in ("outer_params", "outer_optimizer", "inner_optimizer"))


@report("31", "pytorch/pytorch#129079")
def every_option_comes_back() -> None:
    """Values in the groups that are no tensors were not restored."""
    donor, joiner = pair(Case("options", ADAMW))
    group = inner(donor).param_groups[0]
    changed = {"lr": 0.125, "betas": (0.5, 0.25), "eps": 1e-3, "weight_decay": 0.75, "amsgrad": True, "maximize": True}
    group.update(changed | {"own": ["a", 1, None, 2.0]})
    transfer(donor.state, joiner.state)
    restored = inner(joiner).param_groups[0]
    for key, value in changed.items():
        assert restored[key] == value and type(restored[key]) is type(value), key
    assert restored["own"] == ["a", 1, None, 2.0]


@report("32", "pytorch/pytorch#139575")
def kind_of_learning_rate_is_kept() -> None:
    """A tensor learning rate came back as a float, and the other way round; a held reference went stale."""

    def case(lr: float | Tensor) -> Case:
        return Case("kind", lambda net: optim.Adam(net.parameters(), lr=lr, foreach=False))

    for donors, joiners in ((0.5, torch.tensor(1.0)), (torch.tensor(0.5), 1.0)):
        donor, joiner = Worker(case(donors), 0), Worker(case(joiners), 1)
        transfer(donor.state, joiner.state)
        restored = inner(joiner).param_groups[0]["lr"]
        assert type(restored) is type(donors) and float(restored) == 0.5
    donor, joiner = Worker(case(torch.tensor(0.5)), 0), Worker(case(torch.tensor(1.0)), 1)
    held = inner(joiner).param_groups[0]["lr"]
    transfer(donor.state, joiner.state)
    assert inner(joiner).param_groups[0]["lr"] is held and float(held) == 0.5


@report("34", "pytorch/pytorch#140898")
def lost_optimizer_state_is_refused() -> None:
    """Saved optimizer state was empty, without an error, when any gradient was there."""
    donor, joiner = pair(Case("lost", ADAMW), 1)
    for parameter in donor.live.parameters():
        parameter.grad = torch.ones_like(parameter)
    transfer(donor.state, joiner.state)
    assert len(inner(joiner).state) == len(list(joiner.live.parameters()))
    inner(donor).state.clear()
    with pytest.raises(MisuseError, match="inner_optimizer: 0 parameters have optimizer state"):
        describe_state(donor.state)
    donor.state.expect_fewer_states(PartName("inner_optimizer"))
    transfer(donor.state, joiner.state)
    assert not inner(joiner).state


@report("36", "pytorch/pytorch#192224")
def parameters_without_state_are_named() -> None:
    """State that only some parameters have ended in a KeyError that named nothing."""
    donor, joiner = pair(Case("unused", ADAMW, models.Unused), 1)
    for parameter in joiner.live.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner(joiner).step()
    transfer(donor.state, joiner.state)
    named = {name for name, p in joiner.live.named_parameters() if p in inner(joiner).state}
    assert named == {name for name, _ in joiner.live.named_parameters() if not name.startswith("never")}

    fewer = Worker(Case("fewer", lambda net: optim.AdamW(list(net.parameters())[:-1], lr=1e-2), models.Unused), 1)
    with pytest.raises(LayoutMismatch, match=r"inner_optimizer/state/used\.3\.bias: the donor has state for it"):
        transfer(donor.state, fewer.state)


@report("37", "pytorch/pytorch#133415")
def optimizers_without_state_come_back() -> None:
    """An optimizer that keeps no state at all confused getting and setting."""
    donor, joiner = pair(Case("plain", one(optim.SGD, lr=0.1)), 1, 1)
    inner(donor).param_groups[0]["lr"] = 0.03
    for group in (joiner, donor):
        assert not inner(group).state
    transfer(donor.state, joiner.state)
    assert not inner(joiner).state and inner(joiner).param_groups[0]["lr"] == 0.03


@report("38", "pytorch/pytorch#80809")
def step_counters_keep_their_dtype() -> None:
    """The step came back in the parameter's dtype, where 257 is 256, or on its device."""
    for joiner_phases in (0, 1):
        case = Case("step", ADAMW, models.bf16_mlp, outer_dtype=torch.float32)
        donor, joiner = pair(case, 1, joiner_phases)
        for entries in inner(donor).state.values():
            entries["step"].fill_(1001)
        transfer(donor.state, joiner.state)
        for parameter, entries in inner(joiner).state.items():
            assert (entries["step"].dtype, entries["step"].device.type) == (torch.float32, "cpu")
            assert entries["step"].item() == 1001
            assert entries["exp_avg"].dtype == parameter.dtype


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


@report("40", "pytorch/pytorch#1489")
def swapped_parameters_are_found() -> None:
    """After a change of order, moments belonged to other parameters of the same shape, without an error."""
    donor = Worker(Case("order", ADAMW, _TwoLayers), 0)
    donor.train(1)
    swapped = Case("order", lambda net: optim.AdamW(list(net.parameters())[::-1], lr=1e-2), _TwoLayers)
    joiner = Worker(swapped, 1)
    before = contents(joiner.state)
    with pytest.raises(LayoutMismatch, match=r"the donor has first\.weight where this worker has second\.weight"):
        transfer(donor.state, joiner.state)
    assert contents(joiner.state) == before


@report("41", "pytorch/pytorch#34660")
def strict_report_and_lenient() -> None:
    """There was no choice of strictness for optimizers, and no list of what differed."""

    def groups(count: int) -> Case:
        def build(net: nn.Module) -> Optimizer:
            parameters = list(net.parameters())
            cuts = [parameters[i::count] for i in range(count)]
            return optim.AdamW([{"params": cut} for cut in cuts], lr=1e-2)

        return Case("groups", build)

    for donor_groups, joiner_groups in ((2, 1), (1, 2)):
        donor, joiner = Worker(groups(donor_groups), 0), Worker(groups(joiner_groups), 1)
        donor.train(1)
        joiner.train(1)
        said = f"the donor has {donor_groups} parameter groups, this worker {joiner_groups}"
        before = contents(joiner.state)
        with pytest.raises(LayoutMismatch, match=said):
            transfer(donor.state, joiner.state)
        assert any(said in line for line in layout_differences(joiner.state, describe_state(donor.state)).lines)
        assert contents(joiner.state) == before
        restored = transfer(donor.state, joiner.state, lenient=True)
        assert any(said in line for line in restored.differences)
        after = contents(joiner.state)
        assert after["inner_optimizer"] == before["inner_optimizer"]
        assert after["outer_params"] == contents(donor.state)["outer_params"]


class _RateOnLoad(lr_scheduler.LambdaLR):
    """Writes its optimizer's rate when it is loaded, as building any scheduler does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]


@report("42", "pytorch/pytorch#119168")
def order_of_building_and_loading() -> None:
    """Building or loading a scheduler overwrote the optimizer's rate; SequentialLR took the wrong child's."""
    s = lr_scheduler
    schedules: list[Callable[[Optimizer], lr_scheduler.LRScheduler]] = [
        lambda o: s.LambdaLR(o, lambda step: 0.5**step),
        lambda o: _RateOnLoad(o, lambda step: 0.5**step),
        lambda o: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)], [3]),
        lambda o: s.ReduceLROnPlateau(o, factor=0.1, patience=0),
    ]
    for schedule in schedules:
        donor, joiner = pair(Case("order", one(optim.SGD, lr=1.0), schedule=schedule), 1)
        inner(donor).param_groups[0]["lr"] *= 0.01
        expected = inner(donor).param_groups[0]["lr"]
        transfer(donor.state, joiner.state)
        assert inner(joiner).param_groups[0]["lr"] == expected
        assert next_learning_rates(joiner) == next_learning_rates(donor)


@report("45", "pytorch/pytorch#131976")
def odd_shapes_come_back() -> None:
    """Tensors without dimensions and of size one failed."""
    for style in ("offloaded", "last-synchronised"):
        for mode in RestoreMode:
            donor, joiner = pair(Case("odd", ADAMW, models.OddShapes, style=style), 1)
            transfer(donor.state, joiner.state, mode)
            for (name, theirs), ours in zip(donor.live.named_parameters(), joiner.live.parameters(), strict=True):
                assert same_bits(theirs, ours), name
            for (name, buffer), other in zip(donor.live.named_buffers(), joiner.live.buffers(), strict=True):
                assert same_bits(buffer, other), name


@report("47", "pytorch/torchtitan#811")
def other_sharding_is_refused() -> None:
    """A checkpoint of eight ranks did not load on sixteen."""
    donor, joiner = pair(Case("shard", ADAMW), 1)
    manifest = describe_state(donor.state, [PartName("outer_params")])
    part = manifest.part(PartName("outer_params"))
    spec = part.tensors[0]
    shard = ShardSpec(global_shape=(16, 6), global_offset=(8, 0), placements=("S(0)",), mesh_shape=(2,))
    sharded = dataclasses.replace(part, tensors=(dataclasses.replace(spec, shard=shard), *part.tensors[1:]))
    before = contents(joiner.state)
    with pytest.raises(LayoutMismatch, match=r"outer_params/0\.weight: the donor's is float32 \[8, 6\] shard S\(0\)"):
        manifest = dataclasses.replace(manifest, parts=(sharded,))
        transfer(donor.state, joiner.state, manifest=manifest, parts=[PartName("outer_params")])
    assert contents(joiner.state) == before


@report("49", "pytorch/gloo#454")
def every_dtype_travels_as_bytes() -> None:
    """Transports knew few dtypes."""
    donor, joiner = pair(Case("dtypes", ADAMW, models.EveryDtype), 1)
    data = donor.state.read_part(PartName("buffers")).bytes
    for index in range(data.num_tensors):
        piece = data.read(*data.tensor_range(index))
        assert piece.dtype == torch.uint8 and piece.dim() == 1 and piece.is_contiguous()
    transfer(donor.state, joiner.state)
    for (name, buffer), other in zip(donor.live.named_buffers(), joiner.live.named_buffers(), strict=True):
        assert same_bits(buffer, other[1]), name


class _Position:
    def __init__(self, drawn: int) -> None:
        self.drawn = drawn

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


@report("51", "meta-pytorch/torchft#58")
def data_position_stays_ones_own() -> None:
    """Transferred loader state left the joiner at the donor's position in the donor's shard."""
    donor, joiner = pair(Case("data", ADAMW), 1)
    theirs, own = _Position(70), _Position(9)
    donor.state.add("loader", theirs, PartClass.PRIVATE_KEPT)
    joiner.state.add("loader", own, PartClass.PRIVATE_KEPT)
    transfer(donor.state, joiner.state)
    assert own.drawn == 9
    transfer(donor.state, joiner.state, parts=[PartName("loader")])  # the same worker's, from its own disk
    assert own.drawn == 70


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(x.detach().sum(0))
        return self.norm(x)  # type: ignore[no-any-return]


@report("52", "NVIDIA-NeMo/Automodel#3822")
def buffers_come_back() -> None:
    """Buffers differed between replicas; those outside of the state dict never travelled."""
    donor, joiner = pair(Case("buffers", ADAMW, _Hidden), 1)
    transfer(donor.state, joiner.state)
    names = [name for name, _ in donor.live.named_buffers()]
    assert names == ["seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    for name in names:
        assert same_bits(donor.live.get_buffer(name), joiner.live.get_buffer(name)), name
    assert bool(joiner.live.get_buffer("seen").any())


def _missing_state_is_made_without_a_step() -> None:
    for recipe in (ADAMW, one(optim.SGD, lr=0.1, momentum=0.9), one(optim.Adagrad, lr=0.1)):
        for mode in RestoreMode:
            donor, joiner = pair(Case("lazy", recipe), 1)
            before = [p.detach().clone() for p in joiner.live.parameters()]
            states = len(inner(joiner).state)
            generator = torch.get_rng_state()
            restoration = Restoration(joiner.state, describe_state(donor.state), mode=mode)
            restoration.prepare()
            assert all(map(same_bits, before, joiner.live.parameters()))
            assert torch.equal(generator, torch.get_rng_state())
            assert len(inner(joiner).state) == states
            fill(restoration, donor.state)
            restoration.commit()
            assert contents(joiner.state) == contents(donor.state)


report("53", "meta-pytorch/tnt#554")(_missing_state_is_made_without_a_step)
report("3", "PrimeIntellect-ai/prime-diloco#113")(_missing_state_is_made_without_a_step)
report("Z2", "PrimeIntellect-ai/prime-diloco: state made by a random step")(_missing_state_is_made_without_a_step)


class _Broken:
    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("the user's own mistake")


@report("55", "pytorch/pytorch#144657")
def what_is_kept_is_a_copy() -> None:
    """An asynchronous save of CPU tensors wrote later values: its copy was none."""
    donor, joiner = pair(Case("copy", ADAMW), 1)
    module = nn.Linear(2, 2)
    donor.state.add("first", nn.Linear(2, 2), PartClass.PRIVATE_COPIED)
    joiner.state.add("first", module, PartClass.PRIVATE_COPIED)
    for worker in (donor, joiner):
        worker.state.add("second", _Broken(), PartClass.PRIVATE_COPIED)
    before = contents(joiner.state)
    with pytest.raises(KeyError, match="the user's own mistake"):
        transfer(donor.state, joiner.state, RestoreMode.STAGED)
    assert contents(joiner.state) == before  # the first was loaded, and put back from a copy


@report("56", "Lightning-AI/pytorch-lightning#20953")
def mixed_steps_are_refused() -> None:
    """A checkpoint could hold one layer of step n and another of n + 1."""
    donor, joiner = pair(Case("torn", ADAMW), 1)
    manifest = describe_state(donor.state)
    donor.train(1)  # goes on while the bytes are read
    before = contents(joiner.state)
    with pytest.raises(StateMismatch, match="are not those of the manifest"):
        transfer(donor.state, joiner.state, RestoreMode.STAGED, manifest=manifest)
    assert contents(joiner.state) == before
