"""Rules of the house that no type checker sees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = [p for top in ("recovery", "ckpt") for p in sorted((ROOT / top).rglob("*.py"))]
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
PICKLE_BEHIND_A_FLAG: set[str] = {"ckpt/interop/torch_file.py"}
"""Files that may unpickle, each only after its caller passed a flag that says so."""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", CODE, ids=name)
def test_nothing_unpickles(path: Path) -> None:
    """Field report: learning-at-home/hivemind#155, state from a peer was unpickled."""
    if name(path) in PICKLE_BEHIND_A_FLAG:
        loads = [call for function, call in calls(path) if function == "torch.load"]
        assert [ast.unparse(call.keywords[-1].value) for call in loads] == ["not allow_pickle"]
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert not UNSAFE_MODULES & {alias.name.split(".")[0] for alias in node.names}, ast.unparse(node)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNSAFE_MODULES, ast.unparse(node)
    for function, call in calls(path):
        if function.endswith("torch.load") or (function == "load" and "torch" in ast.unparse(call)):
            flags = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert flags.get("weights_only") == "True", (
                f"{name(path)}:{call.lineno}: torch.load without weights_only=True"
            )


@pytest.mark.parametrize("path", [p for p in CODE if name(p).startswith("recovery/")], ids=name)
def test_recovery_never_touches_the_default_process_group(path: Path) -> None:
    """Field report: PrimeIntellect-ai/prime-diloco#156, a transfer on the training group takes the run down."""
    if name(path).startswith("recovery/state/"):
        return  # DTensors carry a mesh of the user's, which is read and never spoken on
    forbidden = re.compile(
        r"(dist|distributed)\.(init_process_group|new_group|all_reduce|all_gather|broadcast|barrier|send|recv|isend|irecv"
        r"|group\.WORLD|get_default_group)$"
    )
    for function, call in calls(path):
        assert not forbidden.search(function), f"{name(path)}:{call.lineno} uses the training's process group"


def test_the_coordinator_never_loads_torch() -> None:
    """Importing everything the coordinator's command needs leaves torch and numpy out."""
    script = (
        "import sys, recovery.cli.main, recovery.control.server, recovery.control.operator_client\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted({'torch', 'numpy'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_no_debt_is_left_in_words() -> None:
    marks = re.compile("TO" + "DO|FIX" + "ME|XX" + "X|HA" + "CK")
    for path in CODE:
        assert not marks.search(path.read_text()), name(path)


def test_every_thread_is_named() -> None:
    for path in CODE:
        for function, call in calls(path):
            if function in {"threading.Thread", "Thread"}:
                named = {keyword.arg for keyword in call.keywords}
                assert "name" in named, f"{name(path)}:{call.lineno}: a thread without a name"


def test_payload_moves_through_the_state_dict_functions_only() -> None:
    """``send_state_dict`` / ``recv_state_dict`` and the live path post through the same two functions: no drift."""
    posts = re.compile(r"\.(send|recv)\(\[")
    users = [name(path) for path in CODE if posts.search(path.read_text())]
    assert users == ["recovery/transport/state_dict.py"]
    live_path = (ROOT / "recovery/transport/process_group.py").read_text()
    assert "import post_receive, post_send" in live_path
