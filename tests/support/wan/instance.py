"""Sets an instance up and removes it, whatever stage it is in."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.wan import namespaces, processes
from tests.support.wan.build import daemon_binary
from tests.support.wan.config import WanConfig
from tests.support.wan.errors import WanError
from tests.support.wan.registry import HostRecord, Place, Record, reserve, root

_ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS = 10.0
_LOCK_SECONDS = 15.0


def set_up(config: WanConfig) -> Place:
    """Start an instance and return its place. If anything fails, also a signal, nothing is left behind.

    Raises:
        WanError: with what failed.
    """
    place = reserve(config.instance)
    try:
        with place.locked(0) as mine:
            if not mine:
                raise WanError(f"instance {place.instance} was removed while it was set up")
            _start(place, config)
    except BaseException:
        remove(place)
        raise
    return place


def take_down(instance: str) -> bool:
    """Remove an instance; return whether there was anything to remove. May be repeated."""
    place = Place(instance)
    with place.locked(_LOCK_SECONDS):
        return remove(place)


def is_alive(place: Place) -> bool:
    """Return whether the instance's daemon runs."""
    found = processes.process_with_argument(place.pid_file, str(place.control))
    if found is None:
        return False
    os.close(found[1])
    return True


def remove(place: Place) -> bool:
    """End the programs in the instance's namespaces, then its daemon; delete namespaces, route and folder.

    Safe at any stage and repeatedly. Namespaces are found by name, so that a lost record loses nothing.

    Raises:
        WanError: a namespace cannot be deleted.
    """
    record = place.load()
    names = namespaces.existing(place.instance)
    found = processes.process_with_argument(place.pid_file, str(place.control))
    if found is not None and found[0] == os.getpid():  # the daemon's time ran out and it became this process
        os.close(found[1])
        found = None
    for _ in range(3):  # again for those that were started while we looked
        handles = processes.inhabitants([namespaces.FOLDER / name for name in names])
        if not handles:
            break
        processes.end(handles, 1.0)
    if found is not None:
        processes.end([found[1]], 3.0)
    if record is not None and record.pid:
        with contextlib.suppress(ChildProcessError):  # another process started it
            os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOHANG)
    failures = []
    for name in names:
        try:
            namespaces.delete(name)
        except WanError as error:
            failures.append(str(error))
    if record is not None and record.guarded:
        namespaces.unguard(record.subnet)
    if failures:
        raise WanError("; ".join(failures))
    shutil.rmtree(place.folder, ignore_errors=True)
    return bool(record or names or found)


def _start(place: Place, config: WanConfig) -> None:
    binary = daemon_binary()
    network = config.network
    hosts = {}
    for index, name in enumerate(config.names):
        own = name == config.own
        hosts[name] = HostRecord(
            namespace=None if own else namespaces.name_of(name, place.instance),
            address=str(network[index + 1]),
            device=f"wan-{place.instance}" if own else "wan0",
        )
    record = Record(instance=place.instance, hosts=hosts, subnet=str(network), mtu=config.mtu, seed=config.seed)
    place.save(record)  # first, so that whoever removes it knows what there may be
    for host in hosts.values():
        if host.namespace is not None:
            namespaces.create(host.namespace)
    record.pid = _start_daemon(place, binary, config, hosts)
    sysctls = namespaces.sysctl_script(config.all_sysctls())
    for host in hosts.values():
        links = namespaces.link_batch(
            device=host.device,
            address=host.address,
            network=network,
            mtu=config.mtu,
            congestion_control=config.congestion_control,
        )
        if host.namespace is not None:
            namespaces.bring_up(host.namespace, host.device, links=links, sysctls=sysctls)
            continue
        namespaces.guard(network)
        record.guarded = True
        place.save(record)
        namespaces.bring_up_own(host.device, links=links)
    place.save(record)


def _start_daemon(place: Place, binary: Path, config: WanConfig, hosts: dict[str, HostRecord]) -> int:
    arguments = [
        *(str(binary), "-s", str(place.control), "-p", str(place.pid_file), "-S", str(config.seed)),
        *("-q", config.quantum, "-m", config.memory),
        *("-g", str(int(config.segmentation_offload)), "-r", str(int(config.realtime))),
    ]
    if config.ttl_seconds:
        arguments += ["-t", str(config.ttl_seconds)]
        for word in _removal(place.instance):
            arguments += ["-x", word]
    for name, host in hosts.items():
        where = str(namespaces.FOLDER / host.namespace) if host.namespace else "-"
        arguments += ["-H", ",".join((name, host.address, host.device, where))]
    for command in config.commands():
        arguments += ["-c", command]
    with place.log.open("wb") as log:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # it outlives the command that starts it
            cwd="/",
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            readable = select.select([process.stdout], [], [], _START_SECONDS)[0]
            if not readable or process.stdout.read(6) != b"ready\n":
                raise WanError(f"the daemon did not start: {place.log.read_text().strip()}")
        except BaseException:
            process.kill()  # a child that was not waited for yet: the pid is certainly its
            process.wait()
            raise
    # It may outlive this process, and ``remove`` ends it by its handle: Popen is not to wait for it or complain.
    process.returncode = 0
    return process.pid


def _removal(instance: str) -> list[str]:
    """Return the command that the daemon becomes when the instance's time is over."""
    python = [sys.executable, "-m", "tests.support.wan", "down", instance]
    return ["/usr/bin/env", f"PYTHONPATH={_ROOT}", f"WAN_STATE_DIR={root()}", *python]
