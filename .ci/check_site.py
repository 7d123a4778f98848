"""Checks that a browser loads nothing from another host when it shows the built documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADED = {"src", "srcset", "poster", "data", "action", "formaction"}  # links of <a> are followed, not loaded
OTHER_HOST = re.compile(r"(?:https?:)?//", re.IGNORECASE)
STYLE_LOADS = re.compile(r"""(?:url\(|@import)\s*["']?\s*(?:https?:)?//[^\s"')]+""", re.IGNORECASE)
SCRIPT_ADDRESS = re.compile(r"""["'`](?:https?:)?//[\w.-]+\.[^"'`\s]*""", re.IGNORECASE)
NAMESPACE = "//www.w3.org/"  # names XML, and is never loaded


class _Loads(HTMLParser):
    """Collects what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        loaded = LOADED | {"href", "xlink:href"} if tag != "a" else set()
        for name, value in attrs:
            if name in loaded and value and OTHER_HOST.match(value.strip()):
                self.found.append(f"<{tag} {name}={value}>")
            elif name == "style" and value:
                self.found += style_loads(value)

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.found += style_loads(data)
        elif self._inside == "script":
            self.found += script_loads(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def style_loads(text: str) -> Iterator[str]:
    """Yield what a style sheet loads from other hosts."""
    return (found for found in STYLE_LOADS.findall(text) if NAMESPACE not in found)


def script_loads(text: str) -> Iterator[str]:
    """Yield the addresses of other hosts in a script's texts."""
    return (found for found in SCRIPT_ADDRESS.findall(text) if NAMESPACE not in found)


def page_loads(text: str) -> Iterator[str]:
    """Yield what a page loads from other hosts."""
    page = _Loads()
    page.feed(text)
    return iter(page.found)


READERS = {".html": page_loads, ".svg": page_loads, ".css": style_loads, ".js": script_loads}


def main() -> None:
    """Check the folder that the command line names."""
    folder = Path(sys.argv[1])
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in READERS]
    if not files:
        sys.exit(f"{folder} does not contain a page")
    found = [f"{path}: {load}" for path in files for load in READERS[path.suffix](path.read_text(encoding="utf-8"))]
    if found:
        sys.exit("\n".join([*found, "the documentation must load nothing from other hosts"]))
    print(f"{len(files)} files load nothing from other hosts")


if __name__ == "__main__":
    main()
