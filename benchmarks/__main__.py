"""Runs the benchmarks one after the other, each in a process of its own: ``python -m benchmarks [NAME ...]``.

A name is that of a module without its prefix, for example ``transfer``; none: all of them. Each writes its record under
``benchmarks/results/``. Measure on a quiet machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PREFIX = "bench_"


def main() -> int:
    """Return 0 if every benchmark ran to its end, 1 otherwise, 2 for an unknown name."""
    known = sorted(path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py"))
    wanted = sys.argv[1:] or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{PREFIX}{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
