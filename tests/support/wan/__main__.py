from __future__ import annotations

import sys

from tests.support.wan.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
