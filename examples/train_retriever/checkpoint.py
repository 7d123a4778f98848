"""Write a trained retriever as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from data import BOS, EOS, PAD
from hybrid import Hybrid, HybridConfig
from model import DraftHead, Retriever, RetrieverConfig
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

SPECIALS = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"}


def write_folder(
    model: Retriever | Hybrid, folder: Path, dtype: torch.dtype = torch.float16, head: DraftHead | None = None
) -> None:
    """Write config, weights and tokenizer.

    Args:
        model: the trained model.
        folder: made if missing; files in it are replaced.
        dtype: of the stored weights.
        head: for multi-token prediction, stored beside the model as `mtp.*`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    tensors = _named("model", model, dtype) | ({} if head is None else _named("mtp", head, dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    specials = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = hugging_face_config(model.config) | ({} if head is None else {"mtp_num_hidden_layers": 1})
    _write_json(folder / "config.json", config | specials | {"dtype": name})
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


def _named(prefix: str, module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = module.state_dict().items()
    return {f"{prefix}.{name}": tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors}


def read_folder(folder: Path) -> Retriever | Hybrid:
    """Load a folder that `write_folder` wrote, in float32, without a head for multi-token prediction."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "qwen3_5_text":
        model: Retriever | Hybrid = Hybrid(HybridConfig(**_shape(config, HybridConfig)))
    else:
        model = Retriever(RetrieverConfig(**_shape(config, RetrieverConfig)))
    tensors = load_file(folder / "model.safetensors").items()
    own = {name.removeprefix("model."): tensor.float() for name, tensor in tensors if name.startswith("model.")}
    model.load_state_dict(own)
    return model


def read_retriever(folder: Path) -> Retriever:
    """Load a folder of the retriever's own architecture."""
    model = read_folder(folder)
    if not isinstance(model, Retriever):
        raise SystemExit(f"{folder} contains a hybrid; give the folder of a retriever")
    return model


def _shape(config: Mapping[str, Any], kind: type) -> dict[str, Any]:
    shape = {field.name: config[field.name] for field in fields(kind) if field.name in config}
    return shape | {"layer_types": tuple(config["layer_types"])}


def hugging_face_config(config: RetrieverConfig | HybridConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe the shape."""
    shape = asdict(config) | {"layer_types": list(config.layer_types), "num_hidden_layers": len(config.layer_types)}
    theta = shape.pop("rope_theta")
    common = {"attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True, "use_cache": True}
    if isinstance(config, HybridConfig):
        sections = [config.rotary_dim // 2, 0, 0]  # of the rotated pairs: all turn by the position in the text
        rope = {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": shape.pop("partial_rotary_factor"),
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **shape,
            **common,
            "rope_parameters": rope | {"mrope_section": sections, "mrope_interleaved": True},
            "hidden_act": "silu",
        }
    local = shape.pop("rope_local_base_freq")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **shape,
        **common,
        "query_pre_attn_scalar": config.head_dim,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
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
