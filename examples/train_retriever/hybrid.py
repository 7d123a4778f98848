"""Qwen 3.5's text decoder, small and fast to train: the same parameters and names as transformers' own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from model import Attention, Mlp, RmsNorm, initialize, rope_table, rotate
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 64  # tokens that the gated delta rule reads at once
SLOWEST, FASTEST = 0.001, 0.1  # first steps of the decay


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Shape of the model; names follow Hugging Face's Qwen3_5TextConfig."""

    vocab_size: int = 264  # 256 bytes, three specials, padded to a multiple of 8
    hidden_size: int = 256
    intermediate_size: int = 512
    layer_types: tuple[str, ...] = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 2
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 33024

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


class GatedAttention(Attention):
    """Grouped-query attention over everything before, whose output has a gate; part of each head is rotated."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.rotary_dim = config.rotary_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * config.head_dim * config.num_attention_heads, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attend; also returns rotated queries [B, Hq, T, D] and keys [B, Hkv, T, D]."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        q, k = self._turn(self.q_norm(q.transpose(1, 2)), rope), self._turn(self.k_norm(k), rope)
        attended = self.attend(q, k, v).transpose(1, 2).flatten(2)
        return self.o_proj(attended * gate.flatten(2).sigmoid()), q, k

    def _turn(self, x: Tensor, rope: Tensor) -> Tensor:
        turned, still = x.split((self.rotary_dim, self.head_dim - self.rotary_dim), -1)
        return torch.cat((rotate(turned, rope), still), -1)


class GatedRmsNorm(nn.Module):
    """Root-mean-square norm whose output has a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize the last dimension in float32; both are [..., size]."""
        wide = functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (wide * functional.silu(gate.float())).to(gate.dtype)


class GatedDelta(nn.Module):
    """A gated delta network.

    Source: Gated Delta Networks, arXiv 2412.06464.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        heads = config.linear_num_value_heads
        keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
        self.sizes = (keys, keys, values)
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.group = heads // config.linear_num_key_heads
        width = sum(self.sizes)
        self.in_proj_qkv = nn.Linear(config.hidden_size, width, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, config.linear_conv_kernel_dim, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        steps = torch.empty(heads).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp()
        self.dt_bias = nn.Parameter(steps.expm1().log())  # softplus of it is the step
        self.norm = GatedRmsNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]; T is a multiple of CHUNK."""
        q, k, v = self._convolve(self.in_proj_qkv(x)).split(self.sizes, -1)
        q, k = (each.unflatten(-1, (-1, self.key_dim)) for each in (q, k))
        q, k = (each.repeat_interleave(self.group, 2) if self.group > 1 else each for each in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        beta, step = self.in_proj_b(x).float().sigmoid(), self.in_proj_a(x).float() + self.dt_bias
        decay = -self.A_log.exp() * functional.softplus(step)
        with torch.autocast(x.device.type, enabled=False):
            read = gated_delta_rule(_unit(q) * self.key_dim**-0.5, _unit(k), v.float(), decay, beta)
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.value_dim))
        return self.out_proj(self.norm(read, gate).flatten(2))

    def _convolve(self, x: Tensor) -> Tensor:
        """Mix each channel's last tokens, [B, T, channels]; shifted sums train faster than a grouped convolution."""
        taps = self.conv1d.weight.squeeze(1).to(x.dtype)  # [channels, taps]
        padded, count = functional.pad(x, (0, 0, taps.shape[1] - 1, 0)), x.shape[1]
        mixed = torch.stack([padded[:, i : i + count] * taps[:, i] for i in range(taps.shape[1])]).sum(0)
        return functional.silu(mixed)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Read a sequence with a state that starts at zero, [B, T, H, Dv].

    For each token: state = exp(decay) state; state += k beta (v - state^T k)^T; the output is state^T q.
    Chunks are read in parallel: each maps the state before it to `keep @ state + added`.

    Args:
        q: [B, T, H, Dk] float32, scaled.
        k: [B, T, H, Dk] float32, of length 1.
        v: [B, T, H, Dv] float32.
        decay: [B, T, H] float32, at most 0.
        beta: [B, T, H] float32.

    Source: arXiv 2412.06464, section 3.3.
    """
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, H, N, C, D]
    decay, beta = (x.transpose(1, 2).unflatten(2, (-1, CHUNK))[..., None] for x in (decay, beta))  # [B, H, N, C, 1]
    total = decay.cumsum(-2)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.mT).masked_fill(future, float("-inf")).exp()  # [B, H, N, C, C]
    written = k * beta
    inverse = invert_unit_lower((written @ k.mT * between).tril(-1))
    u, w = inverse @ (v * beta), inverse @ (written * total.exp())
    last = total[..., -1:, :]
    to_end = (k * (last - total).exp()).mT
    keep = last.exp() * torch.eye(k.shape[-1], device=k.device) - to_end @ w
    state = _states_before(keep, to_end @ u)
    out = (q * total.exp()) @ state + (q @ k.mT * between) @ (u - w @ state)
    return out.flatten(2, 3).transpose(1, 2)


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Return (1 + lower)^-1, [..., C, C], of a strictly lower triangular matrix; C is a power of 2.

    From inverted blocks on the diagonal come those of twice the size, as by forward substitution.
    """
    count = lower.shape[-1]
    index = torch.arange(count, device=lower.device)
    inverse, size = torch.eye(count, device=lower.device).expand_as(lower), 1
    while size < count:
        row, column = index[:, None] // size, index // size
        below = lower * ((row % 2 == 1) & (column == row - 1))
        inverse = inverse - (below if size == 1 else inverse @ below @ inverse)
        size *= 2
    return inverse


def _states_before(keep: Tensor, added: Tensor) -> Tensor:
    """Return the state before each chunk, [B, H, N, Dk, Dv]: a scan that doubles what it spans in each round.

    Args:
        keep: [B, H, N, Dk, Dk].
        added: [B, H, N, Dk, Dv].
    """
    span = 1
    while span < keep.shape[2]:
        later = keep[:, :, span:]
        added = torch.cat((added[:, :, :span], later @ added[:, :, :-span] + added[:, :, span:]), 2)
        keep = torch.cat((keep[:, :, :span], later @ keep[:, :, :-span]), 2)
        span *= 2
    return functional.pad(added, (0, 0, 0, 0, 1, 0))[:, :, :-1]


class HybridLayer(nn.Module):
    """One decoder layer with a norm before each of its two halves."""

    def __init__(self, config: HybridConfig, linear: bool) -> None:
        super().__init__()
        if linear:
            self.linear_attn = GatedDelta(config)
        else:
            self.self_attn = GatedAttention(config)
        self.linear = linear
        self.mlp = Mlp(config, functional.silu)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the new residual stream, and the queries and keys of a layer that has them."""
        look, normed = None, self.input_layernorm(x)
        if self.linear:
            x = x + self.linear_attn(normed)
        else:
            attended, q, k = self.self_attn(normed, rope)
            x, look = x + attended, (q, k)
        return x + self.mlp(self.post_attention_layernorm(x)), look


class Hybrid(nn.Module):
    """The decoder; its state dict is Qwen3_5ForCausalLM's without the prefix "model."."""

    multiple = CHUNK  # what the number of tokens is a multiple of

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(config, kind == "linear_attention") for kind in config.layer_types)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.apply(initialize)

    @property
    def full_attention(self) -> list[Attention]:
        """Layers whose caches an eviction shortens."""
        return [layer.self_attn for layer in self.layers if not layer.linear]

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return logits [B, T, V] and each full layer's rotated queries and keys.

        Args:
            tokens: [B, T] int64; T is a multiple of CHUNK.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rope = rope_table(positions, self.config.rotary_dim, self.config.rope_theta)
        x, looks = self.embed_tokens(tokens), []
        for layer in self.layers:
            x, look = layer(x, rope)
            looks += [] if look is None else [look]
        return functional.linear(self.norm(x), self.embed_tokens.weight), looks
