"""The fused graphs on the command line: exported unless told otherwise, checked and counted by inspect."""

import json
import shutil

import onnx
import pytest

from ortolan.cli import main
from ortolan.errors import ContractMismatchError
from ortolan.manifest import CPU_FILE, FUSED_FILE, read_manifest
from ortolan.retrieval import shipped_model


@pytest.fixture
def graphs_dir(model_dir, tmp_path):
    """A copy of the model's graphs without its weights."""
    for name in ("ortolan.json", "model.onnx", FUSED_FILE, CPU_FILE):
        shutil.copy(model_dir / name, tmp_path / name)
    return tmp_path


def test_json_counts_what_is_fused_and_what_is_left(graphs_dir, capsys):
    assert main(["inspect", str(graphs_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    layers = len(report["layers"])
    assert report["fused"]["file"] == FUSED_FILE
    assert report["fused"]["graph"] == "ok"
    assert report["fused"]["nodes"] < report["nodes"]
    counts = report["fused"]["operators"]
    assert (counts["FusedLinear"], counts["QkvAttention"], counts["Gemm"]) == (4 * layers + 1, layers, 0)
    assert report["cpu"]["file"] == CPU_FILE
    assert report["fused"]["nodes"] < report["cpu"]["nodes"] < report["nodes"]
    assert report["fused"]["default_inputs"] == report["cpu"]["default_inputs"] == ["max_query_len", "max_kv_len"]
    counts = report["cpu"]["operators"]
    assert (counts["FusedLinear"], counts["QkvAttention"], counts["Gemm"]) == (0, layers, 4 * layers + 1)


def test_table_shows_the_fused_graph(graphs_dir, capsys):
    assert main(["inspect", str(graphs_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("fused graph for CUDA: ok (model.fused.onnx"))
    counts = dict(line.split() for line in lines[heading + 3 : heading + 5])
    assert list(counts) == ["FusedLinear", "QkvAttention"]
    assert any(line.startswith("fused graph for CPU: ok (model.cpu.onnx") for line in lines)
    assert lines.count("inputs that need not be fed: max_query_len, max_kv_len") == 2


def test_a_fused_graph_that_is_gone_is_said_to_be_missing(graphs_dir, capsys):
    (graphs_dir / FUSED_FILE).unlink()
    assert main(["inspect", str(graphs_dir)]) == 0
    assert f"fused graph for CUDA: missing ({FUSED_FILE}, which the manifest names)" in capsys.readouterr().out
    assert main(["inspect", str(graphs_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fused"] == {"file": FUSED_FILE, "graph": "missing"}
    with pytest.raises(ContractMismatchError, match="is missing, the manifest names it"):
        read_manifest(graphs_dir)


def test_broken_fused_graph_is_refused(graphs_dir, capsys):
    model = onnx.load(str(graphs_dir / FUSED_FILE), load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "QkvAttention")
    next(a for a in node.attribute if a.name == "num_heads").i = 0
    onnx.save(model, str(graphs_dir / FUSED_FILE))
    assert main(["inspect", str(graphs_dir)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert node.name in output.err


def test_export_without_fusion(tmp_path, capsys):
    assert main(["export", str(shipped_model()), str(tmp_path / "model"), "--max-context", "256", "--no-fuse"]) == 0
    assert not any((tmp_path / "model" / name).exists() for name in (FUSED_FILE, CPU_FILE))
    assert read_manifest(tmp_path / "model").fused_model is None
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "model")]) == 0
    assert "fused graph for CPU: none; CPU runs the plain one" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fused"] is None
