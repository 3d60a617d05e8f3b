"""How gRPC channels and servers of this project are set up: keepalive as the lease, caps, no surprises."""

from __future__ import annotations

from typing import Any

import grpc

from recovery.control.security import SecurityConfig, TokenOnEveryCall
from recovery.types import MIB, Address

MAX_MESSAGE_BYTES = 2 * MIB
"""No message of this project is longer: larger things come in pieces. A longer one ends its call, not the process."""

KEEPALIVE_MS = 1000
KEEPALIVE_TIMEOUT_MS = 2000

# A ping each second, answered by gRPC's own thread without the GIL: a process that is busy keeps its lease, one that is
# frozen or cut off is found after about 4 s. All three values are needed: `ping_timeout_ms` alone decides how long an
# unanswered ping counts as lost, and its default is a minute.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_KEEPALIVE,
    # The other side pings as often as we do; the default would end its connection with "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # With it two servers share a port in silence, and each gets half of the workers.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_KEEPALIVE,
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


def open_channel(address: Address, security: SecurityConfig, *, what: str) -> grpc.Channel:
    """Return a channel to ``address``; it connects at its first call. The caller closes it.

    Raises:
        BadConfiguration: plaintext beyond loopback, or a key, certificate or token file that cannot be used.
    """
    security.check_host(address.host, what=what)
    credentials = security.channel_credentials()
    options = list(CHANNEL_OPTIONS)
    if credentials is not None and security.tls_server_name:
        options.append(("grpc.ssl_target_name_override", security.tls_server_name))
    channel = (
        grpc.insecure_channel(str(address), options=options)
        if credentials is None
        else grpc.secure_channel(str(address), credentials, options=options)
    )
    token = security.bearer_token()
    return grpc.intercept_channel(channel, TokenOnEveryCall(token)) if token else channel
