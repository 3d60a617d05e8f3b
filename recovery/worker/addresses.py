"""Which of this machine's addresses a peer reaches it at."""

from __future__ import annotations

import socket

from recovery.errors import CoordinatorUnreachable
from recovery.types import Address


def host_towards(coordinator: str) -> str:
    """Return the local address from which packets to ``coordinator`` (``host:port``) leave. Sends nothing.

    Raises:
        CoordinatorUnreachable: the host name has no address, or no route leads there.
    """
    target = Address.parse(coordinator)
    try:
        family, _, _, _, destination = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CoordinatorUnreachable(
            f"no route to the coordinator {coordinator}: {error.strerror or error}: check the address, or set data_host"
        ) from error
