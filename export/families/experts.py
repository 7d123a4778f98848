"""Reads the parts that mixtures of experts share: the sizes of the experts, and the names of their tensors."""

from __future__ import annotations

from typing import Any

from ortolan.errors import CheckpointError
from ortolan.export.families.base import Source, Sources
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import ExpertsConfig


def read_experts(
    config: HfConfig,
    *,
    size_key: str = "intermediate_size",
    taken_key: str = "num_experts_per_tok",
    default_count: int | None = None,
    default_taken: int | None = None,
    **differences: Any,
) -> ExpertsConfig:
    """Read the mixture of a layer; `differences` are its other fields.

    transformers 4 and 5 name the number of experts differently.

    Raises:
        CheckpointError: a token would take more experts than there are.
    """
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    count = config.integer(key, default_count)
    taken = config.integer(taken_key, default_taken)
    if taken > count:
        raise CheckpointError(f"config.json: {taken_key} is {taken}; the model has {count} experts")
    values: dict[str, Any] = {
        "intermediate_size": config.integer(size_key),
        "num_experts": count,
        "experts_per_token": taken,
    }
    if "activation" not in differences:
        values["activation"] = config.activation("hidden_act")
    return ExpertsConfig(**{**values, **differences})


def expert_sources(layer: int, config: ExpertsConfig, *, module: str = "mlp", names: tuple[str, str, str]) -> Sources:
    """Map the weights of one layer's mixture.

    Args:
        layer: its number.
        config: the mixture.
        module: what the published checkpoints call it; transformers 5 calls it "mlp".
        names: of an expert's gate, up and down.
    """
    published, fused = f"model.layers.{layer}.{module}", f"model.layers.{layer}.mlp"
    gate, up, down = names

    def of_experts(*linears: str) -> tuple[str, ...]:
        experts = range(config.num_experts)
        return tuple(f"{published}.experts.{e}.{linear}.weight" for e in experts for linear in linears)

    ours = f"layers.{layer}.mlp"
    return {
        f"{ours}.router.weight": Source(name=f"{fused}.gate.weight", parts=(f"{published}.gate.weight",)),
        f"{ours}.experts.gate_up": Source(name=f"{fused}.experts.gate_up_proj", parts=of_experts(gate, up)),
        f"{ours}.experts.down": Source(name=f"{fused}.experts.down_proj", parts=of_experts(down)),
    }
