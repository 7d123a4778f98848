"""The kinds of state that a layer may keep: a new one is a file and a line here."""

from __future__ import annotations

from ortolan.runtime.caches.attention import FullCache, RingCache
from ortolan.runtime.caches.gated_delta import GatedDeltaState
from ortolan.runtime.caches.layer_state import LayerState

KINDS: dict[str, LayerState] = {kind.name: kind for kind in (FullCache(), RingCache(), GatedDeltaState())}
