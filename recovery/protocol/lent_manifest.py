"""Whether a manifest that a donor sent is one that the joiner asked for."""

from __future__ import annotations

from recovery.errors import ManifestRejected
from recovery.protocol.ports import AT_A_CUT, JOURNAL, OUTER, Attempt, Role
from recovery.state.manifest import Manifest, PartSpec
from recovery.types import PartClass


def check_manifest(attempt: Attempt, donor: str, role: Role, manifest: Manifest) -> None:
    """Refuse what does not belong to the run, the version, the fingerprint or the role that ``attempt`` names.

    Raises:
        ManifestRejected: names the donor, what it lends and what was wanted.
    """
    cut = manifest.cut.version
    if manifest.run_id != attempt.run_id:
        raise ManifestRejected(f"{donor} lends a state of run {manifest.run_id!r}, not {attempt.run_id!r}")
    wanted_class = PartClass.PRIVATE_COPIED if role in AT_A_CUT else PartClass.REPLICATED
    for part in manifest.parts:
        if part.part_class is not wanted_class:
            raise ManifestRejected(f"{donor} lists {part.name!r} ({part.part_class.value}) where it does not belong")
    if role == OUTER and (cut, manifest.fingerprint) != (attempt.version, attempt.fingerprint):
        raise ManifestRejected(
            f"{donor} lends {cut} with fingerprint {manifest.fingerprint.hex()[:12]}; "
            f"wanted is {attempt.version} with {attempt.fingerprint.hex()[:12]}"
        )
    if role == JOURNAL and cut != attempt.version:
        raise ManifestRejected(f"{donor} lends the journal of {cut}; wanted is {attempt.version}")
    if role in AT_A_CUT and (cut.lineage != attempt.version.lineage or cut < attempt.version):
        raise ManifestRejected(f"{donor} lends private parts of {cut}; wanted is {attempt.version} or later")


def same_content(one: Manifest, other: Manifest) -> bool:
    """Return whether two donors lend the same replicated parts, byte for byte."""
    return [_content(part) for part in one.parts] == [_content(part) for part in other.parts]


def _content(part: PartSpec) -> tuple[object, ...]:
    return (part.name, part.part_class, part.num_bytes, part.chunks)
