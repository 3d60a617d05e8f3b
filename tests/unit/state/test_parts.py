"""A worker's state is read as named parts, for each way in which DiLoCo is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from recovery.errors import BadConfiguration, MisuseError, UnsupportedLeaf
from recovery.state import Fragment, WorkerState
from recovery.state.manifest import TensorKind
from recovery.types import PartClass, PartName
from tests.support import zoo_models as models
from tests.support.state_lab import ADAMW, contents, same_bits
from tests.support.zoo import Case, Worker

OUTER = PartName("outer_params")
INNER = PartName("inner_optimizer")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def full_state() -> WorkerState:
    net = models.mlp()
    inner = optim.AdamW(net.parameters())
    copies = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    return WorkerState(
        live=net,
        outer_params=copies,
        outer_optimizer=optim.SGD(copies, lr=0.7),
        inner_optimizer=inner,
        scheduler=lr_scheduler.StepLR(inner, 3),
    )


def test_built_in_parts_in_order_with_their_classes() -> None:
    state = full_state()
    replicated, copied = PartClass.REPLICATED, PartClass.PRIVATE_COPIED
    assert {name: state.part_class(name) for name in state.part_names} == {
        "outer_params": replicated,
        "outer_optimizer": replicated,
        "run_progress": replicated,
        "inner_optimizer": copied,
        "scheduler": copied,
        "local_progress": copied,
        "buffers": copied,
    }
    assert state.replicated_names == ["outer_params", "outer_optimizer", "run_progress"]
    assert state.private_copied_names == ["inner_optimizer", "scheduler", "local_progress", "buffers"]
    assert state.private_kept_names == []
    assert [name for name in state.part_names if state.changes_in_forward(name)] == ["buffers"]


def test_a_sequence_is_named_by_the_live_module() -> None:
    state = full_state()
    part = state.read_part(OUTER)
    assert [spec.path for spec in part.specs] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"
    ]  # fmt: skip
    assert all(spec.kind is TensorKind.PARAMETER and spec.requires_grad for spec in part.specs)


def test_optimizer_state_is_keyed_by_parameter_name_live_and_offloaded() -> None:
    worker = Worker(Case("x", ADAMW), 0)
    worker.train(1)
    for part in ("inner_optimizer", "outer_optimizer"):
        names = [spec.path.split("/")[1] for spec in worker.state.read_part(PartName(part)).specs]
        assert names[0] == "0.weight" and set(names) == {name for name, _ in worker.live.named_parameters()}


def test_an_unnamed_parameter_is_named_by_its_place_or_by_the_optimizers_own_names() -> None:
    flat = nn.Parameter(torch.zeros(3))
    flat.grad = torch.ones(3)
    plain = optim.SGD([flat], lr=1.0, momentum=0.9)
    named = optim.SGD([("flat", flat)], lr=1.0, momentum=0.9)
    for optimizer, name in ((plain, "group0.0"), (named, "flat")):
        optimizer.step()
        state = WorkerState(outer_params={"w": torch.zeros(3)}, outer_optimizer=optimizer)
        paths = [spec.path for spec in state.read_part(PartName("outer_optimizer")).specs]
        assert paths == [f"state/{name}/momentum_buffer"]


def test_a_parameter_that_is_replaced_is_named_again() -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    state = WorkerState(live=net, outer_params=nn.Linear(2, 2, bias=False), inner_optimizer=optimizer)
    state.read_part(INNER)
    net.weight = nn.Parameter(torch.ones(2, 2))
    optimizer.param_groups[0]["params"] = [net.weight]
    optimizer.state.clear()
    net.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert [spec.path for spec in state.read_part(INNER).specs] == ["state/weight/momentum_buffer"]


def test_two_parameters_that_share_a_name_are_told_apart() -> None:
    net = nn.Linear(2, 2)
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in net.named_parameters()}
    both = optim.SGD([*net.parameters(), *copies.values()], lr=1.0)
    state = WorkerState(live=net, outer_params=copies, inner_optimizer=both)
    tree = state.part(INNER).read()
    assert isinstance(tree, dict)
    assert tree["param_groups"][0]["params"] == ["weight", "bias", "group0.2", "group0.3"]


def test_a_list_that_fits_neither_count_is_refused_with_both_counts() -> None:
    net = models.frozen()
    with pytest.raises(BadConfiguration, match="has 3 tensors, but live has 6 parameters, 4 of them trainable"):
        WorkerState(live=net, outer_params=list(net.parameters())[:3])


def test_a_list_in_another_order_is_refused() -> None:
    net = models.mlp()
    with pytest.raises(BadConfiguration, match=r"0\.weight: \(4,\) against \(8, 6\) in live"):
        WorkerState(live=net, outer_params=list(net.parameters())[::-1])


def test_a_list_needs_a_module_that_names_it() -> None:
    with pytest.raises(BadConfiguration, match="give live="):
        WorkerState(outer_params=[torch.zeros(2)])


@pytest.mark.parametrize("make", [lambda n: n, lambda n: nn.ParameterList(n.parameters()), lambda n: n.parameters()])
def test_modules_and_iterators_as_outer_parameters(make: object) -> None:
    net, backup = models.mlp(), models.mlp()
    assert callable(make)
    state = WorkerState(live=net, outer_params=make(backup))
    for _ in range(2):
        assert list(state.read_outer_params()) == [name for name, _ in net.named_parameters()]
        assert all(map(same_bits, state.read_outer_params().values(), backup.parameters()))


def test_a_parameter_dict_keeps_its_names() -> None:
    backup = nn.ParameterDict({"bias": torch.ones(2), "weight": torch.ones(2, 2)})
    assert list(WorkerState(live=nn.Linear(2, 2), outer_params=backup).read_outer_params()) == ["bias", "weight"]


def test_an_outer_parameter_that_live_does_not_have_is_named() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(BadConfiguration, match=r"'module\.weight' is no parameter of live, which has weight, bias"):
        WorkerState(live=net, outer_params={"module.weight": net.weight})
    with pytest.raises(BadConfiguration, match=r"'bias' is \[3\], live's is \[2\]"):
        WorkerState(live=net, outer_params={"bias": torch.zeros(3)})


def test_a_function_that_returns_copies_is_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(BadConfiguration, match="outer_params/weight: the function returns another tensor at each call"):
        WorkerState(live=net, outer_params=lambda: [p.detach().clone() for p in net.parameters()])


def test_live_without_outer_parameters_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="nothing says what the model was at the last outer step"):
        WorkerState(live=nn.Linear(2, 2))


def test_getters_are_called_at_each_read() -> None:
    tensors = [{"w": torch.zeros(2)}]
    state = WorkerState(outer_params=lambda: tensors[0])
    before = state.read_part(OUTER)
    tensors[0] = {"w": torch.ones(2)}
    assert torch.equal(state.read_part(OUTER).tensors[0], torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(before.tensors[0], torch.zeros(2))  # type: ignore[arg-type]


def test_reading_refers_to_live_memory() -> None:
    worker = Worker(Case("x", ADAMW), 0)
    part = worker.state.read_part(OUTER)
    assert [t.data_ptr() for t in part.tensors] == [  # type: ignore[union-attr]
        t.data_ptr() for t in worker.state.read_outer_params().values()
    ]


def test_frozen_parameters_that_nobody_mirrors_are_a_replicated_part() -> None:
    net = models.frozen()
    trained = [p for p in net.parameters() if p.requires_grad]
    state = WorkerState(live=net, outer_params=[p.detach().clone() for p in trained])
    assert state.part_class(PartName("frozen_params")) is PartClass.REPLICATED
    assert [spec.path for spec in state.read_part(PartName("frozen_params")).specs] == ["0.weight", "0.bias"]


def test_frozen_parameters_that_each_worker_changes_after_all_are_private() -> None:
    net = models.frozen()
    trained = {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    state = WorkerState(live=net, outer_params=trained, frozen_params=PartClass.PRIVATE_COPIED)
    assert "frozen_params" in state.private_copied_names


def test_trained_parameters_that_nobody_mirrors_are_private() -> None:
    net = models.mlp()
    state = WorkerState(live=net, outer_params={"0.weight": net.get_parameter("0.weight").detach().clone()})
    assert state.part_class(PartName("local_params")) is PartClass.PRIVATE_COPIED
    assert len(state.read_part(PartName("local_params")).specs) == 5


def test_fragments_are_one_part_of_parameters_and_an_optimizer_each() -> None:
    worker = Worker(Case("x", ADAMW, style="fragments"), 0)
    state = worker.state
    assert [spec.path for spec in state.read_part(OUTER).specs] == [name for name, _ in worker.live.named_parameters()]
    assert state.replicated_names == ["outer_params", "outer_optimizer.f0", "outer_optimizer.f1", "run_progress"]
    assert len(state.outer_optimizers) == 2 and state.inner_optimizers == list(worker.inner.values())
    assert state.part_class(PartName("live_params")) is PartClass.PRIVATE_COPIED


def test_fragments_that_overlap_or_share_a_name_are_refused() -> None:
    net = nn.Linear(2, 2)
    weight, bias = {"weight": net.weight.detach().clone()}, {"bias": net.bias.detach().clone()}
    with pytest.raises(BadConfiguration, match="parameter weight is in the fragments a and b"):
        WorkerState(live=net, fragments=[Fragment("a", weight), Fragment("b", weight | bias)])
    with pytest.raises(BadConfiguration, match="fragment names are not unique"):
        WorkerState(live=net, fragments=[Fragment("a", weight), Fragment("a", bias)])
    with pytest.raises(BadConfiguration, match="not both"):
        WorkerState(live=net, outer_params=weight, fragments=[Fragment("a", bias)])


def test_named_optimizers_and_schedulers_are_parts_of_their_own() -> None:
    net = models.mlp()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    inner = {"muon": optim.Muon(matrices), "rest": optim.AdamW(rest)}
    schedules = {name: lr_scheduler.ConstantLR(one) for name, one in inner.items()}
    state = WorkerState(live=net, outer_params=net, inner_optimizer=inner, scheduler=schedules)
    assert [name for name in state.private_copied_names if "." in name] == [
        "inner_optimizer.muon", "inner_optimizer.rest", "scheduler.muon", "scheduler.rest"
    ]  # fmt: skip


def test_a_scheduler_of_the_outer_optimizer_is_replicated() -> None:
    copies = {"w": nn.Parameter(torch.zeros(2))}
    outer = optim.SGD(copies.values(), lr=0.7)
    state = WorkerState(outer_params=copies, outer_optimizer=outer, scheduler=lr_scheduler.StepLR(outer, 3))
    assert state.part_class(PartName("scheduler")) is PartClass.REPLICATED


def test_buffers_can_be_left_out_replaced_or_replicated() -> None:
    net = models.mlp()
    assert "buffers" not in WorkerState(live=net, outer_params=net, buffers=None).part_names
    own = WorkerState(live=net, outer_params=net, buffers={"one": torch.zeros(1)})
    assert [spec.path for spec in own.read_part(PartName("buffers")).specs] == ["one"]
    shared = WorkerState(live=net, outer_params=net, replicated_buffers=True)
    assert shared.part_class(PartName("buffers")) is PartClass.REPLICATED
    assert "buffers" not in WorkerState(live=nn.Linear(2, 2), outer_params=nn.Linear(2, 2)).part_names
    with pytest.raises(BadConfiguration, match='give a mapping, a function, None or "auto"'):
        WorkerState(live=net, outer_params=net, buffers="persistent")


def test_extras_are_checked_when_they_are_added() -> None:
    state = full_state()
    state.add("ema", nn.Linear(2, 2), PartClass.PRIVATE_COPIED, changes_in_forward=True)
    assert state.changes_in_forward(PartName("ema"))
    with pytest.raises(BadConfiguration, match="two parts are named 'ema'"):
        state.add("ema", nn.Linear(2, 2), PartClass.PRIVATE_COPIED)
    with pytest.raises(BadConfiguration, match="part name 'a/b' is not usable"):
        state.add("a/b", nn.Linear(2, 2), PartClass.PRIVATE_COPIED)
    with pytest.raises(BadConfiguration, match="a int has no state_dict"):
        state.add("number", 3, PartClass.PRIVATE_COPIED)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="no part 'other' is registered; there are: outer_params"):
        state.read_part(PartName("other"))


def test_what_cannot_travel_is_named_with_part_and_path() -> None:
    state = full_state()
    state.inner_optimizers[0].param_groups[0]["hook"] = lambda: None
    with pytest.raises(UnsupportedLeaf, match="part 'inner_optimizer': param_groups/0/hook: a value of type function"):
        state.read_part(INNER)


def test_an_optimizer_that_keeps_state_elsewhere_is_refused() -> None:
    class Wrapper(optim.SGD):
        def state_dict(self) -> dict[str, object]:
            return super().state_dict() | {"slow_weights": []}

    net = nn.Linear(2, 2)
    with pytest.raises(UnsupportedLeaf, match=r"keeps state outside of state and param_groups \(\['slow_weights'\]\)"):
        WorkerState(live=net, outer_params=net, inner_optimizer=Wrapper(net.parameters(), lr=1.0))


def test_state_that_an_optimizer_keys_by_a_string_or_keeps_as_attributes_is_read() -> None:
    class Odd(optim.SGD):
        count = 0

    net = nn.Linear(2, 2)
    odd = Odd(net.parameters(), lr=1.0)
    odd.state["shared"] = {"norm": torch.ones(1)}  # type: ignore[index]
    odd.last_loss = 0.5  # type: ignore[attr-defined]
    tree = WorkerState(live=net, outer_params=net, inner_optimizer=odd).part(INNER).read()
    assert isinstance(tree, dict)
    assert tree["other_state"] == {"shared": {"norm": torch.ones(1)}} and tree["attributes"] == {"last_loss": 0.5}
    odd.state[3] = {}  # type: ignore[index]
    with pytest.raises(UnsupportedLeaf, match="state is keyed by int 3"):
        WorkerState(live=net, outer_params=net, inner_optimizer=odd).read_part(INNER)


def test_only_optimizers_can_lose_state_on_purpose() -> None:
    with pytest.raises(MisuseError, match="is no optimizer"):
        full_state().expect_fewer_states(OUTER)


def test_runtime_flags_are_part_of_nothing() -> None:
    net = models.mlp()
    plain = WorkerState(live=net, outer_params=net, inner_optimizer=optim.AdamW(net.parameters(), foreach=False))
    fused = WorkerState(live=net, outer_params=net, inner_optimizer=optim.AdamW(net.parameters(), fused=True))
    assert plain.layout_digest() == fused.layout_digest()
    assert contents(plain, [INNER]) == contents(fused, [INNER])


def test_an_empty_entry_of_state_is_no_state() -> None:
    worker = Worker(Case("x", ADAMW), 0)
    before = contents(worker.state)
    for parameter in worker.live.parameters():
        worker.inner["only"].state[parameter]  # a look makes an entry
    assert contents(worker.state) == before
