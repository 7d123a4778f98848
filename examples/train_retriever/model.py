"""Gemma 3's text decoder, small and fast to train: the same parameters and names as transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverConfig:
    """Shape of the model; names follow Hugging Face's Gemma3TextConfig."""

    vocab_size: int = 264  # 256 bytes, three specials, padded to a multiple of 8
    hidden_size: int = 256
    intermediate_size: int = 512
    layer_types: tuple[str, ...] = ("sliding_attention", "sliding_attention", "full_attention") * 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    sliding_window: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    max_position_embeddings: int = 33024


DRAFT = RetrieverConfig(  # half the layers, half as wide
    hidden_size=128,
    intermediate_size=256,
    layer_types=("sliding_attention", "sliding_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
)


class AttentionShape(Protocol):
    """What attention and its MLP take from a config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float


class RmsNorm(nn.Module):
    """Root-mean-square norm with a zero-centered weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, over everything before or over a sliding window."""

    def __init__(self, config: AttentionShape, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.head_dim = config.head_dim
        width = config.head_dim * config.num_attention_heads
        kv_width = config.head_dim * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attend; also returns rotated queries [B, Hq, T, D] and keys [B, Hkv, T, D].

        Args:
            x: [B, T, hidden].
            rope: [2, T, D], cosine and sine of this layer's base.
        """
        q, k, v = self.project(x, rope)
        attended = sliding_attention(q, k, v, self.window) if self.window else self.attend(q, k, v)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), q, k

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, as [B, H, T, D]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over all keys, [B, Hq, T, D]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Apply rotary position embedding in the half-split layout."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * rope[0] + turned.float() * rope[1]).to(x.dtype)


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend to the last `window` positions, one's own included, in blocks of `window` queries.

    Args:
        q: [B, Hq, T, D] with T a multiple of the window.
        k: [B, Hkv, T, D].
        v: [B, Hkv, T, D].
        window: keys visible to a query.
    """
    batch, heads, tokens, dim = q.shape
    group, blocks = heads // k.shape[1], tokens // window
    q = q.unflatten(2, (blocks, window))
    k, v = (_with_previous_block(x.unflatten(2, (blocks, window))) for x in (k, v))
    q = q.reshape(batch, heads // group, group, blocks, window, dim)
    scores = torch.einsum("bhgnqd,bhnkd->bhgnqk", q, k).float() * dim**-0.5
    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)
    visible = (column > row) & (column <= row + window)  # [W, 2W]; column W is the block's first own key
    exists = (torch.arange(blocks, device=q.device) > 0)[:, None, None] | (column >= window)
    probabilities = scores.masked_fill(~(visible & exists), float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("bhgnqk,bhnkd->bhgnqd", probabilities, v).reshape(batch, heads, tokens, dim)


def _with_previous_block(x: Tensor) -> Tensor:
    """Put each block's predecessor before it: [B, H, N, W, D] to [B, H, N, 2W, D]."""
    previous = functional.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    return torch.cat((previous, x), 3)


class Mlp(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: AttentionShape, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer with a norm before and after each of its two halves."""

    def __init__(self, config: RetrieverConfig, sliding: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.sliding_window if sliding else 0)
        self.mlp = Mlp(config, partial(functional.gelu, approximate="tanh"))
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new residual stream, and this layer's queries and keys."""
        attended, q, k = self.self_attn(self.input_layernorm(x), rope)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), q, k


class Retriever(nn.Module):
    """The decoder; its state dict is Gemma3ForCausalLM's without the prefix "model."."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind == "sliding_attention") for kind in config.layer_types)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.multiple = config.sliding_window  # what the number of tokens is a multiple of
        self.apply(initialize)

    @property
    def full_attention(self) -> list[Attention]:
        """Layers whose caches an eviction shortens."""
        return [layer.self_attn for layer in self.layers if not layer.self_attn.window]

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return logits [B, T, V] and each global layer's rotated queries and keys.

        Args:
            tokens: [B, T] int64; T is a multiple of the sliding window.
        """
        hidden, looks = self.read(tokens)
        return self.logits(hidden), looks

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the first layer reads, [B, T, hidden]."""
        return self.embed_tokens(tokens) * self.config.hidden_size**0.5

    def logits(self, hidden: Tensor) -> Tensor:
        """Map normalized hidden states [B, T, hidden] to logits [B, T, V]."""
        return functional.linear(hidden, self.embed_tokens.weight)

    def read(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the normalized hidden states [B, T, hidden], and what `forward` does."""
        config = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        near = rope_table(positions, config.head_dim, config.rope_local_base_freq)
        far = rope_table(positions, config.head_dim, config.rope_theta)
        x = self.embed(tokens)
        looks = []
        for layer in self.layers:
            sliding = layer.self_attn.window > 0
            x, q, k = layer(x, near if sliding else far)
            if not sliding:
                looks.append((q, k))
        return self.norm(x), looks


class DraftHead(nn.Module):
    """A head that says the token after next: one more layer, over a token and what the model made of the one before.

    Its state dict is that of `mtp` in checkpoints of Qwen3-Next; embedding and head are the model's.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        size, self.config = config.hidden_size, config
        self.pre_fc_norm_embedding = RmsNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RmsNorm(size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config, sliding=False)])
        self.norm = RmsNorm(size, config.rms_norm_eps)
        self.apply(initialize)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return normalized hidden states [B, T, hidden], for the model's head and for the head's next round.

        Args:
            embedded: [B, T, hidden], of the tokens.
            hidden: [B, T, hidden], normalized, of the tokens one position before.
        """
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        rope = rope_table(positions, self.config.head_dim, self.config.rope_theta)
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))
        return self.norm(self.layers[0](x, rope)[0])


def rope_table(positions: Tensor, head_dim: int, base: float) -> Tensor:
    """Return cosine and sine, [2, T, head_dim] float32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None] * base**-exponent
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))


def initialize(module: nn.Module) -> None:
    """Draw the weights of one module."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else module.weight.shape[1] ** -0.5)


def attention_loss(look: list[tuple[Tensor, Tensor]], rows: Tensor, targets: Tensor) -> Tensor:
    """Minus the log of the mean attention, over heads and global layers, from each row to its target.

    Args:
        look: for each global layer, rotated queries [B, Hq, T, D] and keys [B, Hkv, T, D].
        rows: [B, R] int64.
        targets: [B, R] int64.
    """
    logs = []
    for q, k in look:
        dim, group = q.shape[-1], q.shape[1] // k.shape[1]
        index = rows[:, None, :, None].expand(-1, q.shape[1], -1, dim)
        chosen = q.gather(2, index).unflatten(1, (-1, group))  # [B, Hkv, G, R, D]
        scores = torch.einsum("bhgrd,bhkd->bhgrk", chosen, k).float() * dim**-0.5
        future = torch.arange(k.shape[2], device=k.device) > rows[:, :, None]  # [B, R, T]
        scores = scores.masked_fill(future[:, None, None], float("-inf"))
        at_target = scores.gather(-1, targets[:, None, None, :, None].expand(*scores.shape[:4], 1))
        logs.append((at_target.squeeze(-1) - scores.logsumexp(-1)).flatten(1, 2))
    stacked = torch.cat(logs, 1)  # [B, layers * Hq, R]
    return (math.log(stacked.shape[1]) - stacked.logsumexp(1)).mean()
