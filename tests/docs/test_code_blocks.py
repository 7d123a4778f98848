"""Every block of code in README and docs runs, in a folder of its page's own, or says why it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import code_blocks
import pytest
from checkout import ROOT
from code_blocks import CodeBlock, read_blocks, read_page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKES_MODEL = "ortolan export ./checkpoint ./model "  # a page with this command needs no model to begin with


def run(page: Path) -> subprocess.CompletedProcess[str]:
    """Run a page's blocks in a process of their own, in the current folder."""
    command = [sys.executable, code_blocks.__file__, str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_one_after_the_other(page, workplace):
    if MAKES_MODEL in page.read_text(encoding="utf-8"):
        (workplace / "model").unlink()
    if any(block.reason is None for block in read_page(page)):
        done = run(page)
        assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.parametrize(("language", "code"), [("sh", "false\ntrue"), ("python", "raise SystemExit(3)")])
def test_a_block_that_fails_fails_its_page(language, code, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```python\na = 1\n```\n\n```{language}\n{code}\n```\n", encoding="utf-8")
    done = run(page)
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == "== page.md, line 6"


def test_blocks_share_names_and_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    blocks = ["python\na = 'ready'", "sh\necho 1 > file", "python\nprint(a, open('file').read())"]
    page.write_text("\n\n".join(f"```{block}\n```" for block in blocks), encoding="utf-8")
    assert "ready 1" in run(page).stdout
