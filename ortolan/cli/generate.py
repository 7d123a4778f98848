"""`ortolan generate`: continues a prompt, and streams the text to standard output."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ortolan.cli.choosing import (
    add_sampling_options,
    add_speculation_options,
    add_stop_option,
    check_stops,
    read_sampling,
    read_speculation,
)
from ortolan.cli.eviction import add_eviction_options, read_eviction
from ortolan.cli.idle_options import warn_of_idle_sampling
from ortolan.cli.interrupts import interruptible
from ortolan.cli.keeping import add_keeping_options, check_kept_files, print_saved, save_session, write_stats
from ortolan.cli.models import add_device_options, add_session_options, open_model, open_session
from ortolan.cli.progress import token_bar
from ortolan.cli.prompts import add_prompt_options, check_chat_options, encode_prompt, read_prompt
from ortolan.cli.texts import warn_of_full_context, write_text
from ortolan.errors import ConfigError, SessionInterruptedError, whole_number

EPILOG = """examples:
  ortolan generate ./llama --prompt "Once upon a time" --max-new-tokens 100
  ortolan generate ./llama --prompt-file report.txt --evict snapkv --budget 2048 --stats-json stats.json
  ortolan generate ./llama --prompt-file report.txt --evict expected --budget 2048 --evict-option queries=512
  ortolan generate ./llama --prompt-file report.txt --max-new-tokens 0 --save-session report.session
  ortolan generate ./llama --load-session report.session --prompt "And the costs?" --evict snapkv --budget 2048
  ortolan generate ./llama --prompt-file report.txt --speculate lookup --max-new-tokens 500
  git diff | ortolan generate ./llama --chat --system "You review code." --seed 1
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt (--prompt, --prompt-file, or standard input) and stream the text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", help="folder that `ortolan export` made, or the Hub id of one (owner/name)")
    add_prompt_options(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        help="most tokens of the text; 0 only reads the prompt, for --save-session (default: %(default)s)",
    )
    add_stop_option(parser)
    add_device_options(parser)
    add_session_options(parser)
    add_sampling_options(parser, "With --chat, what is left out is as the model's generation_config.json says.")
    add_speculation_options(parser)
    add_eviction_options(parser)
    add_keeping_options(
        parser,
        save="write the session when the text is out, or at Ctrl-C",
        load="go on from a saved session: the prompt is its next turn; an empty one (--prompt '') resumes its text",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Generate; nothing but the text goes to standard output."""
    import ortolan

    given, eviction, speculation = read_sampling(options), read_eviction(options), read_speculation(options)
    _check(options)
    prompt = read_prompt(options)
    model = open_model(options)
    usual = ortolan.Sampling.from_model(model) if options.chat else ortolan.Sampling()
    sampling = dataclasses.replace(usual, **given)
    warn_of_idle_sampling(options, sampling)
    session = open_session(model, options, eviction)
    try:
        with interruptible(session.interrupt):
            if prompt:
                _continue(model, session, prompt, options, {"sampling": sampling, "speculation": speculation})
            else:
                _resume(session, options, given, speculation)
    except (KeyboardInterrupt, SessionInterruptedError):
        if options.save_session and session.logical_length:
            save_session(session, options.save_session)
            print_saved(session, options.save_session)
        raise
    warn_of_full_context(model, session)
    if options.save_session:
        save_session(session, options.save_session)
    if options.stats_json:
        write_stats(options.stats_json, session)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be done, before the work. Raises ConfigError."""
    check_chat_options(options)
    check_kept_files(options)
    check_stops(options)
    if options.max_new_tokens == 0 and not options.save_session:
        raise ConfigError(
            "--max-new-tokens 0 only reads the prompt (max_new_tokens), for a session to be saved; add "
            "--save-session FILE, or generate at least one token"
        )
    whole_number("max_new_tokens", options.max_new_tokens, 0 if options.save_session else 1)


def _continue(model: Any, session: Any, prompt: str, options: argparse.Namespace, choices: dict[str, Any]) -> None:
    """Read the prompt, and write the text that follows it."""
    token_ids = encode_prompt(model.tokenizer, prompt, options, is_first=session.logical_length == 0)
    with token_bar(len(token_ids)) as bar:
        if options.max_new_tokens == 0:
            session.prefill(token_ids, bar.update)
            return
        text = session.stream_text(
            token_ids,
            max_new_tokens=options.max_new_tokens,
            progress=bar.update,
            stop=options.stop,
            **choices,
        )
    write_text(text)


def _resume(session: Any, options: argparse.Namespace, given: dict[str, Any], speculation: Any) -> None:
    """Go on with the saved session's generation, whose sampling and stops go on too; write the rest of its text."""
    from ortolan.runtime.text.streaming import TextStream

    if options.chat:
        raise ConfigError("--chat wraps a prompt, and a text that is resumed has none; leave it out, or give a prompt")
    if given or options.stop:
        raise ConfigError("a text that is resumed goes on with its own sampling and stops; leave those options out")
    left = session.generation
    shown = len(left.text or "") if left else 0
    write_text(TextStream(session.resume(options.max_new_tokens, speculation=speculation), shown))
