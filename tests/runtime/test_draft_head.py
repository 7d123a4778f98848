"""Heads for multi-token prediction: they draft what transformers' layers say, and texts stay what they are."""

import shutil

import numpy as np
import pytest
import torch
from draft_heads import TorchHead, checkpoint_with_head
from fake_cuda import make_session
from families import shared_model
from published import FORMS, write_published
from safetensors.torch import load_file, save_file

import ortolan
from ortolan import Engine, MtpHead, PromptLookup, Sampling, SnapKv
from ortolan.errors import CheckpointError, ConfigError, ContractMismatchError

FAMILIES = ("llama", "qwen3_5", "qwen3_next", "qwen3_5_moe")
SAMPLINGS = (None, Sampling(temperature=0.9, seed=3), Sampling(temperature=0.7, seed=5, repetition_penalty=1.2))
SIZES = {"max_context": 400, "chunk_size": 40}


class Recording(MtpHead):
    """Keeps the drafts that the head proposed, with the sequences that they follow."""

    def open(self, model, max_context):
        drafter, made = super().open(model, max_context), []
        object.__setattr__(self, "made", made)

        class Recorder:
            is_likely, take_hidden = drafter.is_likely, drafter.take_hidden

            def propose(self, tokens, count, sampling):
                draft = drafter.propose(tokens, count, sampling)
                made.append((list(tokens), draft))
                return draft

        return Recorder()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family):
    return checkpoint_with_head(family)


def load(checkpoint, **options):
    model = ortolan.load(shared_model(checkpoint, **SIZES, **options), device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(scope="module")
def quiet(family):
    """A model whose head is right now and then."""
    return load(checkpoint_with_head(family, quiet=True))


def test_drafts_are_those_of_transformers_layers(checkpoint, draw_tokens):
    model, oracle, head = load(checkpoint), TorchHead(checkpoint), Recording(tokens=3)
    session = model.session()
    list(session.generate(draw_tokens(95), 12, speculation=head))  # three chunks
    list(session.generate(draw_tokens(30, seed=4), 8, speculation=head))  # the second turn
    drafts = [(tokens, draft) for tokens, draft in head.made if draft]
    assert len(drafts) >= 4
    assert {len(draft) for _, draft in drafts} <= {1, 2, 3}
    for tokens, draft in drafts:
        assert draft == oracle.draft(tokens, len(draft))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_stay_what_they_are(quiet, draw_tokens, sampling):
    prompt, later = draw_tokens(50), draw_tokens(20, seed=3)
    plain, drafted = quiet.session(), quiet.session()
    speculation = MtpHead(tokens=5)
    for turn in (prompt, later):
        expected = list(plain.generate(turn, 60, sampling))
        generation = drafted.generate(turn, 60, sampling, speculation=speculation)
        assert list(generation) == expected
    assert generation.speculation.accepted_tokens > 0
    assert drafted.logical_length == plain.logical_length


def test_a_head_that_is_right_often_saves_steps(quiet, draw_tokens):
    session = quiet.session()
    generation = session.generate(draw_tokens(40), 80, speculation=MtpHead(tokens=4))
    list(generation)
    assert generation.speculation.tokens_per_check > 1.5


def test_drafts_go_on_after_rewinds_forks_and_turns_without_them(quiet, draw_tokens, tmp_path):
    prompt, head = draw_tokens(60), Recording(tokens=4)
    plain, session = quiet.session(), quiet.session()
    expected = list(plain.generate(prompt, 100))
    assert list(session.generate(prompt, 30, speculation=head)) == expected[:30]
    assert list(session.resume(20)) == expected[30:50]
    session.save(tmp_path / "a.session")
    for other in (session.fork(), quiet.restore(tmp_path / "a.session")):
        assert list(other.resume(50, speculation=MtpHead(tokens=4))) == expected[50:]
    assert list(session.resume(50)) == expected[50:]
    if quiet.manifest.layers[0].state == "attention":  # a recurrent state goes back a few tokens alone
        for each in (plain, session):
            each.rewind(70)
        again = draw_tokens(25, seed=9)
        assert list(session.generate(again, 30, speculation=head)) == list(plain.generate(again, 30))


def test_what_was_read_without_the_head_costs_drafts_alone(quiet, draw_tokens):
    plain, session = quiet.session(), quiet.session()
    prompt, later = draw_tokens(90), draw_tokens(5, seed=3)
    for each in (plain, session):
        list(each.generate(prompt, 30))
    generation = session.generate(later, 40, speculation=MtpHead(tokens=3))
    assert list(generation) == list(plain.generate(later, 40))
    assert generation.speculation.drafted_tokens > 0


def test_drafts_after_an_eviction(quiet, draw_tokens):
    prompt, snapkv = draw_tokens(150), SnapKv(budget=40, window=8, sink=2)
    expected = list(quiet.session(snapkv=snapkv).generate(prompt, 60))
    generation = quiet.session(snapkv=snapkv).generate(prompt, 60, speculation=MtpHead(tokens=4))
    assert list(generation) == expected
    assert generation.speculation.drafted_tokens > 0


def test_steps_on_a_device_draft_the_same(quiet, draw_tokens, monkeypatch):
    prompt = draw_tokens(70)
    expected = list(quiet.session().generate(prompt, 60))
    session = make_session(quiet, monkeypatch)
    generation = session.generate(prompt, 60, speculation=MtpHead(tokens=4))
    assert list(generation) == expected
    assert generation.speculation.accepted_tokens > 0


def test_engines_draft(family, draw_tokens):
    model = load(checkpoint_with_head(family, quiet=True), paged=True, page_size=16)
    prompts = [draw_tokens(count, seed=count) for count in (33, 15, 90, 120)]
    expected = [list(model.session().generate(p, 40, g)) for p, g in zip(prompts, (*SAMPLINGS, None), strict=True)]
    drafters = (MtpHead(tokens=4), None, MtpHead(tokens=2), PromptLookup(shortest=1))
    need = sum(kind.num_pages * kind.page_bytes for kind in model.plan_engine(2, max_context=180).kinds)
    for limits in ({}, {"max_cache_bytes": need, "overcommit": 2.0}):
        with Engine(model, 3, chunk_tokens=24, max_context=180, **limits) as engine:
            streams = [
                engine.submit(p, 40, g, speculation=d)
                for p, g, d in zip(prompts, (*SAMPLINGS, None), drafters, strict=True)
            ]
            assert [stream.result() for stream in streams] == expected
            assert streams[0].speculation.drafted_tokens > 0


def test_a_model_without_a_head_is_refused(full_model, draw_tokens):
    with pytest.raises(ConfigError, match=r"has no draft head: .* choose ortolan.PromptLookup or ortolan.DraftModel"):
        full_model.session().generate(draw_tokens(5), 3, speculation=MtpHead())


def test_random_weights_have_a_head_where_the_config_names_one(tmp_path, draw_tokens):
    checkpoint = checkpoint_with_head("qwen3_5", mtp_num_hidden_layers=1)
    model = load(checkpoint, weights="random")
    assert model.manifest.draft_head is not None
    prompt = draw_tokens(30)
    drafted = list(model.session().generate(prompt, 20, speculation=MtpHead()))
    assert drafted == list(model.session().generate(prompt, 20))


def test_damaged_heads_are_refused(tmp_path):
    source = checkpoint_with_head("llama")
    damaged = tmp_path / "checkpoint"
    shutil.copytree(source, damaged)
    tensors = load_file(source / "model.safetensors")
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the tensor mtp\.layers\.0\.mlp\.up_proj\.weight"):
        ortolan.export(damaged, tmp_path / "model", **SIZES)
    assert not (tmp_path / "model").exists()
    save_file(tensors | {"mtp.layers.1.a": tensors["mtp.fc.weight"].clone()}, damaged / "model.safetensors")
    with pytest.warns(UserWarning, match="mtp tensors are not those of one layer"):
        ortolan.export(damaged, tmp_path / "model", **SIZES)
    assert ortolan.load(tmp_path / "model", device="cpu").manifest.draft_head is None


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "published"])
def test_heads_beside_weights_in_low_bits(is_dense, tmp_path, draw_tokens):
    source = write_published(tmp_path, FORMS["gptq"], vocab_size=131)
    tensors, dense = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "dense"))
    layer = {n.removeprefix("model.layers.1."): t for n, t in (dense if is_dense else tensors).items() if ".1." in n}
    tensors |= {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    size = tensors["model.norm.weight"].shape[0]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = tensors["model.norm.weight"].clone()
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(size), torch.eye(size)], dim=1)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model = ortolan.load(ortolan.export(source, tmp_path / "model", **SIZES), device="cpu", num_threads=1)
    head, prompt = Recording(tokens=3), draw_tokens(60)
    tokens = list(model.session().generate(prompt, 20, speculation=head))
    assert tokens == list(model.session().generate(prompt, 20))
    assert any(draft for _, draft in head.made)
    assert ("LowBit" in model.folder.joinpath("mtp.fused.onnx").read_bytes().decode("latin-1")) != is_dense


def test_a_folder_without_its_heads_files_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(shared_model(checkpoint_with_head("llama"), **SIZES), folder)
    (folder / "mtp.onnx.data").unlink()
    with pytest.raises(ContractMismatchError, match=r"mtp\.onnx\.data is missing"):
        ortolan.load(folder, device="cpu")


@pytest.mark.slow
def test_random_use_gives_the_same_tokens(quiet, draw_tokens):
    random = np.random.default_rng(0)
    for _ in range(20):
        plain, session = quiet.session(), quiet.session()
        for _ in range(int(random.integers(2, 6))):
            prompt = draw_tokens(int(random.integers(1, 60)), seed=int(random.integers(99)))
            count, speculation = int(random.integers(1, 25)), random.choice([None, MtpHead(tokens=3), MtpHead()])
            if plain.logical_length + len(prompt) + count > 390:
                break
            assert list(session.generate(prompt, count, speculation=speculation)) == list(plain.generate(prompt, count))


def test_the_command_line_drafts_and_inspects(tmp_path, capsys):
    import json

    from ortolan.cli import main

    folder = shared_model(checkpoint_with_head("llama", quiet=True), **SIZES)
    assert main(["inspect", str(folder)]) == 0
    assert "draft head (mtp): mtp.onnx, " in capsys.readouterr().out
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_head"]["cache_bytes"] > 0


def test_embedding_and_output_head_are_held_once(quiet, draw_tokens):
    shared = quiet.draft_head().weights
    assert {name for name in shared if name.startswith(("embedding", "head"))}
    for name, value in shared.items():
        assert quiet.decoder.weights[name] is value
        assert value.data_ptr() % 16 == 0
