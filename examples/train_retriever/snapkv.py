"""SnapKV in one attention layer, for measuring what an eviction costs.

Source: SnapKV, arXiv 2404.14469. Options as Ortolan's defaults: each kv head keeps its own,
the query heads of a group are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKvAttention:
    """Causal attention whose queries after the prompt see only the keys that SnapKV keeps.

    Attributes:
        prompt_tokens: length of the prompt; the cache is evicted once it is read.
        budget: keys kept, the window included.
        window: last queries of the prompt that score, and last keys that always stay.
        kernel: width of the average pooling along positions.
        sink: first keys that always stay.
    """

    prompt_tokens: int
    budget: int
    window: int = 64
    kernel: int = 5
    sink: int = 4

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [B, Hq, T, D] and k, v [B, Hkv, T, D]."""
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        read = self.prompt_tokens
        prompt = functional.scaled_dot_product_attention(
            q[:, :, :read], wide_k[:, :, :read], wide_v[:, :, :read], is_causal=True
        )
        kept = self.kept(q, k).repeat_interleave(group, 1)[:, :, None]  # [B, Hq, 1, P]
        fresh = torch.ones(q.shape[2] - read, q.shape[2] - read, dtype=torch.bool, device=q.device).tril()
        shape = (*q.shape[:2], *fresh.shape)
        mask = torch.cat((kept.expand(-1, -1, len(fresh), -1), fresh.expand(shape)), -1)
        answer = functional.scaled_dot_product_attention(q[:, :, read:], wide_k, wide_v, attn_mask=mask)
        return torch.cat((prompt, answer), 2)

    def kept(self, q: Tensor, k: Tensor) -> Tensor:
        """Return which of the prompt's keys stay, [B, Hkv, P] bool."""
        read, group = self.prompt_tokens, q.shape[1] // k.shape[1]
        last = q[:, :, read - self.window : read].unflatten(1, (-1, group))
        scores = torch.einsum("bhgwd,bhpd->bhgwp", last, k[:, :, :read]).float() * q.shape[-1] ** -0.5
        position = torch.arange(read, device=q.device)
        hidden = position > position[-self.window :, None]
        seen = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean((2, 3))  # [B, Hkv, P]
        pooled = functional.avg_pool1d(seen, self.kernel, stride=1, padding=self.kernel // 2)
        pooled[..., : self.sink] = float("inf")
        pooled[..., read - self.window :] = float("inf")
        chosen = pooled.topk(self.budget, -1).indices
        return torch.zeros_like(pooled, dtype=torch.bool).scatter(-1, chosen, True)
