"""Every block of code in README and docs runs, in a folder of its page's own, or says why it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from code_blocks import CodeBlock, read_blocks, read_page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_one_after_the_other(page, workplace):
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read_page(page):
        if block.reason is None:
            run(block, page, names)


def run(block: CodeBlock, page: Path, names: dict[str, Any]) -> None:
    if block.language == "python":
        lines_before = "\n" * (block.line - 1)  # so that a traceback names the page's line
        exec(compile(lines_before + block.code, page, "exec"), names)
    elif block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{page.name}, line {block.line}: {block.code}{done.stdout}{done.stderr}"


def test_blocks_have_their_language_line_and_reason():
    page = "A\n\n```sh\necho 1\n```\n\n- item\n  <!-- not run: needs a GPU -->\n  ```python\n  a = 1\n  ```\n"
    assert read_blocks(page) == [
        CodeBlock(language="sh", line=4, code="echo 1\n", reason=None),
        CodeBlock(language="python", line=10, code="a = 1\n", reason="needs a GPU"),
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```bash\nls\n```\n", "line 1: a block of 'bash'"),
        ("```\nls\n```\n", "line 1: a block of ''"),
        ("text\n\n    ls\n", "line 3 is an indented block"),
        ("```sh\nls\n", "line 1 opens a block that nothing closes"),
        ("<!-- not run: needs a GPU -->\n\n```sh\nls\n```\n", "line 1: `not run` must stand right before"),
        ("<!-- not run: needs a GPU -->\n```text\nls\n```\n", "line 2: a block of 'text' is never run"),
    ],
)
def test_a_block_that_would_escape_is_refused(page, message):
    with pytest.raises(ValueError, match=message):
        read_blocks(page)


def test_what_stands_under_a_list_item_is_not_code():
    assert read_blocks("- item\n\n      continued\n") == []


def test_a_block_that_fails_is_named_by_its_page_and_line(workplace):
    (page,) = [path for path in PAGES if path.name == "README.md"]
    with pytest.raises(AssertionError, match=r"README.md, line 7: exit 3"):
        run(CodeBlock(language="sh", line=7, code="exit 3\n", reason=None), page, {})
