"""Reads what a tokenizer's files say of chats: which template there is, and the texts of special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
