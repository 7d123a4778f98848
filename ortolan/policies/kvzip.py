"""KVzip: what the model attends to when it reads the text a second time, so that questions to come find it.

Source: KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416, section 3.

Once the text is read, it is read again behind itself, in pieces. Each piece comes with a lead: the tokens that stand
before it in the text. A cached position's score is the largest softmax probability that any query of any piece, of any
query head that shares the position's kv head, gives it. The kv heads of a layer share one budget. What differs from the
paper: the lead takes the place of an instruction in words, which would need a tokenizer; each query's softmax is over
the whole cache, not over the piece's own keys (the paper's shortcut for long texts); the budget is shared within a
layer, not by all layers; sinks and the last `window` are always kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.policies.base import whole
from ortolan.policies.eviction import FLOAT32_BYTES, CacheShape, Eviction, SecondReading
from ortolan.policies.parts import Kept, Parts, PieceParts, Tensor
from ortolan.policies.shared_budget import keep_of_all_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class KvZip(Eviction):
    """Keeps what a second reading of the whole text attends to.

    Attributes:
        window: last positions, always kept.
        piece: tokens of the text that are read again in one step; fewer where `chunk_size` is smaller. A later turn
            evicts again only once so many tokens were read since the last eviction, as each takes a second reading.
        lead: tokens before a piece that are read again with it; their queries do not score.
    """

    summary = "what a second reading of the whole text attends to, for questions to come"
    keeps_uneven = True

    policy: str = "kvzip"
    window: int = field(default=64, metadata=whole("last positions, always kept"))
    piece: int = field(default=512, metadata=whole("tokens that are read again in one step"))
    lead: int = field(default=8, metadata=whole("tokens before a piece that are read again with it", least=0))

    @property
    def captured_queries(self) -> int:
        """Return 0: the first reading's queries do not score."""
        return 0

    @property
    def second_reading(self) -> SecondReading:
        """How the text is read again."""
        return SecondReading(piece_tokens=self.piece, lead_tokens=self.lead)

    def workspace_bytes(self, cache: CacheShape) -> int:
        """Return about how many bytes the eviction of a layer takes besides its cache: also the queries of a piece."""
        queries = self.piece * cache.num_heads * cache.head_size
        return Eviction.workspace_bytes(self, cache) + FLOAT32_BYTES * queries

    def score_piece(self, parts: PieceParts) -> dict[int, Tensor]:
        """Score all positions by the queries of a piece: [B, Hkv, C] of each layer."""
        return {i: parts.score(i, group_reduce="max", query_reduce="max") for i in parts.layers}

    def keep(self, parts: Parts) -> dict[int, Kept]:
        """Keep sinks, the last window, and the best-scored rest: Hkv * budget positions of a layer."""
        return {i: keep_of_all_heads(parts, i, parts.collected_score(i)) for i in parts.layers}
