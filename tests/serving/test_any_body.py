"""Whatever a body holds, the answer is one, or says what was wrong with the request."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options"),
    *("logprobs", "top_logprobs", "echo", "eviction", "chat_template_kwargs", "tools", "response_format", "user"),
    *("frequency_penalty", "logit_bias", "best_of", "suffix", "tool_choice", "modalities", "metadata"),
]
WORDS = st.sampled_from(["", "tiny", "x", "user", "text", "snapkv", "assistant", "\ud800", "é😀", "\0"]) | st.text(
    st.characters(), max_size=5
)
NUMBERS = st.integers(-3, 300) | st.floats(-2, 3) | st.sampled_from([10**25, 1e300, float("nan"), float("inf"), 3.0])
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "policy", "budget", "window", "sink", "kernel", "pool"),
        *("include_usage", "include_obfuscation", "flavour", "self", "messages", "add_generation_prompt"),
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | WORDS, inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({"role": WORDS, "content": WORDS | VALUES}, optional={"name": VALUES})
RIGHT = {
    "prompt": st.text(max_size=9) | st.lists(st.integers(0, 255), min_size=1, max_size=9),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "max_tokens": st.integers(1, 4),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "logprobs": st.integers(0, 3) | st.booleans(),
    "temperature": st.floats(0, 5),
    "eviction": st.fixed_dictionaries({"policy": st.just("snapkv"), "budget": st.integers(0, 60)}),
}


@st.composite
def bodies(draw):
    """Bodies of which most fields are right, so that others are reached."""
    body = {"max_tokens": 2}
    for name in [draw(st.sampled_from(["prompt", "messages"])), *draw(st.lists(st.sampled_from(NAMES), max_size=4))]:
        is_right = name in RIGHT and draw(st.integers(0, 3)) > 0
        body[name] = draw(RIGHT[name] if is_right else VALUES)
    return body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies() | VALUES)
def test_any_body(shared_server, shared_http, path, body):
    answer = shared_http.post(path, content=json.dumps(body))
    if answer.status_code != 200:
        assert answer.status_code in (400, 404)
        (error,) = answer.json().values()
        assert list(error) == ["message", "type", "param", "code"]
        assert error["type"] == "invalid_request_error"
    elif body.get("stream"):
        *events, last = answer.content.split(b"\n\n")[:-1]
        assert last == b"data: [DONE]"
        assert all("choices" in json.loads(event.removeprefix(b"data: ")) for event in events)
    else:
        assert answer.json()["choices"]
    shared_server.wait_until_idle()
    assert shared_server.problems == []
