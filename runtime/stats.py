"""Counts what a session did, and how long it took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counters of one session; times are wall-clock seconds.

    On CUDA, where steps are enqueued ahead, a generated token takes its step's time on the device or the time that
    `generate` waited for it, whichever is longer; `decode_device_seconds` has the former alone. Capturing decode
    graphs counts apart from decoding. `decode_seconds` holds the time of drafting, too; `draft_checks` steps checked
    drafts, each of which gives a token more than it accepts. `reread_tokens` were read again by evictions, in
    `eviction_seconds`; they are not among the tokens of the prompts.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_device_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_checks: int = 0
    graph_captures: int = 0
    graph_capture_seconds: float = 0.0
    evictions: int = 0
    reread_tokens: int = 0
    eviction_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the counters with the rates that follow from them."""
        rates = {
            "prefill_tokens_per_second": self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else None,
            "decode_tokens_per_second": self.decode_tokens / self.decode_seconds if self.decode_seconds else None,
            "decode_ms_per_token": 1000 * self.decode_seconds / self.decode_tokens if self.decode_tokens else None,
            "tokens_per_draft_check": 1 + self.accepted_tokens / self.draft_checks if self.draft_checks else None,
        }
        return dataclasses.asdict(self) | rates
