"""Where a coordinator listens: whether an address is free, and the file that tells others which it became."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from recovery.errors import BadConfiguration
from recovery.types import Address


def check_free(address: Address) -> None:
    """Refuse an address that cannot be bound, with the system's reason: gRPC itself only says that it failed.

    Raises:
        BadConfiguration: the port is taken, not permitted, or the address is not this machine's.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BadConfiguration(f"cannot listen on {address}: the host name is not known ({error.strerror})") from error
    family, kind, protocol, _, name = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(name)
            probe.listen()
        except OSError as error:
            what = {
                errno.EADDRINUSE: "the port is in use by another process: stop it, or take another port (0: any free)",
                errno.EADDRNOTAVAIL: "the address is not this machine's",
                errno.EACCES: "the port needs more privileges: take one above 1023",
            }.get(error.errno or 0, os.strerror(error.errno or 0))
            raise BadConfiguration(f"cannot listen on {address}: {what}") from error


def write_port_file(path: Path, address: Address) -> None:
    """Write ``host:port`` so that a reader sees the whole of it or no file.

    Raises:
        BadConfiguration: the folder does not exist or cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(f"{address}\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BadConfiguration(f"port file {path} cannot be written: {error.strerror}") from error
