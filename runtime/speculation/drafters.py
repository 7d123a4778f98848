"""Keeps a session's drafter from one generation to the next."""

from __future__ import annotations

from collections.abc import Callable

from ortolan.runtime.speculation.drafter import Drafter, Speculator, token_cost
from ortolan.runtime.speculation.options import Speculation, check_speculation
from ortolan.runtime.speculation.packed import PackedDrafter
from ortolan.runtime.steps.feeder import Feeder


class Drafters:
    """Makes drafters of the sequence that a feeder feeds; the last one knows what the sequence held before."""

    def __init__(self, open_drafter: Callable[[Speculation], Drafter], feeder: Feeder) -> None:
        self._open, self._feeder = open_drafter, feeder
        self._last: tuple[Speculation, Drafter] | None = None

    def start(self, speculation: Speculation | None) -> Speculator | None:
        """Start to draft for a generation; None where nothing is to be drafted: then the last drafter reads on.

        Raises:
            ConfigError: the model cannot have that drafter.
        """
        options = check_speculation(speculation)
        if options is None:
            return None
        if self._last is None or self._last[0] != options:
            self._last = (options, self._open(options))
        drafter = self._last[1]
        cost = token_cost(self._feeder.stepper)
        speculator = Speculator(lambda: drafter, options, self._feeder.manifest.vocab_size, cost)
        self._feeder.reader = speculator.open_reader()
        return speculator

    @property
    def bytes(self) -> int:
        """Bytes of the drafter's caches and buffers."""
        drafter = self._last and self._last[1]
        return drafter.bytes if isinstance(drafter, PackedDrafter) else 0

    def forget(self, length: int) -> None:
        """Take note that the sequence's tokens from that length on are others now."""
        drafter = self._last and self._last[1]
        if isinstance(drafter, PackedDrafter):
            drafter.forget(length)
