"""Network namespaces: made, set up and deleted by name. A namespace is one host of an instance."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tests.support.wan.commands import output_of
from tests.support.wan.errors import WanError

FOLDER = Path("/run/netns")
HOST = re.compile(r"[a-z][a-z0-9]{0,11}")
_GUARD_METRIC = "4200000000"


def name_of(host: str, instance: str) -> str:
    """Return the name of a host's namespace; unique because an instance's id is."""
    return f"wan-{host}-{instance}"


def existing(instance: str) -> list[str]:
    """Return the namespaces of an instance, known by their names alone."""
    form = re.compile(rf"wan-{HOST.pattern}-{re.escape(instance)}")
    try:
        return sorted(entry.name for entry in FOLDER.iterdir() if form.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def create(name: str) -> None:
    output_of("ip", "netns", "add", name)


def delete(name: str) -> None:
    """Delete a namespace; no error if it is gone already."""
    try:
        output_of("ip", "netns", "del", name)
    except WanError:
        if (FOLDER / name).exists():
            raise


def bring_up(name: str, device: str, *, links: str, sysctls: str) -> None:
    """Give a namespace its address and routes; ``links`` and ``sysctls`` as ``link_batch`` and ``sysctl_script``."""
    output_of("ip", "netns", "exec", name, "sh", "-c", _no_ipv6(device) + sysctls)
    output_of("ip", "-n", name, "-batch", "-", text="link set lo up\n" + links)


def bring_up_own(device: str, *, links: str) -> None:
    """Make the machine's own namespace a member; after ``guard``."""
    output_of("sh", "-c", _no_ipv6(device))
    output_of("ip", "-batch", "-", text=links)


def guard(network: ipaddress.IPv4Network) -> None:
    """Keep packets to the instance's network on this machine, also when the device has gone.

    Raises:
        WanError: the machine has a route to these addresses already.
    """
    for route in json.loads(output_of("ip", "-j", "-4", "route", "show", "table", "all")):
        if route["dst"] == "default":
            continue
        if ipaddress.IPv4Network(route["dst"], strict=False).overlaps(network):
            raise WanError(f"this machine has a route to {route['dst']}: choose another subnet")
    output_of("ip", "-4", "route", "add", "unreachable", str(network), "metric", _GUARD_METRIC)


def unguard(network: str) -> None:
    """Undo ``guard``; no error if it is undone already."""
    try:
        output_of("ip", "-4", "route", "del", "unreachable", network, "metric", _GUARD_METRIC)
    except WanError as error:
        if "No such process" not in str(error):
            raise


def link_batch(
    *, device: str, address: str, network: ipaddress.IPv4Network, mtu: int, congestion_control: str | None
) -> str:
    """Return commands for ``ip -batch`` that give a device its address."""
    lines = [
        f"link set {device} mtu {mtu} txqueuelen 4096",
        f"addr add {address}/{network.prefixlen} dev {device}",
        f"link set {device} up",
    ]
    if congestion_control:
        # By route: the sysctl takes only what the machine allows to everybody.
        lines.append(
            f"route change {network} dev {device} proto kernel scope link src {address} congctl {congestion_control}"
        )
    return "\n".join(lines) + "\n"


def sysctl_script(settings: Sequence[tuple[str, str]]) -> str:
    """Return a shell script that writes these settings.

    Raises:
        WanError: a key or value with characters that none has.
    """
    lines = []
    for key, value in settings:
        if not re.fullmatch(r"[A-Za-z0-9_./-]+", key) or not re.fullmatch(r"[A-Za-z0-9_. -]+", value):
            raise WanError(f"bad sysctl {key}={value}")
        lines.append(f"echo '{value}' >/proc/sys/{key.replace('.', '/')} || exit 1")
    return "\n".join(lines) + "\n"


def device_drops(name: str | None, device: str) -> int:
    """Return how many packets a host's device itself had to drop; ``name`` None: the machine's own namespace."""
    where = ["-n", name] if name else []
    shown = json.loads(output_of("ip", *where, "-s", "-j", "link", "show", device))
    return int(shown[0]["stats64"]["tx"]["dropped"])


def _no_ipv6(device: str) -> str:
    file = f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6"
    return f"[ ! -e {file} ] || echo 1 >{file}\n"
