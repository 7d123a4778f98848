"""Looks the sequence's last tokens up in the sequence itself."""

from __future__ import annotations

from collections.abc import Sequence

from ortolan.runtime.options import Sampling


class LookupDrafter:
    """An index of what followed each few tokens of one sequence when they stood there last.

    It grows with the sequence: a call costs as much as the tokens that are new to it.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """Index runs of `shortest` to `longest` tokens."""
        self._sizes = range(longest, shortest - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}  # of the token after each run
        self._known = 1  # tokens whose places were indexed, but for the first
        self._last = -1  # of these

    def propose(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """Return what followed the longest of the last runs that stood before."""
        self._index(tokens, len(tokens))
        place = self._find(tokens, len(tokens))
        found: list[int] = []
        if place is not None:
            for each in range(place, place + count):  # past the end it goes on as the draft itself begins
                found.append(tokens[each] if each < len(tokens) else found[each - len(tokens)])
        return found

    def is_likely(self, tokens: Sequence[int], known: int) -> bool:
        """Say whether the last known tokens stood before."""
        self._index(tokens, known)
        return self._find(tokens, known) is not None

    def _find(self, tokens: Sequence[int], known: int) -> int | None:
        """Return the place behind the longest run of last tokens that stood before; None where there is none."""
        runs = (tuple(tokens[known - size : known]) for size in self._sizes if size < known)
        return next((place for run in runs if (place := self._places.get(run)) is not None), None)

    def _index(self, tokens: Sequence[int], known: int) -> None:
        """Index what is new. Where the sequence was changed unseen, some drafts are wrong, and nothing else."""
        if self._known > known or (self._known > 1 and tokens[self._known - 1] != self._last):
            self._places.clear()
            self._known = 1
        for place in range(self._known, known):
            for size in self._sizes:
                if size <= place:
                    self._places[tuple(tokens[place - size : place])] = place
        self._known, self._last = known, tokens[known - 1]
