"""Which steps may go, and letting them go. Errors here never end a run; what is not surely ours is never touched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ckpt.catalog import OWNER, Catalog, Step, StepState
from ckpt.layout import REPLICATED_FOLDER, is_manifest_name, parse_worker_folder, step_folder
from ckpt.reader import open_checkpoint
from ckpt.storage import Storage
from recovery.errors import BadConfiguration, CheckpointRejected
from recovery.types import RunId, Version, WorkerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """What stays."""

    keep_newest: int = 3
    """That many newest verified steps, and everything newer than the oldest of them."""
    keep_every: int = 0
    """Whole steps whose outer step is a multiple of this, for ever; 0: none."""
    keep_marked: bool = True
    """Whole steps whose side record ``kept`` says so, for ever: those that an operator had saved."""

    def __post_init__(self) -> None:
        if self.keep_newest < 1:
            raise BadConfiguration(f"keep_newest is {self.keep_newest}: at least 1 step must stay")
        if self.keep_every < 0:
            raise BadConfiguration(f"keep_every is {self.keep_every}: take 0 (none) or more")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What retention decided about one step, and why."""

    version: Version
    delete: bool
    reason: str


def is_whole(step: Step) -> bool:
    """Return whether a step can be restored: what a root of replicated parts is kept for."""
    return step.whole


def decide(
    steps: Iterable[Step],
    policy: RetentionPolicy,
    verified: Callable[[Step], bool],
    worth: Callable[[Step], bool] = is_whole,
) -> list[Verdict]:
    """Return a verdict for every step, newest first. Touches nothing.

    A step goes only if ``policy.keep_newest`` newer ones are whole and *verified*: a newest step that is torn or
    damaged does not count, so that it cannot push out a good one.

    Args:
        steps: As the catalog found them, in any order.
        policy: What stays.
        verified: Tells whether every byte of a step worth keeping agrees; asked newest first, no more than needed.
        worth: Tells which steps the root is kept for.
    """
    verdicts = []
    good = 0
    for step in sorted(steps, key=lambda step: step.version, reverse=True):
        if step.state is StepState.FOREIGN:
            verdicts.append(Verdict(step.version, False, f"not ours: {step.reason}"))
        elif good < policy.keep_newest:
            if worth(step) and verified(step):
                good += 1
                verdicts.append(Verdict(step.version, False, f"verified, number {good} of {policy.keep_newest}"))
            else:
                why = "damaged" if worth(step) else f"torn: {step.reason}"
                verdicts.append(Verdict(step.version, False, f"{why}; too few newer steps are verified to let it go"))
        elif worth(step) and policy.keep_marked and step.kept:
            verdicts.append(Verdict(step.version, False, f"kept for ever: {step.kept}"))
        elif worth(step) and policy.keep_every and step.version.outer_step % policy.keep_every == 0:
            verdicts.append(Verdict(step.version, False, f"kept for ever: a multiple of {policy.keep_every}"))
        else:
            verdicts.append(Verdict(step.version, True, f"{policy.keep_newest} newer steps are verified"))
    return verdicts


class Retention:
    """Applies a policy to one root. One at a time a root; may run on any thread."""

    def __init__(
        self, storage: Storage, run_id: RunId, policy: RetentionPolicy, worker_id: WorkerId | None = None
    ) -> None:
        """Store references.

        Args:
            storage: The root.
            run_id: Whose steps may go.
            policy: What stays.
            worker_id: Whose disk it is: where no replicated parts are saved at all, since another worker saves them
                elsewhere, steps are kept for this worker's private parts.
        """
        self._storage = storage
        self._worker_id = worker_id
        self._policy = policy
        self._catalog = Catalog(storage, run_id)
        self._run_id = run_id
        self._verified: set[tuple[Version, bytes]] = set()

    def trust(self, step: Version, fingerprint: bytes) -> None:
        """Take a step's replicated parts as verified: the caller has just read every byte of them."""
        self._verified.add((step, fingerprint))

    def plan(self) -> list[Verdict]:
        """Return what ``run`` would do now."""
        return self._decide(self._catalog.steps())

    def run(self) -> list[Verdict]:
        """Delete what may go; return what was decided, with the reason where a deletion did not happen.

        Raises nothing for a step that cannot be deleted: it is logged and tried again the next time.
        """
        try:
            steps = self._catalog.steps()
        except OSError as error:
            logger.warning("retention cannot list %s: %s", self._storage.url, error)
            return []
        ours = {step.version: step for step in steps}
        names = _names(steps)
        verdicts = []
        for verdict in self._decide(steps):
            if verdict.delete:
                verdict = self._delete(ours[verdict.version], verdict, names)
            verdicts.append(verdict)
        return verdicts

    def _decide(self, steps: Sequence[Step]) -> list[Verdict]:
        owner = self._worker_id
        if owner is None or any(step.records for step in steps if step.state is not StepState.FOREIGN):
            return decide(steps, self._policy, self._is_verified)
        return decide(steps, self._policy, self._is_private_verified, lambda step: owner in step.workers)

    def _is_private_verified(self, step: Step) -> bool:
        owner = self._worker_id
        assert owner is not None
        try:
            for rank in range(step.local_ranks_of[owner]):
                with open_checkpoint(
                    self._storage,
                    step.version,
                    run_id=self._run_id,
                    worker_id=owner,
                    local_rank=rank,
                    num_local_ranks=step.local_ranks_of[owner],
                ) as checkpoint:
                    checkpoint.verify()
        except CheckpointRejected as error:
            logger.warning("retention does not count %s: %s", step.version, error)
            return False
        return True

    def _is_verified(self, step: Step) -> bool:
        key = (step.version, step.records[0].manifest.fingerprint)
        if key in self._verified:
            return True
        try:
            for rank in range(step.num_local_ranks):
                with open_checkpoint(
                    self._storage,
                    step.version,
                    run_id=self._run_id,
                    local_rank=rank,
                    num_local_ranks=step.num_local_ranks,
                ) as checkpoint:
                    checkpoint.verify()
        except CheckpointRejected as error:
            logger.warning("retention does not count %s: %s", step.version, error)
            return False
        self._verified.add(key)
        return True

    def _delete(self, step: Step, verdict: Verdict, names: frozenset[str]) -> Verdict:
        try:
            reason = delete_step(self._storage, step, self._run_id, names)
        except OSError as error:
            reason = f"cannot be deleted: {error}"
            logger.warning("retention: %s %s", step.version, reason)
        return Verdict(step.version, False, reason) if reason else verdict


def delete_step(storage: Storage, step: Step, run_id: RunId, names: frozenset[str] = frozenset()) -> str:
    """Delete what of a step is ours; return why not, or an empty text when it is done.

    Manifests go first, durably: whatever happens in between, the rest is a torn step and not a damaged whole one.
    Files that no manifest names stay, and their folders with them.

    Args:
        storage: The root.
        step: As the catalog found it.
        run_id: Ours.
        names: File names that manifests of this run use; in a torn step, only these are taken as ours.
    """
    if step.state is StepState.FOREIGN:
        return f"not ours: {step.reason}"
    folder = step_folder(step.version)
    manifests, others = _ours(storage, step, folder, names)
    with ExitStack() as claims:
        for path in manifests:
            claim = storage.claim(path)
            if claim is None:
                if storage.num_bytes(path) is None:
                    continue
                return f"{storage.url_of(path)} is being read"
            claims.callback(claim.close)
        for path in manifests:
            storage.delete(path)
        if manifests:
            storage.settle({path.rpartition("/")[0] for path in manifests})
        for path in others:
            storage.delete(path)
        folders = {folder, *_subfolders(storage, folder)}
        for name in folders:
            storage.sweep(name)
        for name in sorted(folders - {folder}, key=len, reverse=True):
            storage.remove_folder(name)
        # Last but the folder itself: as long as anything of ours is left, it says whose it is.
        storage.delete(f"{folder}/{OWNER}{run_id}")
        storage.remove_folder(folder)
    return ""


def _ours(storage: Storage, step: Step, folder: str, names: frozenset[str]) -> tuple[list[str], list[str]]:
    named = set(step.files)
    if not step.whole or step.torn_workers:
        for sub in (folder, *_subfolders(storage, folder)):
            for entry in storage.entries(sub):
                if not entry.is_folder and (entry.name in names or is_manifest_name(entry.name)):
                    named.add(f"{sub}/{entry.name}")
    manifests = sorted(path for path in named if is_manifest_name(path.rpartition("/")[2]))
    return manifests, sorted(named - set(manifests))


def _subfolders(storage: Storage, folder: str) -> list[str]:
    names = [entry.name for entry in storage.entries(folder) if entry.is_folder]
    return [f"{folder}/{name}" for name in names if name == REPLICATED_FOLDER or parse_worker_folder(name)]


def _names(steps: Sequence[Step]) -> frozenset[str]:
    return frozenset(
        path.rpartition("/")[2] for step in steps if step.state is not StepState.FOREIGN for path in step.files
    )
