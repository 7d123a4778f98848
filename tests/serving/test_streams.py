"""What a stream sends piece by piece is the whole answer, and ends as OpenAI's streams end."""

import json
import re

import pytest
from served import NAME, tokens_changed

MESSAGES = [{"role": "user", "content": "Hi"}]
EVENT = re.compile(rb"data: ([^\n]*)\n\n")
WILD = {"temperature": 30.0, "max_tokens": 60}  # all bytes, so that some make characters and most do not


def texts(parts, choices):
    shown, reasons = [""] * choices, [None] * choices
    for part in parts:
        for choice in part.choices:
            assert reasons[choice.index] is None
            shown[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    return list(zip(shown, reasons, strict=True))


def whole_texts(answer):
    return [(choice.text, choice.finish_reason) for choice in answer.choices]


@pytest.mark.parametrize("seed", range(4))
def test_completions(client, seed):
    options = {"model": NAME, "prompt": ["a", "bc"], "n": 2, "seed": seed, **WILD}
    answer = client.completions.create(**options)
    assert texts(client.completions.create(**options, stream=True), 4) == whole_texts(answer)


@pytest.mark.parametrize("stop", ["\ufffd\ufffd", "\ufffd\ufffd\ufffd", ["€", "\x0f\ufffd"]])
def test_stops_across_tokens(client, stop):
    options = {"model": NAME, "prompt": "abc", "n": 3, "seed": 1, "stop": stop, **WILD}
    answer = client.completions.create(**options)
    assert any(choice.finish_reason == "stop" for choice in answer.choices)
    assert texts(client.completions.create(**options, stream=True), 3) == whole_texts(answer)


def test_characters_of_several_tokens(server, client, model):
    """Each comes whole."""
    text = "naïve € 😀 漢字"
    ids = iter(model.tokenizer.encode(text))
    with tokens_changed(server.engine, lambda tokens: [next(ids) for _ in tokens]):
        length = len(text.encode())
        parts = list(client.completions.create(model=NAME, prompt="x", max_tokens=length, stream=True))
    assert "".join(part.choices[0].text for part in parts) == text


def test_chats(client):
    options = {"model": NAME, "messages": MESSAGES, "n": 2, "seed": 3, **WILD}
    answer = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(**options, stream=True))
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert len({part.id for part in parts}) == 1
    for index, choice in enumerate(answer.choices):
        deltas = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert (deltas[0].delta.role, deltas[0].delta.content) == ("assistant", "")
        assert all(each.delta.role is None for each in deltas[1:])
        assert "".join(each.delta.content or "" for each in deltas) == choice.message.content
        assert [each.finish_reason for each in deltas] == [None] * (len(deltas) - 1) + ["length"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("include", [False, True])
def test_the_events(http, model, path, include):
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    options = {"stream": True, "max_tokens": 5, "n": 2, "stream_options": {"include_usage": include}}
    answer = http.post(f"/v1/{path}", json=asked | options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert EVENT.sub(b"", answer.content) == b""
    *events, last = EVENT.findall(answer.content)
    assert last == b"[DONE]"
    events = [json.loads(event) for event in events]
    if include:
        end = events.pop()
        count = len(model.tokenizer.apply_chat_template(MESSAGES)) if "chat" in path else 2
        assert end["choices"] == []
        assert end["usage"] == {"prompt_tokens": count, "completion_tokens": 10, "total_tokens": count + 10}
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)


def test_a_slow_reader_gets_all(server):
    options = {"prompt": "abc", "max_tokens": 400, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    with server.http() as client:
        expected = client.post("/v1/completions", json=options).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=options | {"stream": True}) as answer:
            server.wait_until_idle()  # it was made while nobody read
            content = answer.read()
    events = [json.loads(event) for event in EVENT.findall(content)[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
