"""Versions, ids and addresses."""

from __future__ import annotations

import pytest

from recovery import errors
from recovery.errors import BadConfiguration, RecoveryError
from recovery.types import NO_VERSION, Address, Cut, Version, checked_id


def test_a_later_lineage_beats_any_number_of_steps() -> None:
    assert NO_VERSION < Version(1, 0) < Version(1, 10**9) < Version(2, 0)
    assert Cut(Version(1, 5), 100) < Cut(Version(1, 6), 0)
    assert str(Cut(Version(2, 7), 3)) == "L2.k7+3"


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:80", "host.example:0", "[fe80::1]:65535"])
def test_addresses_round_trip(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "::1:80", "host:-1"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(BadConfiguration, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["", ".hidden", "a/b", "a b", "ä", "x" * 201, "..", "a\n"])
def test_ids_that_cannot_stand_in_a_path_are_refused(text: str) -> None:
    with pytest.raises(BadConfiguration, match="not usable"):
        checked_id("run id", text)


def test_the_drawing_of_the_error_tree_names_every_class() -> None:
    drawn = errors.__doc__ or ""
    pending: list[type[RecoveryError]] = [RecoveryError]
    while pending:
        error = pending.pop()
        if error.__module__ == errors.__name__:
            assert f" {error.__name__}" in drawn, error.__name__
            assert errors.find(error.__name__) is error
        pending.extend(error.__subclasses__())
