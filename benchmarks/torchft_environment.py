"""torchft in a virtual environment of its own below ``build/``, which borrows torch from the one that runs this."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "torchft"
_INSTALL_SECONDS = 300


def python() -> tuple[Path | None, str]:
    """Return the interpreter that has torchft, installed now if need be; or None and the reason why there is none."""
    interpreter = FOLDER / "bin" / "python"
    try:
        if not interpreter.exists():
            subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True, capture_output=True, text=True)
            borrowed = FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
            (borrowed / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if subprocess.run([str(interpreter), "-c", "import torchft"], check=False, capture_output=True).returncode:
            subprocess.run(
                [str(interpreter), "-m", "pip", "install", "--quiet", "torchft-nightly"],
                check=True,
                capture_output=True,
                text=True,
                timeout=_INSTALL_SECONDS,
            )
    except subprocess.TimeoutExpired:
        return None, f"torchft-nightly was not installed within {_INSTALL_SECONDS} s"
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or [str(error)]
        return None, f"torchft-nightly cannot be installed: {lines[-1]}"
    return interpreter, ""
