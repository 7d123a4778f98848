"""Renders chat templates as their authors expect: with the names, filters and tags that transformers gives them.

Source: transformers' utils/chat_template_utils.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ortolan.errors import ConfigError

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return the text of messages.

    Args:
        template: in Jinja's language; it reaches nothing of Python.
        messages: mappings with "role" and "content".
        variables: further names that the template may use.

    Raises:
        ConfigError: messages are not mappings, or the template refuses them.
    """
    if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError("messages must be a list of mappings, each with a role and a content")
    names = {"tools": None, "documents": None, **variables}
    try:
        return _environment().from_string(template).render(messages=list(messages), **names)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"the chat template refuses the messages: {error}") from error


def choose_template(given: Any, tools: Any) -> str | None:
    """Return the template of a "chat_template": a text, or a list of named ones; None where there is none for this.

    Of several it is "tool_use" where there are tools and it has that, else "default".
    """
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, Mapping)}
        given = named.get("tool_use" if tools is not None and "tool_use" in named else "default")
    return given if isinstance(given, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer's configuration names, `extra_special_tokens` included.

    Each is a text, or an object with its text in "content".
    """
    extra = config.get("extra_special_tokens")
    given = {name: config.get(name) for name in TOKEN_NAMES} | (extra if isinstance(extra, dict) else {})
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in given.items()}
    return {name: text if isinstance(text, str) else "" for name, text in texts.items()}


class _GenerationTag(jinja2.ext.Extension):
    """Reads `{% generation %}` blocks, which mark what an assistant wrote, as what is inside."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _to_json(value: Any, indent: int | None = None, *, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON; Jinja's own filter writes it for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
