"""One tiny config per model family, random checkpoints of them, saved by transformers, and their exports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from shared_folders import shared
from transformers import AutoConfig, AutoModelForCausalLM

import ortolan

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 2048,
    "partial_rotary_factor": 0.75,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "llama_biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "rope_parameters": _YARN,
    },
    "gemma2": {"model_type": "gemma2", "sliding_window": 12, "query_pre_attn_scalar": 24},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 20,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 7,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 12,
        "num_key_value_heads": 1,
        "global_head_dim": 32,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 140,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 20,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gemma4_moe": {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 12,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "phi3": {
        "model_type": "phi3",
        "sliding_window": 20,
        "head_dim": None,
        "hidden_size": 64,
        "rope_parameters": _LONGROPE,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 20,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "initializer_range": 0.1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    "olmoe": {
        "model_type": "olmoe",
        "head_dim": None,
        "hidden_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "rope_parameters": _YARN | {"truncate": False},
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "head_dim": None,
        "hidden_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    "ministral": {
        "model_type": "ministral",
        "sliding_window": 12,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "ministral3": {
        "model_type": "ministral3",
        "sliding_window": 20,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "cohere2": {
        "model_type": "cohere2",
        "head_dim": None,
        "hidden_size": 64,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "attention_bias": True,
        "logit_scale": 0.25,
    },
    "granite": {
        "model_type": "granite",
        "head_dim": None,
        "hidden_size": 64,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    "granite_swa": {
        "model_type": "granite_swa",
        "head_dim": None,
        "hidden_size": 64,
        "sliding_window": 12,
        "layer_rope_theta": [0, 10000.0, 10000.0, 500.0],
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "laguna": {
        "model_type": "laguna",
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 2.0,
        "num_attention_heads_per_layer": [4, 6, 6, 4],
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 40,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        "head_dim": None,
        "hidden_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "sliding_window": 20,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "mellum": {
        "model_type": "mellum",
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "olmo2": {"model_type": "olmo2", "head_dim": None, "hidden_size": 64},
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "head_dim": None,
        "hidden_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
    "olmo3": {"model_type": "olmo3", "head_dim": None, "hidden_size": 64, "sliding_window": 12},
}

# With layers that keep a state instead of keys and values.
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")


def tiny_checkpoint(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Copy a random checkpoint of a family's tiny config, which the caller may change."""
    return Path(shutil.copytree(shared_checkpoint(family, seed, **overrides), folder, dirs_exist_ok=True))


def shared_checkpoint(family: str, seed: int = 0, **overrides: Any) -> Path:
    """Return a random checkpoint of a family's tiny config, which nobody may change."""
    name = f"checkpoint {family} {seed} {sorted(overrides.items())}"
    return shared(name, lambda folder: _save(family, folder, seed, **overrides))


def shared_model(checkpoint: Path, **options: Any) -> Path:
    """Return the model folder of a checkpoint that nobody changes, made once for each of the options of an export."""
    name = f"model {checkpoint} {sorted(options.items())}"
    return shared(name, lambda folder: ortolan.export(checkpoint, folder, **options))


def _save(family: str, folder: Path, seed: int, **overrides: Any) -> None:
    """Save a checkpoint; every parameter differs from its neutral value."""
    keys = {k: v for k, v in {**_COMMON, **FAMILIES[family], **overrides}.items() if v is not None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith(("router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)
            if family.startswith("gemma4") and "q_norm" in name:
                parameter.mul_(len(parameter) ** -0.5)  # without a softmax scale, heads would see one key each
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
