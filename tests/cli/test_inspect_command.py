import importlib.util
import json
import math
import shutil
import sys

import foreign
import onnx
import pytest
from families import shared_checkpoint, shared_model, tiny_checkpoint
from foreign import Foreign
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import ortolan
from ortolan.cli import main
from ortolan.manifest import CPU_FILE, read_manifest
from ortolan.retrieval import shipped_model
from ortolan.runtime import plan_caches


@pytest.fixture
def bare_dir(model_dir, tmp_path):
    """A copy of the model without its weights."""
    for name in ("ortolan.json", "model.onnx"):
        shutil.copy(model_dir / name, tmp_path / name)
    return tmp_path


def test_json_agrees_with_the_plan_and_needs_no_weights(model_dir, bare_dir, capsys):
    assert main(["inspect", str(bare_dir), "--context", "512", "4096", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    manifest = read_manifest(model_dir)
    assert report["graph"] == "ok"
    assert report["operators"]["SwaAttention"] == len(manifest.layers)
    assert [layer.count("RingKvAppend") for layer in report["layers"]] == [1] * len(manifest.layers)
    for given, context in zip(report["plans"], (512, 4096), strict=True):
        plan = plan_caches(manifest, context)
        assert given["bytes"] == plan.bytes == sum(layer["bytes"] for layer in given["layers"])
        assert given["full_length_bytes"] == plan.full_length_bytes > plan.bytes
        assert [layer["capacity"] for layer in given["layers"]] == [layer.capacity for layer in plan.layers]


def test_table_has_a_row_for_each_layer(model_dir, capsys):
    assert main(["inspect", str(model_dir), "--context", "2048"]) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = plan_caches(read_manifest(model_dir), 2048)
    rows = [line.split() for line in lines[lines.index(next(x for x in lines if "2048 tokens" in x)) :]]
    found = {row[0]: row[1:4] for row in rows if row and row[0].isdigit()}
    assert found == {
        str(i): [x.kind, str(x.window) if x.window > 0 else "-", str(x.capacity)] for i, x in enumerate(plan.layers)
    }


def layer_rows(capsys, folder) -> list[str]:
    """Print the table of layers, and return its rows."""
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["layer", "weights"])
    return [" ".join(line.split()) for line in lines[start + 2 : lines.index("", start)]]


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_moe", ["2 of 6", "-", "2 of 6", "2 of 6"]),
        ("laguna", ["-", *["2 of 6 and a shared one"] * 3]),
    ],
)
def test_experts_and_weights_are_shown_by_layer(capsys, family, experts):
    folder = shared_model(shared_checkpoint(family, seed=5), max_context=512, chunk_size=16, dtype="float16")
    rows = layer_rows(capsys, folder)
    assert main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for index, row in enumerate(rows):
        (stored,) = report["layer_weights"][index]
        assert stored["format"] == "float16"
        assert row.startswith(f"{index} float16: {stored['bytes'] / 1024:.1f} KiB {experts[index]} RingKvAppend")
    weights = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    for index in range(4):
        elements = [math.prod(t.dims) for t in weights if t.name.startswith(f"layers.{index}.")]
        assert report["layer_weights"][index][0]["bytes"] == 2 * sum(elements)
    shared = [mixture and mixture["shared"] for mixture in report["experts"]]
    assert shared == [None if text == "-" else "shared" in text for text in experts]


def test_graph_that_reads_a_cache_before_the_append_is_refused(bare_dir, capsys):
    path = bare_dir / "model.onnx"
    model = onnx.load(str(path), load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "SwaAttention")
    node.input[1] = "layer.0.key_cache"
    onnx.save(model, str(path))
    assert main(["inspect", str(bare_dir)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "layer.0.key_cache" in output.err


@pytest.mark.parametrize("context", ["0", "5000"])
def test_context_out_of_range(context, model_dir, capsys):
    assert main(["inspect", str(model_dir), "--context", context]) == 2
    assert "max_context" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("netron") is not None, reason="netron is installed, and would open")
def test_netron_that_is_not_installed(model_dir, capsys):
    assert main(["inspect", str(model_dir), "--netron"]) == 2
    output = capsys.readouterr()
    assert output.out == ""  # said at once
    assert "pip install netron" in output.err


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Stand in for Netron; returns the file in which it writes what it is to show."""
    (tmp_path / "netron.py").write_text(
        f"def start(path): open({str(tmp_path / 'shown')!r}, 'w').write(path)\ndef wait(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "netron", raising=False)
    yield tmp_path / "shown"
    sys.modules.pop("netron", None)


@pytest.mark.parametrize(
    ("graph", "file"), [(None, "model.onnx"), ("plain", "model.onnx"), ("cuda", "model.fused.onnx"), ("cpu", CPU_FILE)]
)
def test_netron_opens_any_graph(graph, file, model_dir, shown):
    assert main(["inspect", str(model_dir), "--netron", *(["--graph", graph] if graph else [])]) == 0
    assert shown.read_text() == str(model_dir / file)


def test_a_fused_graph_that_is_not_there_is_said_at_once(bare_dir, shown, refused, capsys):
    assert "has no fused graph" in refused("inspect", str(bare_dir), "--netron", "--graph", "cuda")
    assert not shown.exists()
    assert main(["inspect", str(bare_dir), "--graph", "cuda"]) == 0
    assert capsys.readouterr().err == "ortolan: warning: --graph has no effect without --netron\n"


def test_weights_and_tokenizer_are_those_of_the_checkpoint(model_dir, capsys):
    assert main(["inspect", str(model_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tensors = load_file(shipped_model() / "model.safetensors")
    assert report["parameters"] == sum(tensor.size for tensor in tensors.values())
    assert report["weight_bytes"] == 4 * report["parameters"]
    assert [row["format"] for row in report["weights"]] == ["float32"]
    assert (
        report["folder_bytes"]
        == sum(path.stat().st_size for path in model_dir.iterdir() if path.suffix != "")
        - (model_dir / "ortolan.json").stat().st_size
    )
    tokens = Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
    assert report["tokenizer"] == {"kind": "BPE", "tokens": tokens, "has_chat_template": False}
    assert report["cpu_bytes"] is None
    assert main(["inspect", str(model_dir)]) == 0
    text = capsys.readouterr().out
    assert f"tokenizer: BPE, {tokens} tokens" in text
    assert f"{report['parameters']:,}" in text


@pytest.mark.parametrize(
    ("spec", "formats"),
    [
        (Foreign(int4=True), {"4 bits in blocks of 32", "float32"}),
        (Foreign(qdq=True, block_embedding=True), {"4 bits in blocks of 16", "4 bits in blocks of 32", "float32"}),
    ],
)
def test_parameters_of_few_bits_are_counted_one_by_one(spec, formats, tmp_path, capsys):
    counts = []
    for name, each in (("few", spec), ("dense", Foreign())):
        source = foreign.write(each, tmp_path / f"{name}-source")
        assert main(["convert", str(source), str(tmp_path / name)]) == 0
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / name), "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out))
    few, dense = counts
    assert few["parameters"] == dense["parameters"]
    assert few["weight_bytes"] < dense["weight_bytes"]
    assert {row["format"] for row in few["weights"]} <= formats


def test_float16_on_the_cpu_takes_what_float32_does(tmp_path, capsys):
    sizes = ["--weights", "random", "--max-context", "64"]
    for dtype in ("float16", "float32"):
        assert main(["export", str(shipped_model()), str(tmp_path / dtype), "--dtype", dtype, *sizes]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "float16")]) == 0
    assert "on the CPU: ONNX Runtime holds these weights as float32" in capsys.readouterr().out
    reports = [
        ortolan.load(tmp_path / dtype, device="cpu").session().memory_report() for dtype in ("float16", "float32")
    ]
    assert reports[0].weights_bytes == pytest.approx(reports[1].weights_bytes, rel=0.02)  # but for padding


def test_a_damaged_tokenizer_is_named(bare_dir, refused):
    (bare_dir / "tokenizer.json").write_text('{"model": {}}')
    assert f"{bare_dir / 'tokenizer.json'} is not a tokenizer" in refused("inspect", str(bare_dir))


def test_folder_that_is_no_model(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "ortolan export" in capsys.readouterr().err


@pytest.mark.parametrize("name", [b"layers.0/attention/SwaAttention", b"layer.0.key_cache", b"Gather"])
def test_names_that_are_no_text_are_refused(name, bare_dir, refused):
    path = bare_dir / "model.onnx"
    content = path.read_bytes()
    assert name in content
    path.write_bytes(content.replace(name, b"\xff" + name[1:], 1))
    assert "UTF-8" in refused("inspect", str(bare_dir))


def test_model_file_that_is_no_graph(bare_dir, capsys):
    (bare_dir / "model.onnx").write_bytes(b"\x00not a graph")
    assert main(["inspect", str(bare_dir)]) == 2
    assert "model.onnx" in capsys.readouterr().err


def test_paged_caches_show_their_kinds(tmp_path, capsys):
    checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf")
    options = ["--max-context", "256", "--chunk-size", "16", "--paged", "--page-size", "32"]
    assert main(["export", str(checkpoint), str(tmp_path / "model"), *options]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "paged caches, 32 slots a page" in lines
    rows = [line.split() for line in lines]
    assert ["window_20", "0,", "2,", "3", "block_table.window_20", "2"] in rows
    assert ["full", "1", "block_table.full", "up", "to", "8"] in rows
    assert main(["inspect", str(tmp_path / "model"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["paged"], report["page_size"]) == (True, 32)
    assert report["cache_kinds"][1] == {
        "name": "full",
        "window": -1,
        "layers": [1],
        "block_table": "block_table.full",
    }


def test_layers_that_share_a_cache_name_its_owner(tmp_path, capsys):
    checkpoint = tiny_checkpoint("gemma4", tmp_path / "hf")
    assert main(["export", str(checkpoint), str(tmp_path / "model"), "--max-context", "256"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "model")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(row[:2] == ["4", "float32:"] and row[4:] == ["SwaAttention"] for row in rows)
    for layer, owner, window in ((4, 2, "12"), (5, 2, "12"), (6, 3, "-")):
        assert [str(layer), "layer", f"{owner}'s", window, "-", "0", "B", "0", "B"] in rows
    assert main(["inspect", str(tmp_path / "model"), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["plans"][0]["layers"]
    assert [layer["cache_of"] for layer in layers] == [None] * 4 + [2, 2, 3]


def test_an_unknown_page_size_is_refused(tmp_path, capsys):
    checkpoint = tiny_checkpoint("gemma3", tmp_path / "hf")
    assert main(["export", str(checkpoint), str(tmp_path / "model"), "--paged", "--page-size", "48"]) == 2
    assert "page_size is 48; allowed: 16, 32, 64, 128, 256" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
