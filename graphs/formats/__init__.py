"""The formats of linear weights."""

from __future__ import annotations

from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.parts import WeightFormat

FORMATS: dict[str, WeightFormat] = {
    "dense": Dense(),
}
