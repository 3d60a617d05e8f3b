"""Who may talk: bearer token, TLS, mutual TLS; the same for the coordinator, the operator and the peers.

Plaintext is for loopback, or for those who say ``insecure``. A server with TLS asks for a token or for a client
certificate, so that encryption alone never stands in for admission.
"""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from recovery.control.rpc_errors import abort_details
from recovery.errors import BadConfiguration, RunRefused

AUTHORIZATION = "authorization"
MIN_TOKEN_LENGTH = 8

# A probe of health by a load balancer or an orchestrator can carry no token, and its answer tells nothing.
_OPEN_METHODS = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityConfig:
    """How channels and servers are secured. Equal on all members of a run.

    Attributes:
        token: Bearer token that every call carries; empty: none. At least 8 characters.
        token_file: File whose stripped content is the token; empty: see ``token``.
        certificate_file: PEM chain of this process; empty: plaintext.
        key_file: PEM private key of ``certificate_file``.
        authority_file: PEM certificates that sign the other side's; on servers it turns mutual TLS on.
        tls_server_name: Name to expect in a server's certificate instead of the host that was dialled; for runs whose
            workers share one certificate. Empty: the host.
        insecure: Allow plaintext beyond loopback.
    """

    token: str = ""
    token_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    authority_file: str = ""
    tls_server_name: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise BadConfiguration("both a token and a token file are given: take one")
        if bool(self.certificate_file) != bool(self.key_file):
            raise BadConfiguration("a certificate needs its key and a key its certificate: give both files")

    @property
    def uses_tls(self) -> bool:
        """True: channels are encrypted."""
        return bool(self.certificate_file or self.authority_file)

    def bearer_token(self) -> str:
        """Return the token, from the file if one is named; empty: none.

        Raises:
            BadConfiguration: the file cannot be read, or the token is too short or not of visible ASCII.
        """
        token = _read_text("token file", self.token_file).strip() if self.token_file else self.token
        if (self.token or self.token_file) and (
            len(token) < MIN_TOKEN_LENGTH or not all(" " < character <= "~" for character in token)
        ):
            where = f"in {self.token_file}" if self.token_file else "given"
            raise BadConfiguration(
                f"the token {where} is not usable: take at least {MIN_TOKEN_LENGTH} visible ASCII characters, no spaces"
            )
        return token

    def check_host(self, host: str, *, what: str) -> None:
        """Refuse plaintext beyond loopback.

        Raises:
            BadConfiguration: ``host`` is not loopback, and neither TLS nor ``insecure`` is set.
        """
        if not self.uses_tls and not self.insecure and not is_loopback(host):
            raise BadConfiguration(
                f"{what} {host} is not loopback and the channel would be plaintext: "
                "give a certificate and a key file with a token or an authority file (--certificate, --key, "
                "--token-file, --authority), or allow it with --insecure"
            )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return credentials for a server; None: plaintext.

        Raises:
            BadConfiguration: files are missing, do not go together, or TLS would admit everybody.
        """
        if not self.uses_tls:
            return None
        if not self.certificate_file:
            raise BadConfiguration("a server with TLS needs a certificate file and a key file")
        if not self.authority_file and not self.bearer_token():
            raise BadConfiguration("TLS alone admits everybody: give an authority file (mutual TLS) or a token")
        self.check_files()
        return grpc.ssl_server_credentials(
            [(_read_bytes("key file", self.key_file), _read_bytes("certificate file", self.certificate_file))],
            root_certificates=_read_bytes("authority file", self.authority_file) if self.authority_file else None,
            require_client_auth=bool(self.authority_file),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return credentials for a client's channel; None: plaintext.

        Raises:
            BadConfiguration: a file cannot be read.
        """
        if not self.uses_tls:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read_bytes("authority file", self.authority_file) if self.authority_file else None,
            private_key=_read_bytes("key file", self.key_file) if self.key_file else None,
            certificate_chain=_read_bytes("certificate file", self.certificate_file) if self.certificate_file else None,
        )

    def check_files(self) -> None:
        """Refuse what gRPC would refuse later, and without a reason.

        Once, at the start: files that are being renewed may not go together for a moment, and a later attempt may.

        Raises:
            BadConfiguration: a file cannot be read or holds something else, or certificate and key do not match.
        """
        if self.certificate_file:
            if b"-----BEGIN CERTIFICATE-----" not in _read_bytes("certificate file", self.certificate_file):
                raise BadConfiguration(f"certificate file {self.certificate_file} holds no PEM certificate")
            if b"PRIVATE KEY-----" not in _read_bytes("key file", self.key_file):
                raise BadConfiguration(f"key file {self.key_file} holds no PEM private key")
            try:
                # An empty passphrase, or a protected key would be asked for on the terminal.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                    self.certificate_file, self.key_file, lambda: ""
                )
            except ssl.SSLError as error:
                pair = f"certificate file {self.certificate_file} and key file {self.key_file}"
                if error.reason == "KEY_VALUES_MISMATCH":
                    raise BadConfiguration(
                        f"{pair} do not belong together: the key is another certificate's"
                    ) from error
                raise BadConfiguration(
                    f"{pair} cannot be used ({error.reason or 'damaged, or the key has a passphrase'})"
                ) from error
        if self.authority_file:
            authority = _read_text("authority file", self.authority_file)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authority)
            except (ssl.SSLError, ValueError) as error:
                raise BadConfiguration(f"authority file {self.authority_file} holds no PEM certificates") from error

    def handshake_trouble(self, details: str) -> str:
        """Return what gRPC's words for a failed connection say about these credentials; empty: nothing."""
        said = details.lower()
        ended = "socket closed" in said or "connection reset" in said or "handshake failed" in said
        if not self.uses_tls:
            demands = "failed to connect" in said and "socket closed" in said
            return "it closed the connection at once: it may demand TLS (--authority FILE)" if demands else ""
        if "certificate_verify_failed" in said:
            if "expired" in said or "not yet valid" in said:
                return "its certificate is expired or not yet valid, or a clock is wrong"
            signers = f"--authority {self.authority_file}" if self.authority_file else "the system (give --authority)"
            return f"its certificate is not signed by {signers}"
        if "hostname verification" in said:
            return "its certificate is for another name: dial that name, or give it as --tls-server-name"
        if "wrong_version_number" in said:
            return "it does not talk TLS: leave the TLS files out, or give it a certificate"
        if ended and self.certificate_file:
            return f"it ended the TLS handshake: it may not trust --certificate {self.certificate_file}"
        return (
            "it ended the TLS handshake: it may demand a client certificate (--certificate FILE --key FILE)"
            if ended
            else ""
        )


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine only: ``localhost``, 127.0.0.0/8 or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _CallDetails(
    NamedTuple(
        "_CallDetails",
        [
            ("method", str),
            ("timeout", float | None),
            ("metadata", Any),
            ("credentials", Any),
            ("wait_for_ready", bool | None),
            ("compression", Any),
        ],
    ),
    grpc.ClientCallDetails,
):
    """gRPC's own details are an interface without a constructor."""


class TokenOnEveryCall(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the bearer token to each call of a channel. Unlike call credentials it also works on plaintext loopback."""

    def __init__(self, token: str) -> None:
        self._header = (AUTHORIZATION, f"Bearer {token}")

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._header],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)


class _Gate:
    """Decides from a call's metadata whether it may pass."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self.refusal = RunRefused("the token is missing or wrong: take the one that the run was started with")

    def admits(self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None) -> bool:
        if method.startswith(_OPEN_METHODS):
            return True
        given = next((value for key, value in metadata or () if key == AUTHORIZATION), "")
        # Constant time: how long a refusal takes must not tell how much of a guess was right.
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected)


class RequireToken(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the token, before their handler runs; for the peers' threaded server."""

    def __init__(self, token: str) -> None:
        self._gate = _Gate(token)
        self._refuse = _refusing_handlers(_abort_now(self._gate.refusal))

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or self._gate.admits(handler_call_details.method, handler_call_details.invocation_metadata):
            return handler
        return self._refuse(handler)


class RequireTokenAsync(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The same for the coordinator's ``grpc.aio`` server."""

    def __init__(self, token: str) -> None:
        self._gate = _Gate(token)
        self._refuse = _refusing_handlers(_abort_later(self._gate.refusal))

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        # None: there is no such method, which gRPC answers by itself.
        if handler is None or self._gate.admits(handler_call_details.method, handler_call_details.invocation_metadata):
            return handler
        return self._refuse(handler)


def _abort_now(refusal: RunRefused) -> Callable[[Any, Any], Any]:
    def behaviour(_request: Any, context: Any) -> Any:
        code, details, trailing = abort_details(refusal, grpc.StatusCode.UNAUTHENTICATED)
        context.set_trailing_metadata(trailing)
        context.abort(code, details)

    return behaviour


def _abort_later(refusal: RunRefused) -> Callable[[Any, Any], Any]:
    async def behaviour(_request: Any, context: Any) -> Any:
        code, details, trailing = abort_details(refusal, grpc.StatusCode.UNAUTHENTICATED)
        await context.abort(code, details, trailing)

    return behaviour


def _refusing_handlers(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def refusing(handler: Any) -> Any:
        # The handler's shape (unary or streaming) must stay the method's, or gRPC mixes up the two sides.
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    return refusing


def _read_bytes(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadConfiguration(f"{what} {path} cannot be read: {error.strerror}") from error


def _read_text(what: str, path: str) -> str:
    try:
        return _read_bytes(what, path).decode()
    except UnicodeDecodeError as error:
        raise BadConfiguration(f"{what} {path} is not text") from error
