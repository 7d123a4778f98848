"""Changes the manifest and the graph of a model folder at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from fuzz.models import copy_folder, read_manifest, use, write_manifest
from fuzz.mutations import junk, mutated_bytes, mutated_json

from ortolan.manifest import EVICT_FILE, MANIFEST_FILE, MODEL_FILE


class Manifests:
    """Manifests whose values, keys or bytes are changed, beside a graph that holds a copy of the right one, or none."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self._folders = []
        for number, source in enumerate(folders):
            plain = copy_folder(source, scratch / f"plain{number}")
            graph = onnx.load(plain / MODEL_FILE, load_external_data=False)
            del graph.metadata_props[:]
            (plain / MODEL_FILE).write_bytes(graph.SerializeToString())
            marked = copy_folder(source, scratch / f"marked{number}")
            self._folders += [(folder, read_manifest(folder)) for folder in (plain, marked)]

    def run(self, rng: random.Random) -> None:
        """Change a manifest, and use the folder."""
        folder, manifest = rng.choice(self._folders)
        write_manifest(folder, manifest)
        if rng.random() < 0.1:
            path = folder / MANIFEST_FILE
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
        else:
            write_manifest(folder, mutated_json(rng, manifest), with_sizes=rng.random() < 0.9)
        use(folder)


class Graphs:
    """Graphs whose nodes, attributes, tensors, values or bytes are changed."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self._folders = [copy_folder(source, scratch / f"model{number}") for number, source in enumerate(folders)]
        self._kept = {
            (folder, name): (folder / name).read_bytes()
            for folder in self._folders
            for name in (MODEL_FILE, EVICT_FILE, MANIFEST_FILE)
            if (folder / name).is_file()
        }

    def run(self, rng: random.Random) -> None:
        """Change a graph, and use the folder."""
        folder = rng.choice(self._folders)
        for (owner, name), content in self._kept.items():
            if owner == folder:
                (folder / name).write_bytes(content)
        name = rng.choice([MODEL_FILE, MODEL_FILE, MODEL_FILE, EVICT_FILE])
        content = self._kept.get((folder, name))
        if content is None:
            return
        (folder / name).write_bytes(mutated_bytes(rng, content) if rng.random() < 0.2 else mutated_graph(rng, content))
        write_manifest(folder, read_manifest(folder))
        use(folder)


def mutated_graph(rng: random.Random, content: bytes) -> bytes:
    """Return a graph with one to three changes that its format allows."""
    model = onnx.ModelProto.FromString(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(CHANGES)(rng, model)
    return bytes(model.SerializeToString())


def _change_attribute(rng: random.Random, model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.attribute]
    attribute = rng.choice(rng.choice(nodes).attribute)
    number = junk(rng, 1)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = _int64(number)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    elif attribute.type == onnx.AttributeProto.INTS and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = _int64(number)
    else:
        attribute.s = rng.choice((b"", b"max", b"\xff", b"x" * 3000))


def _change_wiring(rng: random.Random, model: onnx.ModelProto) -> None:
    node, other = rng.choice(model.graph.node), rng.choice(model.graph.node)
    names = [name for names in (node.input, other.input, other.output) for name in names] or [""]
    if node.input and rng.random() < 0.8:
        node.input[rng.randrange(len(node.input))] = rng.choice((*names, "", "nothing"))
    else:
        node.output[rng.randrange(len(node.output))] = rng.choice((*names, ""))


def _change_nodes(rng: random.Random, model: onnx.ModelProto) -> None:
    node = rng.choice(model.graph.node)
    how = rng.choice(("remove", "type", "domain", "double"))
    if how == "remove":
        model.graph.node.remove(node)
    elif how == "type":
        node.op_type = rng.choice((rng.choice(model.graph.node).op_type, "KvCompact", "Loop", ""))
    elif how == "domain":
        node.domain = rng.choice(("", "ortolan", "com.microsoft"))
    else:
        model.graph.node.add().CopyFrom(node)


def _change_tensor(rng: random.Random, model: onnx.ModelProto) -> None:
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    how = rng.choice(("dims", "type", "place", "bytes"))
    if how == "dims" and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = _int64(junk(rng, 1))
    elif how == "type":
        tensor.data_type = rng.choice((1, 6, 7, 10, 11, 16, 8, 0, 99))
    elif how == "place" and tensor.external_data:
        entry = rng.choice(tensor.external_data)
        entry.value = rng.choice(
            ("../../../../etc/passwd", "/etc/passwd", "", "-1", str(2**62), str(2**64), MODEL_FILE)
        )
    elif tensor.raw_data:
        tensor.raw_data = mutated_bytes(rng, tensor.raw_data)


def _change_value(rng: random.Random, model: onnx.ModelProto) -> None:
    value = rng.choice([*model.graph.input, *model.graph.output])
    how, shape = rng.choice(("dim", "type", "name", "rank", "remove")), value.type.tensor_type.shape
    if how == "dim" and shape.dim:
        rng.choice(shape.dim).dim_value = _int64(junk(rng, 1))
    elif how == "type":
        value.type.tensor_type.elem_type = rng.choice((1, 6, 7, 10, 11, 8, 0))
    elif how == "name":
        value.name = rng.choice(("", "x", rng.choice(model.graph.input).name))
    elif how == "rank" and shape.dim:
        shape.dim.pop()
    elif how == "remove" and value in model.graph.input:
        model.graph.input.remove(value)


def _change_metadata(rng: random.Random, model: onnx.ModelProto) -> None:
    if model.metadata_props:
        rng.choice(model.metadata_props).value = str(junk(rng)).encode("utf-8", "replace").decode()
    if rng.random() < 0.3:
        model.opset_import[0].version = rng.choice((1, 12, 99, -1))


CHANGES: tuple[Callable[[random.Random, onnx.ModelProto], None], ...] = (
    _change_attribute,
    _change_wiring,
    _change_nodes,
    _change_tensor,
    _change_value,
    _change_metadata,
)


def _int64(number: Any) -> int:
    return max(-(2**63), min(2**63 - 1, int(number))) if isinstance(number, int) else -1
