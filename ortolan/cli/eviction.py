"""The command line's eviction options: a policy, its budget, and its other options by name."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ortolan.errors import ConfigError
from ortolan.policies import POLICIES, Eviction

NOT_BY_NAME = {"policy": "--evict", "budget": "--budget"}  # have flags of their own


def add_eviction_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; the parser's formatter must keep the lines of descriptions."""
    declared = Eviction.declared_options()["budget"]
    group = parser.add_argument_group("eviction", describe_policies())
    group.add_argument("--evict", metavar="POLICY", help=f"turn eviction on: {', '.join(POLICIES)} (default: off)")
    group.add_argument("--budget", type=int, metavar="N", help=f"{declared.help} (default: {Eviction().budget})")
    group.add_argument(
        "--evict-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of the policy; repeatable (defaults: see above)",
    )
    group.add_argument(
        "--snapkv-budget", type=int, metavar="N", help="the same as --evict snapkv --budget N (default: off)"
    )


def describe_policies() -> str:
    """List the policies and what their options may be."""
    common = Eviction.declared_options()
    lines = [
        "Evicts from full-attention caches once the prompt is read.",
        "Every --evict-option, first those of all policies:",
    ]
    lines += _describe_options(Eviction, [name for name in common if name not in NOT_BY_NAME])
    for policy, cls in POLICIES.items():
        own = [name for name, declared in cls.declared_options().items() if declared != common.get(name)]
        lines += [f"{policy}: {cls.summary}", *_describe_options(cls, own)]
    return "\n".join(lines)


def _describe_options(cls: type[Eviction], names: list[str]) -> list[str]:
    declared, defaults = cls.declared_options(), {each.name: each.default for each in dataclasses.fields(cls)}
    lines = []
    for name in names:
        default = "" if defaults[name] is None else f"; default: {str(defaults[name]).lower()}"
        lines.append(f"  {name}: {declared[name].help} ({declared[name].allowed}{default})")
    return lines


def read_eviction(options: argparse.Namespace) -> Eviction | None:
    """Return the eviction that was asked for; None where none was.

    Raises:
        ConfigError: the options contradict each other, or a policy or an option does not exist or is not allowed.
    """
    policy, budget = options.evict, options.budget
    if options.snapkv_budget is not None:
        if policy is not None or budget is not None:
            raise ConfigError("--snapkv-budget N means --evict snapkv --budget N; give one or the other, not both")
        policy, budget = "snapkv", options.snapkv_budget
    if policy is None:
        given = "--budget" if budget is not None else "--evict-option" if options.evict_option else None
        if given:
            raise ConfigError(f"{given} needs --evict POLICY; policies: {', '.join(POLICIES)}")
        return None
    chosen: dict[str, Any] = {} if budget is None else {"budget": budget}
    return Eviction(policy=policy, **chosen, **_read_named(policy, options.evict_option))


def _read_named(policy: str, texts: list[str]) -> dict[str, Any]:
    """Read NAME=VALUE texts by the types that the policy declares; names that it does not have stay text."""
    declared = POLICIES[policy].declared_options() if policy in POLICIES else {}
    values: dict[str, Any] = {}
    for each in texts:
        name, found, text = each.partition("=")
        if not found or not name:
            raise ConfigError(f"--evict-option is {each!r}; it must be NAME=VALUE")
        if name in NOT_BY_NAME:
            raise ConfigError(f"--evict-option {name} is not allowed; use {NOT_BY_NAME[name]}")
        if name in values:
            raise ConfigError(f"--evict-option {name} is given twice; give it once")
        values[name] = declared[name].parse(f"--evict-option {name}", text) if name in declared else text
    return values
