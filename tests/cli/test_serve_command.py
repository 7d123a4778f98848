"""`ortolan serve` as a process: how it starts, what it refuses, and how signals end it."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from served import WAIT_SECONDS, make_folder

MANY = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "n": 128, "stream": True}  # takes many seconds
SOME = MANY | {"n": 12}  # takes more than a tick of the server


@pytest.fixture(scope="module")
def folder():
    return make_folder()


@pytest.fixture
def start(folder):
    """Start the command; returns the process and its URL."""
    with contextlib.ExitStack() as stack:

        def started(*options):
            process = subprocess.Popen(
                [sys.executable, "-m", "ortolan", "serve", str(folder), "--device", "cpu", "--port", "0", *options],
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            line = process.stderr.readline()
            found = re.fullmatch(r"ortolan: \S+ at (http://127\.0\.0\.1:\d+)/v1\n", line)
            assert found, line
            return process, found[1]

        yield started


def end_of(process):
    """Return the exit code and what was written to standard error behind the first line."""
    output, errors = process.communicate(timeout=WAIT_SECONDS)
    assert output == ""
    return process.returncode, errors


@contextlib.contextmanager
def streaming(url, body):
    """Ask for a stream, and read until the text has begun; yields the lines that follow."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_SECONDS) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def connect(url, content):
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(content)
    return connection


def post(body, length=0):
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (length or len(content)) + content
    )


def test_a_server_that_is_told_to_end_ends_its_answers(start):
    process, url = start()
    with streaming(url, SOME) as lines:
        process.send_signal(signal.SIGTERM)
        *events, last = lines
    assert last == "[DONE]"
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events]
    assert reasons.count("length") == 12
    assert end_of(process) == (143, "")


@pytest.mark.parametrize(
    ("options", "numbers", "code"),
    [
        (["--ending-seconds", "0"], [signal.SIGTERM], 143),
        (["--ending-seconds", "1"], [signal.SIGTERM], 143),
        ([], [signal.SIGTERM, signal.SIGTERM], 143),
        ([], [signal.SIGTERM, signal.SIGINT], 143),
        ([], [signal.SIGINT, signal.SIGINT], 130),
        (["--ending-seconds", "0"], [signal.SIGHUP], 129),
    ],
)
def test_answers_that_are_cut_short(start, options, numbers, code):
    process, url = start(*options)
    with streaming(url, MANY) as lines:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)  # two at once are one
        *_, error, last = lines
    assert last == "[DONE]"
    assert "closed" in json.loads(error)["error"]["message"]
    assert end_of(process) == (code, "ortolan: interrupted\n" if code == 130 else "")


def test_a_plain_answer_that_is_cut_short(start):
    process, url = start("--ending-seconds", "0")
    with connect(url, post(MANY | {"stream": False})) as connection:
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert connection.makefile("rb").readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        assert end_of(process) == (143, "")


def test_clients_that_neither_read_nor_write_keep_no_server(start):
    process, url = start("--ending-seconds", "1")
    with connect(url, post(MANY)), connect(url, post(MANY, 5000)), connect(url, b"POST /v1"), connect(url, b""):
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        assert end_of(process) == (143, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_server_without_requests_ends_at_once(start, number, code):
    process, url = start()
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    process.send_signal(number)
    assert end_of(process) == (code, "ortolan: interrupted\n" if code == 130 else "")


def test_what_is_not_http_is_a_line_of_the_log(start):
    process, url = start()
    with connect(url, b"\x16\x03\x01\x02 nonsense\r\n\r\n") as connection:
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{url}/health").status_code == 200
    process.terminate()
    assert end_of(process) == (143, "ortolan: warning: Invalid HTTP request received.\n")


def test_a_key_of_the_environment(start, monkeypatch):
    monkeypatch.setenv("ORTOLAN_API_KEY", "ßecret\udcff")
    process, url = start("--model-name", "own/er", "--max-new-tokens", "3")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    key = {b"Authorization": "Bearer ßecret".encode() + b"\xff"}
    assert httpx.get(f"{url}/v1/models/own/er", headers=key).json()["id"] == "own/er"
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=key)
    assert answer.json()["usage"]["completion_tokens"] == 3
    process.terminate()
    assert end_of(process) == (143, "")


def test_the_port_is_taken_before_the_model_is_opened(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused("serve", "no such folder", "--port", port)
    assert f"--port {port} cannot be listened on" in message


@pytest.mark.parametrize(
    "options",
    [
        *(["--port", "70000"], ["--port", "-1"], ["--host", "192.0.2.1"], ["--host", "x" * 70]),
        *(
            ["--host", "a..b"],
            ["--ending-seconds", "-1"],
            ["--chat-template", "no such file"],
            ["--max-sequences", "0"],
        ),
        *(["--max-new-tokens", "0"], ["--max-cache-bytes", "x"], ["--overcommit", "0"]),
        *(["--chat-template", "/dev"], ["--port", "x"], ["--max-context", "100000"]),
    ],
)
def test_options_that_are_refused(refused, folder, options):
    free = [] if "--port" in options else ["--port", "0"]
    message = refused("serve", str(folder), "--device", "cpu", *free, *options)
    assert options[0].strip("-").replace("-", "_") in message.replace("-", "_") or "bytes" in message


def test_models_that_cannot_be_served(refused, folder, model_dir, tmp_path):
    assert "paged" in refused("serve", str(model_dir), "--device", "cpu", "--port", "0")
    bare = shutil.copytree(folder, tmp_path / "bare", symlinks=True)
    (bare / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused("serve", str(bare), "--device", "cpu", "--port", "0")
    (bare / "tokenizer.json").symlink_to((folder / "tokenizer.json").resolve())
    (bare / "generation_config.json").unlink(missing_ok=True)
    (bare / "generation_config.json").write_text('{"do_sample": true, "temperature": -1}')
    assert "temperature" in refused("serve", str(bare), "--device", "cpu", "--port", "0")


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_the_extra_is_named_where_it_is_missing(refused, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ortolan.serving.server", raising=False)
    assert f"needs {name}; run: pip install 'ortolan[serve]'" in refused("serve", "no such folder")
