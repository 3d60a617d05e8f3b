"""The demo's replica: deterministic, and its evidence sees what it must see and changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recovery.demo.model import ByteTransformer, ModelSize, next_byte_loss
from recovery.demo.replica import Replica, TrainingSettings, WarmUp, flip_random_bits
from recovery.errors import BadConfiguration

SMALL = TrainingSettings(size=ModelSize(width=16, num_layers=1, num_heads=2, context=8), warmup_inner_steps=30)


def windows(seed: int) -> Tensor:
    return torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(seed))


def trained(*, seed: int = 1, outer_steps: int = 2, inner_steps: int = 3) -> Replica:
    replica = Replica(SMALL, seed=seed)
    for outer_step in range(outer_steps):
        for inner_step in range(inner_steps):
            replica.inner_step(windows(100 * outer_step + inner_step))
        replica.outer_step(replica.pseudo_gradients())
    return replica


def test_the_demos_own_model_has_one_to_three_million_parameters_and_tied_embeddings() -> None:
    model = ByteTransformer(ModelSize(), seed=0)
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert model.head.weight is model.embedding.weight


def test_the_model_is_a_function_of_its_seed_and_cannot_see_the_future() -> None:
    model, same, other = (ByteTransformer(SMALL.size, seed=seed) for seed in (3, 3, 4))
    for left, right in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)

    tokens = windows(0)[:, :8]
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_the_weights_do_not_depend_on_the_global_generator() -> None:
    torch.manual_seed(5)
    first = ByteTransformer(SMALL.size, seed=3)
    torch.manual_seed(6)
    second = ByteTransformer(SMALL.size, seed=3)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


def test_training_is_deterministic_and_lowers_the_loss() -> None:
    first, second = trained(), trained()
    assert first.outer_digest() == second.outer_digest()
    assert first.inner_digest() == second.inner_digest()

    replica = Replica(SMALL, seed=1)
    batch = windows(0)
    before = next_byte_loss(replica.model, batch).item()
    for _ in range(30):
        replica.inner_step(batch)
    assert next_byte_loss(replica.model, batch).item() < before


def test_an_outer_step_mirrors_the_outer_copy_into_the_live_model() -> None:
    replica = trained()
    for live, outer in zip(replica.model.parameters(), replica.outer_params, strict=True):
        assert torch.equal(live, outer)
        assert live.data_ptr() != outer.data_ptr()


def test_the_next_steps_digest_is_what_the_step_then_gives_and_changes_nothing() -> None:
    replica = trained()
    replica.inner_step(windows(7))
    gradients = replica.pseudo_gradients()
    before = replica.outer_digest(), replica.inner_digest(), replica.momentum_norm()
    expected = replica.next_step_digest(gradients)
    assert (replica.outer_digest(), replica.inner_digest(), replica.momentum_norm()) == before
    replica.outer_step(gradients)
    assert replica.outer_digest() == expected != before[0]


def test_the_first_outer_steps_digest_needs_no_momentum() -> None:
    replica = trained(outer_steps=0)
    replica.inner_step(windows(7))
    assert replica.momentum_norm() == 0
    gradients = replica.pseudo_gradients()
    expected = replica.next_step_digest(gradients)
    replica.outer_step(gradients)
    assert replica.outer_digest() == expected
    assert replica.momentum_norm() > 0


def test_the_next_steps_digest_sees_a_momentum_and_a_learning_rate_that_differ() -> None:
    replica, other = trained(), trained()
    gradients = [torch.ones_like(parameter) for parameter in replica.outer_params]
    expected = replica.next_step_digest(gradients)
    assert other.next_step_digest(gradients) == expected
    next(iter(other.outer.state.values()))["momentum_buffer"].view(-1)[0] += 1
    assert other.next_step_digest(gradients) != expected

    other = trained()
    other.outer.param_groups[0]["lr"] = 0.6
    assert other.outer_digest() == replica.outer_digest()
    assert other.next_step_digest(gradients) != expected


def test_the_inner_digest_sees_one_moment_and_the_step_count() -> None:
    replica = trained()
    before = replica.inner_digest()
    state = next(iter(replica.inner.state.values()))
    state["exp_avg_sq"].view(-1)[0] += 1
    assert replica.inner_digest() != before
    replica = trained()
    next(iter(replica.inner.state.values()))["step"] += 1
    assert replica.inner_digest() != before


def test_the_next_learning_rates_are_those_then_used_across_the_end_of_the_warm_up() -> None:
    replica = Replica(SMALL, seed=1)
    for step in range(20):
        replica.inner_step(windows(step))
    expected = replica.next_learning_rates(20)
    used = []
    for step in range(20):
        used.append(replica.inner.param_groups[0]["lr"])
        replica.inner_step(windows(step))
    assert used == expected
    assert len(set(expected)) == 20


def test_a_learning_rate_that_does_not_fit_the_schedule_shows_in_the_next_ones() -> None:
    """A scheduler that reports the right rate while the optimizer holds a stale one (pytorch/torchtitan#4598)."""
    replica = trained()
    honest = replica.next_learning_rates(20)
    replica.inner.param_groups[0]["lr"] = 0.5
    assert replica.next_learning_rates(20) != honest


def test_the_warm_up_is_never_zero_and_meets_the_decay() -> None:
    factor = WarmUp(30)
    assert factor(0) > 0
    assert factor(29) == 1.0
    assert factor(119) == pytest.approx(0.5)
    assert all(math.isfinite(factor(step)) for step in range(0, 10_000, 97))


def test_flips_invert_exactly_the_named_bits_of_the_outer_copy() -> None:
    replica, before = trained(), trained()
    flips = flip_random_bits(replica, seed=9, num_tensors=3)
    assert flips == flip_random_bits(trained(), seed=9, num_tensors=3)
    assert flips != flip_random_bits(trained(), seed=10, num_tensors=3)
    names = {flip.name for flip in flips}
    assert len(names) == 3
    for name, left, right in zip(replica.names, replica.outer_params, before.outer_params, strict=True):
        difference = left.detach().view(-1).view(torch.int32) ^ right.detach().view(-1).view(torch.int32)
        assert int((difference != 0).sum()) == (1 if name in names else 0)
        assert bool(torch.isfinite(left).all())
    for flip in flips:
        index = replica.names.index(flip.name)
        after, sound = (r.outer_params[index].detach().view(-1).view(torch.int32) for r in (replica, before))
        assert int(after[flip.element] ^ sound[flip.element]) == 1 << flip.bit
    for live, untouched in zip(replica.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(live, untouched)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": 10, "num_heads": 4}, {"context": 0}])
def test_an_impossible_model_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadConfiguration):
        ModelSize(**wrong)


def test_impossible_training_settings_are_refused() -> None:
    with pytest.raises(BadConfiguration):
        TrainingSettings(batch_size=0)
    with pytest.raises(BadConfiguration):
        TrainingSettings(outer_momentum=1.0)
