"""Any range of any part, read at any moment of a version's life, is what was published, or is refused."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from recovery.clock import SystemClock
from recovery.errors import DonorRefused
from recovery.snapshot import SnapshotConfig, Snapshots
from recovery.state import chunks as chunks_module
from recovery.state.parts import WorkerState
from recovery.types import MIB
from tests.unit.snapshot.trainee import FIRST, RUN, WORKER

SIZES = st.lists(st.sampled_from([1, 3, 1000, MIB // 4, MIB + 1, 5 * MIB // 4]), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), sizes=SIZES, strided=st.booleans())
def test_any_range_at_any_moment(data: st.DataObject, sizes: list[int], strided: bool) -> None:
    module = nn.Module()
    for number, size in enumerate(sizes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.randn(size)))
    outer = {name: p.detach().clone() for name, p in module.named_parameters()}
    if strided:
        outer["p0"] = torch.randn(2, sizes[0])[1]
        outer = {name: torch.stack([t, t])[0] for name, t in outer.items()}
    state = WorkerState(live=module, outer_params=outer)
    with Snapshots(
        state,
        SnapshotConfig(copy_ahead=False),
        run_id=RUN,
        worker=WORKER,
        events=lambda event: None,
        clock=SystemClock(),
        hooks=False,
    ) as snapshots:
        snapshots.publish(FIRST)
        lease = snapshots.lease_outer(FIRST, "joiner")
        part = lease.manifest.parts[0]
        assert [(c.offset, c.num_bytes) for c in part.chunks] == chunks_module.chunk_ranges(
            [spec.num_bytes for spec in part.tensors]
        )
        published = lease.read(0, 0, part.num_bytes).data.clone()
        acknowledged = set(data.draw(st.lists(st.integers(0, len(part.chunks) - 1))))
        for chunk in acknowledged:
            lease.acknowledge(0, chunk)
        for closed in (False, True):
            if closed:
                snapshots.before_outer_update()
                for tensor in outer.values():
                    tensor.add_(1)
            for _ in range(4):
                start = data.draw(st.integers(0, part.num_bytes - 1))
                size = data.draw(st.integers(1, part.num_bytes - start))
                gone = closed and any(
                    part.chunks[c].offset < start + size and start < part.chunks[c].offset + part.chunks[c].num_bytes
                    for c in acknowledged
                )
                try:
                    reading = lease.read(0, start, size)
                except DonorRefused:
                    assert gone
                else:
                    assert not gone
                    assert torch.equal(reading.data, published[start : start + size])
                    assert not (closed and reading.live)
