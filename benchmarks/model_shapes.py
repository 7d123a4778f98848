"""Public models' shapes, as configs of Hugging Face checkpoints; shared by the model benchmarks."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": None,
}

GEMMA3: dict[str, Any] = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


def qwen35(model_type: str, architecture: str, **text: Any) -> dict[str, Any]:
    """Return a config as Qwen 3.5 checkpoints have it, and as the peer's builder asks for it: beside one for images."""
    layers, hidden, tied = text["num_hidden_layers"], text["hidden_size"], text["tie_word_embeddings"]
    common = COMMON | {
        "model_type": f"{model_type}_text",
        "vocab_size": 248320,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }
    images = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": hidden}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": common | text,
        "vision_config": images,
        "tie_word_embeddings": tied,
        "eos_token_id": common["eos_token_id"],
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-1b": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "mlp_bias": False,
    },
    "llama-3b": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "mlp_bias": False,
    },
    "qwen3-30b-a3b": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "max_window_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    "qwen3.5-4b": qwen35(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "qwen3.5-35b-a3b": qwen35(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "tiny": COMMON  # for trying a benchmark out
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "mlp_bias": False,
    },
    "gemma3-1b": GEMMA3
    | {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    },
    "gemma3-4b": GEMMA3
    | {
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 1024,
    },
    "gemma4-e2b": COMMON
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}

LAYER_COUNTS = ("num_hidden_layers", "max_window_layers")  # keys of a config


def text_config(shape: str) -> dict[str, Any]:
    """Return the text decoder's part of a shape's config."""
    config = SHAPES[shape]
    return dict(config.get("text_config", config))


def shape_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """Return a shape's config, with only so many layers where a number is given.

    Raises:
        SystemExit: layers of these kinds in this order cannot be so many.
    """
    if layers is None:
        return SHAPES[shape]
    text = text_config(shape)
    if text.get("num_kv_shared_layers"):
        raise SystemExit(f"--layers: layers of {shape} share caches (num_kv_shared_layers); take the whole shape")
    period = layer_period(text)
    if layers < 1 or layers % period:
        rule = f"{shape} repeats after {period}, so give {period}, {2 * period} or another multiple"
        raise SystemExit(f"--layers: {layers} was given; {rule}")
    text |= {name: layers for name in LAYER_COUNTS if name in text}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:period] * (layers // period)
    return SHAPES[shape] | {"text_config": text} if "text_config" in SHAPES[shape] else text


def layer_period(text: dict[str, Any]) -> int:
    """Return after how many layers a text decoder's config repeats their kinds."""
    kinds = text.get("layer_types", ["alike"])
    repeated = (count for count in range(1, len(kinds) + 1) if kinds == kinds[:count] * (len(kinds) // count))
    return text.get("sliding_window_pattern") or next(repeated)
