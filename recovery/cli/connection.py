"""What every operator's command shares: where the coordinator is, which run, credentials, output; defined once.

``connected`` gives a command function these options, opens the client, and hands both to it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from recovery.cli.output import Output
from recovery.control.operator_client import OperatorClient
from recovery.control.security import SecurityConfig
from recovery.types import Address

DEFAULT_ADDRESS = "127.0.0.1:7440"
"""Where a coordinator listens, and its operators look for it, unless told otherwise."""

Coordinator = Annotated[
    str,
    typer.Option("--coordinator", envvar="RECOVERY_COORDINATOR", help="The coordinator's address, host:port."),
]
RunOption = Annotated[
    str,
    typer.Option("--run-id", envvar="RECOVERY_RUN_ID", help="Refuse a coordinator of another run. Empty: any run."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        envvar="RECOVERY_TOKEN_FILE",
        help="File with the run's bearer token. The token itself may stand in RECOVERY_TOKEN.",
    ),
]
Certificate = Annotated[
    str, typer.Option("--certificate", envvar="RECOVERY_CERTIFICATE_FILE", help="PEM certificate of this side.")
]
Key = Annotated[str, typer.Option("--key", envvar="RECOVERY_KEY_FILE", help="PEM key of the certificate.")]
Authority = Annotated[
    str,
    typer.Option("--authority", envvar="RECOVERY_AUTHORITY_FILE", help="PEM certificates that sign the other side's."),
]
ServerName = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        envvar="RECOVERY_TLS_SERVER_NAME",
        help="Name in the server's certificate, if not the host.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", envvar="RECOVERY_INSECURE", help="Allow plaintext beyond loopback.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Deadline of the whole request, in seconds.")]
RequestId = Annotated[
    str, typer.Option("--request-id", help="The same id again returns the first answer instead of acting twice.")
]

SECURITY_OPTIONS: dict[str, Any] = {
    "token_file": TokenFile,
    "certificate": Certificate,
    "key": Key,
    "authority": Authority,
    "tls_server_name": ServerName,
    "insecure": Insecure,
}

_CONNECTION_OPTIONS: dict[str, Any] = {
    "coordinator": Coordinator,
    "run_id": RunOption,
    "as_json": JsonOption,
    **SECURITY_OPTIONS,
}


def security_from(options: dict[str, Any]) -> SecurityConfig:
    """Take the credentials' options out of ``options`` and return what they mean."""
    token_file = options.pop("token_file")
    return SecurityConfig(
        # Never an option: arguments are visible to every user of the machine.
        token="" if token_file else os.environ.get("RECOVERY_TOKEN", ""),
        token_file=token_file,
        certificate_file=options.pop("certificate"),
        key_file=options.pop("key"),
        authority_file=options.pop("authority"),
        tls_server_name=options.pop("tls_server_name"),
        insecure=options.pop("insecure"),
    )


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the shared options on top of its own.

    ``command`` takes an ``OperatorClient`` and an ``Output`` first, then its own options by name.
    """

    def wrapper(**options: Any) -> None:
        security = security_from(options)
        address = options.pop("coordinator") or DEFAULT_ADDRESS
        run_id = options.pop("run_id")
        output = Output(as_json=options.pop("as_json"))
        with OperatorClient(Address.parse(address), security, run_id=run_id) as client:
            command(client, output, **options)

    return with_options(wrapper, command, _CONNECTION_OPTIONS, num_given=2)


def with_options(
    wrapper: Callable[..., None], command: Callable[..., None], options: dict[str, Any], *, num_given: int
) -> Callable[..., None]:
    """Give ``wrapper`` the signature of ``command`` without its first ``num_given`` parameters, and ``options``.

    Typer reads options from the signature; this is how several commands share some without repeating them.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[num_given:]
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=annotation,
            default=_default(annotation),
        )
        for name, annotation in options.items()
    ]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + shared
    functools.update_wrapper(wrapper, command)
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # or inspect would show the command's own signature
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
    return wrapper


def _default(annotation: Any) -> str | bool:
    if annotation is Coordinator:
        return DEFAULT_ADDRESS
    return False if annotation in (JsonOption, Insecure) else ""
