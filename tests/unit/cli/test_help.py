"""Help texts show a flag as what one types."""

from __future__ import annotations

import pytest

from recovery.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ([], ["--help"]),
        (["status"], ["--json", "--insecure", "--help"]),
        (["coordinator"], ["--new-run", "--help"]),
        (["ckpt"], ["--help"]),
        (["ckpt", "prune"], ["--json", "--marked", "--dry-run", "--help"]),
        (["demo"], ["--help"]),
    ],
)
def test_a_flag_takes_no_value(arguments: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--help"]) == 0
    out = capsys.readouterr().out
    assert "<bool>" not in out
    assert all(flag in out for flag in flags)
    if "prune" in arguments:
        assert "<str>" in out  # options with values still say which
