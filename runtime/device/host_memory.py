"""Says how much memory this process could use: at most, or now without making the machine swap."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

MACHINE = Path("/proc/meminfo")
CONTAINERS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)  # versions 2 and 1
FREE_LINE = re.compile(r"^MemAvailable: *(\d+) kB$", re.MULTILINE)
MEMORY_LINE = re.compile(r"^(?:MemTotal|SwapTotal): *(\d+) kB$", re.MULTILINE)


def host_memory_bytes() -> int:
    """Return the bytes of memory and swap space, or the container's limit where that is less."""
    found = [_machine_bytes()]
    for path in CONTAINERS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(path.read_text(encoding="ascii")))
    return min(found)


def free_memory_bytes() -> int | None:
    """Return the bytes that the machine could give without swapping; None where it does not say."""
    with contextlib.suppress(OSError):
        kibibytes = FREE_LINE.findall(MACHINE.read_text(encoding="ascii"))
        if kibibytes:
            return int(kibibytes[0]) * 1024
    return None


def _machine_bytes() -> int:
    with contextlib.suppress(OSError):
        kibibytes = MEMORY_LINE.findall(MACHINE.read_text(encoding="ascii"))
        if kibibytes:
            return sum(map(int, kibibytes)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
