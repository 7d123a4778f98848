"""Counts the quality benchmark's outcomes, prints them as tables, and stores them as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from intervals import wilson_interval
from quality_trials import FULL, Outcome

from ortolan.cli.table import format_table
from ortolan.errors import ConfigError

STREAMING = "streaming"
ALL_KINDS = "all"
SAME_IN_ALL = ("values", "window")  # of runs that are shown as one
COLUMNS = tuple(field.name for field in fields(Outcome))


@dataclass(frozen=True, slots=True)
class Share:
    """Prompts whose values all came back, of those asked."""

    right: int
    samples: int

    @classmethod
    def of(cls, flags: Iterable[bool]) -> Share:
        """Count flags."""
        given = list(flags)
        return cls(sum(given), len(given))

    @property
    def percent(self) -> float:
        """The share, 0 .. 100."""
        return 100 * self.right / self.samples

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % Wilson interval, percent."""
        low, high = wilson_interval(self.right, self.samples)
        return 100 * low, 100 * high

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.percent:.1f} ({low:.1f} .. {high:.1f})"


def answered(outcomes: Iterable[Outcome]) -> Share:
    """Count prompts where every value asked for came back."""
    return Share.of(all(outcome.right) for outcome in outcomes)


def covered(outcomes: Iterable[Outcome]) -> Share:
    """Count prompts where sinks and the latest tokens hold every fact asked for."""
    return Share.of(all(outcome.covered) for outcome in outcomes)


def select(outcomes: Iterable[Outcome], **wanted: Any) -> list[Outcome]:
    """Return the outcomes whose fields have these values."""
    return [o for o in outcomes if all(getattr(o, name) == value for name, value in wanted.items())]


def values_of(outcomes: Iterable[Outcome], name: str) -> list[Any]:
    """Return a field's distinct values in order of appearance."""
    return list(dict.fromkeys(getattr(outcome, name) for outcome in outcomes))


def shares_removed(outcomes: Iterable[Outcome]) -> list[float]:
    """Return the shares removed, ascending, without the full caches' 0."""
    return sorted(share for share in values_of(outcomes, "removed") if share)


def policies_of(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the policies measured, without full caches."""
    return [policy for policy in values_of(outcomes, "policy") if policy != FULL]


def mode_table(outcomes: Sequence[Outcome], mode: str, kind: str) -> str:
    """Format one line per policy, one column per share removed; all lengths together.

    Args:
        outcomes: of any modes and kinds.
        mode: which to show.
        kind: which to show; `ALL_KINDS` takes them all.
    """
    own = select(outcomes, mode=mode) if kind == ALL_KINDS else select(outcomes, mode=mode, kind=kind)
    shares = shares_removed(own)
    rows = []
    for policy in policies_of(own):
        groups = [select(own, policy=policy, removed=share) for share in shares]
        rows.append([policy, *(str(answered(group)) for group in groups)])
        if policy == STREAMING:
            rows.append(["  its coverage", *(f"{covered(group).percent:.1f}" for group in groups)])
    return format_table(["policy", *(f"{100 * share:g} % removed" for share in shares)], rows)


def print_tables(outcomes: Sequence[Outcome]) -> None:
    """Print right answers in percent, with 95 % intervals, by mode and kind."""
    kinds = values_of(outcomes, "kind")
    for mode in values_of(outcomes, "mode"):
        for kind in [*kinds, ALL_KINDS] if len(kinds) > 1 else kinds:
            own = select(outcomes, mode=mode) if kind == ALL_KINDS else select(outcomes, mode=mode, kind=kind)
            full = answered(select(own, policy=FULL))
            print(f"\nquestion {mode}, {kind}: right answers, % (95 % interval), {full.samples} prompts")
            print(f"full caches: {full}")
            print(mode_table(outcomes, mode, kind))


def counts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Count right answers for each mode, policy, share removed, length and kind."""
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    names = ("mode", "policy", "removed", "length", "kind")
    for outcome in outcomes:
        groups.setdefault(tuple(getattr(outcome, name) for name in names), []).append(outcome)
    return [
        dict(zip(names, key, strict=True))
        | asdict(answered(group))
        | {
            "interval_percent": answered(group).interval,
            "values_right": sum(sum(o.right) for o in group),
            "values": sum(len(o.right) for o in group),
            "covered": covered(group).right,
            "held": sum(o.held for o in group) / len(group),
        }
        for key, group in groups.items()
    ]


def write_json(path: Path, outcomes: Sequence[Outcome], about: dict[str, Any]) -> None:
    """Write what was measured on what, the counts, and every outcome as a row of `columns`."""
    rows = [[getattr(outcome, name) for name in COLUMNS] for outcome in outcomes]
    content = {"about": about, "counts": counts(outcomes), "columns": COLUMNS, "outcomes": rows}
    path.write_text(json.dumps(content) + "\n")


def read_runs(paths: Sequence[Path]) -> tuple[list[Outcome], dict[str, Any]]:
    """Read what `write_json` wrote: several runs of other lengths or policies, as if they were one.

    Raises:
        ConfigError: a file is something else, or the runs asked differently.
    """
    outcomes: dict[tuple[Any, ...], Outcome] = {}
    abouts = []
    for path in paths:
        own, about = _read_json(path)
        abouts.append(about)
        different = [name for name in SAME_IN_ALL if about[name] != abouts[0][name]]
        if different:
            raise ConfigError(f"{path} differs from {paths[0]} in {', '.join(different)}; show it by itself")
        for outcome in own:
            prompt = (outcome.length, outcome.kind, outcome.seed)
            outcomes[outcome.mode, outcome.policy, outcome.removed, *prompt] = outcome
    return list(outcomes.values()), abouts[0] | {"lengths": sorted({o.length for o in outcomes.values()})}


def _read_json(path: Path) -> tuple[list[Outcome], dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
        if tuple(content["columns"]) != COLUMNS or not set(SAME_IN_ALL) <= content["about"].keys():
            raise ConfigError(f"{path} was written by another version of this benchmark; measure again")
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in content["outcomes"]]
        lists = ("depths", "right", "covered")
        return [Outcome(**row | {name: tuple(row[name]) for name in lists}) for row in rows], content["about"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} holds no outcomes of this benchmark: {error!r}") from error
