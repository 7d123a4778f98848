"""The kinds of mixers: what lets the tokens of a sequence see each other."""

from __future__ import annotations

from ortolan.graphs.kinds import LayerKind
from ortolan.graphs.mixers import attention, gated_delta

MIXERS: dict[str, LayerKind] = {
    "attention": attention.MIXER,
    "gated_delta": gated_delta.MIXER,
}
