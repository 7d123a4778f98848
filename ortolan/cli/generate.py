"""`ortolan generate`: continues a prompt, and streams the text to standard output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortolan.cli.eviction import add_eviction_options, read_eviction
from ortolan.cli.idle_options import warn_of_idle_sampling
from ortolan.cli.progress import token_bar
from ortolan.cli.report import STANDARD, check_report_target, print_warning, write_report
from ortolan.errors import ConfigError, file_path

QUERIES_READ_AGAIN = 256  # tokens that a short question's eviction may read again for their queries, by any policy
ANSWER = "<<answer>>"  # stands for an answer in a chat template
EPILOG = """examples:
  ortolan generate ./llama --prompt "Once upon a time" --max-new-tokens 100
  ortolan generate ./llama --prompt-file report.txt --evict snapkv --budget 2048 --stats-json stats.json
  ortolan generate ./llama --prompt-file report.txt --evict expected --budget 2048 --evict-option queries=512
  ortolan generate ./llama --prompt-file report.txt --evict snapkv --budget 2048 --save-session report.session
  ortolan generate ./llama --load-session report.session --prompt "And the costs?"
  git diff | ortolan generate ./llama --chat --temperature 0.7 --top-p 0.9 --seed 1
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
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text of the prompt (default: standard input)")
    prompt.add_argument("--prompt-file", type=Path, help="file with the prompt (default: standard input)")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens of the text (default: %(default)s)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable (default: none)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where it is usable)")
    parser.add_argument("--plain", action="store_true", help="run the plain graph on CUDA, not the fused one")
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
    add_eviction_options(parser)
    _add_saving(parser)
    parser.set_defaults(run=run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default): the most likely token")
    group.add_argument("--top-k", type=int, default=0, help="0 (default): all")
    group.add_argument(
        "--top-p", type=float, default=1.0, help="share of probability to draw from (default: %(default)s)"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, help="least share of the best's probability (default: %(default)s)"
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="1: none (default: %(default)s)")
    group.add_argument("--seed", type=int, help="of the random numbers (default: another each time)")


def _add_saving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("saved sessions")
    group.add_argument(
        "--save-session", type=Path, metavar="FILE", help="write the session when the text is out (default: none)"
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

    sampling, eviction = _sampling(options), read_eviction(options)
    _check_files(options)
    if not all(options.stop):
        raise ConfigError("--stop is an empty text; it would stop before the first token")
    prompt = _read_prompt(options)
    model = ortolan.load(options.model_dir, device=options.device, fused=False if options.plain else None)
    warn_of_idle_sampling(options, sampling)
    if options.load_session:
        session = model.restore(options.load_session, options.max_context, options.chunk_size, eviction=eviction)
    else:
        session = model.session(options.max_context, options.chunk_size, eviction)
    pieces = (
        _generate(model, session, prompt, options, sampling) if prompt else _resume(model, session, options, sampling)
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if session.finish_reason == "context":
        advice = context_advice(session.plan.max_context, model.manifest)
        print_warning(f"the text ended at max_context = {session.plan.max_context}; {advice}")
    if options.save_session:
        session.save(options.save_session, rewind_tokens=QUERIES_READ_AGAIN)
    if options.stats_json:
        _write_stats(options.stats_json, session)
    return 0


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


def _generate(model: Any, session: Any, prompt: str, options: argparse.Namespace, sampling: Any) -> Iterator[str]:
    """Read the prompt, and return the text that follows it."""
    if options.chat:
        token_ids = chat_turn(model.tokenizer, prompt, is_first=session.logical_length == 0)
    else:
        token_ids = model.tokenizer.encode(prompt, add_special_tokens=session.logical_length == 0)
    if not token_ids:
        raise ConfigError("the prompt has no tokens")
    with token_bar(len(token_ids)) as bar:
        generation = session.generate(
            token_ids, options.max_new_tokens, sampling, progress=bar.update, stop=options.stop
        )
    return _stream(model, generation, 0)


def _resume(model: Any, session: Any, options: argparse.Namespace, sampling: Any) -> Iterator[str]:
    """Go on with the saved session's generation, whose sampling and stops go on too; return the rest of its text."""
    if options.chat:
        raise ConfigError("--chat wraps a prompt, and a text that is resumed has none; leave it out, or give a prompt")
    if sampling != type(sampling)() or options.stop:
        raise ConfigError("a text that is resumed goes on with its own sampling and stops; leave those options out")
    left = session.generation
    shown = len(left.text or "") if left else 0
    return _stream(model, session.resume(options.max_new_tokens), shown)


def _stream(model: Any, generation: Any, shown: int) -> Iterator[str]:
    """Yield the text of a generation piece by piece, after the characters that were shown before."""
    from ortolan.runtime import stream_text

    if generation.text is None:
        yield from stream_text(model.tokenizer, generation)
        return
    while True:
        is_last = next(generation, None) is None
        yield generation.text[shown:]
        shown = max(shown, len(generation.text))
        if is_last:
            return


def chat_turn(tokenizer: Any, prompt: str, *, is_first: bool) -> list[int]:
    """Return the token ids of a user's turn: the first of a conversation, or one that follows an answer.

    The latter is what the template writes behind an answer, its end mark included.

    Raises:
        ConfigError: there is no template, or it does not write answers as they are.
    """
    user = {"role": "user", "content": prompt}
    if is_first:
        first: list[int] = tokenizer.apply_chat_template([user])
        return first
    answer = {"role": "assistant", "content": ANSWER}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}, answer, user], tokenize=False)
    _, found, turn = text.partition(ANSWER)
    if not found:
        raise ConfigError(
            "the chat template rewrites answers; give the next turn as the model reads it, without --chat"
        )
    following: list[int] = tokenizer.encode(turn, add_special_tokens=False)
    return following


def _sampling(options: argparse.Namespace) -> Any:
    """Build the sampling options."""
    import ortolan

    return ortolan.Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )


def _read_prompt(options: argparse.Namespace) -> str:
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
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # undecodable bytes of an argument arrive as lone surrogates
        raise ConfigError(f"the prompt is not UTF-8 text: {error.reason} at character {error.start}") from error
    return str(text)


def _read_standard_input() -> str:
    """Read UTF-8, as files are read, whatever the locale."""
    binary = getattr(sys.stdin, "buffer", None)
    if binary is not None:
        return str(binary.read().decode("utf-8-sig"))
    return sys.stdin.read().removeprefix("\ufeff") if sys.stdin else ""  # it may be closed


def _write_stats(target: str, session: Any) -> None:
    stats = session.stats.as_dict() | {
        "finish_reason": session.finish_reason,
        "logical_length": session.logical_length,
        "cache_bytes": session.cache_bytes,
        "full_length_cache_bytes": session.plan.full_length_bytes,
        "memory": session.memory_report().as_dict(),
    }
    write_report(target, stats, sys.stderr)
