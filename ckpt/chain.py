"""Several sources as one: the newest step that verifies, wherever it is; of equal steps the first source's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.source import CheckpointSource, Restored
from recovery.errors import BadConfiguration, CheckpointRejected, SourcesExhausted
from recovery.state.parts import WorkerState
from recovery.types import Version


class CheckpointChain:
    """Local disk, then remotes, in the order given. Use from the thread that owns the state."""

    def __init__(self, sources: Sequence[CheckpointSource]) -> None:
        self._sources = tuple(sources)

    def candidates(self, *, at_most: Version | None = None) -> list[tuple[Version, CheckpointSource]]:
        """Return every whole step with its source: newest first, equal steps in the order of the sources."""
        found = [
            (step.version, position)
            for position, source in enumerate(self._sources)
            for step in source.whole_steps(at_most=at_most)
        ]
        found.sort(key=lambda entry: entry[1])
        found.sort(key=lambda entry: entry[0], reverse=True)
        return [(version, self._sources[position]) for version, position in found]

    def restore(self, state: WorkerState, *, at_most: Version | None = None, **options: Any) -> Restored:
        """Make ``state`` the newest step that verifies in any source; ``options`` as for ``CheckpointSource.restore``.

        Raises:
            SourcesExhausted: none can be restored; one line for each that was tried.
            LayoutMismatch, StateMismatch: as ``CheckpointSource.restore``.
        """
        tried = []
        for version, source in self.candidates(at_most=at_most):
            try:
                return source.restore(state, at=version, **options)
            except (CheckpointRejected, BadConfiguration) as error:  # damaged, or gone since it was listed
                tried.append(f"{source.name}, {version}: {error}")
        names = ", ".join(source.name for source in self._sources) or "none is configured"
        listed = "".join(f"\n  {line}" for line in tried) or "\n  there is no whole step"
        raise SourcesExhausted(f"no checkpoint can be restored ({names}):{listed}")
