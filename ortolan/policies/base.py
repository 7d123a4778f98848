"""Declares the options of eviction policies: what each may be, and how its text is read."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, TypeAlias

from ortolan.errors import MAX_LENGTH, ConfigError, one_of, truth, whole_number

OptionValue: TypeAlias = int | str | bool | None

OPTION = "option"  # key of a dataclass field's metadata, under which its `Option` stands
POOLS = ("avg", "max")
GRANULARITIES = ("kv_head", "layer", "model")
GROUP_REDUCES = ("mean", "max", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(abc.ABC):
    """One option of a policy.

    Attributes:
        help: what it means, in a few words.
        shapes_graph: whether the eviction graph is another one for another value.
    """

    help: str
    shapes_graph: bool = False

    @property
    @abc.abstractmethod
    def allowed(self) -> str:
        """What the option may be, in a few words."""

    @abc.abstractmethod
    def check(self, name: str, value: object) -> OptionValue:
        """Return a value as a plain Python value. Raises ConfigError where it is not allowed."""

    @abc.abstractmethod
    def parse(self, name: str, text: str) -> OptionValue:
        """Read a value from text. Raises ConfigError where it is not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeNumber(Option):
    """A count.

    Attributes:
        least: smallest value.
        most: largest value; None: there is none.
        odd: whether it must be odd.
        optional: whether it may be None, which lets the policy choose.
    """

    least: int = 1
    most: int | None = MAX_LENGTH
    odd: bool = False
    optional: bool = False

    @property
    def allowed(self) -> str:
        """What the option may be, in a few words."""
        return f"{'odd' if self.odd else 'whole'} number from {self.least}"

    def check(self, name: str, value: object) -> OptionValue:
        """Return a value as a plain Python value. Raises ConfigError where it is not allowed."""
        if value is None and self.optional:
            return None
        number = whole_number(name, value, self.least, self.most)
        if self.odd and number % 2 == 0:
            raise ConfigError(f"{name} is {number}; it must be an odd number")
        return number

    def parse(self, name: str, text: str) -> OptionValue:
        """Read a value from text. Raises ConfigError where it is not allowed."""
        try:
            value: object = int(text)
        except ValueError:
            value = text
        return self.check(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Option):
    """One of some words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """What the option may be, in a few words."""
        return " | ".join(self.words)

    def check(self, name: str, value: object) -> OptionValue:
        """Return a value as a plain Python value. Raises ConfigError where it is not allowed."""
        return one_of(name, value, self.words)

    def parse(self, name: str, text: str) -> OptionValue:
        """Read a value from text. Raises ConfigError where it is not allowed."""
        return self.check(name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(Option):
    """True or False."""

    @property
    def allowed(self) -> str:
        """What the option may be, in a few words."""
        return "true | false"

    def check(self, name: str, value: object) -> OptionValue:
        """Return a value as a plain Python value. Raises ConfigError where it is not allowed."""
        return truth(name, value)

    def parse(self, name: str, text: str) -> OptionValue:
        """Read a value from text. Raises ConfigError where it is not allowed."""
        return self.check(name, {"true": True, "false": False}.get(text.lower(), text))


def whole(help_text: str, **rules: Any) -> dict[str, Option]:
    """Declare a count: metadata of a dataclass field. The rules are fields of `WholeNumber`."""
    return {OPTION: WholeNumber(help=help_text, **rules)}


def choice(help_text: str, words: tuple[str, ...]) -> dict[str, Option]:
    """Declare a choice of words, which shapes the graph: metadata of a dataclass field."""
    return {OPTION: Choice(help=help_text, words=words, shapes_graph=True)}


def switch(help_text: str) -> dict[str, Option]:
    """Declare a switch: metadata of a dataclass field."""
    return {OPTION: Switch(help=help_text)}


def shared_lists(*granularities: str) -> dict[str, Option]:
    """Declare who shares a keep-list: metadata of a field named `granularity`."""
    return choice("who shares a list of kept positions", granularities or GRANULARITIES)


def reduced_groups() -> dict[str, Option]:
    """Declare how the query heads of a kv head are combined: metadata of a field named `group_reduce`."""
    return choice("over the query heads that share a kv head", GROUP_REDUCES)
