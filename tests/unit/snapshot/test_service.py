"""Service threads, shared copies, the stall account."""

from __future__ import annotations

import functools
import threading

import pytest

from recovery.errors import MisuseError
from recovery.snapshot.copy_jobs import CopyJobs
from recovery.snapshot.service import ServiceThread
from recovery.snapshot.stall import StallAccount, StallCause


def test_jobs_run_in_order_on_a_named_thread_and_close_waits_for_them() -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    service = ServiceThread("snapshot-test")
    for number in range(3):
        service.submit(functools.partial(note, number))
    service.start()
    service.close()
    service.close()
    assert ran == [(0, "snapshot-test"), (1, "snapshot-test"), (2, "snapshot-test")]
    with pytest.raises(MisuseError, match="closed"):
        service.submit(lambda: None)


def test_an_error_is_raised_at_the_owners_next_call_and_ends_nothing_else() -> None:
    service = ServiceThread("snapshot-test")
    service.start()
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ZeroDivisionError

    service.submit(fail)
    after = threading.Event()
    failed.wait(10)
    for _ in range(1000):
        try:
            service.submit(after.set)
        except ZeroDivisionError:
            break
    else:
        pytest.fail("the error was swallowed")
    service.submit(after.set)
    assert after.wait(10)
    service.close()


def test_copies_run_once_each_whoever_runs_them() -> None:
    ran: list[int] = []
    lock = threading.Lock()

    def job(number: int) -> None:
        with lock:
            ran.append(number)

    jobs = CopyJobs([functools.partial(job, n) for n in range(200)])
    helper = threading.Thread(target=jobs.work)
    helper.start()
    jobs.work()
    jobs.wait()
    assert jobs.done
    helper.join()
    assert sorted(ran) == list(range(200))


def test_waiting_is_for_the_copy_that_runs_and_is_told() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(10)

    jobs = CopyJobs([slow])
    helper = threading.Thread(target=jobs.work)
    helper.start()
    assert begun.wait(10)
    jobs.work()  # nothing left to begin: returns
    done_while_it_runs = jobs.done
    threading.Timer(0.01, go_on.set).start()
    assert jobs.wait() is True
    assert (done_while_it_runs, jobs.done) == (False, True)
    helper.join()
    assert CopyJobs([]).wait() is False


def test_a_failed_copy_drops_the_rest_and_is_kept_for_its_reader() -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    jobs = CopyJobs([fail, lambda: ran.append(1)])
    jobs.work()
    assert jobs.done
    assert isinstance(jobs.error, ZeroDivisionError)
    assert ran == []


def test_cancelled_copies_do_not_begin() -> None:
    ran: list[int] = []
    jobs = CopyJobs([lambda: ran.append(1)])
    jobs.cancel()
    jobs.work()
    assert ran == []
    assert jobs.done


def test_other_threads_do_not_count_once_the_training_thread_is_bound() -> None:
    account = StallAccount()
    account.bind()

    def elsewhere() -> None:
        with account.measure(StallCause.CAPTURE_COPY) as span:
            span.num_bytes = 5
        assert span.seconds == 0

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert account.total_seconds == 0
    with account.measure(StallCause.CAPTURE_COPY):
        pass
    assert account.of(StallCause.CAPTURE_COPY).times == 1


def test_the_account_attributes_seconds_and_bytes_also_of_what_raised() -> None:
    account = StallAccount()
    with account.measure(StallCause.GUARD_COPY) as span:
        span.num_bytes = 100
    with pytest.raises(ZeroDivisionError), account.measure(StallCause.GUARD_COPY) as span:
        span.num_bytes = 7
        raise ZeroDivisionError
    with account.measure(StallCause.PUBLISH):
        pass
    stall = account.of(StallCause.GUARD_COPY)
    assert (stall.times, stall.num_bytes) == (2, 107)
    assert 0 < stall.worst_seconds <= stall.seconds
    assert account.total_seconds == pytest.approx(account.serving_seconds + account.of(StallCause.PUBLISH).seconds)
    assert account.by_cause()["guard-copy"] == stall
    assert account.by_cause()["capture-wait"].times == 0
