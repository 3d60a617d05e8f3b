"""Random generators as ready-made extras. Private-kept by default: with a donor's, a joiner would repeat its draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from recovery.errors import UnsupportedLeaf
from recovery.state.parts import WorkerState
from recovery.types import PartClass


class PythonRandom:
    """The state of a ``random.Random``; None: the module's own."""

    def __init__(self, generator: random.Random | None = None) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state as a version, words and the spare Gaussian."""
        version, words, gauss = (self._generator or random).getstate()
        return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        words = tuple(int(word) for word in state["words"])
        (self._generator or random).setstate((state["version"], words, state["gauss"]))


class NumpyRandom:
    """The state of a ``numpy.random.Generator`` or ``RandomState``; None: numpy's global one."""

    def __init__(self, generator: np.random.Generator | np.random.RandomState | None = None) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the bit generator's state; its integers may have 128 bits."""
        if isinstance(self._generator, np.random.Generator):
            return dict(self._generator.bit_generator.state)
        legacy = (self._generator or np.random).get_state(legacy=False)
        assert isinstance(legacy, dict)
        return legacy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            ValueError: of another kind of bit generator (by numpy).
        """
        if isinstance(self._generator, np.random.Generator):
            self._generator.bit_generator.state = state
        else:
            (self._generator or np.random).set_state(state)


class TorchRandom:
    """The state of torch's generators: the CPU's and every CUDA device's, or of one given generator."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the states as byte tensors (copies)."""
        if self._generator is not None:
            return {"generator": self._generator.get_state()}
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": list(cuda)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            UnsupportedLeaf: it has another number of CUDA devices than this process.
        """
        if self._generator is not None:
            self._generator.set_state(state["generator"])
            return
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if len(state["cuda"]) not in (0, here):
            raise UnsupportedLeaf(f"generators of {len(state['cuda'])} CUDA devices, but {here} here")
        torch.set_rng_state(state["cpu"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])


def add_random_generators(state: WorkerState, part_class: PartClass = PartClass.PRIVATE_KEPT) -> None:
    """Register the global generators as the parts ``random``, ``numpy_random`` and ``torch_random``.

    They change in forward (dropout) and are copied between two inner steps.
    """
    state.add("random", PythonRandom(), part_class, changes_in_forward=True)
    state.add("numpy_random", NumpyRandom(), part_class, changes_in_forward=True)
    state.add("torch_random", TorchRandom(), part_class, changes_in_forward=True)
