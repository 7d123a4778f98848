"""Runs one attack for some seconds in this process: every case must end well or in an error of Ortolan's.

Cases are numbered and each follows from its number; before it begins, its number is written to standard output, so
that whoever waits knows which one crashed or hangs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fuzz.attacks_on_bindings import Bindings
from fuzz.attacks_on_folders import Graphs, Manifests
from fuzz.attacks_on_sessions import Sessions
from fuzz.attacks_on_text import Tokenizers

import ortolan

ATTACKS: dict[str, Callable[[list[Path], Path], Attack]] = {
    "bindings": Bindings,
    "graphs": Graphs,
    "manifests": Manifests,
    "sessions": Sessions,
    "tokenizers": Tokenizers,
}
FOUND = 3  # exit status
ADDRESS_SPACE = 8 * 2**30
MOST_BYTES = 2 * 2**30  # resident at any time


class Attack(Protocol):
    """Something that is attacked in one way after another."""

    def run(self, rng: random.Random) -> None:
        """Try one case. Raises OrtolanError where it was refused."""


def main() -> int:
    """Run cases until time is up; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--limited", action="store_true", help="limit the process's memory; AddressSanitizer takes more"
    )
    parser.add_argument("--folder", action="append", default=[], type=Path, help="of a model; repeatable")
    options = parser.parse_args()
    if options.limited:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory() as scratch:
        attack = ATTACKS[options.attack](options.folder, Path(scratch))
        return _run(options.attack, attack, options)


def _run(name: str, attack: Attack, options: Any) -> int:
    deadline = time.monotonic() + options.seconds
    for number in itertools.count(options.first):
        print(number, flush=True)
        try:
            attack.run(random.Random(f"{name} {number}"))
        except ortolan.OrtolanError:
            pass
        except BaseException:
            traceback.print_exc()
            return FOUND
        if options.limited and _most_resident_bytes() > MOST_BYTES:
            print(f"more than {MOST_BYTES} bytes of memory were in use", file=sys.stderr)
            return FOUND
        if time.monotonic() > deadline:
            return 0
    raise AssertionError("counting ends")


def _most_resident_bytes() -> int:
    # Of this program alone: getrusage's ru_maxrss begins at what the process that started this one had held.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.exit(main())
