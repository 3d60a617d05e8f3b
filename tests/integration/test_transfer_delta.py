"""Real donor and joiner processes: what differs moves, what does not stays."""

from __future__ import annotations

from tests.support.transfer_ends import ends, ready, report, restored

NUM_MIB = 400


def test_one_percent_of_the_chunks_costs_less_than_two_percent_of_the_bytes() -> None:
    with ends() as both:
        donor = both.donor("d0", NUM_MIB, seed=1, changed_every=100, tensors=5)
        joiner = both.joiner("j0", NUM_MIB, seed=1, momentum=True, tensors=5, joiner={"delta": True})
        joiner.wait_said("ready")
        assert ready(donor)["num_chunks"] == 100
        first = restored(joiner, donor)
        assert 0 < first["payload_bytes"] < 0.02 * first["num_bytes"]
        assert first["payload_bytes"] + first["reused_bytes"] == first["num_bytes"]
        again = restored(joiner, donor)
        assert again["payload_bytes"] == 0, "nothing differs: no payload"
        assert report(donor)["intact"]
