"""Requests that are not allowed get OpenAI's error object, which names the field."""

import json

import openai
import pytest
from served import MAX_CONTEXT, NAME, serving_engine

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BODIES = {COMPLETIONS: {"prompt": "Hi"}, CHATS: {"messages": MESSAGES}}
BOTH = {
    "model": [7, ["tiny"], {}],
    "max_tokens": [0, -1, 1.5, "7", True, [], 1e400],
    "temperature": ["1", True, [], 1e400],
    "top_p": ["1", False],
    "min_p": [{}],
    "repetition_penalty": ["1"],
    "top_k": [-2, 1.5, "1", True],
    "seed": [-1, 1.5, "1", True],
    "n": [0, -1, 129, "1", True, 1.5],
    "stop": [7, [7], {}, 0, False, [["a"]]],
    "stop_token_ids": ["7", 7, [7.0], ["a"], [True], {}, 0, ""],
    "ignore_eos": [1, "true", []],
    "stream": [1, "true", []],
    "stream_options": [True, [1], "x"],
    "eviction": [True, [1], "snapkv"],
    "frequency_penalty": [0.5, -1, "0", False],
    "presence_penalty": [0.5, -1, []],
    "logit_bias": [{"5": 10}, [1], "x"],
    "misspelt": [1, "x", False, 0],
}
COMPLETION = {
    "prompt": [7, {}, [], True, ["a", 7], [1.5], [True], [[1], "a", [True]], [[[1]]]],
    "logprobs": [-1, 21, True, "1"],
    "echo": [1, "true"],
    "best_of": [2, "1", True],
    "suffix": ["x", 7],
    "messages": [MESSAGES],
    "max_completion_tokens": [5],
    "top_logprobs": [1],
}
CHAT = {
    "messages": [
        *([], {}, "Hi", 7, ["Hi"], [{}], [{"role": 7, "content": "x"}], [{"role": "user"}]),
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 7}]}],
    ],
    "logprobs": [1, 5, "true"],
    "top_logprobs": [2],
    "max_completion_tokens": [0, "7", True],
    "tools": [[TOOL], {}, "x"],
    "tool_choice": ["required", {"type": "function"}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "json"],
    "modalities": [["text", "audio"], "text"],
    "audio": [{}],
    "chat_template_kwargs": [[1], "x", {"tokenize": False}, {"chat_template": "x"}, {"messages": []}],
    "prompt": ["Hi"],
    "suffix": ["x"],
    "echo": [True],
}
CASES = [
    (path, name, value)
    for path, fields in ((COMPLETIONS, BOTH | COMPLETION), (CHATS, BOTH | CHAT))
    for name, values in fields.items()
    for value in values
]


def assert_refused(answer, status=400, param=None, code=None):
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "\n" not in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    return error["message"]


@pytest.mark.parametrize(("path", "name", "value"), CASES)
def test_a_field(http, path, name, value):
    """Python's writer makes Infinity of 1e400, which its reader takes."""
    message = assert_refused(http.post(path, content=json.dumps(BODIES[path] | {name: value})), param=name)
    assert name.removeprefix("max_") in message or "message" in name


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop_token_ids", [256]),
        ("stop_token_ids", [-1]),
        ("eviction", {"policy": "none"}),
        ("eviction", {"budget": 5}),
        ("eviction", {"policy": "snapkv", "budget": 5}),
        ("eviction", {"policy": "snapkv", "budget": 100, "cls": 1}),
        ("eviction", {"policy": "snapkv", "budget": 100, "self": 1}),
        ("eviction", {"policy": "snapkv", "budget": 100, "during_prefill": True}),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"misspelt": True}),
    ],
)
def test_what_the_engine_refuses(http, path, name, value):
    answer = http.post(path, json=BODIES[path] | {name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", ["a", ""], [[]], [[1], []], [256], [-1], [10**30], ["\ud800"]])
def test_a_prompt(http, prompt):
    assert_refused(http.post(COMPLETIONS, content=json.dumps({"prompt": prompt})))


def test_fields_that_do_not_go_together(http):
    assert_refused(http.post(COMPLETIONS, json={"prompt": "x", "echo": True, "logprobs": 1}), param="echo")
    assert_refused(
        http.post(CHATS, json={"messages": MESSAGES, "top_logprobs": 1, "logprobs": False}), param="top_logprobs"
    )
    assert_refused(http.post(COMPLETIONS, json={"prompt": ["x"] * 17, "n": 128}))


def test_no_prompt(http):
    assert_refused(http.post(COMPLETIONS, json={}), param="prompt")
    assert_refused(http.post(CHATS, json={}), param="messages")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"x"', b"null", b"7", b"\xff", b"\xff\xfe", b'{"prompt": "x"} x', b"prompt=x"),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
        b'{"prompt": "x", "max_tokens": ' + b"1" * 5000 + b"}",
    ],
)
def test_bodies_that_are_not_json_objects(http, body):
    assert_refused(http.post(COMPLETIONS, content=body))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "max_tokens", "n", "seed", "frequency_penalty", "prompt", "stop"])
def test_numbers_that_json_does_not_have(http, name, number):
    assert_refused(http.post(COMPLETIONS, content=f'{{"prompt": "x", "{name}": {number}}}'), param=name)


def test_halves_of_surrogate_pairs(http):
    assert_refused(http.post(COMPLETIONS, content=r'{"prompt": "x", "\ud800": 1}'), param="\ud800")
    assert_refused(http.post(COMPLETIONS, content=r'{"prompt": "x\udc00"}'))
    assert_refused(http.post(CHATS, content=r'{"messages": [{"role": "\ud800", "content": "x"}]}'))
    assert_refused(
        http.post(COMPLETIONS, content=r'{"prompt": "x", "model": "\ud800"}'), 404, "model", "model_not_found"
    )
    whole = http.post(COMPLETIONS, content=r'{"prompt": "\ud83d\ude00", "echo": true, "max_tokens": 1}')
    assert whole.json()["choices"][0]["text"].startswith("😀")


def test_the_last_of_two_fields_of_a_name_counts(http):
    answer = http.post(COMPLETIONS, content='{"prompt": "x", "max_tokens": 5, "max_tokens": 2}')
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_a_huge_body(http):
    most = 2**20 + 32 * MAX_CONTEXT
    assert_refused(http.post(COMPLETIONS, content=b"x" * most))
    assert_refused(http.post(COMPLETIONS, content=b"x" * (most + 1)), 413)
    assert_refused(http.post(COMPLETIONS, content=(b"x" * 2**16 for _ in range(200))), 413)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_the_type_of_the_content_does_not_matter(http, kind):
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert http.post(COMPLETIONS, content=body, headers={"Content-Type": kind}).status_code == 200


def test_paths_and_methods(http, client):
    assert_refused(http.post("/v1/embeddings", json={}), 404)
    assert_refused(http.get("/"), 404)
    for method, path, allowed in (
        ("GET", COMPLETIONS, {"POST"}),
        ("DELETE", CHATS, {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/metrics", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ):
        answer = http.request(method, path)
        assert_refused(answer, 405)
        assert set(answer.headers["allow"].split(", ")) == allowed
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="x")


def test_another_model(http, client):
    for path, body in BODIES.items():
        assert_refused(http.post(path, json=body | {"model": "gpt-4"}), 404, "model", "model_not_found")
    assert_refused(http.get("/v1/models/own/er"), 404, "model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="gpt-4", prompt="x")


def test_a_prompt_that_is_too_long(http):
    long = {"role": "user", "content": "x" * MAX_CONTEXT}
    assert_refused(http.post(COMPLETIONS, json={"prompt": "x" * (MAX_CONTEXT + 1)}), code="context_length_exceeded")
    assert_refused(http.post(CHATS, json={"messages": [long]}), code="context_length_exceeded")


def test_a_prompt_that_the_pool_never_holds(model):
    with serving_engine(model, max_cache_bytes=2**16) as small, small.http() as http:
        message = assert_refused(http.post(COMPLETIONS, json={"prompt": "x" * 300, "stream": True}))
        assert "max_cache_bytes" in message
        assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}).status_code == 200
