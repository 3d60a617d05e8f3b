"""Traffic for the emulator's self-test, run inside its hosts: round trips, TCP flows, digests, datagrams.

Each mode prints ``ready`` once it can be reached, where it is a server, and its result as one line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import select
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable

PORT = 5001
_TCP_INFO_BYTES = 104
_RTT_OFFSET = 68
"""Of struct tcp_info: tcpi_rtt, in microseconds."""
_MAX_DATAGRAM = 2048
_DATAGRAM_BYTES = 200
_DATAGRAM_PORT = 9
_DATAGRAMS_TOGETHER = 20
_BUCKETS_PER_SECOND = 10


def _print(result: object) -> None:
    print(json.dumps(result) if not isinstance(result, str) else result, flush=True)


def _listen() -> socket.socket:
    listener = socket.create_server(("", PORT), backlog=128, reuse_port=False)
    _print("ready")
    return listener


def _connect(options: argparse.Namespace, congestion_control: str = "") -> socket.socket:
    deadline = time.monotonic() + options.dial_seconds
    while True:
        dialling = socket.socket()
        if congestion_control:
            dialling.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        dialling.settimeout(max(1.0, deadline - time.monotonic()))
        try:
            dialling.connect((options.to, PORT))
        except OSError:
            dialling.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return dialling


def serve(options: argparse.Namespace) -> None:
    """Accept TCP connections and answer datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("", PORT))
        deadline = time.monotonic() + options.seconds
        with _listen() as listener:
            while (left := deadline - time.monotonic()) > 0:
                for ready in select.select([listener, datagrams], [], [], left)[0]:
                    if ready is listener:
                        listener.accept()[0].close()
                    else:
                        datagrams.sendto(*datagrams.recvfrom(_MAX_DATAGRAM))


def round_trips(options: argparse.Namespace) -> None:
    """Print medians of the kernel's own figure for TCP handshakes and of a UDP echo between programs, in ms."""
    _connect(options).close()
    tcp, udp = [], []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(2)
        for number in range(options.repeat):
            with _connect(options) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                tcp.append(struct.unpack_from("I", info, _RTT_OFFSET)[0] / 1e3)
            began = time.perf_counter()
            datagrams.sendto(b"%d" % number, (options.to, PORT))
            while datagrams.recv(64) != b"%d" % number:
                pass
            udp.append((time.perf_counter() - began) * 1e3)
    _print({"tcp": statistics.median(tcp), "udp": statistics.median(udp)})


def receive(options: argparse.Namespace) -> None:
    """Count TCP bytes by tenths of a second; the rate is taken from ``skip`` seconds after the first byte on."""
    buckets: dict[int, int] = {}
    connections: dict[int, socket.socket] = {}
    began = 0.0
    opened = 0
    buffer = bytearray(1 << 20)
    poll = select.epoll()
    with _listen() as listener:
        poll.register(listener, select.EPOLLIN)
        deadline = time.monotonic() + options.seconds
        while time.monotonic() < deadline and not (opened and not connections):
            for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic())):
                if descriptor == listener.fileno():
                    accepted = listener.accept()[0]
                    connections[accepted.fileno()] = accepted
                    poll.register(accepted, select.EPOLLIN)
                    opened += 1
                    continue
                try:
                    got = connections[descriptor].recv_into(buffer)
                except OSError:
                    got = 0
                if not got:
                    poll.unregister(descriptor)
                    connections.pop(descriptor).close()
                    continue
                began = began or time.clock_gettime(time.CLOCK_BOOTTIME)
                at = int((time.clock_gettime(time.CLOCK_BOOTTIME) - began) * _BUCKETS_PER_SECOND)
                buckets[at] = buckets.get(at, 0) + got
    last = max(buckets, default=0)  # not a whole one
    first = int(options.skip * _BUCKETS_PER_SECOND)
    counted = sum(value for key, value in buckets.items() if first <= key < last)
    _print(
        {
            "flows": opened,
            "began": began,
            "mbit": counted * 8 / max(1, last - first) * _BUCKETS_PER_SECOND / 1e6,
            "buckets": [buckets.get(key, 0) for key in range(last)],
        }
    )


def send(options: argparse.Namespace) -> None:
    """Keep ``flows`` TCP flows as fast as they go."""
    data = bytes(256 << 10)

    def one() -> None:
        with _connect(options, options.congestion_control) as connection:
            connection.settimeout(0.5)
            deadline = time.monotonic() + options.seconds
            while time.monotonic() < deadline:
                try:
                    connection.send(data)
                except TimeoutError:
                    pass  # a cut or a slow link: look at the clock and go on
                except ConnectionError:
                    return
            # What is queued is not wanted any more: end at once.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    threads = [threading.Thread(target=one, name=f"flow-{number}", daemon=True) for number in range(options.flows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(options.seconds + 10)


def receive_digest(options: argparse.Namespace) -> None:
    """Print count and SHA-256 of what one connection brings."""
    digest, count = hashlib.sha256(), 0
    with _listen() as listener:
        listener.settimeout(options.seconds)
        with listener.accept()[0] as connection:
            connection.settimeout(options.seconds)
            while data := connection.recv(1 << 18):
                digest.update(data)
                count += len(data)
    _print({"bytes": count, "sha256": digest.hexdigest()})


def send_digest(options: argparse.Namespace) -> None:
    """Send random bytes in pieces of odd sizes and print count and SHA-256."""
    source, digest, count = random.Random(7), hashlib.sha256(), 0
    with _connect(options) as connection:
        connection.settimeout(options.seconds)
        while count < options.count:
            data = source.randbytes(source.choice((1, 7, 1447, 1448, 1449, 9000, 65536, 200001)))
            connection.sendall(data)
            digest.update(data)
            count += len(data)
    _print({"bytes": count, "sha256": digest.hexdigest()})


def blast(options: argparse.Namespace) -> None:
    """Send ``count`` datagrams, evenly spaced over ``seconds``."""
    began = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for number in range(options.count):
            datagrams.sendto(bytes(_DATAGRAM_BYTES), (options.to, _DATAGRAM_PORT))
            if number % _DATAGRAMS_TOGETHER == _DATAGRAMS_TOGETHER - 1:
                time.sleep(max(0.0, began + options.seconds * number / options.count - time.monotonic()))
    _print({"sent": options.count})


_MODES: dict[str, Callable[[argparse.Namespace], None]] = {
    "serve": serve,
    "round-trips": round_trips,
    "receive": receive,
    "send": send,
    "receive-digest": receive_digest,
    "send-digest": send_digest,
    "blast": blast,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=_MODES)
    parser.add_argument("--to", default="")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dial-seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--skip", type=float, default=0.0)
    parser.add_argument("--flows", type=int, default=1)
    parser.add_argument("--count", type=int, default=1 << 20)
    parser.add_argument("--congestion-control", default="cubic")
    options = parser.parse_args(arguments)
    _MODES[options.mode](options)


if __name__ == "__main__":
    main(sys.argv[1:])
