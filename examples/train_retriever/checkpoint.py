"""Write a trained retriever as a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from data import BOS, EOS, PAD
from model import Retriever, RetrieverConfig
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"}


def write_folder(model: Retriever, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write config, weights and tokenizer.

    Args:
        model: the trained model.
        folder: made if missing; files in it are replaced.
        dtype: of the stored weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    tensors = {
        f"model.{key}": value.detach().to("cpu", dtype).contiguous() for key, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    specials = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", hugging_face_config(model.config) | specials | {"dtype": name})
    _write_json(folder / "generation_config.json", specials | {"do_sample": False})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_position_embeddings,
            "bos_token": SPECIALS[BOS],
            "eos_token": SPECIALS[EOS],
            "pad_token": SPECIALS[PAD],
            "clean_up_tokenization_spaces": False,
        },
    )


def read_folder(folder: Path) -> Retriever:
    """Load a folder that `write_folder` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    names = {field.name for field in fields(RetrieverConfig)} & config.keys() - {"layer_types"}
    shape = {name: config[name] for name in names}
    model = Retriever(RetrieverConfig(layer_types=tuple(config["layer_types"]), **shape))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return model


def hugging_face_config(config: RetrieverConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe the shape."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "query_pre_attn_scalar": config.head_dim,
        "sliding_window": config.sliding_window,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_local_base_freq},
        },
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "use_cache": True,
    }


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose token id is the byte; it adds no special token by itself."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {text: index for index, text in SPECIALS.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS.values()])
    return tokenizer


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte, in byte order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
