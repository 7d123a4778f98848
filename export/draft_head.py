"""Reads a checkpoint's head for multi-token prediction, as Qwen3-Next and Qwen 3.5 publish it: `mtp.*`.

One more decoder layer of full attention, over a token's embedding and what the model made of the token before it, both
normalised and projected to one hidden state; then a norm, and the model's own head.

Source: vLLM's qwen3_next_mtp.py; DeepSeek-V3 (arXiv 2412.19437) for the idea.
"""

from __future__ import annotations

from dataclasses import replace

from ortolan.export.caller import warn_caller
from ortolan.export.checkpoint import Checkpoint
from ortolan.export.families.base import Family, Source, Sources
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import AttentionConfig, LayerConfig, ModelConfig
from ortolan.graphs.parts import Formats
from ortolan.graphs.weights import shared_shapes

MODULE = "mtp"
_OWN = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}


def holds_head(checkpoint: Checkpoint) -> bool:
    """Say whether a checkpoint has a draft head; one of another kind is left out with a warning."""
    names = checkpoint.only(MODULE).entries
    own = (f"{MODULE}.{name}.weight" for name in ("fc", *_OWN.values()))
    is_known = all(name in names for name in own) and not any(f"{MODULE}.layers.1." in name for name in names)
    if names and not is_known:
        warn_caller("the checkpoint's mtp tensors are not those of one layer as Qwen publishes it; they are left out")
    return bool(names) and is_known


def promises_head(config: HfConfig) -> bool:
    """Say whether config.json names a draft head of one layer."""
    return bool(config.get("mtp_num_hidden_layers") == 1)


def can_have_head(config: ModelConfig) -> bool:
    """Say whether a model has a layer like the draft head's, and computes all rows up to its own head."""
    shares = any(layer.mixer.shares_cache_with is not None for layer in config.layers)
    return not shares and config.layer_inputs is None and _attention_layer(config) is not None


def head_config(config: ModelConfig) -> ModelConfig:
    """Describe the draft head of a model: its last layer of full attention, once."""
    layer = _attention_layer(config)
    assert layer is not None
    return replace(config, layers=(layer,), gives_hidden=True, drafts=True)


def head_sources(family: Family, config: ModelConfig) -> Sources:
    """Map the weights of a draft head, which are named as those of the model's layers are."""
    sources = family.sources(config)
    shared, norm = shared_shapes(config), sources["final_norm.weight"]
    found = {name: _of_head(source) for name, source in sources.items() if name not in shared}
    found |= {f"mtp.{ours}.weight": replace(norm, name=f"{MODULE}.{theirs}.weight") for ours, theirs in _OWN.items()}
    return found | {"mtp.input.weight": Source(name=f"{MODULE}.fc.weight")}


def with_shared(formats: Formats, shared: Formats) -> Formats:
    """Return formats of a draft head, with those of its model for what they share."""
    stems = ("embedding", "head")
    return replace(formats, by_stem={**formats.by_stem, **{s: shared.of(s) for s in stems}}, lookup=shared.lookup)


def _attention_layer(config: ModelConfig) -> LayerConfig | None:
    full = [each for each in config.layers if isinstance(each.mixer, AttentionConfig) and each.mixer.window < 0]
    return full[-1] if full else None


def _of_head(source: Source) -> Source:
    return replace(source, name=_renamed(source.name), parts=tuple(map(_renamed, source.parts)))


def _renamed(name: str) -> str:
    return f"{MODULE}.{name.removeprefix('model.')}"
