"""transformers with each query kept from what an eviction had taken before it was read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from parity import oracle

import ortolan


class Visibility:
    """Which keys each query sees, for every layer and kv head, as a session's evictions make it."""

    def __init__(self, session: ortolan.Session, length: int) -> None:
        causal = np.tril(np.ones((length, length), bool))
        manifest = session.feeder.manifest
        layers = manifest.layers
        self._masks = [np.repeat(causal[None], layer.num_kv_heads, axis=0) for layer in layers]
        for mask, layer in zip(self._masks, layers, strict=True):
            if layer.window > 0:
                behind = np.tril(np.ones((length, length), bool), -layer.window)
                behind[:, : manifest.sink] = False
                mask &= ~behind
        owners = [index if layer.cache_of is None else layer.cache_of for index, layer in enumerate(layers)]
        self._evictable = [index for index, owner in enumerate(owners) if layers[owner].evictable]

    def note_eviction(self, session: ortolan.Session) -> None:
        """Hide from all later queries what the session's last eviction did not keep."""
        read = session.logical_length
        for layer in self._evictable:
            for mask, kept in zip(self._masks[layer], session.kept_positions(layer), strict=True):
                gone = np.ones(read, bool)
                gone[kept[kept >= 0]] = False
                mask[read:, :read] &= ~gone

    def logits(self, folder: Path, token_ids: Sequence[int]) -> np.ndarray:
        """Return transformers' logits for every row of a sequence, [T, V] float32."""
        model = oracle(folder)
        with self._hooks(model, len(token_ids)), torch.no_grad():
            result: np.ndarray = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()
        return result

    @contextlib.contextmanager
    def _hooks(self, model: torch.nn.Module, length: int) -> Iterator[None]:
        """Hand each attention layer a mask of its own, [1, Hq, T, T]."""
        handles = []
        for layer, mask in zip(model.model.layers, self._masks, strict=True):
            group = model.config.num_attention_heads // len(mask)
            added = torch.zeros(1, len(mask) * group, length, length)
            hidden = torch.from_numpy(~mask[:, :length, :length]).repeat_interleave(group, dim=0)
            added.masked_fill_(hidden[None], float("-inf"))

            def replace(module, args, kwargs, added=added):
                return args, kwargs | {"attention_mask": added}

            handles.append(layer.self_attn.register_forward_pre_hook(replace, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
