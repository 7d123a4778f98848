"""The kinds of MLPs: what treats tokens one by one."""

from __future__ import annotations

from ortolan.graphs.kinds import LayerKind
from ortolan.graphs.mlps import beside, experts, gated

MLPS: dict[str, LayerKind] = {
    "beside": beside.MLP,
    "experts": experts.MLP,
    "gated": gated.MLP,
}
