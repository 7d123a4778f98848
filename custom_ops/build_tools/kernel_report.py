"""Writes one line per compiled CUDA kernel: registers, shared memory, stack and spills, as ptxas gave them.

    python kernel_report.py BUILD_FOLDER kernel_report.txt

Reads the files that keep_ptxas_output.sh left beside the objects.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
HEADER = f"{'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7}  {'target':<8} kernel"


@dataclass(slots=True)
class Kernel:
    """What ptxas says about one kernel for one architecture; spills are bytes stored plus bytes loaded."""

    name: str
    target: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0

    @property
    def line(self) -> str:
        """The kernel's line of the report."""
        numbers = f"{self.registers:>9} {self.shared_bytes:>7} {self.stack_bytes:>6} {self.spill_bytes:>7}"
        return f"{numbers}  {self.target:<8} {self.name}"


def read_kernels(text: str) -> list[Kernel]:
    """Read the output of one `ptxas -v`; what it says belongs to the entry it named last.

    Functions that a kernel calls have stacks and spills of their own, named after the kernel's; they add to it.
    """
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if match := ENTRY.search(line):
            kernels.append(Kernel(match[1], match[2]))
        elif kernels and (match := STACK.search(line)):
            kernels[-1].stack_bytes += int(match[1])
            kernels[-1].spill_bytes += int(match[2]) + int(match[3])
        elif kernels and (match := USED.search(line)):
            kernels[-1].registers = int(match[1])
            shared = SHARED.search(line)
            kernels[-1].shared_bytes = int(shared[1]) if shared else 0
    return kernels


def demangle(names: list[str]) -> list[str]:
    """Return readable names, or the same where there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), text=True, capture_output=True, check=True)
    return done.stdout.splitlines()


def main() -> None:
    """Write the report of one build folder."""
    folder, report = Path(sys.argv[1]), Path(sys.argv[2])
    kernels = [k for path in sorted(folder.rglob("*.ptxas")) for k in read_kernels(path.read_text(errors="replace"))]
    for kernel, name in zip(kernels, demangle([k.name for k in kernels]), strict=True):
        kernel.name = name
    kernels.sort(key=lambda kernel: (kernel.name, kernel.target))
    report.write_text("\n".join([HEADER, *(kernel.line for kernel in kernels)]) + "\n")


if __name__ == "__main__":
    main()
