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


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], source: str = "chat_template"
) -> str:
    """Return the text of messages.

    Args:
        template: in Jinja's language; it reaches nothing of Python.
        messages: mappings with "role" and "content".
        variables: further names that the template may use.
        source: where the template comes from, for messages.

    Raises:
        ConfigError: messages are not mappings, the template is not one of Jinja's, or it refuses the messages.
    """
    if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError("messages must be a list of mappings, each with a role and a content")
    try:
        compiled = _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{source} is not a chat template: line {error.lineno}: {error.message}; correct it"
        ) from error
    names = {"tools": None, "documents": None, **variables}
    try:
        return compiled.render(names | {"messages": list(messages)})
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"the chat template of {source} refuses the messages: {error}") from error


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
