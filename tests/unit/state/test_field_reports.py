"""What users of neighbouring systems reported about state that did not come back does not happen here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support import state_reports, state_reports_origin  # noqa: F401 (they register their checks)
from tests.support.report_registry import REPORTS


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a hundred numbers only lose by more threads."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "check", [pytest.param(check, id=f"{row}:{check.__name__}") for row, (_, check) in REPORTS.items()]
)
def test_report(check: Callable[[], None]) -> None:
    """The check's docstring says what was reported; ``REPORTS`` and FIELD_REPORTS.md say where."""
    check()
