"""`ortolan generate`: continues a prompt, and streams the text to standard output."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from ortolan.cli.eviction import add_eviction_options, read_eviction
from ortolan.cli.idle_options import warn_of_idle_sampling
from ortolan.cli.interrupts import interruptible
from ortolan.cli.models import add_device_options, open_model, open_session
from ortolan.cli.progress import token_bar
from ortolan.cli.prompts import add_prompt_options, check_chat_options, encode_prompt, read_prompt
from ortolan.cli.report import STANDARD, check_report_target, print_warning, write_report
from ortolan.errors import ConfigError, SessionInterruptedError, file_path, whole_number

QUERIES_READ_AGAIN = 256  # tokens that a short question's eviction may read again for their queries, by any policy
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
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
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable (default: none)"
    )
    add_device_options(parser)
    parser.add_argument("--max-context", type=int, help="longest sequence, tokens (default: the export's)")
    parser.add_argument(
        "--chunk-size",
        type=int,
        help="prompt tokens per step (default: the export's; where it chose none, CUDA may take more)",
    )
    parser.add_argument(
        "--stats-json", metavar="FILE", help="write counters and timings; - for standard error (default: neither)"
    )
    _add_sampling(parser)
    _add_speculation(parser)
    add_eviction_options(parser)
    _add_saving(parser)
    parser.set_defaults(run=run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.description = "With --chat, what is left out is as the model's generation_config.json says."
    group.add_argument("--temperature", type=float, help="0: the most likely token (default: 0)")
    group.add_argument("--top-k", type=int, help="of the most likely tokens; 0: all (default: 0)")
    group.add_argument("--top-p", type=float, help="share of the probability to draw from (default: 1.0)")
    group.add_argument("--min-p", type=float, help="least share of the best token's probability (default: 0.0)")
    group.add_argument("--repetition-penalty", type=float, help="1: none (default: 1.0)")
    group.add_argument("--seed", type=int, help="of the random numbers (default: another each time)")


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculate",
        metavar="lookup|mtp|FOLDER",
        help="draft tokens that are then checked several in a step: lookup drafts what followed the last tokens "
        "earlier in the text; mtp drafts with the model's own head for it, where it has one; FOLDER is a smaller model "
        "with the same tokenizer (default: off)",
    )
    group.add_argument(
        "--speculate-tokens", type=int, metavar="N", help="most tokens of a draft (default: 7 with lookup, else 4)"
    )


def _read_speculation(options: argparse.Namespace) -> Any:
    """Return who drafts; None: nobody. Raises ConfigError."""
    import ortolan

    given = {} if options.speculate_tokens is None else {"tokens": options.speculate_tokens}
    if options.speculate is None:
        if given:
            raise ConfigError("--speculate-tokens needs --speculate lookup, --speculate mtp or --speculate FOLDER")
        return None
    if options.speculate == "lookup":
        return ortolan.PromptLookup(**given)
    if options.speculate == "mtp":
        return ortolan.MtpHead(**given)
    return ortolan.DraftModel(options.speculate, **given)


def _add_saving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("saved sessions")
    group.add_argument(
        "--save-session",
        type=Path,
        metavar="FILE",
        help="write the session when the text is out, or at Ctrl-C (default: none)",
    )
    group.add_argument(
        "--load-session",
        type=Path,
        metavar="FILE",
        help="go on from a saved session: the prompt is its next turn; an empty one (--prompt '') resumes its text "
        "(default: a new session)",
    )


def run(options: argparse.Namespace) -> int:
    """Generate; nothing but the text goes to standard output."""
    import ortolan
    from ortolan.runtime.caches.plan import context_advice

    given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    sampling, eviction = ortolan.Sampling(**given), read_eviction(options)
    speculation = _read_speculation(options)
    _check(options)
    prompt = read_prompt(options)
    model = open_model(options)
    if options.chat:
        sampling = dataclasses.replace(ortolan.Sampling.from_model(model), **given)
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
            _save(session, options)
            print(f"ortolan: {session.logical_length} tokens were read: {options.save_session}", file=sys.stderr)
        raise
    if session.finish_reason == "context":
        advice = context_advice(session.plan.max_context, model.manifest)
        print_warning(f"the text ended at max_context = {session.plan.max_context}; {advice}")
    if options.save_session:
        _save(session, options)
    if options.stats_json:
        _write_stats(options.stats_json, session)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be done, before the work. Raises ConfigError."""
    check_chat_options(options)
    _check_files(options)
    if not all(options.stop):
        raise ConfigError("--stop is an empty text; it would stop before the first token")
    if options.max_new_tokens == 0 and not options.save_session:
        raise ConfigError(
            "--max-new-tokens 0 only reads the prompt (max_new_tokens), for a session to be saved; add "
            "--save-session FILE, or generate at least one token"
        )
    whole_number("max_new_tokens", options.max_new_tokens, 0 if options.save_session else 1)


def _check_files(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, and statistics that would replace a session. Raises ConfigError."""
    from ortolan.runtime.saved.file import check_target

    if options.save_session:
        check_target(file_path("--save-session", options.save_session))
    check_report_target(options.stats_json)
    if options.stats_json in (None, STANDARD):
        return
    for name in ("save_session", "load_session"):
        path = getattr(options, name)
        if path and os.path.realpath(path) == os.path.realpath(options.stats_json):
            raise ConfigError(
                f"--stats-json names the file of --{name.replace('_', '-')}, {path}, which it would replace; give "
                "another name"
            )


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
    _write(text)


def _resume(session: Any, options: argparse.Namespace, given: dict[str, Any], speculation: Any) -> None:
    """Go on with the saved session's generation, whose sampling and stops go on too; write the rest of its text."""
    from ortolan.runtime.text.streaming import TextStream

    if options.chat:
        raise ConfigError("--chat wraps a prompt, and a text that is resumed has none; leave it out, or give a prompt")
    if given or options.stop:
        raise ConfigError("a text that is resumed goes on with its own sampling and stops; leave those options out")
    left = session.generation
    shown = len(left.text or "") if left else 0
    _write(TextStream(session.resume(options.max_new_tokens, speculation=speculation), shown))


def _write(pieces: Any) -> None:
    """Write a text piece by piece, and end its line also where it breaks off, before anything is said of that."""
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def _save(session: Any, options: argparse.Namespace) -> None:
    session.save(options.save_session, rewind_tokens=QUERIES_READ_AGAIN)


def _write_stats(target: str, session: Any) -> None:
    stats = session.stats.as_dict() | {
        "finish_reason": session.finish_reason,
        "logical_length": session.logical_length,
        "cache_bytes": session.cache_bytes,
        "full_length_cache_bytes": session.plan.full_length_bytes,
        "memory": session.memory_report().as_dict(),
    }
    write_report(target, stats, sys.stderr)
