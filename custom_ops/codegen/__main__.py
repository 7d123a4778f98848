"""Writes the generated files of a source tree, or with --check reports those that differ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ortolan.custom_ops.codegen.files import generated_files


def main() -> int:
    """Write the files, or with --check report those that differ."""
    parser = argparse.ArgumentParser(prog="python -m ortolan.custom_ops.codegen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a file differs")
    parser.add_argument("root", type=Path, help="root of the source tree")
    options = parser.parse_args()
    files = generated_files(options.root)
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path} is out of date: run python -m ortolan.custom_ops.codegen {options.root}", file=sys.stderr)
        else:
            path.write_text(files[path])
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
