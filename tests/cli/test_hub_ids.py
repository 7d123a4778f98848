"""Models by their id on the Hugging Face hub, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from byte_tokenizer import write_byte_tokenizer
from families import shared_checkpoint, tiny_checkpoint
from hub_stand_in import run_ortolan, serving
from safetensors.torch import load_file, save_file

SMALL = ("--max-context", 256, "--chunk-size", 16)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A checkpoint as it is published: in shards, with files that no export reads."""
    folder = tiny_checkpoint("llama", tmp_path / "published")
    write_byte_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "README.md").write_text("# a model")
    return folder


def assert_refused(result, *parts: str) -> None:
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("ortolan: error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.slow
def test_a_checkpoint_is_exported_by_its_id_and_later_without_the_hub(published, tmp_path):
    with serving({"me/tiny": published}) as hub:
        result = run_ortolan("export", "me/tiny", "model", *SMALL, folder=tmp_path, endpoint=hub.endpoint)
    assert (result.returncode, result.stdout) == (0, "model\n"), result.stderr
    sent = {name.removeprefix("me/tiny/") for name in hub.downloads}
    kept = {"README.md", "consolidated.safetensors"}
    assert sent == {path.name for path in published.iterdir()} - kept
    again = run_ortolan("export", "me/tiny", "again", *SMALL, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stderr) == (0, "")
    for name in ("model.onnx.data", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    generated = run_ortolan("generate", "me/tiny", "--prompt", "a", folder=tmp_path, HF_HUB_OFFLINE="1")
    assert_refused(generated, "run `ortolan export me/tiny MODEL_DIR`, then give MODEL_DIR")


@pytest.mark.slow
def test_a_model_folder_is_run_by_its_id_and_inspected_without_its_weights(published, tmp_path):
    assert run_ortolan("export", published, "made", *SMALL, folder=tmp_path).returncode == 0
    with serving({"me/made": tmp_path / "made"}) as hub:
        inspected = run_ortolan("inspect", "me/made", "--json", folder=tmp_path, endpoint=hub.endpoint)
        assert json.loads(inspected.stdout)["parameters"] > 0
        assert "me/made/model.onnx.data" not in hub.downloads
        options = ("--prompt", "ab", "--max-new-tokens", 3, "--device", "cpu")
        by_id = run_ortolan("generate", "me/made", *options, folder=tmp_path, endpoint=hub.endpoint)
    assert "me/made/model.onnx.data" in hub.downloads
    assert (by_id.returncode, by_id.stderr) == (0, "")
    assert by_id.stdout == run_ortolan("generate", "made", *options, folder=tmp_path).stdout
    cached = run_ortolan("generate", "me/made", *options, folder=tmp_path)  # the hub cannot be reached any more
    assert (cached.returncode, cached.stdout) == (0, by_id.stdout)


@pytest.mark.parametrize("name", ["../../../../stolen", "/stolen", ".."])
def test_a_manifest_reaches_nothing_outside_of_the_cache(name, model_dir, tmp_path):
    folder = Path(shutil.copytree(model_dir, tmp_path / "made"))
    manifest = json.loads((folder / "ortolan.json").read_text())
    (folder / "ortolan.json").write_text(json.dumps(manifest | {"files": {name: 1}}))
    with serving({"me/made": folder}) as hub:
        result = run_ortolan("inspect", "me/made", folder=tmp_path, endpoint=hub.endpoint)
    assert_refused(result, f"me/made: its manifest names {name!r}, which is not the name of a file")
    assert hub.downloads == ["me/made/ortolan.json"]


def test_a_local_folder_wins(tmp_path):
    shutil.copytree(shared_checkpoint("llama"), tmp_path / "me" / "tiny")
    with serving({"me/tiny": shared_checkpoint("qwen3")}) as hub:
        result = run_ortolan("export", "me/tiny", "model", *SMALL, folder=tmp_path, endpoint=hub.endpoint)
    assert result.returncode == 0
    assert hub.downloads == []
    assert json.loads((tmp_path / "model" / "ortolan.json").read_text())["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize("command", ["export", "generate"])
def test_what_the_hub_refuses_is_said(command, tmp_path):
    arguments = ("model",) if command == "export" else ("--prompt", "a")
    with serving({}, gated=("me/gated",)) as hub:
        absent = run_ortolan(command, "me/absent", *arguments, folder=tmp_path, endpoint=hub.endpoint)
        gated = run_ortolan(command, "me/gated", *arguments, folder=tmp_path, endpoint=hub.endpoint)
    assert_refused(absent, "me/absent is neither a folder here nor a model on the Hugging Face hub")
    assert_refused(gated, "does not let you read me/gated", "hf auth login")


@pytest.mark.parametrize("command", ["export", "generate", "inspect"])
@pytest.mark.parametrize(
    ("settings", "named"), [({"HF_HUB_OFFLINE": "1"}, "is offline (HF_HUB_OFFLINE is set)"), ({}, "cannot be reached")]
)
def test_no_way_to_the_hub_is_said(command, settings, named, tmp_path):
    arguments = {"export": ("model",), "generate": ("--prompt", "a"), "inspect": ()}[command]
    result = run_ortolan(command, "me/tiny", *arguments, folder=tmp_path, **settings)
    assert_refused(result, "me/tiny is not a folder here", named, str(tmp_path / "cache"), "`hf download me/tiny`")


def test_a_cache_that_lacks_weights_is_said(published, tmp_path):
    with serving({"me/tiny": published}) as hub:
        random = run_ortolan(
            "export", "me/tiny", "random", "--weights", "random", *SMALL, folder=tmp_path, endpoint=hub.endpoint
        )
    assert random.returncode == 0
    assert not any("safetensors" in name for name in hub.downloads)
    result = run_ortolan("export", "me/tiny", "model", *SMALL, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert_refused(result, "does not have the model's model.safetensors")
