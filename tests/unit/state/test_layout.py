"""The layout tells workers apart that must not exchange state; manifests describe those that may."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from recovery.state import WorkerState, describe, fingerprint, part_digests
from recovery.types import DigestAlgorithm, Fingerprint, PartClass, PartName
from tests.support import zoo_models as models
from tests.support.state_lab import ADAMW, describe_state
from tests.support.zoo import Case, Worker, one

OUTER = PartName("outer_params")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class TestLayout:
    """The layout's digest."""

    def digest(self, **changes: object) -> bytes:
        net = changes.pop("net", None) or models.mlp()
        assert isinstance(net, nn.Module)
        inner = changes.pop("inner", ADAMW)
        assert callable(inner)
        optimizer = inner(net)
        schedule = changes.pop("schedule", lambda o: lr_scheduler.StepLR(o, 3))
        assert callable(schedule)
        outer = changes.pop("outer", lambda n: [p.detach().clone() for p in n.parameters()])
        assert callable(outer)
        state = WorkerState(
            live=net,
            outer_params=outer(net),
            inner_optimizer=optimizer,
            scheduler=schedule(optimizer),
            **changes,  # type: ignore[arg-type]
        )
        return state.layout_digest()

    def test_is_equal_whatever_the_values_and_the_age(self) -> None:
        first, second = (Worker(Case("x", ADAMW), seed) for seed in (0, 1))
        assert first.state.layout_digest() == second.state.layout_digest()
        first.train(1)
        assert first.state.layout_digest() == second.state.layout_digest()

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"net": nn.Linear(6, 8)}, id="model"),
            pytest.param({"net": models.mlp().double()}, id="dtype"),
            pytest.param({"inner": one(optim.Adam)}, id="optimizer"),
            pytest.param({"inner": lambda net: optim.AdamW(list(net.parameters())[::-1])}, id="order"),
            pytest.param({"inner": lambda net: optim.AdamW([{"params": [p]} for p in net.parameters()])}, id="groups"),
            pytest.param({"schedule": lr_scheduler.ConstantLR}, id="scheduler"),
            pytest.param({"schedule": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3)])}, id="nest"),
            pytest.param({"buffers": None}, id="buffers"),
            pytest.param({"replicated_buffers": True}, id="class"),
            pytest.param({"outer": lambda n: [p.detach().double() for p in n.parameters()]}, id="outer dtype"),
        ],
    )
    def test_tells_workers_apart(self, changes: dict[str, object]) -> None:
        outer = changes.get("outer")
        held = outer(models.mlp()) if callable(outer) else None
        assert self.digest(**(changes | ({"outer": lambda _: held} if held else {}))) != self.digest()

    def test_tells_the_live_dtype_apart(self) -> None:
        copies = [p.detach().clone() for p in models.mlp().parameters()]
        digests = {self.digest(net=net, outer=lambda _: copies) for net in (models.mlp(), models.mlp().bfloat16())}
        assert len(digests) == 2

    def test_tells_ties_apart(self) -> None:
        tied, apart = models.Tied(), models.Tied()
        apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())

        def named(net: nn.Module) -> dict[str, Tensor]:
            return dict(net.named_parameters(remove_duplicate=False))

        layouts = [WorkerState(live=net, outer_params=named(net)).layout() for net in (tied, apart)]
        ties = [{t.name: t.tied_to for t in layout.tensors if t.tied_to} for layout in layouts]
        assert ties[0]["outer_params/head.weight"] == "outer_params/embedding.weight"
        assert ties[1] == {}

    def test_lists_fragments(self) -> None:
        worker = Worker(Case("x", ADAMW, style="fragments"), 0)
        found = {fragment.name: list(fragment.parameters) for fragment in worker.state.layout().fragments}
        assert found == {"f0": ["0.weight", "0.bias", "1.weight"], "f1": ["1.bias", "3.weight", "3.bias"]}


class TestDescribe:
    """Manifests of live parts."""

    def test_holds_every_part_and_the_fingerprint_of_the_replicated_ones(self) -> None:
        worker = Worker(Case("x", ADAMW), 0)
        worker.train(1)
        manifest = describe_state(worker.state)
        assert [part.name for part in manifest.parts] == worker.state.part_names
        replicated = [worker.state.read_part(name) for name in worker.state.replicated_names]
        assert manifest.fingerprint == fingerprint(replicated)
        assert describe_state(worker.state, worker.state.private_copied_names).fingerprint == b""

    def test_two_workers_that_did_the_same_have_one_fingerprint(self) -> None:
        first, second = (Worker(Case("x", ADAMW), 0) for _ in range(2))
        first.train(1)
        second.train(1)
        assert describe_state(first.state).fingerprint == describe_state(second.state).fingerprint
        second.state.run_progress.tokens += 1
        assert describe_state(first.state).fingerprint != describe_state(second.state).fingerprint

    @pytest.mark.parametrize("algorithm", list(DigestAlgorithm))
    def test_one_pass_gives_what_two_would(self, algorithm: DigestAlgorithm) -> None:
        worker = Worker(Case("x", ADAMW), 0)
        parts = [worker.state.read_part(name) for name in worker.state.part_names]
        plain = describe_state(worker.state)
        found = describe(
            parts,
            run_id=plain.run_id,
            worker=plain.worker,
            cut=plain.cut,
            numerics_id=plain.numerics_id,
            layout_digest=plain.layout_digest,
            algorithm=algorithm,
        )
        replicated = [part for part in parts if part.part_class is PartClass.REPLICATED]
        assert found.fingerprint == fingerprint(replicated, algorithm)
        for part, spec in zip(parts, found.parts, strict=True):
            assert [chunk.digest for chunk in spec.chunks] == part_digests(part.bytes, algorithm)

    def test_local_ranks_bring_the_fingerprint_that_they_agreed_on(self) -> None:
        worker = Worker(Case("x", ADAMW), 0)
        plain = describe_state(worker.state)
        found = describe(
            [worker.state.read_part(name) for name in worker.state.part_names],
            run_id=plain.run_id,
            worker=plain.worker,
            cut=plain.cut,
            numerics_id=plain.numerics_id,
            layout_digest=plain.layout_digest,
            agreed_fingerprint=Fingerprint(b"F" * 32),
        )
        assert found.fingerprint == b"F" * 32 and found.parts == plain.parts

    def test_tied_weights_and_views_cost_their_bytes_once(self) -> None:
        flat = torch.zeros(1_000_000)
        views = {f"p{i}": flat[i * 1000 : (i + 1) * 1000] for i in range(1000)}
        state = WorkerState(outer_params=views | {"again": views["p0"]})
        assert state.read_part(OUTER).bytes.num_bytes == 4_000_000
