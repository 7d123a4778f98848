"""What is known of one sequence: its tokens, how far they were read, and the pages and queries that are its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.runtime.caches.captures import Captures
from ortolan.runtime.device.buffers import Array
from ortolan.runtime.state.lengths import Lengths


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState:
    """One sequence, in a session or in an engine.

    Attributes:
        tokens: all that are known: the first `lengths.logical` were read, the others are still to be fed.
        lengths: how much was read, and how much of it each cache holds.
        variant: of RoPE, which its keys were rotated with.
        pages: of each cache kind, in the order of their slots; empty where caches are contiguous, or nothing is read.
        captures: for each evictable layer the buffer [1, Wq, Hq, D] that takes queries; empty: none are taken.
        captured_at_eviction: copies of them, made at the last eviction, while its keys were there.
    """

    tokens: list[int] = field(default_factory=list)
    lengths: Lengths = field(default_factory=Lengths)
    variant: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    captures: Captures = field(default_factory=Captures)
    captured_at_eviction: dict[int, Array] = field(default_factory=dict)

    @property
    def fed(self) -> int:
        """Logical length: tokens whose keys and values were computed."""
        return self.lengths.logical

    @property
    def history(self) -> list[int]:
        """The tokens that were read."""
        return self.tokens[: self.lengths.logical]

    @property
    def pending(self) -> list[int]:
        """The tokens that are known and not read."""
        return self.tokens[self.lengths.logical :]

    def read(self, tokens: list[int]) -> None:
        """Count tokens as read: the first of those that were pending, or others that take the place of all of them."""
        begin = self.lengths.logical
        if self.tokens[begin : begin + len(tokens)] != tokens:
            self.tokens[begin:] = tokens
        self.lengths.advance(len(tokens))

    def forget_pending(self) -> None:
        """Forget the tokens that were not read."""
        del self.tokens[self.lengths.logical :]
