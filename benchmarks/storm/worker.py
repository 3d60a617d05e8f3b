"""A worker of a storm: ``python -m benchmarks.storm.worker '<json>'``; says what happens as JSON lines.

The plan: ``agent`` (fields of ``AgentConfig``), ``seed``, ``shard``, ``phase_seconds`` (least time of an inner phase,
spread over its steps). A line ``finish`` on standard input ends it after the next boundary; the end of standard input
at once: whoever started it is gone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.storm.training import Trainee
from recovery.control.security import SecurityConfig
from recovery.errors import RecoveryError
from recovery.events import (
    BoundaryStage,
    CatchUpRebased,
    Event,
    StateRestored,
    TransferEnded,
    TransferProgress,
    to_json,
)
from recovery.worker import Agent, AgentConfig

logger = logging.getLogger(__name__)

TOLD = (StateRestored, TransferEnded, CatchUpRebased)


class Voice:
    """Writes JSON lines, each with the machine's monotonic time, to what was standard output at the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def say(self, kind: str, **fields: object) -> None:
        line = json.dumps({"say": kind, "at": time.monotonic(), **fields}, default=str)
        with self._lock:
            os.write(self._descriptor, (line + "\n").encode())

    def __call__(self, event: Event, /) -> None:
        """Pass on the events that the storm looks at; the others go to the log."""
        if isinstance(event, TOLD):
            fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
            self.say("event", event=type(event).__name__, **fields)
        elif isinstance(event, BoundaryStage) and event.stage == "rostered":
            self.say("rostered", version=event.version, epoch=event.epoch)
        if not isinstance(event, BoundaryStage | TransferProgress):
            logger.info("%s %s", type(event).__name__, to_json(event))


def main(plan: dict[str, Any]) -> int:
    """Train until told to finish; return 0, or 1 if the run ended this worker's part with an error."""
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    voice = Voice()
    finish = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "finish":
                finish.set()
        os._exit(9)

    threading.Thread(target=listen, name="storm-orders", daemon=True).start()
    trainee = Trainee(seed=int(plan["seed"]), shard=int(plan["shard"]))
    config = AgentConfig(**plan["agent"], security=SecurityConfig(insecure=bool(plan.get("insecure"))))
    step_seconds = float(plan["phase_seconds"]) / config.inner_steps_per_phase
    agent = Agent(trainee.state, config, events=voice)
    voice.say("started", pid=os.getpid())
    try:
        with agent:
            voice.say("joined", version=agent.version)
            while not finish.is_set():
                train(agent, trainee, voice, step_seconds)
    except RecoveryError as error:
        voice.say("error", error=error.kind, message=str(error))
        return 1
    voice.say("ended", version=agent.version, cpu_seconds=time.process_time())
    return 0


def train(agent: Agent, trainee: Trainee, voice: Voice, step_seconds: float) -> None:
    """Train one phase, and say what the boundary brought if it committed."""
    loss = 0.0
    for _ in agent.phase():
        began = time.monotonic()
        loss = trainee.inner_step()
        agent.count_tokens(1)
        time.sleep(max(0.0, step_seconds - (time.monotonic() - began)))
    committed = False
    with agent.boundary() as boundary:
        trainee.apply(boundary.average(trainee.pseudo_gradients))
        committed = True
    if committed:
        voice.say("commit", version=agent.version, loss=loss, held_out=trainee.held_out_loss())


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
