"""A stand-in for the Hugging Face hub: serves folders as models over HTTP, and notes what is asked for."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


class Hub(http.server.ThreadingHTTPServer):
    """Serves `models`, folders by id; `downloads` has what was sent, by id and file."""

    def __init__(self, models: Mapping[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.gated = models, gated
        self.downloads: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(sends=False)

    def do_GET(self) -> None:
        self._answer(sends=True)

    def _answer(self, *, sends: bool) -> None:
        model, _, rest = self.path.lstrip("/").partition("/resolve/")
        name = rest.partition("/")[2]
        if model in self.server.gated:
            self._refuse(403, "GatedRepo")
        elif model not in self.server.models:
            self._refuse(404, "RepoNotFound")
        elif not (self.server.models[model] / name).is_file():
            self._refuse(404, "EntryNotFound")
        else:
            content = (self.server.models[model] / name).read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if sends:
                self.server.downloads.append(f"{model}/{name}")
                self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(models: Mapping[str, Path], gated: tuple[str, ...] = ()) -> Iterator[Hub]:
    with Hub(models, gated) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def run_ortolan(
    *arguments: object, folder: Path, endpoint: str = NOWHERE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, which also has the hub's cache; `huggingface_hub` reads its settings at import."""
    settings = {"HF_HOME": str(folder / "cache"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    unset = {"HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "ortolan", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=kept | settings | environment, capture_output=True, text=True, timeout=120, check=False
    )
