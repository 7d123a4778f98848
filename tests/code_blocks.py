"""Finds the fenced blocks of code in Markdown pages and what is said about those that are not run; runs the others.

`python tests/code_blocks.py PAGE` runs the blocks of a page one after the other in the current folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = frozenset({"python", "sh", "text", "{toctree}"})  # of which the first two are run
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*)\s*$")
_MARK = re.compile(r"^ *<!-- not run: (?P<reason>.+) -->$")
_ITEM = re.compile(r"^ *([-*]|\d+\.) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """A fenced block.

    Attributes:
        language: what stands behind its backticks.
        line: of the page, on which its first line of code stands; counted from 1.
        code: its text, without the indentation of the fence.
        reason: why it is not run; None: it is.
    """

    language: str
    line: int
    code: str
    reason: str | None


def read_blocks(page: str) -> list[CodeBlock]:
    """Return the fenced blocks of a page, in order.

    Raises:
        ValueError: a fence has another language, or is not closed; a block is indented instead of fenced, or a mark
            does not stand right before a block of python or sh.
    """
    blocks: list[CodeBlock] = []
    lines = page.splitlines()
    number, reason = 0, None
    while number < len(lines):
        fence, mark = _FENCE.match(lines[number]), _MARK.match(lines[number])
        if fence:
            end = _end_of(lines, number, fence["ticks"])
            blocks.append(_block(lines[number + 1 : end], fence, number + 2, reason))
            number, reason = end, None
        elif reason is not None:
            raise ValueError(f"line {number}: `not run` must stand right before a block of code")
        elif mark:
            reason = mark["reason"]
        elif _is_indented_code(lines, number):
            raise ValueError(f"line {number + 1} is an indented block; fence it, and name its language")
        number += 1
    return blocks


def _end_of(lines: list[str], begin: int, ticks: str) -> int:
    for number in range(begin + 1, len(lines)):
        if lines[number].strip() == ticks:
            return number
    raise ValueError(f"line {begin + 1} opens a block that nothing closes")


def _block(lines: list[str], fence: re.Match[str], first: int, reason: str | None) -> CodeBlock:
    language, indent = fence["language"], len(fence["indent"])
    if language not in LANGUAGES:
        raise ValueError(f"line {first - 1}: a block of {language!r}; allowed: {', '.join(sorted(LANGUAGES))}")
    if reason is not None and language not in ("python", "sh"):
        raise ValueError(f"line {first - 1}: a block of {language!r} is never run; take the mark away")
    code = "".join(f"{line[indent:]}\n" for line in lines)
    return CodeBlock(language=language, line=first, code=code, reason=reason)


def _is_indented_code(lines: list[str], number: int) -> bool:
    """Say whether an indented block begins: after a blank line that is not part of a list."""
    if not lines[number].startswith("    ") or number == 0 or lines[number - 1].strip():
        return False
    before = [line for line in lines[:number] if line.strip()]
    return not before or not (_ITEM.match(before[-1]) or before[-1].startswith(" "))


def read_page(path: Path) -> list[CodeBlock]:
    """Return the blocks of a file. Raises ValueError, which names the file."""
    try:
        return read_blocks(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def run_page(path: Path) -> None:
    """Run the blocks of a file: Python in one namespace, commands in the current folder. Raises what a block raises."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read_page(path):
        if block.reason is not None or block.language not in ("python", "sh"):
            continue
        print(f"== {path.name}, line {block.line}", flush=True)
        if block.language == "python":
            lines_before = "\n" * (block.line - 1)  # so that a traceback names the page's line
            exec(compile(lines_before + block.code, path, "exec"), names)
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
