"""The check of the built documentation finds whatever a browser would load from another host."""

from __future__ import annotations

import subprocess
import sys

import pytest
from checkout import ROOT

PAGE = """<html><head><link rel="stylesheet" href="_static/furo.css"><script src="_static/furo.js"></script></head>
<body><a href="https://example.org/">a link that somebody may follow</a><img src="images/a.png">
<svg xmlns="http://www.w3.org/2000/svg"><use href="#icon"></use></svg><script>const a = "b//c";</script>
</body></html>"""


@pytest.fixture
def check(tmp_path):
    def run(**files: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text, encoding="utf-8")
        command = [sys.executable, str(ROOT / ".ci" / "check_site.py"), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_a_page_whose_links_alone_lead_elsewhere_passes(check):
    done = check(page_html=PAGE, style_css="a { background: url(images/a.png) }", code_js="fetch('search.json')")
    assert (done.returncode, done.stdout) == (0, "3 files load nothing from other hosts\n")


def test_whatever_a_browser_loads_from_another_host_is_named(check):
    loads = {
        "a_html": '<script src="https://cdn.example.org/a.js"></script>',
        "b_html": '<link rel="stylesheet" href="//fonts.example.org/css">',
        "c_html": '<img srcset="http://example.org/a.png 2x">',
        "d_html": '<p style="background: url(https://example.org/a.png)">',
        "e_html": "<style>@import 'https://example.org/a.css';</style>",
        "f_html": "<script>fetch('https://example.org/track')</script>",
        "g_css": "@font-face { src: url('//fonts.example.org/a.woff2') }",
        "h_css": '@import "https://example.org/a.css";',
        "i_js": 'import("https://cdn.example.org/a.mjs")',
    }
    done = check(page_html=PAGE, **loads)
    *found, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert all("example.org" in line for line in found)
    assert [line.split(":")[0].rpartition("/")[2] for line in found] == [name.replace("_", ".") for name in loads]
    assert last == "the documentation must load nothing from other hosts"


def test_a_folder_without_pages_is_refused(check):
    assert "does not contain a page" in check().stderr
