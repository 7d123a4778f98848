"""What differs between checkpoints of OLMo Hybrid: names of tensors, RoPE, and how much a new value counts."""

import numpy as np
import pytest
import torch
from edited_checkpoints import edit_tensors
from families import shared_checkpoint, shared_model, tiny_checkpoint
from parity import oracle_logits, relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.errors import CheckpointError

PROMPT = list(range(3, 60))
ROPE = {"rope_type": "default", "rope_theta": 500.0}


def logits(folder):
    return ortolan.load(folder, device="cpu").session().prefill(PROMPT)


@pytest.mark.parametrize(
    "differences", [{"rope_parameters": ROPE}, {"linear_allow_neg_eigval": False}], ids=["rope", "beta"]
)
def test_options_are_read_as_transformers_reads_them(differences):
    checkpoint = shared_checkpoint("olmo_hybrid", **differences)
    ours = logits(shared_model(checkpoint, max_context=128))
    assert relative_difference(ours, oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE
    plain = logits(shared_model(shared_checkpoint("olmo_hybrid"), max_context=128))
    assert relative_difference(ours, plain) > 100 * LOGITS_RELATIVE


def rename_as_published(tensors):
    """Part convolutions by what they belong to, and use the other names of attention's norms."""
    for stem in {name.rpartition(".q_conv1d")[0] for name in tensors if ".q_conv1d" in name}:
        names = [f"{stem}.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        parts = whole.split([16, 16, 64])
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    for name in [name for name in tensors if "layers.1.feedforward_layer_norm" in name]:
        tensors[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = tensors.pop(name)


def join_convolutions(tensors):
    for stem in {name.rpartition(".q_conv1d")[0] for name in tensors if ".q_conv1d" in name}:
        names = [f"{stem}.{part}_conv1d.weight" for part in "qkv"]
        tensors[f"{stem}.conv1d.weight"] = torch.cat([tensors.pop(name) for name in names])


@pytest.mark.parametrize("edit", [rename_as_published, join_convolutions])
def test_tensors_are_found_by_all_their_names(edit, tmp_path):
    checkpoint = tiny_checkpoint("olmo_hybrid", tmp_path / "checkpoint")
    edit_tensors(checkpoint, edit)
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=128)
    np.testing.assert_array_equal(
        logits(folder), logits(shared_model(shared_checkpoint("olmo_hybrid"), max_context=128))
    )


def test_missing_rows_are_refused(tmp_path):
    checkpoint = tiny_checkpoint("olmo_hybrid", tmp_path / "checkpoint")
    name = "model.layers.0.linear_attn.k_proj.weight"
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: tensors[name][1:].contiguous()}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\..*contradicts config"):
        ortolan.export(checkpoint, tmp_path / "model", max_context=128)
