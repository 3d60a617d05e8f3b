"""``tests/FIELD_REPORTS.md`` and the tests that it names belong together: none is missing, renamed or unlisted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = [
    line for line in (TESTS / "FIELD_REPORTS.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
][1:]
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def _files(row: str) -> list[Path]:
    """Return the test files that a row names; a bare name stands in the folder of the one before it."""
    found: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", row):
        found.append(TESTS.parent / name if "/" in name else found[-1].parent / name)
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:60] for row in ROWS])
def test_a_listed_report_has_its_tests(row: str) -> None:
    files = _files(row)
    assert files, "no test file is named"
    assert [str(file) for file in files if not file.is_file()] == []
    checks = sorted((TESTS / "support").glob("state_reports*.py"))  # what test_field_reports.py runs, by name
    source = "\n".join(file.read_text(encoding="utf-8") for file in [*files, *checks])
    names = re.findall(r"[(,] ?`(\w+)`", row.split("|")[2])
    assert [name for name in names if not re.search(rf"def \w*{name}|\"{name}\"", source)] == []


def test_a_report_that_a_test_cites_is_listed() -> None:
    listed = (TESTS / "FIELD_REPORTS.md").read_text(encoding="utf-8")
    cited: dict[str, str] = {}
    for file in sorted(TESTS.rglob("*.py")):
        if file != Path(__file__):
            cited |= {report: str(file) for report in REPORT.findall(file.read_text(encoding="utf-8"))}
    assert {report: file for report, file in cited.items() if report.split("#")[1] not in listed} == {}
