"""Reads the prompt of the command line, and turns it into token ids, by a chat template where that is asked for."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from ortolan.errors import ConfigError

ANSWER = "<<answer>>"  # stands for an answer in a chat template
PROMPT_SIGN = "> "
LATE_SYSTEM = "--system begins a chat, and the saved session has begun already; leave it out"


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add where the prompt comes from, and how it is wrapped."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text of the prompt (default: standard input; a terminal asks for a line)")
    prompt.add_argument("--prompt-file", type=Path, help="file with the prompt (default: standard input)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="wrap the prompt in a chat template, and sample as the model's generation_config.json says",
    )
    add_chat_options(parser)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add what a chat begins with, and how its messages are written."""
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the chat (default: none)")
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="template in Jinja's language (default: the model's)"
    )


def check_chat_options(options: argparse.Namespace) -> None:
    """Refuse options of chats without --chat, or in the middle of one. Raises ConfigError."""
    for name in ("system", "chat_template"):
        if getattr(options, name) is not None and not options.chat:
            raise ConfigError(f"--{name.replace('_', '-')} is for chats; add --chat")


def read_prompt(options: argparse.Namespace) -> str:
    """Read the prompt, from a terminal one line of it.

    Raises:
        ConfigError: it cannot be read, is not UTF-8 text, or is empty and no saved session can go on without one.
    """
    if options.prompt is not None:
        text = options.prompt
    else:
        try:
            file = options.prompt_file
            text = file.read_text(encoding="utf-8-sig") if file else _read_standard_input()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the prompt cannot be read: {error}") from error
    if not text and not options.load_session:
        raise ConfigError("the prompt is empty")
    check_text("the prompt", text)
    return str(text)


def check_text(name: str, text: str) -> None:
    """Raise ConfigError where a text is not one that UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # undecodable bytes of an argument arrive as lone surrogates
        raise ConfigError(f"{name} is not UTF-8 text: {error.reason} at character {error.start}") from error


def _read_standard_input() -> str:
    """Read UTF-8 as files are read, whatever the locale."""
    if sys.stdin is None:  # it may be closed
        return ""
    if sys.stdin.isatty():
        print(PROMPT_SIGN, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().removesuffix("\n")
    binary = getattr(sys.stdin, "buffer", None)
    if binary is not None:
        return decoded(binary.read())
    return sys.stdin.read().removeprefix("\ufeff")


def decoded(data: bytes) -> str:
    """Return bytes as a text file of them is read: UTF-8 without its byte-order mark, lines ended by a line feed."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()


def encode_prompt(tokenizer: Any, prompt: str, options: argparse.Namespace, *, is_first: bool) -> list[int]:
    """Return the token ids of a prompt that begins a sequence, or follows what was read.

    Raises:
        ConfigError: it has none, or the chat template refuses it.
    """
    if not options.chat:
        token_ids = tokenizer.encode(prompt, add_special_tokens=is_first)
    else:
        token_ids = chat_turn(
            tokenizer, prompt, is_first=is_first, system=options.system, template=options.chat_template
        )
    if not token_ids:
        raise ConfigError("the prompt has no tokens")
    listed: list[int] = token_ids
    return listed


def chat_turn(
    tokenizer: Any, prompt: str, *, is_first: bool, system: str | None = None, template: Path | None = None
) -> list[int]:
    """Return the token ids of a user's turn: the first of a conversation, or one that follows an answer.

    The latter is what the template writes behind an answer, its end mark included.

    Args:
        tokenizer: of the model.
        prompt: what the user says.
        is_first: whether nothing was read before.
        system: message that begins the conversation; None: there is none.
        template: file of the chat template; None takes the model's own.

    Raises:
        ConfigError: there is no template, it does not write answers as they are, or a system message comes late.
    """
    user = {"role": "user", "content": prompt}
    if is_first:
        return conversation_ids(tokenizer, [user], system=system, template=template)
    if system is not None:
        raise ConfigError(LATE_SYSTEM)
    return following_ids(tokenizer, [user], template=template)


def conversation_ids(
    tokenizer: Any, messages: list[dict[str, str]], *, system: str | None = None, template: Path | None = None
) -> list[int]:
    """Return the token ids of messages that begin a conversation, up to where the next answer begins.

    Raises:
        ConfigError: there is no template, or it refuses the messages.
    """
    begin = [] if system is None else [{"role": "system", "content": system}]
    token_ids: list[int] = tokenizer.apply_chat_template([*begin, *messages], chat_template=template)
    return token_ids


def following_ids(tokenizer: Any, messages: list[dict[str, str]], *, template: Path | None = None) -> list[int]:
    """Return the token ids of messages that follow an answer, from its end mark on.

    Raises:
        ConfigError: there is no template, it refuses the messages, or it does not write answers as they are.
    """
    begin = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template([*begin, *messages], tokenize=False, chat_template=template)
    _, found, turn = text.partition(ANSWER)
    if not found:
        raise ConfigError(
            "the chat template rewrites answers, so that no message can follow one that was read; give the next turn "
            "as the model reads it, by `ortolan generate` without --chat, or begin a new conversation"
        )
    token_ids: list[int] = tokenizer.encode(turn, add_special_tokens=False)
    return token_ids
