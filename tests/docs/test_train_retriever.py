"""What examples/train_retriever trains is what transformers and Ortolan run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkout import ROOT
from tolerances import LOGITS_RELATIVE
from transformers import AutoModelForCausalLM

import ortolan

FOLDER = ROOT / "examples" / "train_retriever"
MODULES = ("checkpoint", "course", "data", "hybrid", "model", "snapkv")
TOKENS = torch.randint(0, 256, (1, 192), generator=torch.Generator().manual_seed(0))
TOKENS[:, 40:120] = 32  # a long run of one key, which the delta rule inverts badly if it is careless


@pytest.fixture
def example(monkeypatch):
    """Import the example's modules, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch.manual_seed(1)
    yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def tiny(config, layer_types, **others):
    return config(hidden_size=32, intermediate_size=48, head_dim=16, layer_types=layer_types, **others)


def shaken(model):
    """Move every vector away from where training starts, so that one left out is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def check_close(actual, expected):
    spread = expected.std(-1, keepdim=True)
    torch.testing.assert_close(actual / spread, expected / spread, rtol=0, atol=LOGITS_RELATIVE)


@torch.inference_mode()
def check_agreement(checkpoint, model, folder):
    expected = model(TOKENS)[0]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS).logits
    check_close(theirs, expected)
    torch.testing.assert_close(checkpoint.read_folder(folder)(TOKENS)[0], expected, rtol=0, atol=0)
    exported = ortolan.export(folder, folder.parent / "exported", max_context=256, chunk_size=64)
    logits = ortolan.load(exported, device="cpu").session().prefill(TOKENS[0].tolist())
    check_close(torch.from_numpy(np.array(logits)), expected[0, -1])


@pytest.mark.parametrize("value_heads", [2, 4])
def test_a_hybrid_computes_the_same_everywhere(example, tmp_path, value_heads):
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_value_heads": value_heads}
    config = tiny(example.hybrid.HybridConfig, ("linear_attention", "full_attention"), **sizes)
    model = shaken(example.hybrid.Hybrid(config))
    example.checkpoint.write_folder(model, tmp_path / "model", torch.float32)
    check_agreement(example.checkpoint, model, tmp_path / "model")


def test_a_retriever_computes_the_same_everywhere(example, tmp_path):
    model = shaken(
        example.model.Retriever(tiny(example.model.RetrieverConfig, ("sliding_attention", "full_attention")))
    )
    example.checkpoint.write_folder(model, tmp_path / "model", torch.float32)
    check_agreement(example.checkpoint, model, tmp_path / "model")


def test_a_head_is_stored_where_an_export_finds_it(example, tmp_path):
    model = shaken(
        example.model.Retriever(tiny(example.model.RetrieverConfig, ("sliding_attention", "full_attention")))
    )
    head = shaken(example.model.DraftHead(model.config))
    example.checkpoint.write_folder(model, tmp_path / "model", torch.float32, head=head)
    loaded = ortolan.load(ortolan.export(tmp_path / "model", tmp_path / "exported", chunk_size=64), device="cpu")
    prompt = TOKENS[0].tolist()
    plain = list(loaded.session().generate(prompt, 20))
    drafted = loaded.session().generate(prompt, 20, speculation=ortolan.MtpHead(tokens=2))
    assert list(drafted) == plain
    assert drafted.speculation.drafted_tokens > 0


def test_a_course_goes_on_where_it_stopped_and_is_cut_by_the_clock(example):
    stages = tuple(example.data.Stage(tokens=tokens, batch=1, steps=2) for tokens in (512, 576))
    course = example.course.Course(stages=stages, seconds=1e6)
    lengths = [(step, batch.tokens.shape[1] - 1) for step, batch in course.batches(seed=0, workers=0)]
    assert lengths == [(0, 512), (1, 512), (2, 576), (3, 576)]
    resumed = example.course.Course(stages=stages, seconds=1e6, start=3)
    assert [step for step, _ in resumed.batches(seed=0, workers=0)] == [3]
    late = example.course.Course(stages=stages, seconds=100, began=course.began - 60)
    assert next(late.batches(seed=0, workers=0))[1].tokens.shape[1] - 1 == 576
    assert late.rate(200) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["train.py", "--model", "hybrid"], ["train.py"], ["distill.py", "head"], ["distill.py", "model"]]
)
def test_the_scripts_write_models_that_ortolan_runs(command, tmp_path):
    options = ["--out", "trained", "--stages", "512:1:2", "--workers", "0", "--device", "cpu", "--log-every", "1"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / command[0]), *command[1:], *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "wrote trained at step 2"
    model = ortolan.load(ortolan.export(tmp_path / "trained", tmp_path / "exported", max_context=64), device="cpu")
    assert len(list(model.session().generate(model.tokenizer.encode("def"), 2))) == 2
    assert (model.manifest.draft_head is not None) == (command[-1] == "head")
