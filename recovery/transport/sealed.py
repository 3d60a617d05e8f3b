"""A link whose messages are sealed with AES-256-GCM: nobody between the ends can read, change, repeat or swap them.

Each end makes a key pair for one conversation and tells the other its public half over their authenticated stream; the
key itself never travels, and is gone with the conversation. A link carries payload in one direction only, so each key
has one sender, which counts its messages lane by lane: a nonce cannot occur twice.

A message on the wire: the sealed bytes, 16 bytes of tag, 12 bytes of nonce (lane, number of the message in its lane).
What the tag also covers: run, transfer, attempt, rendezvous and both public keys, and the message's own tag. That one
names the pull, and a pull's id stands for one range of one part in the letters that both ends have exchanged.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from recovery.errors import ChunkDamaged, DonorLost, DonorRefused
from recovery.transport.link import Link, Transfer, check_message
from recovery.types import KIB, MIB

_LABEL = b"recovery payload 1"
_KEY_BYTES = 32
_TAG_BYTES = 16
_NONCE = struct.Struct("<IQ")
OVERHEAD_BYTES = _TAG_BYTES + _NONCE.size
"""What sealing adds to each message."""

_BUFFER_STEP_BYTES = 64 * KIB
_KEPT_BYTES = 32 * MIB


class SealingKeys:
    """One end's key pair, for one conversation or one attempt.

    Attributes:
        public: What the other end is told, 32 bytes.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def seal(self, link: Link, far_public: bytes, *, donor: bool, context: Sequence[bytes], peer: str) -> SealedLink:
        """Return ``link`` with every message sealed under the key that only the two ends can know.

        Args:
            link: A new link, on which nothing was sent; owned from here on, closed if this raises.
            far_public: The other end's public key, as it came over the authenticated stream.
            donor: Whether this is the donor's end.
            context: What the two must agree on besides: run, transfer, attempt, rendezvous. Equal at both ends.
            peer: The other end's name, for errors.

        Raises:
            DonorRefused: ``far_public`` is not a usable key.
        """
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(far_public))
        except ValueError as error:
            link.close()
            raise DonorRefused(f"{peer} sent a sealing key that cannot be used: {error}") from error
        keys = (self.public, far_public) if donor else (far_public, self.public)
        about = b"".join(struct.pack("<I", len(word)) + word for word in (_LABEL, *keys, *context))
        key = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=about).derive(secret)
        return SealedLink(link, key, hashlib.sha256(about).digest(), peer)


class SealedLink:
    """Seals what the donor sends and opens what the joiner receives; all else is the link's that it wraps.

    A message that does not open raises ``ChunkDamaged`` from the receive's ``wait``: the memory may hold anything, the
    link can be used on. Opening and sealing run on the threads that wait and post, without the interpreter's lock.

    Args:
        link: What carries the sealed messages; owned from here on.
        key: 32 bytes, of this link alone.
        about: What every message is bound to; equal at both ends.
        peer: The other end's name.
    """

    def __init__(self, link: Link, key: bytes, about: bytes, peer: str) -> None:
        self._link = link
        self._cipher = AESGCM(key)
        self._about = about
        self._peer = peer
        self._lanes = [_Lane() for _ in range(link.lanes)]
        self._buffers = _Buffers()
        self._shut_reason: str | None = None

    @property
    def lanes(self) -> int:
        return self._link.lanes

    def send(self, lane: int, tag: int, data: torch.Tensor) -> Transfer:
        check_message(lane, self.lanes, tag, data)
        num_bytes = data.numel()
        buffer = self._buffers.take(num_bytes + OVERHEAD_BYTES)
        message = buffer[: num_bytes + OVERHEAD_BYTES]
        with self._lanes[lane].working:
            self._check_shut()
            nonce = _NONCE.pack(lane, self._lanes[lane].next_number())
            whole = _bytes_of(message)
            self._cipher.encrypt_into(nonce, _bytes_of(data), self._bound_to(tag), whole[: num_bytes + _TAG_BYTES])
            whole[num_bytes + _TAG_BYTES :] = nonce
            transfer = self._link.send(lane, tag, message)
        return _SealedSend(transfer, self._buffers, buffer)

    def receive(self, lane: int, tag: int, into: torch.Tensor) -> Transfer:
        check_message(lane, self.lanes, tag, into)
        buffer = self._buffers.take(into.numel() + OVERHEAD_BYTES)
        transfer = self._link.receive(lane, tag, buffer[: into.numel() + OVERHEAD_BYTES])
        return _SealedReceive(self, transfer, lane, tag, into, buffer)

    def shut(self, reason: str) -> None:
        self._shut_reason = self._shut_reason or reason
        self._link.shut(reason)
        # From here on nobody begins to read or write the caller's memory; who is at it ends within a message's time.
        for lane in self._lanes:
            with lane.working:
                pass

    def close(self) -> None:
        self.shut("closed")
        self._link.close()
        self._buffers.close()

    def endpoints(self) -> list[str]:
        return self._link.endpoints()

    def bytes_moved(self) -> int:
        return self._link.bytes_moved()

    def round_trip_seconds(self) -> float | None:
        return self._link.round_trip_seconds()

    def open(self, lane: int, tag: int, buffer: torch.Tensor, into: torch.Tensor) -> None:
        """Write a received message's bytes, checked, to ``into``, and take its buffer back.

        Raises:
            ChunkDamaged: it was not sealed by the other end for this pull.
            DonorLost: the link was shut; ``into`` was not touched.
        """
        num_bytes = into.numel()
        whole = _bytes_of(buffer)
        nonce = bytes(whole[num_bytes + _TAG_BYTES : num_bytes + OVERHEAD_BYTES])
        with self._lanes[lane].working:
            self._check_shut()
            try:
                self._cipher.decrypt_into(nonce, whole[: num_bytes + _TAG_BYTES], self._bound_to(tag), _bytes_of(into))
            except InvalidTag as error:
                raise ChunkDamaged(
                    f"{self._peer}: {num_bytes} bytes on lane {lane} are not what it sealed: they were changed on the "
                    "way, or somebody else sent them"
                ) from error
            finally:
                self._buffers.give(buffer)

    def _bound_to(self, tag: int) -> bytes:
        return self._about + struct.pack("<I", tag)

    def _check_shut(self) -> None:
        if self._shut_reason is not None:
            raise DonorLost(f"the link was shut: {self._shut_reason}")


class _Lane:
    """``working`` is held while the caller's memory of this lane is read or written."""

    def __init__(self) -> None:
        self.working = threading.Lock()
        self._sent = 0

    def next_number(self) -> int:
        self._sent += 1
        return self._sent


class _SealedSend:
    """A send of the sealed bytes: the plain ones were read when it was posted."""

    def __init__(self, transfer: Transfer, buffers: _Buffers, buffer: torch.Tensor) -> None:
        self._transfer = transfer
        self._buffers = buffers
        self._buffer = buffer

    def wait(self, timeout_seconds: float) -> None:
        self._transfer.wait(timeout_seconds)
        # If it raises, the buffer stays the link's.
        self._buffers.give(self._buffer)


class _SealedReceive:
    def __init__(
        self, link: SealedLink, transfer: Transfer, lane: int, tag: int, into: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        self._link = link
        self._transfer = transfer
        self._lane = lane
        self._tag = tag
        self._into = into
        self._buffer = buffer

    def wait(self, timeout_seconds: float) -> None:
        self._transfer.wait(timeout_seconds)
        self._link.open(self._lane, self._tag, self._buffer, self._into)


class _Buffers:
    """Memory for sealed messages, used again: its first touch costs more than sealing. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._free_bytes = 0
        self._closed = False

    def take(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            fitting = [index for index, each in enumerate(self._free) if num_bytes <= each.numel()]
            if fitting:
                buffer = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
                self._free_bytes -= buffer.numel()
                return buffer
        steps = -(-num_bytes // _BUFFER_STEP_BYTES)
        return torch.empty(steps * _BUFFER_STEP_BYTES, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            if not self._closed and self._free_bytes + buffer.numel() <= _KEPT_BYTES:
                self._free.append(buffer)
                self._free_bytes += buffer.numel()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free.clear()
            self._free_bytes = 0


def _bytes_of(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on
