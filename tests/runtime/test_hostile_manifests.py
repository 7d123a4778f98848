"""Sizes out of proportion are refused at once, before anything of that size is allocated."""

import json
import resource
import shutil
import subprocess
import sys

import onnx
import pytest
from families import shared_checkpoint, shared_model

from ortolan.manifest import MANIFEST_FILE, MODEL_FILE

LARGEST = 2**31 - 1
ADDRESS_SPACE = 6 * 2**30
MOST_BYTES = 400 * 2**20  # of a process that has opened a tiny model
MOST_SECONDS = 1.0  # of a core
PROGRAM = """
import pathlib, sys, time
import ortolan, ortolan.runtime
import onnxruntime, onnx, tokenizers
start = time.process_time()
try:
    model = ortolan.load(sys.argv[1], device="cpu", num_threads=1)
    (ortolan.Engine(model) if sys.argv[2] == "engine" else model.session()).close()
except ortolan.OrtolanError as error:
    status = pathlib.Path("/proc/self/status").read_text()  # unlike resource's, without what the parent had
    print(type(error).__name__, time.process_time() - start, int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""
WHOLE = [{"sink": LARGEST}, {"sink": 511, "max_context": LARGEST, "rope_limits": [LARGEST]}, {"vocab_size": LARGEST}]
WHOLE += [{"max_context": LARGEST, "rope_limits": [LARGEST]}, {"sink": LARGEST - 1, "max_context": LARGEST}]
WHOLE += [{"sink": LARGEST - 1, "max_context": LARGEST, "rope_limits": [LARGEST]}]
LAYERS = [{name: LARGEST} for name in ("window", "num_heads", "num_kv_heads", "head_size")]


def limit():
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def write_manifest(folder, changes, layer_changes):
    """Change the manifest, and take the copy of it in the graph away, which tells what was changed."""
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False)
    del graph.metadata_props[:]
    (folder / MODEL_FILE).write_bytes(graph.SerializeToString())
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text()) | changes
    manifest["layers"] = [layer | layer_changes for layer in manifest["layers"]]
    if "window" in layer_changes and manifest["paged"]:
        layers = tuple(range(len(manifest["layers"])))
        name = f"window_{LARGEST}"
        manifest["cache_kinds"] = [
            {"name": name, "window": LARGEST, "layers": layers, "block_table": f"block_table.{name}"}
        ]
    manifest["files"] = {name: (folder / name).stat().st_size for name in manifest["files"]}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("user", ["session", "engine"])
@pytest.mark.parametrize("change", [*WHOLE, *LAYERS], ids=str)
def test_sizes_out_of_proportion_are_refused_at_once(tmp_path, user, change):
    pages = {"paged": True, "page_size": 16} if user == "engine" else {}
    made = shared_model(shared_checkpoint("llama", seed=5), max_context=512, chunk_size=16, sink=2, **pages)
    folder = shutil.copytree(made, tmp_path / "model")
    write_manifest(folder, *(({}, change) if change in LAYERS else (change, {})))
    command = [sys.executable, "-c", PROGRAM, str(folder), user]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=limit)
    assert result.returncode == 0, result.stderr
    kind, seconds, size = result.stdout.split()
    assert kind in ("ContractMismatchError", "CapacityError")
    assert float(seconds) < MOST_SECONDS
    assert int(size) < MOST_BYTES
