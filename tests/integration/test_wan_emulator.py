"""The emulator does what it is told: delay, rate, loss, cuts; and leaves nothing behind.

What a wide-area test proves rests on this. Figures that need minutes are in ``test_wan_emulator_long``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.wan import Wan, WanConfig, WanError, emulated
from tests.support.wan import namespaces as spaces
from tests.support.wan.registry import instances
from tests.support.wan.traffic import flow, needs_namespaces, result, transfer

pytestmark = needs_namespaces


def test_a_round_trip_takes_the_delays_of_both_ways() -> None:
    with emulated({"a": {"delay": "30ms"}, "b": {"delay": "10ms"}}) as wan, flow(wan, "b", "serve") as server:
        server.line("ready")
        with flow(wan, "a", "round-trips", to=wan.address("b"), repeat=5) as client:
            found = result(client)
    assert 39.9 <= found["tcp"] <= 42.0


def test_a_link_carries_no_more_than_its_rate_and_loses_what_it_is_told_to() -> None:
    with emulated({"a": {"up": "50mbit", "loss": "1%"}, "b": {}}, every={"rtt": "10ms"}) as wan:
        found = transfer(wan, "a", "b", seconds=2.0, skip=0.5, flows=8)
        stats = wan.stats()
    up = stats.hosts["a"].up
    assert found["flows"] == 8
    assert up.bytes * 8 <= 50e6 * stats.uptime_seconds
    assert up.packets > 1000
    assert 0.005 < up.drop_loss / (up.drop_loss + up.packets) < 0.02
    assert up.offered_packets == up.packets + up.drops + up.queued_packets


def test_equal_seeds_lose_equally() -> None:
    lost = []
    for _ in range(2):
        with emulated(["a", "b"], every={"rate": "100mbit", "ge": "0.5%/10%"}, seed=5) as wan:
            with flow(wan, "a", "blast", to=wan.address("b"), count=4000, seconds=0.5) as child:
                assert result(child)["sent"] == 4000
            up = wan.stats().hosts["a"].up
            assert up.offered_packets == 4000
            lost.append(up.drop_loss)
    assert lost[0] == lost[1] > 0


def test_a_cut_reaches_its_victim_and_heals() -> None:
    with (
        emulated(["a", "b", "c"], every={"rtt": "10ms", "rate": "50mbit"}) as wan,
        flow(wan, "b", "serve", seconds=60) as server,
        flow(wan, "c", "serve", seconds=60) as other,
    ):
        server.line("ready")
        other.line("ready")

        def reaches(host: str) -> bool:
            with flow(wan, "a", "round-trips", to=wan.address(host), dial_seconds=0.5, repeat=1) as client:
                return client.wait(60) == 0

        wan.cut("a-b")
        assert not reaches("b")
        assert wan.stats().hosts["a"].up.drop_cut > 0
        assert reaches("c"), "c is not part of the cut"
        wan.heal("a-b")
        assert reaches("b"), "b is healed"


@pytest.mark.parametrize("offload", [True, False])
def test_bytes_arrive_as_they_were_sent_under_loss_and_jitter(offload: bool) -> None:
    shape = {"rtt": "4ms", "jitter": "1ms", "rate": "400mbit", "queue": "128k", "loss": "0.2%"}
    with emulated(["a", "b"], every=shape, segmentation_offload=offload, congestion_control="bbr") as wan:
        with flow(wan, "b", "receive-digest", seconds=60) as server:
            server.line("ready")
            with flow(wan, "a", "send-digest", to=wan.address("b"), seconds=60, count=4_000_000) as client:
                assert result(client) == result(server)
        assert wan.stats().hosts["a"].up.drop_loss > 0


def test_settings_change_while_it_runs_and_bad_ones_are_refused() -> None:
    with emulated(["a", "b"], every={"rate": "100mbit"}) as wan:
        wan.set("a", up="20mbit", loss="1%")
        assert wan.show()["hosts"]["a"]["up"] == {"rate_bps": 20_000_000, "queue_bytes": 262144, "loss": 0.01}
        assert wan.show()["hosts"]["b"]["up"]["rate_bps"] == 100_000_000
        with pytest.raises(WanError, match="bad loss"):
            wan.set("a", loss="200%")
        with pytest.raises(WanError, match="no such host"):
            wan.cut("z")


@pytest.mark.parametrize("state", ["running", "programs inside", "dead daemon", "stopped daemon"])
def test_nothing_is_left_after_it_goes_down(state: str) -> None:
    with emulated(["a", "b"]) as wan:
        record = wan.record
        namespaces = spaces.existing(record.instance)
        assert len(namespaces) == 2
        with flow(wan, "a", "serve", seconds=100) as inside:
            inside.line("ready")
            if state == "dead daemon":
                os.kill(record.pid, signal.SIGKILL)
                os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOWAIT)
            elif state == "stopped daemon":
                os.kill(record.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, record.pid, os.WSTOPPED | os.WNOWAIT)
            if state == "running":
                inside.kill()
            assert wan.down()
            assert inside.wait(30) != 0
        assert not spaces.existing(record.instance)
        assert not wan.place.folder.exists()
        assert not wan.down(), "a second time there is nothing to do"
        with pytest.raises(ProcessLookupError):
            os.kill(record.pid, 0)


def test_a_set_up_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAN_STATE_DIR", str(tmp_path))
    config = WanConfig(hosts={"a": {}, "b": {"loss": "200%"}}, instance="7left")
    with pytest.raises(WanError, match="bad loss"), emulated([], config=config):
        pass
    assert not spaces.existing("7left")
    assert instances() == []


def test_it_goes_down_by_itself_when_its_time_is_over() -> None:
    with emulated(["a", "b"], ttl_seconds=0.2) as wan:
        pid = wan.record.pid
        os.waitid(os.P_PID, pid, os.WEXITED)
        assert not wan.place.folder.exists()
        assert not spaces.existing(wan.place.instance)


def test_the_command_runs_another_inside_and_cleans_up() -> None:
    tool = [sys.executable, "-m", "tests.support.wan"]
    inner = [*tool, "exec", "b", "--", "ip", "-4", "-o", "addr", "show", "wan0"]
    done = subprocess.run(
        [*tool, "run", "--hosts", "a,b", "--rtt", "5ms", "--", *inner], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "10.77.0.2/24" in done.stdout


def test_the_command_interrupted_at_its_start_leaves_nothing(tmp_path: Path) -> None:
    tool = [sys.executable, "-m", "tests.support.wan"]
    environment = {**os.environ, "WAN_STATE_DIR": str(tmp_path)}
    process = subprocess.Popen([*tool, "run", "--hosts", "a,b,c", "--", "sleep", "1000"], cwd=ROOT, env=environment)
    while not list(tmp_path.iterdir()) and process.poll() is None:
        pass  # until it has reserved its id: from here on there is something to leave behind
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sense_is_refused_before_anything_is_made() -> None:
    for hosts, options, message in (
        ({"a": {}}, {}, "2 to 32 hosts"),
        ({"a": {}, "B": {}}, {}, "bad host name"),
        ({"a": {}, "b": {"speed": "1"}}, {}, "bad setting"),
        ({"a": {}, "b": {}}, {"mtu": 1}, "MTU"),
        ({"a": {}, "b": {}}, {"instance": "x"}, "bad id"),
        ({"a": {}, "b": {}}, {"subnet": "10.0.0.1/8"}, "bad subnet"),
    ):
        with pytest.raises(WanError, match=message):
            WanConfig(hosts=hosts, **options)


def test_the_only_instance_or_the_named_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAN_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("WAN_INSTANCE", raising=False)
    with pytest.raises(WanError, match="which instance"):
        Wan.attached()
    with emulated(["a", "b"]) as wan:
        assert Wan.attached() == wan
        with emulated(["a", "b"]) as other:
            with pytest.raises(WanError, match="which instance"):
                Wan.attached()
            assert Wan.attached(other.place.instance) == other
