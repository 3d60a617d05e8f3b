"""A worker whose data loaders fork worker processes: one before the agent starts, one more in every phase.

Plan as in ``worker_process``. Says ``joined``, ``round`` at each boundary (how many threads, open descriptors and
children there are, whether somebody was being served) and ``ended``, when anything was written to it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from recovery.events import Event, LeaseEnded, LeaseTaken
from recovery.worker import Agent, AgentConfig
from tests.support.toy import Toy
from tests.support.worker_process import Voice

NUM_ITEMS = 8


class Numbers(Dataset[torch.Tensor]):
    """What the forked workers make."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Serving:
    """Knows who holds leases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[str] = []
        self.taken = 0

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            if isinstance(event, LeaseTaken):
                self._holders.append(event.holder)
                self.taken += 1
            elif isinstance(event, LeaseEnded):
                self._holders.remove(event.holder)

    @property
    def now(self) -> bool:
        return bool(self._holders)


def loader(*, stays: bool) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", persistent_workers=stays)


def drawn(batches: Iterator[torch.Tensor]) -> float:
    return sum(float(batch.sum()) for batch in batches)


def main(plan: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    voice = Voice()
    finish = threading.Event()
    threading.Thread(target=_listen, args=(finish,), daemon=True).start()
    early = loader(stays=True)
    expected = 4.0 * sum(range(NUM_ITEMS))
    assert drawn(iter(early)) == expected  # its workers are there before the agent's threads
    toy = Toy(int(plan["hidden"]), int(plan["seed"]))
    serving = Serving()
    with Agent(toy.state, AgentConfig(**plan["agent"]), events=serving) as agent:
        voice.say("joined", version=agent.version)
        number = 0
        while not finish.is_set():
            served = serving.now
            late = iter(loader(stays=False))  # forks beside the agent's threads, gRPC's among them
            for _ in agent.phase():
                toy.inner_step()
                agent.count_tokens(8)
            served |= serving.now
            assert drawn(late) == expected
            assert drawn(iter(early)) == expected
            del late
            with agent.boundary() as boundary:
                toy.apply(boundary.average(toy.pseudo_gradients))
            number += 1
            voice.say(
                "round",
                number=number,
                version=agent.version,
                served=served,
                leases=serving.taken,
                threads=threading.active_count(),
                descriptors=len(list(Path("/proc/self/fd").iterdir())),
                children=len(multiprocessing.active_children()),
            )
    voice.say("ended")
    return 0


def _listen(finish: threading.Event) -> None:
    while os.read(0, 65536):
        finish.set()
    os._exit(9)  # the test is gone


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
