"""``recovery ckpt`` from the outside: every command, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ckpt.local import LocalStorage
from ckpt.source import CheckpointSource
from recovery.cli.main import run
from recovery.errors import LayoutMismatch
from recovery.events import Recorder
from recovery.types import PartName
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, W0
from tests.unit.ckpt.test_interop import golden_cosmos, golden_zeroband, names_of
from tests.unit.ckpt.workers import Worker, differences


@pytest.fixture
def root(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path / "root", Quick())
    worker = Worker(1)
    for _ in range(3):
        worker.train().save(storage)
    return storage.root


def call(capsys: pytest.CaptureFixture[str], *arguments: object, expect: int = 0) -> list[dict[str, Any]]:
    """Run a command with ``--json``; return what it wrote."""
    capsys.readouterr()
    code = run(["ckpt", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == expect, out + err
    return [json.loads(line) for line in out.splitlines()]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_and_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = call(capsys, "list", root)
    assert [row["step"] for row in rows] == ["L1.k3", "L1.k2", "L1.k1"]
    assert rows[0]["state"] == "whole"
    assert rows[0]["workers"] == ["w0"]
    (shown,) = call(capsys, "show", root, "newest")
    assert shown["cut"] == "L1.k3+0"
    assert {part["name"] for part in shown["parts"]} == {"outer_params", "outer_optimizer", "run_progress"}
    (private,) = call(capsys, "show", root, "1.2", "--worker", "w0")
    assert "inner_optimizer" in {part["name"] for part in private["parts"]}


def test_people_get_tables(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "list", str(root)]) == 0
    assert "L1.k3" in capsys.readouterr().out
    assert run(["ckpt", "verify", str(root), "L1.k3"]) == 0
    assert "every byte is right" in capsys.readouterr().out


def test_verify_names_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(row["ok"] for row in call(capsys, "verify", root))
    flip(root / "step_1_2" / "replicated" / "outer_params.safetensors")
    flip(root / "step_1_2" / "worker_w0" / "scheduler.safetensors")
    rows = {row["step"]: row for row in call(capsys, "verify", root, expect=3)}
    assert rows["L1.k3"]["ok"]
    assert not rows["L1.k2"]["ok"]
    text = " ".join(rows["L1.k2"]["problems"])
    assert "outer_params" in text
    assert "scheduler" in text


def test_diff_names_leaves(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (same,) = call(capsys, "diff", root, "1.2", root, "1.2")
    assert same["equal"]
    (other,) = call(capsys, "diff", root, "1.2", root, "1.3", expect=3)
    assert any(line.startswith("outer_params/0.weight") for line in other["differences"])


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    would = call(capsys, "prune", root, "--run", RUN, "--keep", 1, "--dry-run")
    assert not any(row["deleted"] for row in would)
    assert len(call(capsys, "list", root)) == 3
    done = call(capsys, "prune", root, "--run", RUN, "--keep", 1, "--every", 2)
    assert [row["step"] for row in done if row["deleted"]] == ["L1.k1"]
    assert [row["step"] for row in call(capsys, "list", root)] == ["L1.k3", "L1.k2"]


def test_copy(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = call(capsys, "copy", root, "newest", tmp_path / "there")
    assert report["moved"] == report["bytes"]
    assert all(row["ok"] for row in call(capsys, "verify", tmp_path / "there"))
    (again,) = call(capsys, "copy", root, "newest", tmp_path / "there")
    assert again["moved"] == 0


def test_export_is_plain_safetensors(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = call(capsys, "export", root, "newest", tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    expected = Worker(1).train(3).model.state_dict()
    assert report["tensors"] == len(expected)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].equal(tensor)


@pytest.mark.parametrize("layout", ["zeroband", "cosmos", "dcp"])
def test_convert_out_and_in(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    call(capsys, "convert", root, tmp_path / "out", "--to", layout)
    source = tmp_path / "out" / "step_9" if layout == "zeroband" else tmp_path / "out"
    more = ["--rename", "data_loader=data"] if layout == "zeroband" else []
    (report,) = call(
        capsys, "convert", source, tmp_path / "back", "--to", "ours", "--run", RUN, "--worker", "w0", *more
    )
    assert report["from"] == layout
    assert report["absent"] == {}
    back = LocalStorage(tmp_path / "back")
    fresh, worker = Worker(2), Worker(1).train(3)
    # Cosmos's trainer state is no part of this worker, and says so.
    exclude = [PartName("trainer")] if layout == "cosmos" else []
    restored = CheckpointSource(back, run_id=RUN, worker=W0, events=Recorder()).restore(fresh.state, exclude=exclude)
    assert restored.version.outer_step == 3
    assert restored.differences == ()
    assert restored.own_position == (layout != "cosmos")
    if layout == "dcp":
        assert differences(worker, fresh) == []
    fresh.data.at = worker.data.at
    worker.train()
    fresh.train()
    assert worker.model.state_dict().keys() == fresh.model.state_dict().keys()
    assert all(a.equal(b) for a, b in zip(worker.model.parameters(), fresh.model.parameters(), strict=True))


def test_a_converted_checkpoint_that_is_whole_is_restored_strictly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker(1).train(2)
    worker.state.local_progress.tokens = worker.state.run_progress.tokens  # zeroband counts them once
    step = golden_zeroband(tmp_path / "z", worker)
    call(
        capsys,
        *("convert", step, tmp_path / "ours", "--to", "ours", "--run", RUN, "--worker", "w0"),
        *("--rename", "data_loader=data"),
    )
    fresh = Worker(2)
    source = CheckpointSource(LocalStorage(tmp_path / "ours"), run_id=RUN, worker=W0, events=Recorder())
    restored = source.restore(fresh.state)
    assert restored.own_position
    assert differences(worker, fresh) == []
    assert differences(worker.train(), fresh.train()) == []


def test_a_converted_checkpoint_that_lacks_a_part_says_which_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker(1).train(2)
    golden_cosmos(tmp_path / "c", worker)
    (tmp_path / "names.txt").write_text("\n".join(names_of(worker)))
    (report,) = call(
        capsys,
        *("convert", tmp_path / "c", tmp_path / "ours", "--to", "ours", "--run", RUN, "--worker", "w0"),
        *("--parameter-names", tmp_path / "names.txt"),
    )
    assert set(report["absent"]) == {"outer_optimizer"}
    fresh, before = Worker(2), Worker(2)
    source = CheckpointSource(LocalStorage(tmp_path / "ours"), run_id=RUN, worker=W0, events=Recorder())
    with pytest.raises(
        LayoutMismatch, match=r"converted from Cosmos(.|\n)*outer_optimizer: it is a data-parallel"
    ) as found:
        source.restore(fresh.state)
    assert "exclude=['outer_optimizer']" in str(found.value)
    with pytest.raises(LayoutMismatch, match="trainer: unexpected"):
        source.restore(fresh.state, exclude=[PartName("outer_optimizer")])
    assert differences(before, fresh) == []  # nothing was changed
    source.restore(fresh.state, exclude=[PartName("outer_optimizer"), PartName("trainer")])
    assert differences(worker, fresh, parts=["outer_params", "inner_optimizer", "scheduler", "buffers"]) == []


def test_renaming_what_is_not_there_is_an_error(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for pair, text in (("nothing=x", "no part nothing"), ("data=scheduler", "one name"), ("data", "OLD=NEW")):
        capsys.readouterr()
        assert run(["ckpt", "convert", str(root), str(tmp_path / "x"), "--to", "dcp", "--rename", pair]) == 1
        assert text in capsys.readouterr().err


def test_convert_the_ancestors_golden_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(1).train(2)
    step = golden_zeroband(tmp_path / "z", worker)
    golden_cosmos(tmp_path / "c", worker)
    (tmp_path / "names.txt").write_text("\n".join(names_of(worker)))
    more = ["--run", RUN, "--worker", "w0"]
    call(capsys, "convert", step, tmp_path / "from-z", "--to", "ours", *more)
    call(
        capsys,
        "convert",
        tmp_path / "c",
        tmp_path / "from-c",
        "--to",
        "ours",
        "--parameter-names",
        tmp_path / "names.txt",
        *more,
    )
    for name in ("from-z", "from-c"):
        assert all(row["ok"] for row in call(capsys, "verify", tmp_path / name))
    (shown,) = call(capsys, "show", tmp_path / "from-c", "newest")
    assert shown["records"]["trained_data_record"] == {"image": 12, "video": 3}
    assert list(shown["records"]["converted"]["absent"]) == ["outer_optimizer"]


def test_errors_are_one_line_and_exit_code_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["show", root, "1.9"], "L1.k9"),
        (["show", root, "nonsense"], "is not of the form"),
        (["convert", root, root / "x", "--to", "ours"], "--run and --worker"),
        (["list", "nosuch://x"], "nosuch"),
        (["copy", root, "1.1", "/proc/nowhere"], "/proc/nowhere"),
        (["list", root, "--storage-options", "{"], "not JSON"),
    ):
        capsys.readouterr()
        assert run(["ckpt", *map(str, arguments)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert text in err
        assert err.count("\n") == 1
