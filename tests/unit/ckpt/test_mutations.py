"""Each protection is removed in turn: its field report's test must notice. One that still passes proves nothing."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckpt.catalog
import ckpt.interop.dcp
import ckpt.layout
import ckpt.reader
import ckpt.record
import ckpt.retention
import ckpt.saver
import ckpt.source
from ckpt.catalog import Catalog, Step
from ckpt.layout import parse_step_folder
from ckpt.local import LocalStorage, _Lock
from ckpt.objects import FsspecStorage, open_storage
from ckpt.part_reading import PartReading
from ckpt.saver import Saver
from ckpt.transfer import _Copy
from ckpt.writer import _Job, write_checkpoint
from recovery.control.orders import OrderDesk
from recovery.errors import BadConfiguration, RecoveryError
from recovery.types import Version
from tests.integration import test_ckpt_transfer as transfers
from tests.unit.ckpt import test_damage as damage
from tests.unit.ckpt import test_interop as interop
from tests.unit.ckpt import test_power_cut as power_cut
from tests.unit.ckpt import test_retention as retention
from tests.unit.ckpt import test_round_trip as round_trip
from tests.unit.ckpt import test_saver as saver
from tests.unit.ckpt import test_source as source
from tests.unit.ckpt import test_storage_faults as storage_faults
from tests.unit.worker import test_saves_by_order as by_order

NOTICED = (AssertionError, pytest.fail.Exception, RecoveryError, OSError, TypeError)

_GET = Catalog.get
_GIVE = OrderDesk._give
_WRITE = write_checkpoint


def _nothing(*_: object, **__: object) -> None:
    return None


def _true(*_: object, **__: object) -> bool:
    return True


def _newest_instead(self: Catalog, version: Version) -> Step:
    try:
        return _GET(self, version)
    except BadConfiguration:
        newest = self.newest()
        assert newest is not None
        return newest


def _only_the_hint(self: Catalog) -> list[Version]:
    hinted = self.hint()
    return [hinted] if hinted is not None else []


def _as_text(self: Catalog) -> list[Version]:
    found = [v for entry in self.storage.entries("") if (v := parse_step_folder(entry.name)) is not None]
    return sorted(found, key=lambda version: str(version.outer_step), reverse=True)


def _first_come(steps: list[Step], policy: Any, verified: object) -> list[ckpt.retention.Verdict]:
    """Count names, as retention by name does, whatever they hold."""
    ordered = sorted(steps, key=lambda step: step.version, reverse=True)
    return [ckpt.retention.Verdict(s.version, n >= policy.keep_newest, "") for n, s in enumerate(ordered)]


def _no_lock(self: LocalStorage, path: str) -> _Lock:
    return _Lock(-1)


def _unpickle(content: bytes, where: str) -> object:
    return pickle.loads(content)  # noqa: S301 - what the protection is there for


def _everybodys(*arguments: Any, own: bool) -> tuple[Any, ...]:
    checkpoint = arguments[0]
    return tuple(checkpoint.part_names)


def _steps_of_anyone(self: Catalog, replicated: Any, runs: object, owners: object) -> tuple[Any, str]:
    state = ckpt.catalog.StepState
    return (state.WHOLE, "") if not replicated.reason else (state.TORN, replicated.reason)


def _all_or_nothing(self: Catalog) -> Iterator[Step]:
    for version in self.versions():
        step = self.look(version)
        if step is not None:
            yield step


def _one_order_each(self: OrderDesk, request_id: str, member: Any, what: str, *rest: Any) -> None:
    self._open.clear()
    _GIVE(self, request_id, member, what, *rest)


def _without_records(*arguments: Any, records: object = None, **options: Any) -> Any:
    return _WRITE(*arguments, **options)


def _two_answers_lost(path: Path) -> None:
    by_order.test_two_who_ask_at_once_get_one_save_and_two_answers()


@dataclass(frozen=True)
class Mutation:
    """``where.what`` becomes ``by``; then ``check`` must fail."""

    row: str
    where: object
    what: str
    by: Any
    check: Callable[..., None]
    arguments: tuple[object, ...] = ()


def _equal_size_on_memory(tmp_path: Path) -> None:
    remote = open_storage("memory://mutation/root")
    assert isinstance(remote, FsspecStorage)
    transfers.test_equal_size_is_not_taken_for_equal_content(tmp_path, remote)


MUTATIONS = [
    Mutation("88 digests", PartReading, "_check", _nothing, damage.test_two_swapped_files_of_one_size_are_found),
    Mutation("88 restore", PartReading, "_check", _nothing, source.test_a_damaged_newest_step_is_skipped_aloud),
    Mutation("88 place", ckpt.reader, "check_place", _nothing, round_trip.test_open_refuses_what_belongs_elsewhere),
    Mutation("89 ranks", Catalog, "_judge_share", _nothing, damage.test_a_step_with_one_rank_missing_is_torn),
    Mutation("89 undo", _Job, "undo", _nothing, storage_faults.test_a_fault_at_every_call, (False,)),
    Mutation(
        "89 settle", LocalStorage, "settle", _nothing, power_cut.test_a_power_cut_at_every_call_of_a_save, (False,)
    ),
    Mutation("90 pointer", Catalog, "versions", _only_the_hint, source.test_latest_is_only_a_hint),
    Mutation(
        "91 names",
        ckpt.layout,
        "_STEP",
        re.compile(r"step_([0-9]+)_([0-9]+).*"),
        retention.test_names_that_only_look_like_ours_are_not,
        ("step_1_1.backup",),
    ),
    Mutation(
        "91 verified",
        ckpt.retention,
        "decide",
        _first_come,
        retention.test_a_torn_or_damaged_newest_step_does_not_push_out_a_good_one,
    ),
    Mutation("91 order", Catalog, "versions", _as_text, source.test_the_newest_lineage_wins_over_the_highest_step),
    Mutation("91 run", Catalog, "_judge", _steps_of_anyone, retention.test_another_runs_steps_stay),
    Mutation(
        "91 marked",
        Step,
        "kept",
        property(lambda self: ""),
        retention.test_a_step_saved_by_order_stays_until_marked_ones_may_go_too,
    ),
    Mutation(
        "91 unreadable",
        Catalog,
        "iterate",
        _all_or_nothing,
        source.test_a_step_that_the_disk_does_not_give_does_not_hide_the_others,
        ("step_1_2",),
    ),
    Mutation("91 read", LocalStorage, "pin", _no_lock, retention.test_a_step_that_is_read_stays_until_it_was_read),
    Mutation(
        "92 next call",
        Saver,
        "_surface",
        _nothing,
        saver.test_a_failed_save_is_an_event_and_raises_at_the_next_call,
    ),
    Mutation("92 close", Saver, "close", _nothing, saver.test_a_failed_save_raises_at_close),
    Mutation(
        "93 format",
        ckpt.record,
        "FORMAT",
        2,
        damage.test_another_format_is_refused_and_says_who_wrote_it,
    ),
    Mutation("95 explicit", Catalog, "get", _newest_instead, source.test_an_explicit_step_that_is_missing_is_an_error),
    Mutation("97 one action", OrderDesk, "_give", _one_order_each, _two_answers_lost),
    Mutation(
        "97 kept",
        ckpt.saver,
        "write_checkpoint",
        _without_records,
        by_order.test_retention_leaves_what_was_saved_by_order,
    ),
    Mutation(
        "51 position",
        ckpt.source,
        "_chosen",
        _everybodys,
        source.test_a_worker_without_own_parts_takes_anothers_but_never_its_data_position,
    ),
    Mutation("Z15 proof", _Copy, "_prove", _nothing, transfers.test_an_upload_is_proven_and_a_lost_file_is_a_failure),
    Mutation("Z16 size", _Copy, "_holds", _true, _equal_size_on_memory),
    Mutation("Q1 code", ckpt.interop.dcp, "read_inert", _unpickle, interop.test_metadata_that_brings_code_is_data_only),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.row)
def test_the_check_fails_without_its_protection(
    tmp_path: Path, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation.where, mutation.what, mutation.by)
    with pytest.raises(NOTICED):
        mutation.check(tmp_path, *mutation.arguments)
