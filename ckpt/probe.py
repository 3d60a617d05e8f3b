"""Finding out at the start whether every configured place can be written, instead of hours later."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from ckpt.storage import Storage, read_whole, write_whole
from recovery.errors import BadConfiguration


def probe(storages: Iterable[Storage]) -> None:
    """Return if a file can be written to, read back from and removed from each storage.

    The file has a unique name, so that workers that start at once do not meet.

    Raises:
        BadConfiguration: one line for each storage that fails. All were tried.
    """
    failures = []
    for storage in storages:
        name = f".probe-{secrets.token_hex(16)}"
        content = secrets.token_bytes(64)
        try:
            write_whole(storage, name, content)
            try:
                if read_whole(storage, name) != content:
                    raise OSError("what was written is not what is read")
            finally:
                storage.delete(name)
        except OSError as error:
            failures.append(f"{storage.url}: {error}")
    if failures:
        raise BadConfiguration("checkpoints cannot be saved to " + "; ".join(failures))
