"""Emulated wide-area links between network namespaces of this machine.

  wan up [OPTIONS]                        start an instance, print it as JSON
  wan run [OPTIONS] -- CMD...             up, run CMD with WAN_INSTANCE set, down
  wan exec [INSTANCE] HOST -- CMD...      run CMD in a host
  wan set [INSTANCE] TARGET KEY VALUE...  change settings while it runs
  wan cut|heal [INSTANCE] TARGET...       drop everything there / let it pass again
  wan stats [INSTANCE] [--reset]          counters as JSON (--reset: then zero them)
  wan show [INSTANCE]                     settings as JSON
  wan list                                instances as JSON
  wan down INSTANCE... | --all            remove instances; no error if gone already
  wan gc                                  remove instances whose daemon has died

`wan` stands for `python -m tests.support.wan`. INSTANCE may be left out where
WAN_INSTANCE is set or only one instance is up. TARGET: all, a host `a`, a
direction `a:b`, both directions `a-b`.

KEYS of a host (what the host sends, but for the down ones):
  rate R | up R | down R        500mbit, 2gbit, 0 for unlimited; rate sets both
  delay T | rtt T | jitter T    40ms; delay is one-way, rtt is twice the delay
  loss P | lossdown P           1% or 0.01, for each packet
  ge G | gedown G               Gilbert-Elliott p/r[/lossbad[/lossgood]], or off
  queue S | upqueue S | downqueue S      bytes, 512k, or auto
KEYS of a pair, in place of its sending host's: delay, rtt, jitter, loss; or `default`.

Needs root, Linux, iproute2, gcc. State lies in $WAN_STATE_DIR (/run/recovery-wan), the
compiled daemon in $WAN_CACHE_DIR (below ~/.cache).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from tests.support.wan import control, instance
from tests.support.wan.config import INSTANCE, SHAPING, WanConfig
from tests.support.wan.errors import Interrupted, WanError
from tests.support.wan.network import Wan
from tests.support.wan.registry import Place, find, instances

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHILD_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Carry out one command and return its exit status."""
    words, tail = list(arguments), list[str]()
    if "--" in words:
        at = words.index("--")
        words, tail = words[:at], words[at + 1 :]
    if not words or words[0] in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
        return 0 if words else 2
    command = words.pop(0)
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        if command == "exec":
            _exec(words, tail)
        if command == "run":
            status = _run(words, tail)
            return status if status >= 0 else 128 - status
        if command not in _COMMANDS:
            raise WanError(f"unknown command {command!r}; see --help")
        answer = _COMMANDS[command](words)
        if answer or command == "list":
            print(json.dumps(answer, indent=1))
        return 0
    except WanError as error:
        print(f"wan: {error}", file=sys.stderr)
        return 1
    except Interrupted as stop:
        return 128 + stop.number


def _up(words: list[str]) -> dict[str, Any]:
    return _described(_set_up("up", words))


def _set_up(command: str, words: list[str]) -> Place:
    config = config_from(_parser(f"wan {command}").parse_args(words))
    return instance.set_up(config)


def _described(place: Place) -> dict[str, Any]:
    record = Wan(place).record
    return {**record.as_json(), "state": str(place.folder), "control": str(place.control)}


def _down(words: list[str]) -> dict[str, str]:
    if words == ["--all"]:
        words = instances()
    elif not words or any(not INSTANCE.fullmatch(word) for word in words):
        raise WanError("usage: wan down INSTANCE... | --all")
    with _shielded():
        return {word: "removed" if instance.take_down(word) else "nothing there" for word in words}


def _gc(words: list[str]) -> dict[str, str]:
    del words
    removed = {}
    for name in instances():
        place = Place(name)
        try:
            with place.locked(0), _shielded():
                if not instance.is_alive(place):
                    instance.remove(place)
                    removed[name] = "removed"
        except WanError:
            continue  # another command is at it
    return removed


def _list(words: list[str]) -> dict[str, Any]:
    del words
    return {
        name: {"alive": instance.is_alive(Place(name)), **(record.as_json() if record is not None else {})}
        for name in instances()
        for record in [Place(name).load()]
    }


def _exec(words: list[str], tail: list[str]) -> NoReturn:
    wan = Wan(_pick(words))
    if len(words) != 1 or not tail:
        raise WanError(f"usage: wan exec [INSTANCE] HOST -- CMD...; hosts: {' '.join(wan.record.hosts)}")
    command = [*wan.prefix(words[0]), *tail]
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, "WAN_INSTANCE": wan.place.instance})
    except OSError as error:
        raise WanError(f"{command[0]}: {error.strerror}") from error


def _run(words: list[str], tail: list[str]) -> int:
    if not tail:
        raise WanError("usage: wan run [OPTIONS] -- CMD...")
    place = _set_up("run", words)
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(tail, env={**os.environ, "WAN_INSTANCE": place.instance})
        return process.wait()
    except OSError as error:
        raise WanError(f"{tail[0]}: {error.strerror}") from error
    except Interrupted:
        if process is not None:
            process.terminate()
        raise
    finally:
        with _shielded():
            instance.take_down(place.instance)
            if process is not None:
                try:
                    process.wait(_CHILD_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _stats(words: list[str]) -> dict[str, Any]:
    reset = "--reset" in words
    rest = [word for word in words if word != "--reset"]
    place = _pick(rest)
    if rest:
        raise WanError("usage: wan stats [INSTANCE] [--reset]")
    found = control.raw_stats(place)
    if reset:
        control.ask(place, "reset")
    return found


def _sender(command: str) -> Callable[[list[str]], dict[str, Any]]:
    def send(words: list[str]) -> dict[str, Any]:
        place = _pick(words)
        return control.ask(place, " ".join([command, *words]))

    return send


_COMMANDS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "up": _up,
    "down": _down,
    "gc": _gc,
    "list": _list,
    "stats": _stats,
    **{name: _sender(name) for name in ("show", "set", "cut", "heal")},
}


def _pick(words: list[str]) -> Place:
    """Take the instance off the front of the words, or find the one that is meant."""
    return find(words.pop(0) if words and INSTANCE.fullmatch(words[0]) else None)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Start an instance.", epilog="Keys: see wan --help.")
    parser.add_argument("--hosts", default="", help="names, such as a,b,c")
    parser.add_argument(
        *("--host",),
        action="append",
        default=[],
        metavar="NAME[,KEY=VALUE...]",
        help="a host with settings of its own, such as a,up=500mbit,down=1gbit,delay=40ms",
    )
    parser.add_argument(
        *("--path",),
        action="append",
        default=[],
        metavar="A:B|A-B,KEY=VALUE...",
        help="settings of one direction or pair, such as a-b,rtt=60ms",
    )
    parser.add_argument("--root", metavar="NAME", help="make the machine's own namespace a member of this name")
    for key in SHAPING:
        parser.add_argument(f"--{key}", metavar="V", help=f"{key} of every host")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1, help="of random losses and jitter (default 1)")
    parser.add_argument("--gso", choices=("on", "off"), default="on", help="segmentation offload (default on)")
    parser.add_argument("--quantum", default="100us", help="shortest time between rounds of the daemon")
    parser.add_argument("--memory", default="1g", help="most memory for packets (default 1g)")
    parser.add_argument("--rt", choices=("on", "off"), default="on", help="real-time scheduling of the daemon")
    parser.add_argument("--cc", help="TCP congestion control in the hosts")
    parser.add_argument("--tcpbuf", metavar="BYTES", type=int, default=0, help="largest TCP buffers in the hosts")
    parser.add_argument("--sysctl", action="append", default=[], metavar="KEY=VALUE", help="set this in the hosts")
    parser.add_argument("--subnet", default="10.77.0.0/24")
    parser.add_argument("--id", default="", help="instance id: a digit, then 1 to 9 of a-z 0-9 (default: drawn)")
    parser.add_argument("--ttl", type=float, default=0, metavar="SECONDS", help="go down by itself after this")
    return parser


def config_from(options: argparse.Namespace) -> WanConfig:
    """Return what the options of ``up`` ask for.

    Raises:
        WanError: they make no sense.
    """
    hosts: dict[str, dict[str, str]] = {}
    names = [*filter(None, options.hosts.split(",")), *(spec.split(",")[0] for spec in options.host)]
    for name in names:
        hosts[name] = {}
    if len(set(filter(None, options.hosts.split(",")))) != len([*filter(None, options.hosts.split(","))]):
        raise WanError("a host is named twice")
    for spec in options.host:
        name, *rest = spec.split(",")
        hosts[name].update(_settings(rest))
    return WanConfig(
        hosts=hosts,
        every={key: value for key in SHAPING if (value := getattr(options, key)) is not None},
        paths={target: _settings(rest) for target, *rest in (spec.split(",") for spec in options.path)},
        own=options.root,
        mtu=options.mtu,
        seed=options.seed,
        segmentation_offload=options.gso == "on",
        quantum=options.quantum,
        memory=options.memory,
        realtime=options.rt == "on",
        congestion_control=options.cc,
        tcp_buffer_bytes=options.tcpbuf,
        sysctls=_settings(options.sysctl),
        subnet=options.subnet,
        instance=options.id,
        ttl_seconds=options.ttl,
    )


def _settings(words: list[str]) -> dict[str, str]:
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise WanError(f"bad setting {word!r}: KEY=VALUE")
        settings[key] = value
    return settings


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Finish what we are at, whatever signal comes."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    yield


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    for each in _SIGNALS:  # what follows is clearing up, which a second signal must not cut short
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)
