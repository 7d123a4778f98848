"""`ortolan serve`: answers OpenAI's HTTP requests with a model."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import Any

from ortolan.cli.engines import add_engine_options, open_service
from ortolan.errors import ConfigError, whole_number

KEY_VARIABLE = "ORTOLAN_API_KEY"
ENDING_SECONDS = 30
EPILOG = """examples:
  ortolan serve ./paged-model
  ortolan serve ./paged-model --host 0.0.0.0 --port 8080 --max-sequences 32 --max-cache-bytes 8GiB
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "Once upon a time", "max_tokens": 40}'
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP by OpenAI's interface: /v1/completions, /v1/chat/completions, /v1/models, "
        "and /health and /metrics. Needs the extra `serve`. Ctrl-C or SIGTERM lets running requests end first; a "
        "second one cuts them short.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"that requests must bear; the variable {KEY_VARIABLE} sets it, too, and no list of processes shows it "
        "(default: none)",
    )
    group.add_argument(
        "--ending-seconds",
        type=int,
        default=ENDING_SECONDS,
        help="that running requests get to end when the server is told to (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    make_server = _server_class()
    from ortolan.serving.app import create_app

    whole_number("--ending-seconds", options.ending_seconds, 0)
    with listen(options.host, options.port) as listening, open_service(options) as service:
        app = create_app(service, options.api_key or os.environ.get(KEY_VARIABLE) or None)
        server = make_server(app, service.engine.close, options.ending_seconds)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"ortolan: {service.name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
        server.run(sockets=[listening])
    if server.signal is not None:
        signal.raise_signal(server.signal)  # what it does to every command
    return 0


def _server_class() -> Any:
    try:
        import starlette  # noqa: F401

        from ortolan.serving.server import Server
    except ImportError as error:
        raise ConfigError(f"a server needs {error.name}; run: pip install 'ortolan[serve]'") from error
    return Server


def listen(host: str, port: int) -> socket.socket:
    """Take a port, before the model is opened; its connections send every event at once. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"--host {host} --port {port} cannot be listened on: {error}; give others") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves sockets without a protocol alone
    return listening
