"""Reads what a request asks for: OpenAI's completions and chat completions, as options of `Engine.submit`.

Source: the API reference of OpenAI (completions, chat completions); `top_k`, `min_p`, `repetition_penalty`,
`ignore_eos`, `stop_token_ids` and `chat_template_kwargs` are called as vLLM's server calls them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ortolan
from ortolan.errors import ConfigError
from ortolan.serving.fields import FieldError, Fields

COMPLETION_TOKENS = 16  # where a completion names no number, by OpenAI's reference
MOST_CHOICES, MOST_ANSWERS = 128, 2048  # to a prompt, and to all of a request's
MOST_TOP_LOGPROBS = 20
# What they ask for does not change the answer.
IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


class Limits(Protocol):
    """What a request needs to know of the service."""

    @property
    def model(self) -> ortolan.Model:
        """The model, which has a tokenizer."""

    @property
    def name(self) -> str:
        """Its name in requests."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens of an answer in a chat that names no number."""

    @property
    def chat_template(self) -> Path | None:
        """File of the template; None takes the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for, checked as far as that is possible without the engine.

    Attributes:
        is_chat: whether the answer is a message.
        prompts: token ids of each prompt.
        echoed: the text of each prompt, where answers begin with it; else empty texts.
        choices: answers to each prompt.
        options: of `Engine.submit`.
        is_streamed: whether the answer is sent piece by piece.
        has_usage: whether a stream ends with counts of tokens.
    """

    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    echoed: tuple[str, ...]
    choices: int
    options: Mapping[str, Any] = field(repr=False)
    is_streamed: bool
    has_usage: bool

    @property
    def has_offsets(self) -> bool:
        """Whether answers say where the text of each token begins."""
        return not self.is_chat and self.options["logprobs"] is not None

    def options_of(self, choice: int) -> dict[str, Any]:
        """Return the options of one of the choices: a seed gives each another text."""
        sampling = self.options["sampling"]
        if choice == 0 or sampling.seed is None:
            return dict(self.options)
        return {**self.options, "sampling": dataclasses.replace(sampling, seed=sampling.seed + choice)}


def read_completion(fields: Fields, limits: Limits) -> Asked:
    """Read a request for a completion. Raises ConfigError."""
    tokenizer = limits.model.tokenizer
    _check_model(fields, limits)
    given = fields.take("prompt")
    prompts = tuple(_encode(each, tokenizer) for each in _listed_prompts(given))
    is_echoed = fields.flag("echo")
    logprobs = fields.whole("logprobs", 0, MOST_TOP_LOGPROBS)
    if is_echoed and logprobs is not None:
        raise FieldError("echo with logprobs is not supported here; leave one of them out", "echo")
    max_new_tokens = fields.whole("max_tokens", 1) or COMPLETION_TOKENS
    for name, neutral in (("best_of", (1,)), ("suffix", ("",))):
        fields.only(name, neutral)
    return Asked(
        is_chat=False,
        prompts=prompts,
        echoed=tuple(tokenizer.decode(each) if is_echoed else "" for each in prompts),
        **_read_common(fields, limits, max_new_tokens, logprobs),
    )


def read_chat(fields: Fields, limits: Limits) -> Asked:
    """Read a request for the next message of a chat. Raises ConfigError."""
    tokenizer = limits.model.tokenizer
    _check_model(fields, limits)
    messages = _messages(fields.take("messages"))
    effort = fields.text("reasoning_effort")
    variables = ({} if effort is None else {"reasoning_effort": effort}) | fields.object("chat_template_kwargs")
    if reserved := {"messages", "tokenize", "chat_template"} & variables.keys():
        raise FieldError(f"chat_template_kwargs may not hold {min(reserved)}", "chat_template_kwargs")
    prompt = tuple(tokenizer.apply_chat_template(messages, chat_template=limits.chat_template, **variables))
    wants, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top is not None and not wants:
        raise FieldError("top_logprobs needs logprobs = true", "top_logprobs")
    older, newer = fields.whole("max_tokens", 1), fields.whole("max_completion_tokens", 1)
    for name, neutral in (
        ("response_format", ({"type": "text"},)),
        ("modalities", (["text"],)),
        ("tools", ([],)),
        ("tool_choice", ("none", "auto")),
        ("functions", ([],)),
        ("function_call", ("none", "auto")),
    ):
        fields.only(name, neutral)
    return Asked(
        is_chat=True,
        prompts=(prompt,),
        echoed=("",),
        **_read_common(fields, limits, newer or older or limits.max_new_tokens, (top or 0) if wants else None),
    )


def _read_common(fields: Fields, limits: Limits, max_new_tokens: int, logprobs: int | None) -> dict[str, Any]:
    """Read what completions and chats have in common; nothing may be left behind it."""
    is_streamed, streaming = fields.flag("stream"), Fields(fields.object("stream_options"))
    has_usage = streaming.flag("include_usage")
    streaming.only("include_obfuscation", (False, True))
    streaming.end(())
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, (0, 0.0))
    fields.only("logit_bias", ({},))
    eviction = fields.object("eviction")
    common = {
        "choices": fields.whole("n", 1, MOST_CHOICES) or 1,
        "is_streamed": is_streamed,
        "has_usage": has_usage and is_streamed,
        "options": {
            "max_new_tokens": max_new_tokens,
            "sampling": _sampling(fields, limits),
            "stop": [*fields.texts("stop"), *_token_ids(fields.listed("stop_token_ids"), "stop_token_ids")],
            "ignore_eos": fields.flag("ignore_eos"),
            "eviction": ortolan.Eviction(**eviction) if eviction else None,
            "logprobs": logprobs,
        },
    }
    fields.end(IGNORED)
    return common


def _check_model(fields: Fields, limits: Limits) -> None:
    name = fields.text("model")
    if name not in (None, limits.name):
        raise UnknownModelError(f"there is no model {name!r}; this server has {limits.name!r}", "model")


class UnknownModelError(FieldError):
    """A request names another model than the one that is served."""


def _sampling(fields: Fields, limits: Limits) -> ortolan.Sampling:
    """Read how tokens are chosen: what is left out is as the model's generation_config.json says."""
    given: dict[str, float | int | None] = {
        name: fields.number(name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    }
    top_k = fields.whole("top_k", -1)
    given |= {"top_k": 0 if top_k == -1 else top_k, "seed": fields.whole("seed", 0)}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(ortolan.Sampling.from_model(limits.model), **chosen)


def _listed_prompts(given: Any) -> list[Any]:
    """Return one prompt, a text or token ids, or a list of prompts as a list."""
    is_one = isinstance(given, str) or (isinstance(given, list) and bool(given) and isinstance(given[0], int))
    listed = [given] if is_one else given
    if not isinstance(listed, list) or not listed:
        raise FieldError("prompt must be a text, a list of token ids, or a list of such", "prompt")
    return listed


def _encode(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt, "prompt"))


def _token_ids(given: Any, name: str) -> list[int]:
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise FieldError(f"{name} must be a list of token ids", name)
    return given


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise FieldError("messages must be a list of at least one message", "messages")
    return [_message(each) for each in given]


def _message(given: Any) -> dict[str, Any]:
    """Return a message whose content is one text, as chat templates read it."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise FieldError("a message must be an object with a role", "messages")
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(_part(each) for each in content)
    if not isinstance(content, str) and not (content is None and given["role"] == "assistant"):
        raise FieldError("a message's content must be a text or a list of parts of type text", "messages")
    return {**given, "content": content}


def _part(given: Any) -> str:
    text = given.get("text") if isinstance(given, dict) and given.get("type") == "text" else None
    if not isinstance(text, str):
        raise FieldError("a message's content may have parts of type text alone", "messages")
    return text


READERS = {"/v1/completions": read_completion, "/v1/chat/completions": read_chat}


def read(path: str, fields: Fields, limits: Limits) -> Asked:
    """Read a request to a path of READERS.

    Raises:
        ConfigError: a field is missing or not allowed; FieldError names it.
    """
    asked = READERS[path](fields, limits)
    if not all(asked.prompts):
        raise ConfigError("the prompt has no tokens")
    if (answers := len(asked.prompts) * asked.choices) > MOST_ANSWERS:
        raise ConfigError(f"the request asks for {answers} answers; at most {MOST_ANSWERS} are allowed")
    return asked
