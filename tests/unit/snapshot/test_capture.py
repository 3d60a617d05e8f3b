"""Private parts: where the cut lies, what waits, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from torch.optim import Optimizer

from recovery.errors import DonorBusy, DonorRefused, RecoveryError, UnsupportedLeaf
from recovery.events import Recorder, SnapshotCaptured, TrainingThreadWaited
from recovery.snapshot import Lease, SnapshotConfig, StallCause, capture, frozen
from recovery.snapshot.copy_jobs import CopyJobs
from recovery.snapshot.hooks import SILENT_STEPS
from recovery.snapshot.preparation import Preparation
from recovery.state.live_part import LivePart
from recovery.types import Cut, PartClass, PartName, Version
from tests.unit.snapshot.reader import until
from tests.unit.snapshot.test_guard import whole
from tests.unit.snapshot.trainee import FIRST, Trainee, digest_of

SMALL = SnapshotConfig()
IN_BACKGROUND = SnapshotConfig(measure_in_step_bytes=0)
Reference = dict[str, tuple[bytes, bytes]]


class Donor:
    """A worker that keeps reference copies of its private parts at every cut."""

    def __init__(self, config: SnapshotConfig = SMALL, *, hooks: bool = True, width: int = 32) -> None:
        self.events = Recorder()
        self.trainee = Trainee(width=width)
        self.trainee.inner_step()
        self.trainee.state.local_progress.inner_step = 0
        self.snapshots = self.trainee.snapshots(config, events=self.events, hooks=hooks)
        self.snapshots.start()
        self.version = FIRST
        self.references: dict[Cut, Reference] = {}
        self.publish()

    def publish(self) -> None:
        self.snapshots.publish(self.version)
        self.note()

    def note(self) -> None:
        cut = Cut(self.version, self.trainee.state.local_progress.inner_step)
        self.references[cut] = self.trainee.reference(PartClass.PRIVATE_COPIED)

    def step(self, *, overflow: bool = False, says_boundary: bool = False) -> None:
        self.trainee.inner_step(overflow=overflow)
        self.note()
        if says_boundary:
            self.snapshots.inner_boundary()

    def outer_step(self) -> None:
        self.trainee.outer_step()
        self.version = self.version.next()
        self.publish()

    def ask(self, holder: str = "joiner", not_before: Version = FIRST) -> Future[Lease]:
        return self.snapshots.lease_private(holder, not_before)

    def check(self, future: Future[Lease]) -> Cut:
        """Every part equals the reference at the lease's cut, which is returned."""
        lease = future.result(20)
        cut = lease.manifest.cut
        assert found_in(lease) == self.references[cut], cut
        assert all(lease.recheck(p, c) for p, part in enumerate(lease.manifest.parts) for c in range(len(part.chunks)))
        return cut


def found_in(lease: Lease) -> Reference:
    return {
        part.name: (part.tree.SerializeToString(deterministic=True), digest_of(data))
        for part, data in zip(lease.manifest.parts, whole(lease), strict=True)
    }


@pytest.fixture
def donor() -> Iterator[Donor]:
    donor = Donor()
    yield donor
    donor.snapshots.close()


def test_the_cut_lies_between_two_steps_with_the_scalars_of_the_later_moment(donor: Donor) -> None:
    future = donor.ask()
    donor.step()
    assert not future.done(), "the scheduler's step belongs to it, and only the next step shows that it is over"
    donor.step()
    assert donor.check(future) == Cut(FIRST, 1)
    (event,) = donor.events.of(SnapshotCaptured)
    assert event.cut == Cut(FIRST, 1)
    assert 0 < event.copied_on_training_thread_bytes < event.num_bytes
    assert event.training_thread_seconds > 0


def test_a_loop_that_says_its_boundaries_is_served_there(donor: Donor) -> None:
    future = donor.ask()
    donor.step(says_boundary=True)
    assert donor.check(future) == Cut(FIRST, 1)


def test_a_boundary_alone_serves(donor: Donor) -> None:
    future = donor.ask()
    donor.snapshots.inner_boundary()
    assert donor.check(future) == Cut(FIRST, 0)
    donor.step()
    again = donor.ask("other")
    donor.snapshots.inner_boundary()
    assert donor.check(again) == Cut(FIRST, 1)


def test_without_hooks_the_boundary_is_whole() -> None:
    donor = Donor(hooks=False)
    with donor.snapshots:
        future = donor.ask()
        donor.snapshots.inner_boundary()
        donor.trainee.inner_step()  # nothing waits for a copy here
        assert donor.check(future) == Cut(FIRST, 0)


def test_memory_of_a_large_state_is_touched_before_the_capture() -> None:
    donor = Donor(IN_BACKGROUND)
    with donor.snapshots:
        future = donor.ask()
        donor.snapshots.inner_boundary()
        assert until(lambda: donor.snapshots.vault.used_bytes > 0)
        while not future.done():
            donor.step()
        assert donor.check(future).inner_step >= 1


def test_the_next_capture_uses_touched_memory_again_as_long_as_anybody_reads() -> None:
    donor = Donor(IN_BACKGROUND)
    vault = donor.snapshots.vault
    with donor.snapshots:
        stays = donor.snapshots.lease_outer(FIRST, "stays")
        assert until(lambda: vault._holds)

        def capture(name: str) -> int:
            future = donor.ask(name)
            while not future.done():
                donor.step()
            lease = future.result()
            where = lease.read(0, 0, 1).data.data_ptr()
            lease.release("done")
            return where

        first = capture("one")
        assert until(lambda: bool(vault._kept))
        assert vault._kept[-1].touched
        peak = vault.peak_bytes
        assert capture("two") == first
        assert vault.peak_bytes == peak
        stays.release("done")
        del stays
        assert until(lambda: vault.used_bytes == 0), "the keeper gives it back"
        assert not vault._holds


@pytest.mark.parametrize("config", [SMALL, IN_BACKGROUND])
def test_whoever_asks_while_the_training_thread_stands_is_served_by_a_service_thread(config: SnapshotConfig) -> None:
    donor = Donor(config)
    with donor.snapshots:
        donor.step()
        early = donor.ask("early")
        with donor.snapshots.standing():
            assert donor.check(early) == Cut(FIRST, 1)
            assert donor.check(donor.ask("late")) == Cut(FIRST, 1)
        after = donor.ask("after")
        donor.step()
        assert not after.done()


def test_all_who_wait_share_one_capture(donor: Donor) -> None:
    futures = [donor.ask(name) for name in ("one", "two", "three")]
    donor.step(says_boundary=True)
    leases = [future.result(20) for future in futures]
    assert len({lease.manifest_bytes for lease in leases}) == 1
    assert len(donor.events.of(SnapshotCaptured)) == 1
    used = donor.snapshots.vault.used_bytes
    del futures
    for lease in leases[:2]:
        lease.release("done")
    assert donor.snapshots.vault.used_bytes == used
    leases[2].release("done")
    assert until(lambda: donor.snapshots.vault.used_bytes == 0)
    with pytest.raises(DonorRefused):
        leases[2].read(0, 0, 1)


def test_not_before_a_version(donor: Donor) -> None:
    future = donor.ask(not_before=FIRST.next())
    donor.step(says_boundary=True)
    donor.step(says_boundary=True)
    assert not future.done()
    donor.outer_step()
    donor.snapshots.inner_boundary()
    assert donor.check(future) == Cut(FIRST.next(), 0)


def test_the_guard_ends_a_capture_that_no_further_step_would_end(donor: Donor) -> None:
    future = donor.ask()
    donor.step()
    donor.outer_step()
    assert donor.check(future) == Cut(FIRST, 1)


@pytest.mark.parametrize("config", [SMALL, IN_BACKGROUND])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_instant_before_the_first_step_is_captured_whatever_is_ready(config: SnapshotConfig, ahead: bool) -> None:
    donor = Donor(config)
    with donor.snapshots:
        version = FIRST.next()
        # Memory that is being made ready must not be waited for: this thread is busy until the capture has begun.
        busy = threading.Event()
        donor.snapshots._copier.submit(lambda: busy.wait(20))
        early = donor.snapshots.lease_at_boundary("checkpoint", version) if ahead else None
        donor.step(says_boundary=True)
        donor.outer_step()
        future = early or donor.snapshots.lease_at_boundary("checkpoint", version)
        joiner = donor.ask("joiner", version)
        donor.snapshots.inner_boundary()
        busy.set()
        donor.step(says_boundary=True)
        donor.step(says_boundary=True)
        assert donor.check(future) == Cut(version, 0)
        assert donor.check(joiner) == Cut(version, 0), "they share it"


def test_memory_is_touched_at_leisure_unless_training_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = threading.Semaphore(0)
    rest = capture.PrivateCapture._rest

    def noted(self: capture.PrivateCapture, preparation: Preparation, seconds: float) -> bool:
        rests.release()
        return rest(self, preparation, 1000.0)  # a thousand seconds' worth of touching, to be rested from

    monkeypatch.setattr(capture.PrivateCapture, "_rest", noted)
    donor = Donor(IN_BACKGROUND)
    with donor.snapshots:
        future = donor.ask()
        donor.snapshots.inner_boundary()
        assert rests.acquire(timeout=20)
        donor.step(says_boundary=True)
        assert not future.done()
        with donor.snapshots.standing():
            donor.check(future)
    donor = Donor(IN_BACKGROUND)
    with donor.snapshots:
        waiting = donor.ask()
        donor.snapshots.inner_boundary()
        assert rests.acquire(timeout=20)
    with pytest.raises(DonorRefused, match="closing"):  # and closing does not wait for the rest
        waiting.result(20)


def test_memory_for_a_boundary_is_touched_before_it() -> None:
    donor = Donor(IN_BACKGROUND)
    with donor.snapshots:
        future = donor.snapshots.lease_at_boundary("checkpoint", FIRST.next())
        assert until(lambda: donor.snapshots.vault.used_bytes > 0)
        for _ in range(2):
            donor.step(says_boundary=True)
        assert not future.done()
        donor.outer_step()
        donor.snapshots.inner_boundary()
        assert donor.check(future) == Cut(FIRST.next(), 0)


@pytest.mark.parametrize("says_boundary", [True, False])
def test_an_instant_that_is_past_is_refused(donor: Donor, says_boundary: bool) -> None:
    donor.step(says_boundary=True)
    future = donor.snapshots.lease_at_boundary("checkpoint", FIRST)
    joiner = donor.ask()
    donor.step(says_boundary=says_boundary)
    with pytest.raises(DonorBusy, match=r"L1.k0\+0 is past"):
        future.result(20)
    donor.step(says_boundary=says_boundary)
    donor.check(joiner)


def test_nothing_is_captured_between_the_guard_and_the_publication(donor: Donor) -> None:
    donor.snapshots.before_outer_update()
    future = donor.ask()
    donor.snapshots.inner_boundary()
    donor.step()
    donor.step()
    assert not future.done()


def test_a_lost_holder_gets_its_snapshot_again_but_not_an_older_one_than_it_asks_for(donor: Donor) -> None:
    future = donor.ask()
    donor.snapshots.inner_boundary()
    lease = future.result(20)
    before = whole(lease)
    lease.release("stream lost", grace=True)
    donor.outer_step()
    again = donor.ask().result(0)
    assert again.manifest == lease.manifest
    assert all(torch.equal(a, b) for a, b in zip(whole(again), before, strict=True))
    newer = donor.ask(not_before=donor.version)
    assert not newer.done()


# Steps that are not what they seem


def test_scalars_after_a_skipped_step_are_not_mixed_with_buffers_before_it(donor: Donor) -> None:
    future = donor.ask()
    donor.step()
    before = donor.trainee.model.norm.running_mean
    assert before is not None
    old = before.clone()
    donor.trainee.model(torch.randn(8, 16))  # a step whose optimizers were all skipped: forward changed the buffers
    for scheduler in donor.trainee.schedulers.values():
        scheduler.step()
    donor.trainee.state.local_progress.inner_step += 1
    donor.note()
    assert not torch.equal(before, old)
    donor.step()
    donor.step()
    assert donor.check(future) == Cut(FIRST, 3)


def test_state_created_after_it_was_measured_is_captured_whole() -> None:
    trainee = Trainee(width=16)
    with trainee.snapshots() as snapshots:
        snapshots.publish(FIRST)
        future = snapshots.lease_private("joiner", FIRST)
        snapshots.inner_boundary()
        assert future.result(20).manifest.part(trainee.state.private_copied_names[0]).num_bytes < 16
        trainee.inner_step()
        later = snapshots.lease_private("later", FIRST)
        expected = trainee.reference(PartClass.PRIVATE_COPIED)
        snapshots.inner_boundary()
        assert found_in(later.result(20)) == expected


def test_a_measured_state_that_grew_is_measured_again() -> None:
    trainee = Trainee(width=16)
    with trainee.snapshots(IN_BACKGROUND) as snapshots:
        snapshots.publish(FIRST)
        future = snapshots.lease_private("joiner", FIRST)
        snapshots.inner_boundary()  # measures the optimizers without any state
        references: dict[int, Reference] = {}
        while not future.done():
            trainee.inner_step()
            references[trainee.state.local_progress.inner_step] = trainee.reference(PartClass.PRIVATE_COPIED)
        lease = future.result(0)
        assert found_in(lease) == references[lease.manifest.cut.inner_step]
        assert len(lease.manifest.parts[0].tensors) > 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_exception_in_a_users_hook_leaves_a_whole_snapshot(donor: Donor, moment: str) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError

    optimizer = donor.trainee.inner["second"]
    future = donor.ask()
    donor.step()
    register = optimizer.register_step_pre_hook if moment == "before" else optimizer.register_step_post_hook
    handle = register(fails)
    with pytest.raises(ZeroDivisionError):
        donor.trainee.inner_step()
    handle.remove()
    assert donor.check(future) == Cut(FIRST, 1)


def test_a_parameter_group_added_in_mid_run_is_captured(donor: Donor) -> None:
    extra = torch.nn.Parameter(torch.randn(7))
    donor.trainee.model.register_parameter("extra", extra)
    donor.trainee.inner["first"].add_param_group({"params": [extra], "lr": torch.tensor(0.5)})
    donor.trainee.schedulers["first"].base_lrs.append(0.5)
    donor.trainee.schedulers["first"].lr_lambdas.append(lambda step: 1.0)
    donor.trainee.averages["extra"] = torch.zeros(7)
    donor.step()
    future = donor.ask()
    donor.snapshots.inner_boundary()
    donor.check(future)
    assert b"extra" in future.result(0).manifest.parts[0].tree.SerializeToString()


def test_a_parameter_resized_in_mid_run_is_captured_in_its_new_size() -> None:
    donor = Donor(IN_BACKGROUND)
    with donor.snapshots:
        trainee, optimizer = donor.trainee, donor.trainee.inner["second"]
        layout = trainee.state.layout_digest()
        future = donor.ask()
        donor.snapshots.inner_boundary()  # measured in the old size
        for name, shape in (("head.weight", (8, 32)), ("head.bias", (8,))):
            parameter = trainee.model.get_parameter(name)
            parameter.data = torch.randn(shape)
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][moment] = torch.rand(shape)
            trainee.averages[name] = torch.randn(shape)
        donor.note()
        while not future.done():
            donor.step(says_boundary=True)
        donor.check(future)
        part = future.result(0).manifest.part(PartName("inner_optimizer.second"))
        assert (8, 32) in {spec.shape for spec in part.tensors}
        assert trainee.state.layout_digest() != layout, "a joiner of the old size is refused before anything moves"


def test_a_model_cast_in_mid_run_is_captured_as_it_is() -> None:
    donor = Donor()
    with donor.snapshots:
        first = donor.ask("first")
        donor.snapshots.inner_boundary()
        donor.check(first)
        donor.trainee.model.to(torch.float64)
        second = donor.ask("second")
        donor.note()
        donor.snapshots.inner_boundary()
        donor.check(second)
        buffers = second.result(0).manifest.part(next(n for n in donor.trainee.state.part_names if n == "buffers"))
        assert "float64" in {spec.dtype for spec in buffers.tensors}


def test_a_learning_rate_tensor_that_is_replaced_at_each_step_is_read_late(donor: Donor) -> None:
    future = donor.ask()
    for number in range(2):
        donor.trainee.inner_step()
        donor.trainee.inner["first"].param_groups[0]["lr"] = torch.tensor(0.25 + number)
        donor.note()
    donor.step()
    assert donor.check(future).inner_step in (1, 2)


def test_an_optimizer_that_no_longer_steps_is_refused_by_name(donor: Donor) -> None:
    replaced = donor.trainee.inner["second"]
    donor.trainee.inner["second"] = torch.optim.AdamW(replaced.param_groups[0]["params"], lr=1e-3)
    for _ in range(SILENT_STEPS):
        donor.trainee.inner_step()
    waiting = donor.ask("waiting")
    donor.outer_step()
    for future in (waiting, donor.ask("late")):
        with pytest.raises(DonorRefused, match=r"inner_optimizer\.second did not step in the last 32 inner steps"):
            future.result(20)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_a_compiled_model_is_captured() -> None:
    donor = Donor()
    with donor.snapshots:
        trainee = donor.trainee
        model = torch.compile(trainee.model, backend="eager")
        optimizers: list[Optimizer] = list(trainee.inner.values())

        def step() -> None:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            model(torch.randn(8, 16)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in trainee.schedulers.values():
                scheduler.step()
            trainee.state.local_progress.inner_step += 1
            donor.note()

        step()
        future = donor.ask()
        for _ in range(4):
            step()
        donor.check(future)


# Waiting


def test_the_next_step_waits_for_the_copy_and_says_so(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(part: LivePart, offset: int, out: torch.Tensor) -> None:
        if threading.current_thread().name == "snapshot-copy":
            begun.set()
            assert go_on.wait(20)
        frozen.copy_range(part, offset, out)

    wait = CopyJobs.wait

    def waiting(self: CopyJobs) -> bool:
        if threading.current_thread() is threading.main_thread():
            threading.Timer(0.02, go_on.set).start()
        return wait(self)

    monkeypatch.setattr(capture, "copy_range", slow)
    monkeypatch.setattr(CopyJobs, "wait", waiting)
    future = donor.ask()
    donor.step(says_boundary=True)
    assert begun.wait(20)
    donor.step()
    assert go_on.is_set(), "the step did not wait"
    assert donor.check(future) == Cut(FIRST, 1)
    (event,) = donor.events.of(TrainingThreadWaited)
    assert event.for_whom == "joiner"
    assert event.waited_seconds > 0
    assert donor.snapshots.stall.of(StallCause.CAPTURE_WAIT).seconds >= event.waited_seconds


def test_idle_steps_do_nothing(donor: Donor) -> None:
    for _ in range(3):
        donor.step(says_boundary=True)
    assert donor.snapshots.stall.serving_seconds == 0
    assert donor.snapshots.vault.peak_bytes == 0


# Refusals


def test_what_does_not_fit_the_budget_is_refused_with_numbers() -> None:
    donor = Donor(SnapshotConfig(budget_bytes=100))
    with donor.snapshots:
        future = donor.ask()
        donor.step()
        with pytest.raises(DonorBusy, match=r"bytes of private state do not fit .* budget of 100 bytes"):
            future.result(20)
        donor.step()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (lambda: {"odd": object()}, UnsupportedLeaf),
        (lambda: 1 / 0, DonorBusy),
    ],
)
def test_a_part_that_cannot_be_read_fails_the_request_and_not_the_step(
    donor: Donor, value: Callable[[], object], error: type[RecoveryError]
) -> None:
    fails = False
    donor.trainee.state.add("odd", lambda: value() if fails else {}, PartClass.PRIVATE_COPIED)
    future = donor.ask("early")
    fails = True
    donor.trainee.inner_step()
    donor.trainee.inner_step()
    with pytest.raises(error):
        future.result(20)
    fails = False
    again = donor.ask("later")
    donor.note()
    donor.snapshots.inner_boundary()
    donor.check(again)


def test_a_cancelled_request_is_forgotten_and_its_memory_given_back() -> None:
    donor = Donor(IN_BACKGROUND)
    with donor.snapshots:
        reserves = threading.Event()
        donor.snapshots._copier.submit(lambda: reserves.wait(20))
        future = donor.ask()
        donor.snapshots.inner_boundary()  # finds no memory yet
        reserves.set()
        assert until(lambda: donor.snapshots.vault.used_bytes > 0)
        assert future.cancel()
        assert until(lambda: donor.snapshots.vault.used_bytes == 0), "the keeper gives it back"
        donor.step()
        donor.step()
        assert donor.events.of(SnapshotCaptured) == []


def test_a_capture_that_ends_after_the_last_request_was_cancelled_leaves_nothing() -> None:
    donor = Donor()
    with donor.snapshots:
        hands_over = threading.Event()
        donor.snapshots._digester.submit(lambda: hands_over.wait(20))
        future = donor.ask()
        donor.snapshots.inner_boundary()  # the capture runs to its end; only handing it over is held up
        assert until(lambda: donor.snapshots._captures._whole._capture is None)
        assert future.cancel()
        hands_over.set()
        assert until(lambda: donor.snapshots.vault.used_bytes == 0)
        assert donor.events.of(SnapshotCaptured) == []
        donor.check(_served(donor))


def test_a_running_capture_that_nobody_waits_for_ends_without_another_step() -> None:
    donor = Donor()
    with donor.snapshots:
        future = donor.ask()
        donor.step()  # begun at the step's end; its scalars would be read at the next boundary
        assert donor.snapshots._captures._whole._capture is not None
        assert future.cancel()
        assert until(lambda: donor.snapshots.vault.used_bytes == 0)
        donor.check(_served(donor))


def test_a_request_cancelled_while_its_capture_is_prepared_leaves_nothing() -> None:
    donor = Donor(IN_BACKGROUND)
    future: Future[Lease] | None = None

    def cancels() -> dict[str, object]:
        if future is not None and future.cancel():
            donor.snapshots.expire_leases()  # the keeper comes by and finds nothing wanted any more: it falls asleep
        return {}

    donor.trainee.state.add("cancels", cancels, PartClass.PRIVATE_COPIED)
    donor.note()
    with donor.snapshots:
        donor.snapshots._keeper.close()
        future = donor.ask()
        donor.snapshots.inner_boundary()
        assert future.cancelled()
        done = threading.Event()
        donor.snapshots._copier.submit(done.set)  # behind whatever was reserved
        assert done.wait(20)
        assert until(lambda: donor.snapshots.vault.used_bytes == 0)


def _served(donor: Donor) -> Future[Lease]:
    """Whoever asks later is served as if nothing had been."""
    future = donor.ask("later")
    donor.snapshots.inner_boundary()
    return future


def test_closing_fails_those_who_wait() -> None:
    donor = Donor()
    future = donor.ask()
    donor.snapshots.close()
    with pytest.raises(DonorRefused, match="closing"):
        future.result(20)
