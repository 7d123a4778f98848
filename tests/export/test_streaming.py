"""An export holds one slab of weights at a time, whatever the checkpoint's size."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 2**20
HIDDEN, INNER, LAYERS, VOCABULARY = 1024, 4096, 6, 4000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# Exports a folder once for what is loaded on the way, then again, and prints by how much the second time needed more.
MEASURED = """
import json, sys, warnings
import ortolan

def resident(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

warnings.simplefilter("ignore")
small, large, target = sys.argv[1:]
ortolan.export(small, target, dtype="bfloat16", weights="random")
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
seen = []
ortolan.export(large, target, dtype="bfloat16", overwrite=True, progress=lambda *numbers: seen.append(numbers))
print(json.dumps([resident("VmHWM") - before, seen]))
"""


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    stem = f"model.layers.{index}"
    linear = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    linear |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    norms = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    return {f"{stem}.{name}.weight": shape for name, shape in (linear | norms).items()}


def write_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Write a safetensors file of float32 zeros, which take no room on the disk; returns the bytes of its tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(stream.tell() + end)
    return end


def write_checkpoint(folder: Path) -> int:
    """Write a checkpoint of a file for each layer; returns the bytes of its tensors."""
    folder.mkdir()
    files = {f"layer-{i}.safetensors": layer_shapes(i) for i in range(LAYERS)}
    files["ends.safetensors"] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(write_file(folder / file, shapes) for file, shapes in files.items())


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read as Linux tells it"
)
def test_an_export_holds_a_tensor_and_not_the_model(tmp_path):
    total = write_checkpoint(tmp_path / "large")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64, "intermediate_size": 64}))
    folders = [str(tmp_path / name) for name in ("small", "large", "model")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *folders], capture_output=True, text=True, check=True)
    grown, seen = json.loads(done.stdout)
    largest = 4 * INNER * HIDDEN
    assert total > 350 * MIB
    assert grown < 2 * largest + 64 * MIB, f"{grown / MIB:.0f} MiB for tensors of at most {largest / MIB:.0f}"
    written = np.array([bytes_written for bytes_written, _ in seen])
    assert {bytes_in_all for _, bytes_in_all in seen} == {total // 2}
    assert written[-1] == total // 2
    assert np.all(np.diff(written, prepend=0) <= largest)
