"""``recovery ckpt`` used wrongly, on folders that are odd, and interrupted: one line, an exit code, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ckpt.catalog import Catalog
from ckpt.local import LocalStorage
from ckpt.record import KEPT
from ckpt.writer import write_checkpoint
from recovery.cli.main import run
from tests.unit.ckpt.power import Quick
from tests.unit.ckpt.states import RUN, source
from tests.unit.ckpt.workers import Worker

WAIT = 60.0
PIECES = 24


@pytest.fixture
def root(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path / "root", Quick())
    Worker(1).train().save(storage)
    return storage.root


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line of an error."""
    capsys.readouterr()
    code = run(["ckpt", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 1, out + err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["show", "{root}", "1.99999999999999999999"], "not a version that can be saved"),
        (["show", "{root}", "1.1", "--worker", "../w0"], "worker id"),
        (["show", "{root}", "1.1", "--worker", "nobody"], "worker_nobody"),
        (["list", "{root}", "--run", "a/b"], "run id"),
        (["prune", "{root}", "--run", "run-a", "--keep", "0"], "at least 1"),
        (["verify", "{empty}"], "holds no checkpoint"),
        *(
            ([command, "{empty}/nowhere", *more], "nowhere does not exist")
            for command, *more in (
                ["verify"],
                ["list"],
                ["show", "newest"],
                ["export", "newest", "{empty}/w"],
                ["copy", "newest", "{empty}/there"],
                ["prune", "--run", "run-a"],
                ["convert", "{empty}/x", "--to", "dcp"],
                ["diff", "newest", "{root}", "newest"],
            )
        ),
        (["list", "{root}/latest"], "is no folder"),
        (["show", "{empty}", "newest"], "no whole step"),
        (["export", "{empty}", "newest", "{empty}/w"], "no whole step"),
        (["export", "{root}", "newest", "{empty}/nowhere/w"], "there is no folder {empty}/nowhere; make it"),
        (["export", "{root}", "newest", "{empty}"], "{empty} is a folder: name the file"),
        (["copy", "{empty}", "newest", "{empty}/there"], "no whole step"),
        (["verify", "nosuch://bucket/prefix"], "nosuch"),
        (["copy", "{root}", "newest", "nosuch://bucket"], "nosuch"),
        (["list", "nosuch://bucket"], "s3:// (pip install 'diloco-recovery[s3]')"),
        (["list", "gs://bucket/x"], "pip install 'diloco-recovery[gcs]'"),
        (["convert", "{root}", "s3://bucket/x", "--to", "zeroband"], "local folder"),
        (["convert", "{root}", "{empty}/x", "--to", "ours", "--run", "a/b", "--worker", "w"], "run id"),
        (["convert", "{root}", "{empty}/x", "--to", "dcp", "--parameter-names", "{empty}/none"], "none"),
        (["convert", "{empty}", "{empty}/x", "--to", "dcp"], "no whole step"),
        (["list", "{loop}"], "loop"),
        (["verify", "{loop}/x"], "loop"),
        (["list", "{root}", "--storage-options", "[]"], "not a JSON object"),
    ],
)
def test_wrong_use_is_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    empty, loop = tmp_path / "empty", tmp_path / "loop"
    empty.mkdir()
    loop.symlink_to(loop)
    places = {"root": str(root), "empty": str(empty), "loop": str(loop)}
    error = refused(capsys, *(argument.format(**places) for argument in arguments))
    assert text.format(**places) in error
    assert list(empty.iterdir()) == []  # nothing was written


def test_export_replaces_a_file_only_when_asked(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"somebody's")
    assert "--force replaces it" in refused(capsys, "export", root, "newest", file)
    assert file.read_bytes() == b"somebody's"
    assert run(["ckpt", "export", str(root), "newest", str(file), "--force"]) == 0
    assert load_file(file)


def test_a_bucket_without_credentials_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    error = refused(capsys, "list", "s3://bucket/prefix")
    assert "NoCredentialsError" in error
    assert "AWS_ACCESS_KEY_ID" in error
    assert "AWS_PROFILE" in error
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "AWS_PROFILE" in refused(capsys, "list", "s3://bucket/prefix")


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["diff", "x"], ["nonsense"], ["verify", "x", "--frobnicate"], ["convert", "a", "b", "--to", "?"]],
)
def test_wrong_flags_are_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(["ckpt", *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_full_of_other_things_is_listed_and_verified(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step_1_1" / "loop").symlink_to(root)
    (root / "step_1_2").symlink_to(root / "step_1_1")
    (root / "step_1_3").symlink_to(root / "step_1_3")
    (root / "step_1_4").mkdir()
    (root / "step_1_4" / "manifest.pb").mkdir()
    (root / "step_1_5").write_text("a file")
    (root / "step_1_6").mkdir()
    os.mkfifo(root / "step_1_6" / "manifest.pb")
    (root / "latest").unlink()
    (root / "latest").symlink_to(root / "latest")
    capsys.readouterr()
    assert run(["ckpt", "list", str(root), "--json"]) == 0
    states = {row["step"]: row["state"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert states["L1.k1"] == "whole"
    assert {state for step, state in states.items() if step != "L1.k1"} <= {"foreign"}
    assert run(["ckpt", "verify", str(root), "newest", "--json"]) == 0
    assert run(["ckpt", "prune", str(root), "--run", RUN, "--keep", "1"]) == 0
    assert run(["ckpt", "verify", str(root), "newest"]) == 0


def test_steps_saved_by_order_are_shown_and_go_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(tmp_path / "root", Quick())
    for step in range(1, 4):
        write_checkpoint(storage, [source(step)], records={KEPT: "saved by order"} if step == 1 else None)
    capsys.readouterr()
    assert run(["ckpt", "list", str(storage.root)]) == 0
    assert "kept: saved by order" in capsys.readouterr().out
    prune = ["ckpt", "prune", str(storage.root), "--run", RUN, "--keep", "1"]
    assert run(prune) == 0
    assert [step.version.outer_step for step in Catalog(storage, RUN).steps()] == [3, 1]
    assert run([*prune, "--marked"]) == 0
    assert [step.version.outer_step for step in Catalog(storage, RUN).steps()] == [3]


SLOWED = """
import os, sys
import ckpt.{module} as module
from recovery.cli.main import main
before = module.{name}.{method}
def slowly(self, *arguments):
    result = before(self, *arguments)
    sys.stdout.write("busy\\n")
    sys.stdout.flush()
    import threading
    threading.Event().wait(0.5)
    return result
module.{name}.{method} = slowly
main(sys.argv[1:])
"""


def interrupted(module: str, name: str, method: str, *arguments: object) -> tuple[int, str]:
    """Run a command that is slowed down, press Ctrl-C in the middle; return exit code and errors."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED.format(module=module, name=name, method=method), "ckpt", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT)
    # It was in the middle, and did not go on to the end.
    assert out.count("busy") < PIECES // 2
    return process.returncode, err


@pytest.fixture(scope="module")
def long_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of many pieces."""
    import torch

    from recovery.types import PartClass, PartName

    storage = LocalStorage(tmp_path_factory.mktemp("long") / "root", Quick())
    tensors = {f"t{n}": torch.full((1 << 20,), n, dtype=torch.int8) for n in range(4 * PIECES)}
    write_checkpoint(storage, [source(1, of={PartName("outer_params"): (PartClass.REPLICATED, tensors)})])
    return storage.root


@pytest.mark.parametrize("command", ["verify", "copy", "export"])
def test_ctrl_c_ends_at_once_and_leaves_nothing_half_done(long_root: Path, tmp_path: Path, command: str) -> None:
    there = tmp_path / "there"
    there.mkdir()
    arguments: dict[str, list[object]] = {
        "verify": ["verify", long_root],
        "copy": ["copy", long_root, "newest", there],
        "export": ["export", long_root, "newest", there / "weights.safetensors"],
    }
    code, err = interrupted("part_reading", "PartReading", "_checked", *arguments[command])
    assert code == 130, err
    assert "Traceback" not in err
    assert Catalog(LocalStorage(there), RUN).whole() == []
    files = [path.name for path in there.rglob("*") if path.is_file()]
    assert all(re.fullmatch(r"run_run-a", name) for name in files), files
