"""The table of ``docs/ancestors.md`` is true: its tests exist, run, and are not skipped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "ancestors.md"
_TEST = re.compile(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`")
_SKIPS = {"skip", "skipif", "xfail", "importorskip"}


def rows() -> list[list[str]]:
    """Return the cells of every row of the tables."""
    lines = DOCUMENT.read_text().splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [cells for cells in found if cells[0] != "ability"]


def names() -> list[tuple[str, str]]:
    """Return (file, test) of every test that the tables name, once."""
    return sorted({(file, test) for cells in rows() for file, test in _TEST.findall(cells[-1])})


def test_every_row_names_its_tests() -> None:
    assert len(rows()) >= 30
    for cells in rows():
        assert len(cells) == 3, cells
        assert _TEST.search(cells[2]), cells[0]
        # Nothing but tests stands in the last column, so that no name is misspelt into plain text.
        assert not _TEST.sub("", cells[2]).replace(",", "").strip(), cells[2]


@pytest.mark.parametrize("file", sorted({file for file, _ in names()}))
def test_the_named_tests_exist_and_nothing_skips_them(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    whole_file = [ast.dump(node) for node in tree.body if isinstance(node, ast.Assign)]
    assert not any("pytestmark" in text and word in text for text in whole_file for word in _SKIPS)
    for name in [test for where, test in names() if where == file]:
        assert name in functions, f"{file} has no {name}"
        used = {node.attr for node in ast.walk(functions[name]) if isinstance(node, ast.Attribute)}
        assert not used & _SKIPS, f"{name} can be skipped"


@pytest.mark.timeout(400)
def test_the_named_tests_run() -> None:
    """All of this storey in one process of their own. Those of other storeys cost minutes and run where they are."""
    ours = [f"{file}::{test}" for file, test in names() if "ckpt" in file and "test_ckpt_live" not in file]
    ours = [name for name in ours if "test_ckpt_objects" not in name and "test_ckpt_transfer" not in name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *ours]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout[-3000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.search(r"\b(\d+) passed", summary), summary
    assert "skipped" not in summary
    assert "xfailed" not in summary
