"""How gRPC channels and servers of this project are set up: keepalive as the lease, caps, no surprises."""

from __future__ import annotations

import gc
import os
from typing import Any

import grpc

from recovery.control.security import SecurityConfig, TokenOnEveryCall
from recovery.types import MIB, Address

# A forked child must not collect what its parent let go of: gRPC's destructors spin there, for threads that it lacks.
os.register_at_fork(after_in_child=gc.freeze)

MAX_MESSAGE_BYTES = 2 * MIB
"""No message of this project is longer: larger things come in pieces. A longer one ends its call, not the process."""

PING_SECONDS = 0.5
PING_TIMEOUT_SECONDS = 2.0
"""How long the other side may leave a ping unanswered. With two pings a second a frozen or unreachable process is found
after 2 to 2.5 s; one on a link that its own transfers saturate wants more."""


def _keepalive(ping_timeout_seconds: float) -> tuple[tuple[str, Any], ...]:
    # Pings are answered by gRPC's own threads without the interpreter's lock: a process that is busy keeps its lease.
    # All three times are needed: `ping_timeout_ms` alone decides how long an unanswered ping may take, and its default
    # is a minute.
    timeout_ms = round(ping_timeout_seconds * 1000)
    return (
        ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


_SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    # The other side pings as often as we do; the default would end its connection with "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # With it two servers share a port in silence, and each gets half of the workers.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A proxy in the environment is meant for the web, not for the next machine of the run.
    ("grpc.enable_http_proxy", 0),
    # Each channel has a connection of its own: one that is lost or throttled does not touch the others.
    ("grpc.use_local_subchannel_pool", 1),
    # Retrying is the callers' affair: they know which calls may be made twice.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This one is also the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def server_options(ping_timeout_seconds: float = PING_TIMEOUT_SECONDS) -> list[tuple[str, Any]]:
    """Return the options of a server that finds a lost client by keepalive."""
    return [*_keepalive(ping_timeout_seconds), *_SERVER_OPTIONS]


def open_channel(
    address: Address,
    security: SecurityConfig,
    *,
    what: str,
    ping_timeout_seconds: float = PING_TIMEOUT_SECONDS,
) -> grpc.Channel:
    """Return a channel to ``address``; it connects at its first call. The caller closes it.

    Raises:
        BadConfiguration: plaintext beyond loopback, or a key, certificate or token file that cannot be used.
    """
    security.check_host(address.host, what=what)
    credentials = security.channel_credentials()
    options = [*_keepalive(ping_timeout_seconds), *_CHANNEL_OPTIONS]
    if credentials is not None and security.tls_server_name:
        options.append(("grpc.ssl_target_name_override", security.tls_server_name))
    channel = (
        grpc.insecure_channel(str(address), options=options)
        if credentials is None
        else grpc.secure_channel(str(address), credentials, options=options)
    )
    token = security.bearer_token()
    return grpc.intercept_channel(channel, TokenOnEveryCall(token)) if token else channel
