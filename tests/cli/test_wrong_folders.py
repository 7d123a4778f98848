"""A path that a command cannot take: the message says what it is and what to run."""

from __future__ import annotations

import shutil
from pathlib import Path

import foreign
import pytest
from byte_tokenizer import write_byte_tokenizer
from families import tiny_checkpoint
from foreign import Foreign

import ortolan
from ortolan.cli import main
from ortolan.errors import CheckpointError, ConfigError, ContractMismatchError

RUNS = {"generate": ["--prompt", "x"], "bench": [], "inspect": []}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456\n".format("0" * 64)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tiny_checkpoint("llama", tmp_path / "checkpoint")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return foreign.write(Foreign(), tmp_path / "source")


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "models" / "one"))


@pytest.mark.parametrize("command", RUNS)
class TestWhatShouldBeAModelFolder:
    @pytest.fixture
    def line(self, command, refused):
        return lambda path: refused(command, str(path), *RUNS[command])

    def test_is_missing(self, line, tmp_path):
        assert f"{tmp_path / 'absent'} does not exist; give a model folder" in line(tmp_path / "absent")

    def test_is_a_checkpoint(self, line, checkpoint):
        wanted = (
            f"{checkpoint} is a Hugging Face checkpoint, not a model folder; run `ortolan export {checkpoint} MODEL"
        )
        assert wanted in line(checkpoint)

    def test_is_a_folder_of_genai(self, line, source):
        wanted = f"{source} is a model of onnxruntime-genai, not a model folder; run `ortolan convert {source} MODEL"
        assert wanted in line(source)

    def test_is_a_folder_of_graphs_beside_a_config(self, line, source):
        (source / "genai_config.json").rename(source / "config.json")
        assert f"{source} is a folder of ONNX graphs, not a model folder; run `ortolan convert {source} " in line(
            source
        )

    def test_is_a_graph(self, line, source):
        graph = source / "model.onnx"
        assert f"{graph} is an ONNX file, not a model folder; run `ortolan convert {graph} MODEL_DIR`" in line(graph)

    def test_is_a_file_of_a_model_folder(self, line, model):
        assert line(model / "model.onnx").endswith(f"is a file of a model folder; give the folder, {model}\n")

    def test_is_the_folder_above(self, line, model):
        assert line(model.parent).endswith(f"it has no ortolan.json; give {model}, which is one\n")

    def test_has_a_name_that_a_shell_would_split(self, line, checkpoint, tmp_path):
        spaced = checkpoint.rename(tmp_path / "my model")
        assert f"`ortolan export '{spaced}' MODEL_DIR`" in line(spaced)


def test_python_says_the_same(checkpoint, tmp_path):
    with pytest.raises(ContractMismatchError, match=r"is a Hugging Face checkpoint.*run `ortolan export"):
        ortolan.load(checkpoint)
    with pytest.raises(ContractMismatchError, match="absent does not exist"):
        ortolan.load(tmp_path / "absent")


def test_export_names_what_is_no_checkpoint(refused, source, model, tmp_path):
    def line(path: Path) -> str:
        return refused("export", str(path), str(tmp_path / "target"))

    assert f"{tmp_path / 'absent'} does not exist; give the folder of a Hugging Face" in line(tmp_path / "absent")
    assert "is a model of onnxruntime-genai, not a Hugging Face checkpoint; run `ortolan convert" in line(source)
    assert "is a model folder of Ortolan already; load it as it is" in line(model)
    assert "model.onnx is an ONNX file, not a Hugging Face checkpoint; run `ortolan convert" in line(
        source / "model.onnx"
    )
    assert "genai_config.json is a file; give the folder of a" in line(source / "genai_config.json")


def test_convert_says_export_of_a_checkpoint(refused, checkpoint, tmp_path):
    line = refused("convert", str(checkpoint), str(tmp_path / "target"))
    assert f"{checkpoint} is a Hugging Face checkpoint, which has no ONNX graph to convert; run `ortolan export" in line
    with pytest.raises(ConfigError, match="not a Hub id"):
        ortolan.convert("me/model", tmp_path / "target")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_checkpoint_of_git_lfs_pointers(name, refused, checkpoint, tmp_path):
    (checkpoint / name).write_text(POINTER)
    line = refused("export", str(checkpoint), str(tmp_path / "target"))
    assert f"{checkpoint / name} is a git-lfs pointer, not the file itself; download it: run `git lfs pull` in" in line
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        ortolan.export(checkpoint, tmp_path / "target")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "genai_config.json"])
def test_a_source_of_git_lfs_pointers(name, refused, source, tmp_path):
    (source / name).write_text(POINTER)
    assert f"{source / name} is a git-lfs pointer" in refused("convert", str(source), str(tmp_path / "target"))


@pytest.mark.parametrize("name", ["ortolan.json", "model.onnx.data"])
def test_a_model_folder_of_git_lfs_pointers(name, refused, model):
    (model / name).write_text(POINTER)
    assert f"{model / name} is a git-lfs pointer" in refused("generate", str(model), "--prompt", "x")


def test_an_architecture_is_not_mistaken_for_another(refused, checkpoint, tmp_path):
    path, target = checkpoint / "config.json", tmp_path / "target"
    text = path.read_text()
    path.write_text(text.replace("LlamaForCausalLM", "DbrxForCausalLM"))
    line = refused("export", str(checkpoint), str(target))
    assert "does not support architecture DbrxForCausalLM; supported: Cohere2ForCausalLM" in line
    assert "did you mean" not in line
    path.write_text(text.replace("LlamaForCausalLM", "NemotronForCausalLM"))
    assert "`ortolan convert` makes a model folder of that" in refused("export", str(checkpoint), str(target))
    assert main(["export", str(checkpoint), str(target)]) == 2
    assert not target.exists()
