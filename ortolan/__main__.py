"""Entry point of the `ortolan` command."""

import sys

from ortolan.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
