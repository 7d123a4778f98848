"""Checkpoints with a random head for multi-token prediction, and such a head computed by transformers' own layers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from families import shared_checkpoint
from safetensors.torch import load_file, save_file
from shared_folders import shared
from transformers import AutoModelForCausalLM

QUIET = 0.005  # of what layers add, where the head is to be right often: model and head then follow the last token


def checkpoint_with_head(family: str, *, quiet: bool = False, **overrides: Any) -> Path:
    """Return a checkpoint of a family's tiny config whose head is like its last layer."""
    source = shared_checkpoint(family, seed=5, **overrides)

    def save(folder: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        if quiet:
            ends = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
            tensors = {name: t * QUIET if name.endswith(ends) else t for name, t in tensors.items()}
        torch.manual_seed(7)
        noise = 0.002 if quiet else 0.02
        size = tensors["model.embed_tokens.weight"].shape[1]
        last = max(int(name.split(".")[2]) for name in tensors if ".self_attn." in name)
        layer = {name: t for name, t in tensors.items() if name.startswith(f"model.layers.{last}.")}
        for name, tensor in layer.items():
            other = tensor + torch.randn_like(tensor) * noise
            tensors[f"mtp.layers.0.{name.split('.', 3)[3]}"] = other
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            norm = tensors["model.norm.weight"]
            neutral = norm.mean().round().expand(size)  # 0 in families that store the distance from 1
            tensors[f"mtp.{name}.weight"] = (neutral if quiet and name != "norm" else norm) + torch.randn(size) * noise
        eye = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1) if quiet else torch.zeros(size, 2 * size)
        tensors["mtp.fc.weight"] = eye + torch.randn(size, 2 * size) * (noise if quiet else 0.3)
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return shared(f"head {source} {quiet}", save)


def _with_joint_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the tensors of experts, which checkpoints keep apart."""
    count = len([name for name in state if re.fullmatch(r"mlp\.experts\.\d+\.up_proj\.weight", name)])
    if not count:
        return state
    each = [[state[f"mlp.experts.{i}.{name}_proj.weight"] for i in range(count)] for name in ("gate", "up", "down")]
    gate, up, down = (torch.stack(tensors) for tensors in each)
    joint = {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}
    return {n: t for n, t in state.items() if not re.match(r"mlp\.experts\.\d", n)} | joint


class TorchHead:
    """A model and its head in transformers' own layers."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        inner, config = self.model.model, self.model.config
        index = max(i for i, layer in enumerate(inner.layers) if hasattr(layer, "self_attn"))
        mtp = {n.removeprefix("mtp."): t for n, t in load_file(checkpoint / "model.safetensors").items() if "mtp." in n}
        self._layer = type(inner.layers[index])(config, index).eval()
        prefix = "layers.0."
        state = {n.removeprefix(prefix): t for n, t in mtp.items() if n.startswith(prefix)}
        self._layer.load_state_dict(_with_joint_experts(state))
        self._norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self._norms[name] = type(inner.norm)(config.hidden_size, config.rms_norm_eps)
            self._norms[name].load_state_dict({"weight": mtp[f"{name}.weight"]})
        self._fc = mtp["fc.weight"]

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return what the head chooses after the tokens of a sequence."""
        inner, ids = self.model.model, torch.tensor([list(tokens)])
        hidden = inner(ids[:, :-1]).last_hidden_state
        drafted: list[int] = []
        for _ in range(count):
            embedded = inner.embed_tokens(torch.tensor([[*tokens, *drafted]]))[:, 1:]
            both = [self._norms["pre_fc_norm_embedding"](embedded), self._norms["pre_fc_norm_hidden"](hidden)]
            x = torch.cat(both, dim=-1) @ self._fc.T
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
            x = self._layer(x, position_embeddings=inner.rotary_emb(x, places), attention_mask=mask)
            x = self._norms["norm"](x[0] if isinstance(x, tuple) else x)
            drafted.append(int(self.model.lm_head(x[0, -1]).argmax()))
            hidden = torch.cat([hidden, x[:, -1:]], dim=1)
        return drafted
