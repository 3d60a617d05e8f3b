"""Small states for the disk tests: every kind of part, several dtypes, chunks of their own and packed ones."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt.local import LocalStorage
from ckpt.values import ValueSource, source_of
from recovery.types import (
    Cut,
    Fingerprint,
    Incarnation,
    PartClass,
    PartName,
    RunId,
    Version,
    WorkerId,
    WorkerRef,
)

RUN = RunId("run-a")
W0 = WorkerRef(WorkerId("w0"), Incarnation("i0"))
W1 = WorkerRef(WorkerId("w1"), Incarnation("i1"))
OUTER = PartName("outer_params")
OUTER_OPT = PartName("outer_optimizer")
PROGRESS = PartName("run_progress")
INNER = PartName("inner_optimizer")
DATA = PartName("data")

Values = dict[PartName, tuple[PartClass, object]]


def replicated_values(seed: int, *, large: bool = False) -> Values:
    """Return replicated parts that differ from seed to seed; ``large`` adds a tensor of two and a half chunks."""
    random = torch.Generator().manual_seed(seed)
    params: dict[str, torch.Tensor] = {
        "a.weight": torch.randn(64, 48, generator=random),
        "a.bias": torch.randn(7, generator=random),
        "half": torch.randn(3, 5, generator=random).bfloat16(),
        "count": torch.arange(5) + seed,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5 + seed),
        "columns": torch.randn(6, 4, generator=random).t(),
        "double complex": torch.complex(torch.ones(2).double() * seed, torch.ones(2).double()),
    }
    if large:
        params["large"] = torch.randn(2_621_440 + 3, generator=random)
    return {
        OUTER: (PartClass.REPLICATED, params),
        OUTER_OPT: (
            PartClass.REPLICATED,
            {
                "state": {"a.weight": {"momentum_buffer": torch.randn(64, 48, generator=random)}},
                "param_groups": [{"lr": 0.7, "params": ["a.weight"]}],
            },
        ),
        PROGRESS: (PartClass.REPLICATED, {"outer_step": seed, "tokens": seed * 1000}),
    }


def private_values(seed: int) -> Values:
    """Return private parts that differ from seed to seed, a data position among them."""
    random = torch.Generator().manual_seed(1000 + seed)
    moments = {"step": torch.tensor(float(seed)), "exp_avg": torch.randn(9, generator=random).bfloat16()}
    return {
        INNER: (PartClass.PRIVATE_COPIED, {"state": {"a.weight": moments}, "param_groups": [{"lr": 0.1}]}),
        DATA: (PartClass.PRIVATE_KEPT, {"position": seed, "generator": torch.arange(11, dtype=torch.uint8)}),
    }


def values(seed: int, *, large: bool = False) -> Values:
    """Return all parts."""
    return {**replicated_values(seed, large=large), **private_values(seed)}


def source(
    seed: int,
    version: Version | None = None,
    *,
    of: Values | None = None,
    run_id: RunId = RUN,
    worker: WorkerRef = W0,
    fingerprint: bytes | None = None,
    large: bool = False,
) -> ValueSource:
    """Return a source at ``version`` (default: lineage 1, step ``seed``) that holds the values of ``seed``."""
    return source_of(
        values(seed, large=large) if of is None else of,
        run_id=run_id,
        worker=worker,
        cut=Cut(version or Version(1, seed)),
        fingerprint=Fingerprint(fingerprint if fingerprint is not None else bytes([seed % 256]) * 32),
    )


def storage(path: Path) -> LocalStorage:
    """Return a local root under a test's folder."""
    return LocalStorage(path / "root")


def same(a: object, b: object) -> bool:
    """Return whether two trees are equal: kinds, dtypes, shapes and every bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
