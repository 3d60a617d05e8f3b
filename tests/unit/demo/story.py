"""A made-up record of a demo in which everything went right, for tests to spoil in one place."""

from __future__ import annotations

from recovery.demo.reports import COORDINATOR, DEMO, Entry

INNER_STEPS = 4
WORKERS = 4
OUTER_STEPS = 8


def learning_rates(epoch: int) -> list[float]:
    """Return what every worker that is right reports after ``epoch`` inner steps."""
    return [0.001 * (epoch + index + 1) for index in range(20)]


class Story:
    """Writes entries; ``k`` is the newest outer step, ``lineage`` the newest lineage."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.lineage = 1
        self.k = 0
        self.launches: dict[str, int] = {}
        self.batches: dict[str, int] = {}

    @property
    def version(self) -> str:
        return f"L{self.lineage}.k{self.k}"

    def add(self, source: str, kind: str, /, **fields: object) -> None:
        launch = self.launches.get(source, 0)
        self.entries.append(
            Entry(seconds=float(len(self.entries)), source=source, launch=launch, kind=kind, fields=fields)
        )

    def start(self, source: str) -> None:
        self.launches[source] = self.launches.get(source, 0) + 1
        self.add(source, "started", pid=1)

    def state(self, source: str, origin: str, donors: list[str], inner_step: int = 0) -> None:
        epoch = self.k * INNER_STEPS + inner_step
        self.add(source, "StateRestored", version=self.version, source=origin)
        self.add(
            source,
            "state",
            source=origin,
            donors=donors,
            cut=f"{self.version}+{inner_step}",
            version=self.version,
            epoch=epoch,
            outer_digest=f"outer-{self.k}",
            inner_digest=f"inner-{epoch}",
            learning_rates=learning_rates(epoch),
            position=64 * self.batches.get(source, 0),
        )

    def inner(self, source: str, inner_step: int) -> None:
        epoch = self.k * INNER_STEPS + inner_step
        self.batches[source] = self.batches.get(source, 0) + 1
        self.add(
            source,
            "inner",
            position=64 * self.batches[source],
            version=self.version,
            inner_step=inner_step,
            epoch=epoch,
            inner_digest=f"inner-{epoch}",
            learning_rates=learning_rates(epoch),
            loss=3.0,
        )

    def phase(self, sources: list[str], first: dict[str, int] | None = None) -> None:
        """One whole phase and its boundary; ``first`` says at which inner step somebody begins."""
        for source in sources:
            for inner_step in range((first or {}).get(source, 0), INNER_STEPS):
                self.inner(source, inner_step)
        self.boundary(sources)

    def boundary(self, sources: list[str]) -> None:
        self.k += 1
        self.add(COORDINATOR, "EpochEnded", epoch=self.k, verdict="committed", version=self.version, reason="")
        for source in sources:
            self.add(
                source,
                "applied",
                version=self.version,
                outer_digest=f"outer-{self.k}",
                next_step_digest=f"next-{self.k}",
                momentum_norm=1.0,
                outer_learning_rate=0.7,
            )
        self.add(COORDINATOR, "VersionSealed", version=self.version, fingerprint=f"f{self.k}", reporters=sources)

    def verified(self, worker: str, when: str, different: list[str]) -> None:
        self.add(DEMO, "verified", worker=worker, when=when, different=different)


def good_story() -> list[Entry]:
    """Return the record of a demo of ``WORKERS`` workers that proved everything."""
    story = Story()
    story.start(COORDINATOR)
    names = [f"worker-{index}" for index in range(WORKERS)]
    first = names[:3]
    for name in first:
        story.start(name)
    story.add(COORDINATOR, "LineageStarted", version="L1.k0", cause="origin", parent="L0.k0", lost_steps=0)
    story.state("worker-0", "origin", [])
    for name in first[1:]:
        story.state(name, "peers", ["worker-0"])
    story.phase(first)
    # The fourth joins in the middle of a phase.
    story.start("worker-3")
    for name in first:
        story.inner(name, 0)
        story.inner(name, 1)
    story.state("worker-3", "peers", ["worker-1"], inner_step=1)
    story.phase(names, {**dict.fromkeys(first, 2), "worker-3": 1})
    # The first is killed and comes back.
    story.add("worker-0", "held", stage="averaging", version=story.version)
    story.add("worker-0", "killed", pid=1)
    story.add(COORDINATOR, "EpochEnded", epoch=90, verdict="aborted", version=story.version, reason="worker-0 lost")
    story.phase(names[1:])
    story.start("worker-0")
    story.inner("worker-2", 0)
    story.state("worker-0", "peers", ["worker-2", "worker-3"])
    story.phase(names, {"worker-2": 1})
    # Bits flip in the second.
    story.verified("worker-1", "before", [])
    story.inner("worker-1", 0)
    story.add("worker-1", "flipped", names=["b", "a"], version=story.version)
    story.verified("worker-1", "damaged", ["outer_params/a", "outer_params/b"])
    story.inner("worker-3", 0)
    story.state("worker-1", "peers", ["worker-3"])
    story.add(DEMO, "resynced", worker="worker-1", detail="")
    story.verified("worker-1", "healed", [])
    story.phase(names, {"worker-3": 1})
    while story.k < OUTER_STEPS:
        story.phase(names)
    story.add(DEMO, "status", when="lineage 1", aborted_epochs=1, committed_epochs=story.k)
    for name in names:
        story.add(name, "killed", pid=1)
    # One resumes from disk, one step behind.
    story.start("worker-1")
    story.lineage, story.k = 2, OUTER_STEPS - 1
    story.add("worker-1", "CheckpointLoaded", url="x", cut=f"L1.k{OUTER_STEPS - 1}", num_bytes=1, took_seconds=1.0)
    story.add(
        COORDINATOR,
        "LineageStarted",
        version=story.version,
        cause="resume",
        parent=f"L1.k{OUTER_STEPS - 1}",
        lost_steps=1,
    )
    story.state("worker-1", "disk", [])
    story.phase(["worker-1"])
    story.add(DEMO, "status", when="lineage 2", aborted_epochs=1, committed_epochs=OUTER_STEPS + 1)
    story.add(DEMO, "children_ended", running=0, started=7)
    return story.entries
