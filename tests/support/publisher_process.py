"""A worker with an all-reduce of its own: ``python -m tests.support.publisher_process '<json>'``.

Plan: ``agent``, ``hidden``, ``seed``, ``outer_steps``, ``step_seconds`` as in ``tests.support.worker_process``;
``rank``, ``size`` and ``meeting`` (a file) of the group that averages; ``damage``: before publishing this outer step
the worker's outer state is changed in one bit.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recovery.errors import RecoveryError
from recovery.worker import Agent, AgentConfig
from tests.support.toy import Toy
from tests.support.worker_process import Halt, Voice, flip, parts_digest


def main(plan: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    voice = Voice()
    toy = Toy(int(plan["hidden"]), int(plan["seed"]))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{plan['meeting']}",
        rank=int(plan["rank"]),
        world_size=int(plan["size"]),
        timeout=timedelta(seconds=60),
    )
    agent = Agent(toy.state, AgentConfig(**plan["agent"]), events=Halt(voice, None))
    try:
        with agent:
            voice.say("joined", version=agent.version, parts=parts_digest(agent, toy))
            while agent.version.outer_step < int(plan["outer_steps"]):
                for _ in agent.phase():
                    toy.inner_step()
                    time.sleep(float(plan["step_seconds"]))
                gradients = toy.pseudo_gradients()
                with agent.standing():
                    for gradient in gradients:
                        dist.all_reduce(gradient)
                        gradient.div_(int(plan["size"]))
                agent.before_outer_update(gradients)
                toy.apply(gradients)
                following = agent.version.outer_step + 1
                if following == plan.get("damage"):
                    flip(toy, ["0.weight"])
                agent.publish(following, run_tokens=8 * int(plan["size"]))
                voice.say("boundary", version=agent.version, parts=parts_digest(agent, toy))
    except RecoveryError as error:
        voice.say("error", error=error.kind, message=str(error))
        return 1
    voice.say("ended", version=agent.version)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
