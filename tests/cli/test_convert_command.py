"""`ortolan convert` and what the other commands do with its folder."""

from __future__ import annotations

import json
import sys

import foreign
import onnx
import pytest
from foreign import Foreign

from ortolan.cli import main


@pytest.fixture
def source(tmp_path):
    return foreign.write(Foreign(windows=(12, -1)), tmp_path / "source")


def test_options_reach_the_manifest(source, tmp_path, capsys):
    target = tmp_path / "model"
    options = ["--max-context", "256", "--chunk-size", "32", "--sink", "4", "--snapkv-window", "16"]
    assert main(["convert", str(source), str(target), *options, "--paged", "--page-size", "32"]) == 0
    output = capsys.readouterr()
    assert output.out == f"{target}\n"
    assert output.err == ""
    manifest = json.loads((target / "ortolan.json").read_text())
    wanted = {"max_context": 256, "chunk_size": 32, "sink": 4, "snapkv_window": 16, "paged": True, "page_size": 32}
    assert {key: manifest[key] for key in wanted} == wanted
    assert [layer["window"] for layer in manifest["layers"]] == [12, -1]


def test_the_folder_generates_and_is_inspected(source, tmp_path, capsys):
    target = str(tmp_path / "model")
    assert main(["convert", str(source), target, "--max-context", "256"]) == 0
    capsys.readouterr()
    assert main(["inspect", target, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layers"] == [["RingKvAppend", "SwaAttention"], ["RingKvAppend", "SnapKvCapture", "SwaAttention"]]
    assert [layer["kind"] for layer in report["plans"][0]["layers"]] == ["ring", "full"]
    options = ["--device", "cpu", "--max-new-tokens", "4", "--snapkv-budget", "96", "--stats-json", "-"]
    assert main(["generate", target, "--prompt", "a long prompt " * 12, *options]) == 0
    assert capsys.readouterr().out


def test_sliding_window_is_warned_of_and_taken(tmp_path, capsys):
    config = {"sliding_window": {"window_size": 20, "layers": []}}
    source = foreign.write(Foreign(), tmp_path / "mistral", decoder=config)
    assert main(["convert", str(source), str(tmp_path / "full")]) == 0
    assert "ortolan: warning: the source's configuration names a sliding window of 20" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "rings"), "--sliding-window", "20"]) == 0
    assert capsys.readouterr().err == ""
    manifest = json.loads((tmp_path / "rings" / "ortolan.json").read_text())
    assert [layer["window"] for layer in manifest["layers"]] == [20, 20]


def test_overwrite_is_needed_and_works(source, tmp_path):
    target = tmp_path / "model"
    assert main(["convert", str(source), str(target), "--max-context", "64"]) == 0
    assert main(["convert", str(source), str(target), "--max-context", "96"]) == 2
    assert json.loads((target / "ortolan.json").read_text())["max_context"] == 64
    assert main(["convert", str(source), str(target), "--max-context", "96", "--overwrite"]) == 0
    assert json.loads((target / "ortolan.json").read_text())["max_context"] == 96


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-context", "0"], "max_context"),
        (["--max-context", "4096"], "1024 positions"),
        (["--sink", "-1"], "sink"),
        (["--page-size", "20"], "page_size"),
        (["--sliding-window", "-4"], "sliding_window"),
        (["--chunk-size", "x"], "--chunk-size"),
        (["--dtype", "float16"], "--dtype"),
    ],
)
def test_bad_option_is_one_line_and_writes_nothing(source, arguments, named, tmp_path, refused):
    assert named in refused("convert", str(source), str(tmp_path / "model"), *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_node_that_cannot_be_converted_is_named(source, tmp_path, capsys):
    model = onnx.load(source / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    node.op_type = "SparseAttention"
    (source / "model.onnx").write_bytes(model.SerializeToString())
    assert main(["convert", str(source), str(tmp_path / "model")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"ortolan: error: cannot convert node '{node.name}', a SparseAttention: ")
    assert errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_graphs_further_below_are_named(source, tmp_path, refused):
    (source / "genai_config.json").unlink()
    (source / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (source / name).rename(source / "onnx" / name)
    line = refused("convert", str(source), str(tmp_path / "model"))
    assert "graphs in the folder: onnx/model.onnx; name the one to convert" in line
    assert main(["convert", str(source / "onnx"), str(tmp_path / "model")]) == 0


@pytest.mark.parametrize("missing", ["absent", "empty"])
def test_no_model_there(tmp_path, capsys, missing):
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(tmp_path / missing), str(tmp_path / "model")]) == 2
    assert str(tmp_path / missing) in capsys.readouterr().err


def test_a_terminal_sees_a_progress_bar(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["convert", str(source), str(tmp_path / "model")]) == 0
    assert "weights: 100%" in capsys.readouterr().err
