"""Cuts the path of chosen connections of this process: what arrives is thrown away before TCP sees it.

The kernel does it, by a filter on the socket that lets nothing pass: data, acknowledgements and closes vanish, both
ends keep an open connection, and nobody is told. A filter needs no privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Sequence

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_SO_MEMINFO = 55
_DROPS = 8
"""Index into the 32-bit words of SO_MEMINFO: packets that this socket dropped."""

_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)


def cut(sockets: Sequence[socket.socket]) -> None:
    """Let nothing reach these sockets any more."""
    code = ctypes.create_string_buffer(_RETURN_NOTHING)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def mend(sockets: Sequence[socket.socket]) -> None:
    """Let everything pass again, on those that are still open."""
    for each in sockets:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def dropped(sockets: Sequence[socket.socket]) -> int:
    """Return how many packets vanished: the proof that the cut was felt."""
    words = [struct.unpack("=9I", each.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36)) for each in sockets]
    return sum(each[_DROPS] for each in words)
