"""Whether this process may make network namespaces and TUN devices."""

from __future__ import annotations

import functools
import os
import subprocess
import sys


@functools.cache
def why_not_permitted() -> str:
    """Return why namespaces are not permitted here; empty: they are.

    A missing tool (gcc, iproute2) is not a matter of permission: it fails where it is used, by its name.
    """
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        return f"network namespaces are not permitted here: {trial.stderr.strip()}"
    return ""
