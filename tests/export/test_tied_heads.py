"""Heads are tied to the embedding where transformers ties them."""

import pytest
import torch
from edited_checkpoints import edit_config, edit_tensors
from families import tiny_checkpoint
from parity import oracle_logits, relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan

PROMPT = list(range(3, 40))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_head_that_differs_is_not_tied(family, tmp_path):
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", tie_word_embeddings=False)
    edit_config(checkpoint, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"ties the head to the embedding .* lm_head\.weight differs"):
        folder = ortolan.export(checkpoint, tmp_path / "model", max_context=64)
    logits = ortolan.load(folder, device="cpu").session().prefill(PROMPT)
    assert relative_difference(logits, oracle_logits(checkpoint, PROMPT)[-1]) <= LOGITS_RELATIVE


@pytest.mark.filterwarnings("error:config.json ties")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_the_same_values_is_not_written(tmp_path, dtype):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "hf", tie_word_embeddings=True)
    tied = ortolan.export(checkpoint, tmp_path / "tied", max_context=64)

    def repeat(tensors):
        embedding = tensors["model.embed_tokens.weight"].bfloat16()
        tensors |= {"model.embed_tokens.weight": embedding.float(), "lm_head.weight": embedding.to(dtype)}

    edit_tensors(checkpoint, repeat)
    repeated = ortolan.export(checkpoint, tmp_path / "repeated", max_context=64)
    assert len({(folder / "model.onnx.data").stat().st_size for folder in (tied, repeated)}) == 1
