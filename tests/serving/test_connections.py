"""Clients that come in numbers, without a key, go away, or do not read."""

import asyncio
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import NAME, serving, serving_engine, slowed, wait_until
from starlette.requests import ClientDisconnect

from ortolan import Sampling
from ortolan.cli.serve import listen
from ortolan.serving.app import create_app
from ortolan.serving.fields import Fields

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}  # no answer is over before its client leaves
MESSAGES = [{"role": "user", "content": "Hi"}]
METRIC = re.compile(r"(# TYPE (ortolan_\w+) (counter|gauge))\n(\2 \d+)\n")


def raw_request(body, length=None):
    """Return the bytes of a request."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(content)}\r\n\r\n"
    return head.encode() + content


def send(server, content):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(content)
    return connection


@pytest.fixture
def counts(server):
    """Return how many requests were cancelled since the test began."""
    before = server.engine.stats().failed
    return lambda: server.engine.stats().failed - before


def test_many_at_once(server, model):
    def ask(i):
        client, prompt, seed = server.client(), f"request {i}" * (1 + i % 7), i % 5
        sampling = Sampling(temperature=1.0, seed=seed)
        options = {"model": NAME, "seed": seed, "temperature": 1.0, "max_tokens": 10 + i % 9, "stream": i % 2 == 0}
        if i % 3:
            ids, answer = model.tokenizer.encode(prompt), client.completions.create(prompt=prompt, **options)
            shown = [part.choices[0].text for part in (answer if i % 2 == 0 else [answer])]
        else:
            messages = [{"role": "user", "content": prompt}]
            ids = model.tokenizer.apply_chat_template(messages)
            answer = client.chat.completions.create(messages=messages, **options)
            if i % 2 == 0:
                shown = [part.choices[0].delta.content or "" for part in answer]
            else:
                shown = [answer.choices[0].message.content]
        return "".join(shown), (ids, options["max_tokens"], sampling)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(50)))
    for text, (ids, count, sampling) in answers:
        assert text == "".join(model.session().stream_text(ids, max_new_tokens=count, sampling=sampling))
    assert server.engine.stats().most_running > 1


def test_a_client_that_leaves_a_stream(server, http, counts):
    with slowed(server.engine):
        with http.stream("POST", "/v1/completions", json=LONG | {"n": 2, "stream": True}) as answer:
            next(answer.iter_raw())
        wait_until(lambda: counts() == 2)


def test_a_client_that_leaves_while_it_waits(server, counts):
    with slowed(server.engine), send(server, raw_request(LONG)):
        wait_until(lambda: server.engine.memory().held_bytes > 0)
    wait_until(lambda: counts() == 1)


def test_a_client_that_leaves_before_its_request_is_whole(server, http):
    before = server.engine.stats().steps
    send(server, raw_request(LONG, length=1000)).close()
    send(server, b"POST /v1/completions HTTP/1.1\r\nHost").close()
    assert http.get("/health").status_code == 200
    assert server.engine.stats().steps == before


def test_a_client_that_sends_its_next_request_before_the_answer(server):
    body = {"prompt": "abc", "max_tokens": 3}
    with send(server, raw_request(body) * 2) as connection, connection.makefile("rb") as answers:
        for _ in range(2):
            assert answers.readline().startswith(b"HTTP/1.1 200")
            head = b"".join(iter(answers.readline, b"\r\n"))
            length = int(re.search(rb"content-length: (\d+)", head)[1])
            assert json.loads(answers.read(length))["usage"]["completion_tokens"] == 3


def test_a_request_that_is_cancelled_while_it_is_read(server, model, monkeypatch, counts):
    """As when the server has to end."""
    submit, tasks = server.engine.submit, []

    def submit_and_cancel(*arguments, **options):
        tasks[0].get_loop().call_soon_threadsafe(tasks[0].cancel)
        return submit(*arguments, **options)

    async def begin():
        fields = Fields(LONG | {"n": 3})
        tasks.append(asyncio.ensure_future(server.service.begin("/v1/completions", fields)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await asyncio.to_thread(wait_until, lambda: counts() == 3)

    monkeypatch.setattr(server.engine, "submit", submit_and_cancel)
    with slowed(server.engine):
        asyncio.run(begin())


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_stream_that_nobody_begins_to_read(server, counts, version):
    """Servers of other makes raise OSError where a client has left."""
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    bodies = [{"type": "http.request", "body": json.dumps(LONG | {"stream": True}).encode()}]

    async def receive():
        return bodies.pop() if bodies else await asyncio.sleep(60)

    async def send_nothing(_):
        raise OSError

    async def ask():
        app = create_app(server.service)
        await app(scope | {"asgi": {"spec_version": version}}, receive, send_nothing)

    with slowed(server.engine):
        with pytest.raises((OSError, ClientDisconnect)):
            asyncio.run(ask())
        wait_until(lambda: counts() == 1)


@pytest.mark.parametrize("key", ["secret", "ßecret"])
def test_a_key(server, key):
    with serving(server.service, key) as guarded, guarded.http() as http:
        for path in ("/v1/models", f"/v1/models/{NAME}", "/metrics"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert http.post("/v1/completions", content=b"{").status_code == 401
        assert http.get("/health").status_code == 200
        given = key.encode()
        for wrong in (b"Bearer \xff\xfe", b"Bearer", given, b"Basic " + given, b"\xff", b"Bearer " + given + b"x"):
            assert http.get("/v1/models", headers={b"Authorization": wrong}).status_code == 401
        assert http.get("/v1/models", headers={b"Authorization": b"Bearer " + given}).status_code == 200


def test_a_key_of_a_client(server):
    with serving(server.service, "secret") as guarded:
        assert guarded.client("secret").models.list().data[0].id == NAME
        with pytest.raises(openai.AuthenticationError):
            guarded.client("wrong").completions.create(model=NAME, prompt="x")


def test_metrics(model):
    with serving_engine(model) as fresh, fresh.http() as http:
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
        answer = http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert METRIC.sub("", answer.text) == ""
    values = dict(line.split() for _, _, _, line in METRIC.findall(answer.text))
    assert values["ortolan_finished_total"] == "2"
    assert values["ortolan_generated_tokens_total"] == "10"
    assert values["ortolan_held_bytes"] == "0"
    assert int(values["ortolan_pool_bytes"]) == int(values["ortolan_kept_bytes"]) + int(values["ortolan_free_bytes"])
    kinds = {name: kind for _, name, kind, _ in METRIC.findall(answer.text)}
    assert kinds["ortolan_most_running"] == "gauge"
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())


def test_connections_send_at_once():
    """Without the option, every event would wait until the client has confirmed the one before."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()
