"""`ortolan chat`: holds a conversation, turn by turn, and streams the answers to standard output."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortolan.cli.choosing import (
    add_sampling_options,
    add_speculation_options,
    add_stop_option,
    check_stops,
    open_drafter,
    read_sampling,
    read_speculation,
)
from ortolan.cli.conversation import Conversation
from ortolan.cli.eviction import add_eviction_options, read_eviction
from ortolan.cli.idle_options import warn_of_idle_sampling
from ortolan.cli.interrupts import interruptible
from ortolan.cli.keeping import (
    add_keeping_options,
    check_kept_files,
    check_session_target,
    print_saved,
    save_session,
    write_stats,
)
from ortolan.cli.lines import is_terminal, read_line
from ortolan.cli.models import add_device_options, add_session_options, open_model, open_session
from ortolan.cli.progress import token_bar
from ortolan.cli.prompts import LATE_SYSTEM, add_chat_options
from ortolan.cli.report import print_error
from ortolan.cli.texts import warn_of_full_context, write_text
from ortolan.errors import ConfigError, OrtolanError, SessionInterruptedError, whole_number

EXIT_FAILED = 1
COMMANDS = """/reset      begin a new conversation
/save FILE  save the session, for --load-session
/exit       end, as Ctrl-D does
/help       list the commands
//TEXT      say /TEXT"""
EPILOG = """A line of standard input is a message, unless it is empty or a command:
  /reset, /save FILE, /exit, /help; a line that begins with // is a message that begins with /

examples:
  ortolan chat ./llama
  ortolan chat ./llama --system "Answer briefly." --temperature 0.7 --seed 1
  ortolan chat ./llama --load-session talk.session --save-session talk.session
  ortolan chat ./llama --max-new-tokens 200 < questions.txt > answers.txt
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "chat",
        help="hold a conversation, turn by turn",
        description="Hold a conversation: read a message per line of standard input, and stream the answers to "
        "standard output. Ctrl-C ends an answer, and at the prompt the conversation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", help="folder that `ortolan export` made, or the Hub id of one (owner/name)")
    add_chat_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=1024, help="most tokens of an answer (default: %(default)s)"
    )
    add_stop_option(parser)
    add_device_options(parser)
    add_session_options(parser)
    add_sampling_options(parser, "What is left out is as the model's generation_config.json says, where it has one.")
    add_speculation_options(parser)
    add_eviction_options(parser)
    add_keeping_options(
        parser, save="write the session at the end, also at Ctrl-C", load="go on with a saved conversation"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Chat; nothing but the answers goes to standard output."""
    import ortolan

    given, eviction, speculation = read_sampling(options), read_eviction(options), read_speculation(options)
    whole_number("max_new_tokens", options.max_new_tokens)
    check_stops(options)
    check_kept_files(options)
    model = open_model(options)
    sampling = dataclasses.replace(ortolan.Sampling.from_model(model), **given)
    warn_of_idle_sampling(options, sampling)
    open_drafter(model, options)
    session = open_session(model, options, eviction)
    if options.system is not None and session.logical_length:
        raise ConfigError(LATE_SYSTEM)
    choices = {
        "max_new_tokens": options.max_new_tokens,
        "sampling": sampling,
        "stop": options.stop,
        "speculation": speculation,
    }
    conversation = Conversation(model.tokenizer, session, system=options.system, template=options.chat_template)
    conversation.check()
    try:
        code = Chat(model, session, conversation, choices).hold()
    except KeyboardInterrupt:
        if _end(session, options):
            print_saved(session, options.save_session)
        raise
    _end(session, options)
    return code


def _end(session: Any, options: argparse.Namespace) -> bool:
    """Write what was asked for of a session; returns whether that was saved, as something was read."""
    is_saved = bool(options.save_session and session.logical_length)
    if is_saved:
        save_session(session, options.save_session)
    if options.stats_json:
        write_stats(options.stats_json, session)
    return is_saved


class Chat:
    """The lines of standard input, and what is done at each."""

    def __init__(self, model: Any, session: Any, conversation: Conversation, choices: dict[str, Any]) -> None:
        """Begin; `choices` are those of `Session.stream_text` for every answer."""
        self._model, self._session = model, session
        self._conversation, self._choices = conversation, choices
        self._is_terminal = is_terminal()

    def hold(self) -> int:
        """Read lines to their end; returns the exit code. What goes wrong with one ends only a pipe's."""
        is_over = False
        while not is_over:
            try:
                is_over = self._take(read_line())
            except OrtolanError as error:
                print_error(error)
                if not self._is_terminal:
                    return EXIT_FAILED
        return 0

    def _take(self, line: str | None) -> bool:
        """Do what a line says; returns whether it is the last one."""
        if line is None:
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._obey(line)
        if line.strip():
            self._answer(line.removeprefix("/"))
        return False

    def _obey(self, line: str) -> bool:
        """Do what a command says; returns whether it is the last one."""
        name, _, rest = line.strip().partition(" ")
        match name, rest.strip():
            case "/exit", "":
                return True
            case "/help", "":
                print(COMMANDS, file=sys.stderr)
            case "/reset", "":
                self._conversation.reset()
            case "/save", path if path:
                self._save(Path(path))
            case _:
                raise ConfigError(
                    f"{line.strip()} is not a command; there are /reset, /save FILE, /exit and /help, and a message "
                    "that begins with a slash takes another one before it"
                )
        return False

    def _save(self, path: Path) -> None:
        check_session_target("/save", path)
        save_session(self._session, path)
        print_saved(self._session, path)

    def _answer(self, message: str) -> None:
        """Read a message, and write the answer; the first Ctrl-C ends that, and on a terminal no more."""
        with contextlib.suppress(SessionInterruptedError):  # an earlier one that found nothing left to end
            self._session.feeder.interrupt.check()
        is_over = False
        try:
            with interruptible(self._session.interrupt):
                with contextlib.suppress(SessionInterruptedError):
                    write_text(self._read(message))
                is_over = True
        except KeyboardInterrupt:
            if not (is_over and self._is_terminal):
                raise
        warn_of_full_context(self._model, self._session)

    def _read(self, message: str) -> Iterator[str]:
        """Read a message, and return an iterator over the answer's text."""
        turn = self._conversation.plan(message)
        with token_bar(len(turn.token_ids) - turn.kept) as bar:
            return self._conversation.read(turn, progress=bar.update, **self._choices)
