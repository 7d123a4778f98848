"""Counts what a session did, and how long it took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counters of one session; times are wall-clock seconds."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    evictions: int = 0
    eviction_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the counters with the rates that follow from them."""
        rates = {
            "prefill_tokens_per_second": self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else None,
            "decode_tokens_per_second": self.decode_tokens / self.decode_seconds if self.decode_seconds else None,
        }
        return dataclasses.asdict(self) | rates
