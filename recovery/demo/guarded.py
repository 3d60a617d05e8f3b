"""Runs a module as ``python -m`` does, in a process that ends when its standard input does.

``python -m recovery.demo.guarded MODULE ARGUMENTS...``: the demo holds the other end of the pipe and never writes to
it, so that however the demo ends, killed included, the module's process does not stay behind.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading

from recovery.demo.channel import DEMO_GONE_EXIT_CODE


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os._exit(DEMO_GONE_EXIT_CODE)


def main() -> None:
    """Run ``sys.argv[1]`` with the arguments after it."""
    # A daemon: it is blocked in a read that only the parent can end, and so can never be joined from here.
    threading.Thread(target=_watch, name="demo-guard", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
