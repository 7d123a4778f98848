"""The typed description of a decoder that the graph builder reads; no Hugging Face key lives past it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from ortolan.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh"]
ExpertActivation = Literal["silu", "gelu", "gelu_tanh", "clamped_silu"]
QkNorm = Literal["none", "head", "unit", "projection"]
OutputGate = Literal["none", "sigmoid", "softplus"]
Norm = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "sandwich", "parallel"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeVariant:
    """One set of rotation frequencies.

    Attributes:
        limit: longest sequence (tokens) it serves.
        inv_freq: radians per position of each rotated pair, rotary_size / 2 values.
        attention_factor: multiplies cosine and sine (yarn, longrope).
    """

    limit: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding: one variant, or several chosen by the sequence's length (longrope, dynamic).

    Attributes:
        name: identifies it in value names, e.g. "global" or "local".
        variants: ascending by limit; every rope of a model has the same limits.
    """

    name: str
    variants: tuple[RopeVariant, ...]

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated (a prefix of the head)."""
        return 2 * len(self.variants[0].inv_freq)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """A rotary embedding whose cosines and sines are weights, "rope.{name}.cosine" and ".sine".

    Attributes:
        name: identifies it in value names.
        rows: positions of the tables.
        rotary_size: elements of a head that are rotated.
        first_rows: where the tables hold two variants, the row at which the second one begins; 0 where they hold one.
    """

    name: str
    rows: int
    rotary_size: int
    first_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """A factor of queries that grows with their position: 1 + beta * log(1 + floor(position / length))."""

    beta: float
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of one layer.

    Attributes:
        window: keys a query sees, itself included; -1 for full attention.
        rope: name of the model's rope that this layer uses; None where it has no position encoding.
        scale: softmax scale; 0 means 1/sqrt(D).
        softcap: 0 means none.
        qk_norm: "none", "head" (one RMSNorm weight [D] for all heads), "unit" (each head, without a weight),
            "projection" (over Hq*D, Hkv*D).
        value_norm: whether each value head is normalised by an RMSNorm without a weight.
        value_is_key: whether values are the key projection, as it is before its norm and RoPE.
        value_size: features of a value head that are not always 0; 0: all D.
        value_scale: factor of values, which their weights hold already.
        query_scale: a factor of queries by their position; None for none.
        output_gate: of a projection of the layer's input, a factor of what heads return; "none" for none.
        gate_per_head: whether that is one factor for each head, or one for each of its features.
        learned_sinks: whether a logit per query head joins the softmax's denominator (gpt-oss).
        shares_cache_with: the layer before this one whose keys and values it reads; None where it has its own.
        kind: of mixer, a key of `ortolan.graphs.mixers.MIXERS`.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = -1
    rope: str | None = None
    scale: float = 0.0
    softcap: float = 0.0
    qk_norm: QkNorm = "none"
    value_norm: bool = False
    value_is_key: bool = False
    value_size: int = 0
    value_scale: float = 1.0
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    query_scale: QueryScale | None = None
    output_gate: OutputGate = "none"
    gate_per_head: bool = False
    learned_sinks: bool = False
    shares_cache_with: int | None = None
    kind: str = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta network in the place of attention: a recurrent state for each value head (arXiv 2412.06464).

    Attributes:
        num_key_heads: Hk.
        key_size: Dk.
        num_value_heads: Hv, a multiple of Hk.
        value_size: Dv.
        conv_taps: K, tokens that the causal convolution before it sees, itself included.
        beta_scale: the most that a new value counts; above 1 the state may have negative eigenvalues.
        norm_epsilon: of the gated norm; None takes the model's.
        kind: of mixer, a key of `ortolan.graphs.mixers.MIXERS`.
    """

    num_key_heads: int
    key_size: int
    num_value_heads: int
    value_size: int
    conv_taps: int
    beta_scale: float = 1.0
    norm_epsilon: float | None = None
    kind: str = "gated_delta"

    window: ClassVar[int] = -1
    rope: ClassVar[str | None] = None
    query_scale: ClassVar[QueryScale | None] = None
    shares_cache_with: ClassVar[int | None] = None

    @property
    def features(self) -> int:
        """F: features of the convolution, those of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size


MixerConfig: TypeAlias = AttentionConfig | GatedDeltaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The MLP of one layer; a kind with other options takes a class of its own with a `kind`.

    Attributes:
        kind: a key of `ortolan.graphs.mlps.MLPS`.
    """

    intermediate_size: int
    activation: Activation
    bias: bool = False
    kind: str = "gated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts of one layer: gated MLPs, of which each token takes some.

    Attributes:
        intermediate_size: of each expert.
        scoring: how a router's logits become scores, of which a token's weights are the largest.
        normalise: whether a token's weights are divided by their sum.
        scale: factor of all weights, after that.
        logit_softcap: of the router's logits; 0 means none.
        selection_bias: whether a learned bias joins the scores by which experts are chosen, not the weights.
        limit: of "clamped_silu", the bound of its inputs.
        alpha: of "clamped_silu", the factor in its sigmoid.
        bias: whether the experts' products have one.
        shared_size: of a gated MLP that every token takes beside its experts; 0 where there is none.
        shared_gate: whether what that returns is multiplied by the sigmoid of a linear layer of one output.
        kind: a key of `ortolan.graphs.mlps.MLPS`.
    """

    intermediate_size: int
    activation: ExpertActivation
    num_experts: int
    experts_per_token: int
    scoring: Scoring = "softmax"
    normalise: bool = False
    scale: float = 1.0
    logit_softcap: float = 0.0
    selection_bias: bool = False
    limit: float = 7.0
    alpha: float = 1.702
    bias: bool = False
    router_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    kind: str = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideConfig:
    """A gated MLP and a mixture of experts side by side, each with a norm behind it (Gemma 4).

    The experts have a norm of their own before them, and so has the router, whose logits are divided by
    sqrt(hidden_size); a learned factor of each expert multiplies its weights.

    Attributes:
        kind: a key of `ortolan.graphs.mlps.MLPS`.
    """

    dense: MlpConfig
    experts: ExpertsConfig
    kind: str = "beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer: what mixes tokens, and what treats them one by one.

    Attributes:
        scaled: whether a learned scalar multiplies what the layer returns.
        norm_placement: of this layer; None takes the model's.
    """

    mixer: Any  # a MixerConfig, which names its kind
    mlp: Any  # a MlpConfig, or the options of another kind, which names itself by `kind`
    scaled: bool = False
    norm_placement: NormPlacement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Per-layer embeddings: what each layer adds of its own share of a second embedding of the token.

    Attributes:
        size: features of one layer's share.
        activation: of the gate that the hidden state makes of it.
        vocab_size: rows of the second embedding.
    """

    size: int
    activation: Activation
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, in the terms of the graph builder.

    Attributes:
        norm_placement: "pre" (Llama), "post" (OLMo 2: norm after attention and after MLP, none before),
            "sandwich" (Gemma 2/3: both), "parallel" (Cohere: attention and MLP read one norm, and are added to what it
            reads).
        norm: "rms", or "layer": LayerNorm without a bias, where norms come before attention and MLP alone.
        post_norm_epsilon: of norms after attention and MLP; None takes norm_epsilon.
        embedding_norm: whether embeddings are normalised by an RMSNorm without a weight.
        embedding_scale: multiplies token embeddings (Gemma: sqrt(hidden_size)).
        residual_scale: multiplies what attention and MLP add to the hidden state (Granite).
        logit_divisor: divides the logits, before their softcap (Granite).
        logit_softcap: 0 means none.
        layer_inputs: per-layer embeddings; None where there are none.
        gives_hidden: whether the graph returns what its head reads of every token, for a draft head.
        drafts: whether this is a draft head: layers over embeddings that are joined with the hidden states of another
            model, whose embedding and head it shares (multi-token prediction, arXiv 2412.19437).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope | RopeTable, ...]
    norm_placement: NormPlacement = "pre"
    norm: Norm = "rms"
    post_norm_epsilon: float | None = None
    embedding_norm: bool = False
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float = 0.0
    layer_inputs: LayerInputs | None = None
    gives_hidden: bool = False
    drafts: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def placement(self, index: int) -> NormPlacement:
        """Return where one layer has its norms."""
        return self.layers[index].norm_placement or self.norm_placement

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.mixer.shares_cache_with is not None:
                _check_sharing(self.layers, index, layer.mixer.shares_cache_with)


def _check_sharing(layers: tuple[LayerConfig, ...], index: int, owner: int) -> None:
    """Check that a layer can read another one's cache."""
    if not 0 <= owner < index:
        raise ConfigError(f"layer {index} shares the cache of layer {owner}; it must be a layer before it")
    theirs, ours = layers[owner].mixer, layers[index].mixer
    if not isinstance(theirs, AttentionConfig) or not isinstance(ours, AttentionConfig):
        raise ConfigError(f"layer {index} shares the cache of layer {owner}; both must be attention layers")
    if ours.query_scale is not None:
        raise ConfigError(f"layer {index} shares the cache of layer {owner}; its queries cannot have a query_scale")
    if theirs.shares_cache_with is not None:
        raise ConfigError(f"layer {index} shares the cache of layer {owner}, which has none of its own")
    for name in ("num_kv_heads", "head_size", "window"):
        if getattr(theirs, name) != getattr(ours, name):
            raise ConfigError(f"layer {index} and layer {owner} share a cache, so {name} must be the same in both")
