"""Options of how tokens are chosen and where a text ends: stops, sampling and speculation."""

from __future__ import annotations

import argparse
from typing import Any

from ortolan.errors import ConfigError

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def add_stop_option(parser: argparse.ArgumentParser) -> None:
    """Add the texts that end a text."""
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable (default: none)"
    )


def check_stops(options: argparse.Namespace) -> None:
    """Refuse a stop that ends everything. Raises ConfigError."""
    if not all(options.stop):
        raise ConfigError("--stop is an empty text; it would stop before the first token")


def add_sampling_options(parser: argparse.ArgumentParser, description: str) -> None:
    """Add how a token is chosen; `description` says where the defaults are other ones."""
    group = parser.add_argument_group("sampling", description)
    group.add_argument("--temperature", type=float, help="0: the most likely token (default: 0)")
    group.add_argument("--top-k", type=int, help="of the most likely tokens; 0: all (default: 0)")
    group.add_argument("--top-p", type=float, help="share of the probability to draw from (default: 1.0)")
    group.add_argument("--min-p", type=float, help="least share of the best token's probability (default: 0.0)")
    group.add_argument("--repetition-penalty", type=float, help="1: none (default: 1.0)")
    group.add_argument("--seed", type=int, help="of the random numbers (default: another each time)")


def read_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Sampling` that were given. Raises ConfigError where one is not allowed."""
    import ortolan

    given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    ortolan.Sampling(**given)
    return given


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Add who drafts tokens."""
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


def read_speculation(options: argparse.Namespace) -> Any:
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


def open_drafter(model: Any, options: argparse.Namespace) -> None:
    """Open what drafts, which stays open, before there is anything to draft. Raises ConfigError and as `load`."""
    if options.speculate == "mtp":
        model.draft_head()
    elif options.speculate not in (None, "lookup"):
        model.draft_model(options.speculate)
