"""Turns text into token ids and back, whole or piece by piece, and renders chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as HfTokenizer

from ortolan.errors import ConfigError, ContractMismatchError

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ContractMismatchError(f"{folder} has no tokenizer.json; use token ids, or add one and export again")
        self._tokenizer = HfTokenizer.from_file(str(path))
        config = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        template = folder / "chat_template.jinja"
        if template.is_file():
            self._config["chat_template"] = template.read_text(encoding="utf-8")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self) -> DetokenizerStream:
        """Start to decode ids as they come."""
        return DetokenizerStream(self)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Render messages with the model's chat template.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's turn.
            tokenize: return token ids; otherwise the text.
            variables: further names that the template may use.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the messages.
        """
        template = self._config.get("chat_template")
        if not isinstance(template, str):
            raise ConfigError("this model has no chat template; pass a plain prompt")
        names = {key: _token_text(self._config.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        try:
            text = (
                _environment()
                .from_string(template)
                .render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names, **variables)
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=False) if tokenize else text


class DetokenizerStream:
    """Decodes ids one by one, and holds back bytes that are not a whole character yet.

    Attributes:
        is_whole: whether nothing is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_whole = True
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0  # ids before it are out and only give context
        self._read = 0  # ids before it are out

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became whole, possibly none."""
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        """Return what is left, with replacement characters for bytes that never became whole."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        self.is_whole = len(now) <= len(before) or final or not now.endswith(_REPLACEMENT)
        if len(now) <= len(before) or not self.is_whole:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]


def _token_text(value: Any) -> str:
    """Read a special token, which may be a text or an object with its text in "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
