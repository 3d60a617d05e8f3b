"""One worker process of the demo: ``python -m recovery.demo.training SETTINGS_AS_JSON``.

It trains as a user's own loop would, with the public worker API, and writes what it sees as JSON lines to standard
output. Standard input is a private channel to the demo, through which it is told to invert bits of its own memory;
the end of that channel ends the process, so that none outlives the demo.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recovery.demo.channel import CommandReader, ReportWriter
from recovery.demo.corpus import CorpusReader, read_shard, shard_of, standard_library_files
from recovery.demo.replica import Replica, TrainingSettings, flip_random_bits
from recovery.errors import RecoveryError
from recovery.events import BoundaryStage, Event, StateRestored, TransferEnded, TransferStarted, to_json
from recovery.state import WorkerState
from recovery.types import PartClass
from recovery.worker import Agent, AgentConfig

NUM_LEARNING_RATES = 20
"""How many coming learning rates are reported for comparison."""
HOLD_SECONDS = 30.0
"""The longest that the training thread stands still on the demo's order: after a flip, for the demo to look at the
damage, and in a boundary, for the demo to kill it there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What the demo tells a worker process at its start."""

    coordinator: str
    run_id: str
    worker_id: str
    worker_index: int
    num_workers: int
    inner_steps: int
    checkpoint_url: str
    checkpoint_every: int
    seed: int
    """Of the initial weights; another one for each process, so that only a transfer can make two workers equal."""


class Observer:
    """The event sink: reports every event and remembers what the training thread has to report about a restoration."""

    def __init__(self, reports: ReportWriter, commands: CommandReader) -> None:
        self._reports = reports
        self._commands = commands
        self._lock = threading.Lock()
        self._donors: tuple[str, ...] = ()
        self._cut = ""
        self._restored: dict[str, object] | None = None

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            if isinstance(event, TransferStarted):
                self._donors = event.donors
            elif isinstance(event, TransferEnded):
                self._cut = "" if event.failure else str(event.cut)
            elif isinstance(event, StateRestored):
                self._restored = {"source": event.source, "donors": list(self._donors), "cut": self._cut}
        self._reports.write({"type": "event", "event": type(event).__name__, "fields": json.loads(to_json(event))})
        if isinstance(event, BoundaryStage) and self._commands.take_hold(event.stage):
            # A fault on purpose: the training thread stands still inside the boundary, where the demo kills it.
            self._reports.write({"type": "held", "stage": event.stage, "version": str(event.version)})
            self._commands.wait_go_on(HOLD_SECONDS)

    def take_restoration(self) -> dict[str, object] | None:
        """Return what is known about the restoration since the last call; None if there was none."""
        with self._lock:
            restored, self._restored = self._restored, None
            return restored


class Trainer:
    """The training thread's loop, and what it reports at each of its moments."""

    def __init__(self, settings: WorkerSettings, reports: ReportWriter, commands: CommandReader) -> None:
        self._settings = settings
        self._reports = reports
        self._commands = commands
        self._observer = Observer(reports, commands)
        self._replica = Replica(TrainingSettings(), seed=settings.seed)
        files = shard_of(standard_library_files(), index=settings.worker_index, count=settings.num_workers)
        self._reader = CorpusReader(
            read_shard(files),
            worker_index=settings.worker_index,
            batch_size=self._replica.settings.batch_size,
            context=self._replica.settings.size.context,
        )
        replica = self._replica
        state = WorkerState(
            live=replica.model,
            outer_params=replica.outer_params,
            outer_optimizer=replica.outer,
            inner_optimizer=replica.inner,
            scheduler=replica.scheduler,
        )
        state.add("data", self._reader, PartClass.PRIVATE_KEPT)
        self._agent = Agent(
            state,
            AgentConfig(
                coordinator=settings.coordinator,
                run_id=settings.run_id,
                worker_id=settings.worker_id,
                inner_steps_per_phase=settings.inner_steps,
                checkpoint_url=settings.checkpoint_url,
                checkpoint_every=settings.checkpoint_every,
            ),
            events=self._observer,
        )

    def run(self) -> None:
        """Train until told to finish.

        Raises:
            RecoveryError: the worker cannot take part; the message says why and what to do.
        """
        with self._agent as agent:
            self._report_restoration()
            while not self._finished():
                losses = []
                for index in agent.phase():
                    self._report_restoration()
                    self._obey()
                    losses.append(self._inner_step(index))
                self._report_restoration()
                self._outer_step(losses)
        self._reports.write({"type": "done", "version": str(agent.version)})

    def _finished(self) -> bool:
        last = self._commands.finish_at
        return last is not None and self._agent.version.outer_step >= last

    def _inner_step(self, index: int) -> float:
        replica = self._replica
        before = {
            "inner_step": index,
            "version": str(self._agent.version),
            "epoch": replica.schedule_epoch,
            "inner_digest": replica.inner_digest(),
            "learning_rates": replica.next_learning_rates(NUM_LEARNING_RATES),
        }
        windows = self._reader.next_batch()
        loss = replica.inner_step(windows)
        self._agent.count_tokens(windows.shape[0] * (windows.shape[1] - 1))
        self._reports.write({"type": "inner", "loss": loss, "position": self._reader.cursor, **before})
        return loss

    def _outer_step(self, losses: Sequence[float]) -> None:
        replica = self._replica
        began = time.monotonic()
        applied: list[Tensor] | None = None
        with self._agent.boundary() as boundary:
            averaged = list(boundary.average(replica.pseudo_gradients))
            waited = time.monotonic() - began
            # A copy: what average() returned belongs to the boundary and may be used again after it.
            kept = [tensor.clone() for tensor in averaged]
            replica.outer_step(averaged)
            applied = kept
        if applied is None:
            return  # the state was replaced instead: the restoration is reported by the next phase
        self._reports.write(
            {
                "type": "applied",
                "version": str(self._agent.version),
                "outer_digest": replica.outer_digest(),
                "next_step_digest": replica.next_step_digest(applied),
                "momentum_norm": replica.momentum_norm(),
                "outer_learning_rate": replica.outer.param_groups[0]["lr"],
                "inner_steps": len(losses),
                "loss": sum(losses) / len(losses) if losses else None,
                "boundary_seconds": waited,
            }
        )

    def _report_restoration(self) -> None:
        restored = self._observer.take_restoration()
        if restored is not None:
            self._report_state(restored)

    def _report_state(self, origin: dict[str, object]) -> None:
        replica = self._replica
        self._reports.write(
            {
                "type": "state",
                **origin,
                "version": str(self._agent.version),
                "epoch": replica.schedule_epoch,
                "outer_digest": replica.outer_digest(),
                "inner_digest": replica.inner_digest(),
                "learning_rates": replica.next_learning_rates(NUM_LEARNING_RATES),
                "position": self._reader.cursor,
            }
        )

    def _obey(self) -> None:
        """Invert bits if the demo said so, then stand still until it has asked the service about them.

        Standing still keeps the damaged copy out of the next boundary, where its pseudo-gradients would reach the
        others before anybody looked.
        """
        order = self._commands.take_flip()
        if order is None:
            return
        flips = flip_random_bits(self._replica, seed=order.seed, num_tensors=order.num_tensors)
        self._reports.write(
            {
                "type": "flipped",
                "version": str(self._agent.version),
                "names": [flip.name for flip in flips],
                "flips": [dataclasses.asdict(flip) for flip in flips],
            }
        )
        self._commands.wait_go_on(HOLD_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Run one worker; return the process's exit code."""
    settings = WorkerSettings(**json.loads(arguments[0]))
    # One thread a worker: several of them share the machine's cores.
    torch.set_num_threads(1)
    reports = ReportWriter.take_standard_output()
    commands = CommandReader()
    commands.start()
    reports.write({"type": "hello", "pid": os.getpid()})
    try:
        Trainer(settings, reports, commands).run()
    except RecoveryError as error:
        reports.write({"type": "error", "kind": error.kind, "message": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
