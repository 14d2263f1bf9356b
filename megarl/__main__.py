"""Entry point of `python -m megarl`, which torchrun needs; the same as the command `megarl`."""

from __future__ import annotations

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
