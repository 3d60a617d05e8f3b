"""Starts the processes of ``transfer_process`` for a test and ends them by pid."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fleet import ROOT, Worker

Said = dict[str, Any]


class Ends:
    """Donors and joiners."""

    def __init__(self) -> None:
        self._processes: list[Worker] = []

    def donor(
        self, name: str, num_mib: int, *, seed: int = 1, changed_every: int = 0, tensors: int = 8, **plan: Any
    ) -> Worker:
        """Start a donor; its state has ``num_mib``, momentum included."""
        state = {"num_mib": num_mib, "seed": seed, "changed_every": changed_every, "tensors": tensors}
        return self._start({"role": "donor", "name": name, "state": state, **plan})

    def joiner(
        self, name: str, num_mib: int, *, seed: int = 0, momentum: bool = False, tensors: int = 8, **plan: Any
    ) -> Worker:
        """Start a joiner; without a seed its parameters are zeros, without momentum its optimizer has no state yet."""
        state = {"num_mib": num_mib, "seed": seed, "momentum": momentum, "tensors": tensors}
        return self._start({"role": "joiner", "name": name, "state": state, **plan})

    def _start(self, plan: dict[str, Any]) -> Worker:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.support.transfer_process", json.dumps(plan)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        worker = Worker(plan["name"], process)
        self._processes.append(worker)
        return worker

    def close(self) -> None:
        for each in self._processes:
            if each.process.poll() is None:
                each.process.kill()
            each.close()


@contextmanager
def ends() -> Iterator[Ends]:
    """Yield a place to start processes in; all of them have ended afterwards."""
    made = Ends()
    try:
        yield made
    finally:
        made.close()


def ready(donor: Worker) -> Said:
    """Return what a donor says when it lends: what an attempt names it by."""
    return donor.wait_said("ready")


def attempt(joiner: Worker, *donors: Worker, **options: Any) -> int:
    """Have the joiner try these donors; return from where on its answer is heard."""
    since = len(joiner.heard)
    joiner.command(do="attempt", donors=[ready(donor) for donor in donors], **options)
    return since


def outcome(joiner: Worker, since: int = 0) -> Said:
    """Return how the attempt ended: ``done`` or ``failed``."""
    return joiner.wait(lambda m: m["say"] in ("done", "failed"), "the end of an attempt", since=since)


def restored(joiner: Worker, *donors: Worker, **options: Any) -> Said:
    """Run one attempt to its end and return what it did; the first donor's state, bit for bit."""
    done = outcome(joiner, attempt(joiner, *donors, **options))
    assert done["say"] == "done", done
    assert done["fingerprint"] == ready(donors[0])["fingerprint"]
    return done


def report(process: Worker, do: str = "report") -> Said:
    """Return resident bytes, their peak, descriptors, threads; ``do="reset_peak"`` lets the peak begin anew."""
    since = len(process.heard)
    process.command(do=do)
    return process.wait_said("reset" if do == "reset_peak" else "report", since=since)
