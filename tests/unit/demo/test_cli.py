"""The command's options: wrong ones end with one line that names them, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from recovery.demo.cli import demo


def application() -> typer.Typer:
    app = typer.Typer()
    app.command()(demo)
    return app


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workers", "2"], "--workers 2"),
        (["--inner-steps", "1"], "--inner-steps"),
        (["--outer-steps", "0"], "--outer-steps"),
        (["--seed", "-1"], "--seed -1"),
    ],
)
def test_an_impossible_option_is_named(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert len(result.output.splitlines()) == 1


def test_a_file_as_output_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    result = CliRunner().invoke(application(), ["--out", str(path)])
    assert result.exit_code == 2
    assert str(path) in result.output


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(application(), ["--help"], terminal_width=200)
    assert result.exit_code == 0
    for option in ("--workers", "--outer-steps", "--inner-steps", "--out", "--seed", "--keep", "--json"):
        assert option in result.output
