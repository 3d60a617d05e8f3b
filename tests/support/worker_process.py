"""A real worker process for tests: ``python -m tests.support.worker_process '<json>'``.

Says what happens as JSON lines on standard output, obeys JSON lines on standard input. The plan (the argument):

- ``agent``: fields of ``AgentConfig``; ``hidden``, ``seed``: the toy; ``outer_steps``: when to end;
- ``step_seconds``: least time of an inner step; ``threads``: torch's;
- ``security``: fields of ``SecurityConfig``; none: plaintext;
- ``report_steps``: say every part's digest and the next learning rates before each inner step;
- ``halt``: ``{"event": <class name>, "when": {<field>: <value>}, "after": n}``: at the n-th such event (from 0) the
  thread it happens on says ``halted`` and stands still until ``go_on`` is commanded. A victim is hit there, so that the
  test knows where it was.

- ``gate``: before this inner step of each phase the training thread says ``at_gate`` and stands still until the outer
  step that the phase leads to was passed: the test decides when boundaries take place, not the clock;
- ``report_arrivals``: say ``arrived`` with all bytes verified so far in this process's transfers, as they come;
- ``skew``: from this outer step of lineage 1 on the worker's averages differ from everybody else's in one bit;
  ``skew_size``: only in rosters of at least so many.

Commands: ``{"do": "go_on"}``, ``{"do": "finish"}`` (after the present boundary), ``{"do": "flip", "names": n}``,
``{"do": "halt", "plan": {...}}`` (a new halt, in place of the one before), ``{"do": "pass", "outer_step": n}`` (gates
are open up to the boundary that leads to outer step n), ``{"do": "hear_seal", "outer_step": n}`` (says ``seal_heard``
once this worker knows of it).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recovery.control.security import SecurityConfig
from recovery.errors import RecoveryError
from recovery.events import Event
from recovery.state import describe
from recovery.types import Cut, NumericsId, RunId
from recovery.worker import Agent, AgentConfig
from recovery.worker.averaging import Averager, Collectives
from recovery.worker.gradient_codec import codec_named
from tests.support.toy import Toy


class Voice:
    """Writes JSON lines to the test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def say(self, kind: str, **fields: object) -> None:
        line = json.dumps({"say": kind, **fields}, default=lambda v: v.hex() if isinstance(v, bytes) else str(v))
        with self._lock:
            os.write(self._descriptor, (line + "\n").encode())


class Halt:
    """Stands still at one named place; reports events on the way."""

    def __init__(self, voice: Voice, plan: dict[str, Any] | None) -> None:
        self._voice = voice
        self._plan = plan
        self._seen = 0
        self._go_on = threading.Event()

    def arm(self, plan: dict[str, Any]) -> None:
        """Take a new plan, in place of the one before."""
        self._seen, self._plan = 0, plan

    def release(self) -> None:
        """Let the thread that stands still go on."""
        self._go_on.set()

    def __call__(self, event: Event, /) -> None:
        name = type(event).__name__
        fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
        self._voice.say("event", event=name, **fields)
        plan = self._plan
        if plan is None or plan["event"] != name:
            return
        if any(str(fields[key]) != str(value) for key, value in plan.get("when", {}).items()):
            return
        self._seen += 1
        if self._seen > int(plan.get("after", 0)):
            self._plan = None
            self._go_on.clear()
            self._voice.say("halted", event=name, **fields)
            self._go_on.wait()


class Gate:
    """Where a training thread stands, between two inner steps, until the test lets it pass."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._changed = threading.Condition()
        self._passed = 0

    def let_pass(self, outer_step: int) -> None:
        """Open up to the boundary that leads to ``outer_step``."""
        with self._changed:
            self._passed = max(self._passed, outer_step)
            self._changed.notify_all()

    def stand(self, agent: Agent, inner_step: int) -> None:
        """Return once the present phase's boundary may take place."""
        self._voice.say("at_gate", version=agent.version, inner_step=inner_step)
        with agent.standing(), self._changed:
            self._changed.wait_for(lambda: self._passed > agent.version.outer_step)


def report_arrivals(agent: Agent, voice: Voice) -> None:
    """Say how many bytes are verified, whenever that grew; for ever."""
    peers, session, before, said = agent._own._chain._peers, None, 0, 0
    look = threading.Event()
    while not look.wait(0.02):
        now = peers._session
        try:
            if now is not session:
                before += 0 if session is None else session.machine.verified_bytes
                session = now
            total = before + (0 if session is None else session.machine.verified_bytes)
        except RuntimeError:
            continue  # a manifest came while it was summed
        if total > said:
            said = total
            voice.say("arrived", num_bytes=total)


class SkewedAverager(Averager):
    """Differs from everybody else in one bit, as a worker does whose memory or processor fails while it averages."""

    def __init__(self, agent: Agent, since: int, least_members: int) -> None:
        super().__init__(agent.config.bucket_bytes, codec_named(agent.config.gradient_codec))
        self._agent = agent
        self._since = since
        self._least_members = least_members

    def average(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        rank: int,
        group: Collectives | None,
        timeout: float,
    ) -> list[Tensor]:
        means = super().average(tensors, weights, rank, group, timeout)
        now = self._agent.version
        if len(weights) >= self._least_members and now.lineage == 1 and now.outer_step >= self._since:
            means[0].view(-1).view(torch.int32)[0].bitwise_xor_(1)
        return means


def parts_digest(agent: Agent, toy: Toy) -> dict[str, str]:
    """Return a digest of every part of the worker's state, as it is in memory now."""
    manifest = describe(
        [toy.state.read_part(name) for name in toy.state.part_names],
        run_id=RunId(agent.config.run_id),
        worker=agent.worker,
        cut=Cut(agent.version),
        numerics_id=NumericsId(""),
        layout_digest=b"",
    )
    return {
        part.name: "/".join(
            [part.tree.SerializeToString(deterministic=True).hex(), *(c.digest.hex() for c in part.chunks)]
        )
        for part in manifest.parts
    }


def main(plan: dict[str, Any]) -> int:
    torch.set_num_threads(int(plan.get("threads", 1)))
    voice = Voice()
    halt = Halt(voice, plan.get("halt"))
    toy = Toy(int(plan["hidden"]), int(plan["seed"]))
    finish = threading.Event()
    gate = Gate(voice)

    def hear_seal(outer_step: int) -> None:
        look = threading.Event()
        while agent._context.inbox.sealed.outer_step < outer_step:
            look.wait(0.01)
        voice.say("seal_heard", outer_step=outer_step)

    def listen() -> None:
        pending = b""
        while data := os.read(0, 65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                match json.loads(line):
                    case {"do": "go_on"}:
                        halt.release()
                    case {"do": "halt", "plan": dict(armed)}:
                        halt.arm(armed)
                    case {"do": "pass", "outer_step": int(outer_step)}:
                        gate.let_pass(outer_step)
                    case {"do": "hear_seal", "outer_step": int(outer_step)}:
                        threading.Thread(target=hear_seal, args=(outer_step,), daemon=True).start()
                    case {"do": "finish"}:
                        finish.set()
                    case {"do": "flip", "names": list(names)}:
                        flip(toy, names)
                        voice.say("flipped", names=names)
        os._exit(9)  # the test is gone

    threading.Thread(target=listen, daemon=True).start()
    config = AgentConfig(**plan["agent"], security=SecurityConfig(**plan.get("security", {})))
    agent = Agent(toy.state, config, events=halt)
    if plan.get("report_arrivals"):
        threading.Thread(target=report_arrivals, args=(agent, voice), daemon=True).start()
    if "skew" in plan:
        agent._averager = SkewedAverager(agent, int(plan["skew"]), int(plan.get("skew_size", 1)))
    try:
        with agent:
            voice.say(
                "joined",
                version=agent.version,
                inner_step=toy.state.local_progress.inner_step,
                parts=parts_digest(agent, toy),
                next_rates=toy.next_learning_rates(20),
            )
            while agent.version.outer_step < int(plan["outer_steps"]) and not finish.is_set():
                loss = 0.0
                for inner_step in agent.phase():
                    if plan.get("report_steps"):
                        voice.say(
                            "step",
                            version=agent.version,
                            inner_step=inner_step,
                            parts=parts_digest(agent, toy),
                            next_rates=toy.next_learning_rates(20),
                        )
                    if inner_step == plan.get("gate"):
                        gate.stand(agent, inner_step)
                    began = time.monotonic()
                    loss = toy.inner_step()
                    agent.count_tokens(8)
                    time.sleep(max(0.0, float(plan.get("step_seconds", 0.0)) - (time.monotonic() - began)))
                if plan.get("report_steps"):  # the place where the phase is over: a capture may take place there too
                    voice.say(
                        "step",
                        version=agent.version,
                        inner_step=toy.state.local_progress.inner_step,
                        parts=parts_digest(agent, toy),
                        next_rates=toy.next_learning_rates(20),
                    )
                with agent.boundary() as boundary:
                    toy.apply(boundary.average(toy.pseudo_gradients))
                at = time.monotonic()
                voice.say("boundary", version=agent.version, loss=loss, parts=parts_digest(agent, toy), at=at)
    except RecoveryError as error:
        voice.say("error", error=error.kind, message=str(error))
        return 1
    voice.say("ended", version=agent.version)
    return 0


def flip(toy: Toy, names: list[str]) -> None:
    """Invert one bit in each of the named outer parameters."""
    ordered = [name for name, _ in toy.model.named_parameters()]
    with torch.no_grad():
        for name in names:
            toy.outer_params[ordered.index(name)].detach().view(-1).view(torch.int32)[0].bitwise_xor_(1 << 3)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
