"""What fails in the engine becomes an error of the server, in a stream the last event."""

import json
import logging
import threading

import pytest
from served import serving_engine, slowed, tokens_changed, wait_until

from ortolan.runtime.steps.stepper import BAD

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
ASKED = {"prompt": "abc", "max_tokens": 5}


def assert_error(answer, status, *words):
    assert answer.status_code == status
    check_error(answer.json(), *words)


def check_error(described, *words):
    error = described["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, None)
    assert all(word in error["message"] for word in words)


def read_events(content):
    *events, last = [event.removeprefix(b"data: ") for event in content.split(b"\n\n")[:-1]]
    assert last == b"[DONE]"
    return [json.loads(event) for event in events]


def bad_after(count):
    """Return a change of tokens that makes those after some BAD, as of logits with NaN."""
    steps = iter(range(1000))
    return lambda tokens: [BAD] * len(tokens) if next(steps) >= count else tokens


def test_logits_without_numbers(server, http, caplog):
    with tokens_changed(server.engine, bad_after(2)):
        assert_error(http.post("/v1/completions", json=ASKED), 500, "NaN")
    assert "NaN" in caplog.text
    with tokens_changed(server.engine, bad_after(0)):
        assert_error(http.post("/v1/completions", json=ASKED | {"n": 3}), 500, "NaN")
    with tokens_changed(server.engine, bad_after(2)):
        answer = http.post("/v1/completions", json=ASKED | {"stream": True})
    *parts, error = read_events(answer.content)
    assert answer.status_code == 200
    assert len(parts) <= 2
    check_error(error, "NaN")
    assert http.post("/v1/completions", json=ASKED).status_code == 200


def test_one_of_several_answers_that_fails_ends_the_others(server, http):
    failed = server.engine.stats().failed
    with tokens_changed(server.engine, lambda tokens: [*tokens[:-1], BAD] if len(tokens) == 2 else tokens):
        assert_error(http.post("/v1/completions", json=LONG | {"n": 2}), 500, "NaN")
        server.wait_until_idle()
    assert server.engine.stats().failed == failed + 2


def test_an_engine_that_is_closed(model):
    with serving_engine(model) as served, served.http() as http:
        with slowed(served.engine), http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            waiting = threading.Thread(target=lambda: waited.append(http.post("/v1/completions", json=LONG)))
            waited = []
            waiting.start()
            wait_until(lambda: served.engine.stats().most_running == 2)
            served.engine.close()
            events = [line.removeprefix("data: ") for line in lines if line]
        waiting.join()
        assert events[-1] == "[DONE]"
        check_error(json.loads(events[-2]), "closed")
        assert_error(waited[0], 503, "closed")
        for answer in (
            http.get("/health"),
            http.get("/metrics"),
            http.post("/v1/completions", json=ASKED),
            http.post("/v1/completions", json=ASKED | {"stream": True}),
        ):
            assert_error(answer, 503, "closed")


def test_an_engine_that_fails_as_a_whole(model):
    def fail(_):
        raise KeyError("broken")

    with serving_engine(model) as served, served.http() as http:
        with tokens_changed(served.engine, fail):
            assert_error(http.post("/v1/completions", json=ASKED), 503, "broken")
        assert_error(http.get("/health"), 503, "broken")


@pytest.mark.parametrize("body", [ASKED, ASKED | {"stream": True}])
def test_an_error_that_nobody_expects(server, http, monkeypatch, caplog, body):
    def fail(*_, **__):
        raise KeyError("something of the server's own")

    monkeypatch.setattr(server.engine, "submit", fail)
    with caplog.at_level(logging.ERROR, "ortolan.serving"):
        answer = http.post("/v1/completions", json=body)
    assert_error(answer, 500, "log")
    assert "own" not in answer.text
    assert "KeyError" in caplog.messages[0]
