"""Turns text into token ids and back, whole or piece by piece, and renders chat templates."""

from __future__ import annotations

import contextlib
import json
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from ortolan.errors import ConfigError, ContractMismatchError, file_path
from ortolan.folders import SPECIALS_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from ortolan.runtime.text.chat import choose_template, special_tokens
from ortolan.runtime.text.failures import tokenizer_failures, without_panic_reports

_REPLACEMENT = "\ufffd"
_MAX_ID = 2**32 - 1
CONTEXT_IDS = 8  # before the first one that a stream decodes
TRIED_IDS = 256  # that a file must decode to be taken


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ContractMismatchError(f"{folder} has no {TOKENIZER_FILE}; use token ids, or add one and export again")
        self._path = path
        with tokenizer_failures(f"{path} is not a tokenizer"), without_panic_reports():
            self._tokenizer = HfTokenizer.from_file(str(path))
            self._tokenizer.decode(list(range(min(self._tokenizer.get_vocab_size(), TRIED_IDS))))
        self._tokenizer.no_truncation()  # what training has left in the file would cut prompts off
        self._tokenizer.no_padding()
        self._config = _read_json(folder / TOKENIZER_CONFIG_FILE)
        self._special_tokens = special_tokens(self._config | _read_json(folder / SPECIALS_FILE))
        self._template, self._template_file = self._config.get("chat_template"), folder / TOKENIZER_CONFIG_FILE
        template = _read_text(folder / TEMPLATE_FILE)
        if template is not None:
            self._template, self._template_file = template, folder / TEMPLATE_FILE

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            ConfigError: it is not a text, or not one that UTF-8 can hold.
            ContractMismatchError: the tokenizer fails on it.
        """
        try:
            with tokenizer_failures(f"{self._path} cannot encode {reprlib.repr(text)}"):
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # also for halves of surrogate pairs
            raise ConfigError(f"{reprlib.repr(text)} is not a text that UTF-8 can encode: {error}") from error

    def decode(self, ids: int | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, or of one; ids outside the vocabulary add nothing.

        Raises:
            ConfigError: these are not token ids.
            ContractMismatchError: the tokenizer fails on them.
        """
        listed = _listed(ids)
        with tokenizer_failures(f"{self._path} cannot decode {reprlib.repr(listed)}"):
            return str(self._tokenizer.decode(listed, skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token, those added to the vocabulary included."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def stream(self, context: Sequence[int] = ()) -> DetokenizerStream:
        """Start to decode ids as they come: `push(token_id)` returns the text that it completes, `finish()` the rest.

        Args:
            context: ids before the first one, whose text is not repeated. With them the first piece keeps its space.
        """
        return DetokenizerStream(self, context)

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        chat_template: str | Path | None = None,
        **variables: Any,
    ) -> Any:
        """Render messages with a chat template.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's turn.
            tokenize: return token ids; otherwise the text.
            chat_template: in Jinja's language: its text, or the path of a file with it; None takes the model's own.
            variables: further names that the template may use.

        Raises:
            ConfigError: the model has no chat template, the template is not one of Jinja's, messages are not mappings,
                or the template refuses them.
        """
        from ortolan.runtime.text.rendering import render_chat  # Jinja takes long to import

        given, source = self._template, str(self._template_file)
        if chat_template is not None:
            given, source = _read_template(chat_template)
        template = choose_template(given, variables.get("tools"))
        if template is None:
            raise ConfigError(
                "this model has no chat template; pass a plain prompt, or give a template "
                "(chat_template=, --chat-template)"
            )
        names = self._special_tokens | {"add_generation_prompt": add_generation_prompt} | variables
        text = render_chat(template, messages, names, source)
        return self.encode(text, add_special_tokens=False) if tokenize else text


class DetokenizerStream:
    """Decodes ids one by one, and holds back bytes that are not a whole character yet. Made by `Tokenizer.stream`.

    The pieces together are what `Tokenizer.decode` gives for all ids, the context included, behind the context's text.

    Attributes:
        is_whole: whether nothing is held back.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self.is_whole = True
        self._tokenizer = tokenizer
        self._ids = _with_text(tokenizer, _listed(context))
        self._prefix = 0  # ids before it are out and only give context
        self._read = len(self._ids)  # ids before it are out

    @property
    def held(self) -> str:
        """What is held back, with replacement characters for bytes that are not whole."""
        return self._decoded()[1]

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that became whole, possibly none."""
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        """Return what is left, with replacement characters for bytes that never became whole."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        now, fresh = self._decoded()
        self.is_whole = not fresh or final or not now.endswith(_REPLACEMENT)
        if not fresh or not self.is_whole:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return fresh

    def _decoded(self) -> tuple[str, str]:
        """Return the text of the context and of what is held back, and the latter's share."""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        return now, now[len(before) :]


Detokenize = Callable[[Sequence[int]], DetokenizerStream]  # starts to decode ids behind those of a context


def _with_text(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the last ids that have a text: behind special tokens alone, a word would lose its space."""
    count = min(CONTEXT_IDS, len(ids))
    while count < len(ids) and not tokenizer.decode(ids[-count:]).strip():
        count = min(2 * count, len(ids))
    return ids[len(ids) - count :]


def _listed(ids: int | Sequence[int]) -> list[int]:
    given: Any = ids
    with contextlib.suppress(TypeError):
        given = [operator.index(given)]
    try:
        listed = [operator.index(token) for token in given]
    except TypeError as error:
        raise ConfigError(f"invalid token ids {reprlib.repr(ids)}: {error}") from error
    if not all(0 <= token <= _MAX_ID for token in listed):
        raise ConfigError(f"invalid token ids {reprlib.repr(ids)}: one is negative, or larger than any token id")
    return listed


def _read_template(given: object) -> tuple[str, str]:
    """Return a template's text and where it comes from. Raises ConfigError where it cannot be read."""
    if isinstance(given, str):
        return given, "chat_template"
    path = file_path("chat_template", given)
    try:
        return path.read_text(encoding="utf-8-sig"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one where there is none."""
    try:
        value = json.loads(_read_text(path) or "{}")
    except (ValueError, RecursionError) as error:
        raise ContractMismatchError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ContractMismatchError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _read_text(path: Path) -> str | None:
    """Return the text of a file; None where there is none."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ContractMismatchError(f"{path} cannot be read: {error}") from error
