"""Writes decoder graphs as another exporter does, with padded batches and GroupQueryAttention, and runs them.

The node patterns are those of onnxruntime-genai's model builder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from byte_tokenizer import write_byte_tokenizer
from onnx import TensorProto, helper

VOCABULARY = 256
MICROSOFT = "com.microsoft"
ROPE_NODES = ("nodes", "standard", "lookups")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A tiny decoder.

    Attributes:
        windows: of each layer; -1 for none.
        rope: "attention" (inside GroupQueryAttention), "nodes" (RotaryEmbedding with position_ids), "standard" (that
            of ONNX itself), "lookups" (rows of the tables by position_ids, and arithmetic) or "none".
        rope_limit: above 0, an If chooses between two tables at this length.
        head_norm: whether query and key heads are normalised; `norm_inside` says that attention does it, which
            ONNX Runtime's has on GPUs alone. The weights are the same.
        packed: whether one product gives queries, keys and values.
        split: whether one product gives them, and a Split takes it apart for what is done to heads.
        computed_shapes: whether heads are split by shapes that the graph computes.
        sinks: "none", "learned" or "smooth".
        head: "plain", "softcap", "tied" (the embedding is the head's weight, transposed), or "gather" and "slice" (only
            the last token gets logits).
        experts: above 0, MLPs are a mixture of as many, two of which are taken.
        block_embedding: whether the embedding is int4, in blocks.
        int4: whether products are MatMulNBits.
        qdq: whether weights are int4 initializers before DequantizeLinear.
        accuracy_level: of int4 products.
    """

    windows: tuple[int, ...] = (-1, -1)
    rope: str = "attention"
    rope_limit: int = 0
    head_norm: bool = False
    norm_inside: bool = False
    computed_shapes: bool = False
    packed: bool = True
    split: bool = False
    sinks: str = "none"
    head: str = "plain"
    bias: bool = False
    experts: int = 0
    block_embedding: bool = False
    int4: bool = False
    qdq: bool = False
    accuracy_level: int = 0
    rotary_size: int = 16
    interleaved: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    dtype: type[np.floating] = np.float32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    hidden: int = 48
    positions: int = 1024
    seed: int = 0


class Writer:
    """Collects the nodes and weights of a graph."""

    def __init__(self, spec: Foreign) -> None:
        self.spec = spec
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(spec.seed)

    def node(self, op: str, inputs: Sequence[str], outputs: int | Sequence[str] = 1, **attributes: object) -> str:
        """Add a node and return its first output."""
        name = f"/model/{attributes.pop('name', op)}_{len(self.nodes)}"
        names = [f"{name}/output_{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, **attributes))
        return names[0]

    def constant(self, values: object) -> str:
        """Add a Constant node, as the model builder does."""
        return self.node("Constant", [], value=onnx.numpy_helper.from_array(np.array(values)))

    def weight(self, *shape: int, around: float = 0.0) -> str:
        values = self._random.standard_normal(shape) * (0.2 if len(shape) == 1 else 2 / np.sqrt(shape[0])) + around
        return self.initializer(values.astype(self.spec.dtype))

    def initializer(self, values: np.ndarray) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(onnx.numpy_helper.from_array(values, name))
        return name

    def linear(self, x: str, columns_in: int, columns_out: int) -> str:
        if self.spec.int4:
            y = self._quantized(x, columns_in, columns_out)
        elif self.spec.qdq:
            y = self.node("MatMul", [x, self._dequantized(columns_in, columns_out)])
        else:
            y = self.node("MatMul", [x, self.weight(columns_in, columns_out)])
        return self.node("Add", [y, self.weight(columns_out)]) if self.spec.bias else y

    def _quantized(self, x: str, columns_in: int, columns_out: int) -> str:
        blocks = -(-columns_in // 32)
        packed = self._random.integers(0, 256, (columns_out, blocks, 16), np.uint8)
        scales = (self._random.random((columns_out, blocks)) * 0.1).astype(self.spec.dtype)
        attributes = {"K": columns_in, "N": columns_out, "bits": 4, "block_size": 32}
        attributes["accuracy_level"] = self.spec.accuracy_level
        inputs = [x, self.initializer(packed), self.initializer(scales)]
        return self.node("MatMulNBits", inputs, domain=MICROSOFT, **attributes)

    def _dequantized(self, columns_in: int, columns_out: int) -> str:
        integers = self._random.integers(-8, 8, (columns_in, columns_out)).astype(ml_dtypes.int4)
        scales = (self._random.random((columns_in // 16, columns_out)) * 0.1).astype(self.spec.dtype)
        inputs = [self.initializer(integers), self.initializer(scales)]
        return self.node("DequantizeLinear", inputs, axis=0, block_size=16)

    def norm(self, x: str, size: int) -> str:
        inputs = [x, self.weight(size, around=1.0)]
        return self.node("SimplifiedLayerNormalization", inputs, axis=-1, epsilon=1e-6, stash_type=1)


def build(spec: Foreign) -> onnx.ModelProto:
    """Build the graph."""
    writer = Writer(spec)
    lengths, total = _mask_lengths(writer)
    tables = _rope_tables(writer, total) if spec.rope != "none" else ("", "")
    head_weight = writer.weight(spec.hidden, VOCABULARY)
    embedding = writer.weight(VOCABULARY, spec.hidden)
    if spec.head == "tied":
        embedding = writer.node("Transpose", [head_weight], perm=[1, 0])
    skip = _block_embedding(writer) if spec.block_embedding else writer.node("Gather", [embedding, "input_ids"])
    normed = writer.norm(skip, spec.hidden)
    for layer in range(len(spec.windows)):
        attended = _attention(writer, layer, normed, (lengths, writer.node("Cast", [total], to=6)), tables)
        normed, skip = _skip_norm(writer, skip, writer.linear(attended, spec.num_heads * spec.head_size, spec.hidden))
        is_last = layer == len(spec.windows) - 1
        normed, skip = _skip_norm(writer, skip, _mlp(writer, normed), gives_sum=not is_last)
    _head(writer, normed, head_weight)
    return _model(writer)


def _mask_lengths(writer: Writer) -> tuple[str, str]:
    """Return the input seqlens_k, and the mask's length as int64."""
    counts = writer.node("ReduceSum", ["attention_mask", writer.constant([1])], keepdims=0)
    lengths = writer.node("Cast", [writer.node("Sub", [counts, writer.constant([1])])], to=6)
    shape = writer.node("Shape", ["attention_mask"])
    return lengths, writer.node("Gather", [shape, writer.constant(1)], axis=0)


def rope_table(spec: Foreign, rows: int, factor: float) -> tuple[np.ndarray, np.ndarray]:
    half = spec.rotary_size // 2
    frequencies = 1.0 / (1000.0 ** (np.arange(half) / half) * factor)
    angles = np.arange(rows)[:, None] * frequencies
    return np.cos(angles).astype(spec.dtype), np.sin(angles).astype(spec.dtype)


def _rope_tables(writer: Writer, total: str) -> tuple[str, str]:
    spec = writer.spec
    large = rope_table(spec, spec.positions, 1.0)
    if not spec.rope_limit:
        return writer.initializer(large[0]), writer.initializer(large[1])
    branches = {}
    for name, tables in (
        ("then_branch", rope_table(spec, spec.positions, 4.0)),
        ("else_branch", (large[0][: spec.rope_limit], large[1][: spec.rope_limit])),
    ):
        outputs = [f"{name}/{kind}" for kind in ("cos", "sin")]
        nodes = [
            helper.make_node("Constant", [], [output], value=onnx.numpy_helper.from_array(table))
            for output, table in zip(outputs, tables, strict=True)
        ]
        values = [
            helper.make_tensor_value_info(o, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), None)
            for o in outputs
        ]
        branches[name] = helper.make_graph(nodes, name, [], values)
    condition = writer.node("Greater", [total, writer.constant(spec.rope_limit)])
    cosine = writer.node("If", [condition], ["cos_cache", "sin_cache"], **branches)
    return cosine, "sin_cache"


def _attention(writer: Writer, layer: int, x: str, lengths: tuple[str, str], tables: tuple[str, str]) -> str:
    spec = writer.spec
    sizes = [heads * spec.head_size for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    if spec.split:
        parts = [f"/model/layers.{layer}/attn/qkv_proj/Split/output_{i}" for i in range(3)]
        joint = writer.linear(x, spec.hidden, sum(sizes))
        writer.node("Split", [joint, writer.constant(sizes)], parts, axis=-1)
        query, key, value = parts
    elif spec.packed and not spec.head_norm and spec.rope not in ROPE_NODES:
        query, key, value = writer.linear(x, spec.hidden, sum(sizes)), "", ""
    else:
        query, key, value = (writer.linear(x, spec.hidden, size) for size in sizes)
    norms = [writer.weight(spec.head_size, around=1.0) for _ in range(2)] if spec.head_norm else []
    if norms and not spec.norm_inside:
        query, key = (
            _head_norm(writer, part, size, weight)
            for part, size, weight in zip((query, key), sizes[:2], norms, strict=True)
        )
    if spec.rope in ROPE_NODES:
        query, key = (
            _rotate(writer, part, heads, tables) for part, heads in ((query, spec.num_heads), (key, spec.num_kv_heads))
        )
    inside = spec.rope == "attention"
    inputs = [query, key, value, f"past_key_values.{layer}.key", f"past_key_values.{layer}.value", *lengths]
    inputs += [
        *(tables if inside else ("", "")),
        "",
        "",
        writer.weight(spec.num_heads) if spec.sinks == "learned" else "",
    ]
    if spec.norm_inside:
        inputs += ["", "", *norms]
    attributes = {
        "num_heads": spec.num_heads,
        "kv_num_heads": spec.num_kv_heads,
        "local_window_size": spec.windows[layer],
        "do_rotary": int(inside),
        "rotary_interleaved": spec.interleaved,
        "scale": spec.scale,
        "softcap": spec.softcap,
        "smooth_softmax": int(spec.sinks == "smooth"),
    }
    outputs = [f"/model/layers.{layer}/attn/output_0", f"present.{layer}.key", f"present.{layer}.value"]
    name = f"layers.{layer}/attn/GroupQueryAttention"
    return writer.node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, name=name, **attributes)


def _head_norm(writer: Writer, x: str, size: int, weight: str) -> str:
    if writer.spec.computed_shapes:
        return _head_norm_by_shape(writer, x, size, weight)
    heads = writer.node("Reshape", [x, writer.constant([0, -1, writer.spec.head_size])])
    normed = writer.node("SimplifiedLayerNormalization", [heads, weight], axis=-1, epsilon=1e-6, stash_type=1)
    return writer.node("Reshape", [normed, writer.constant([0, -1, size])])


def _head_norm_by_shape(writer: Writer, x: str, size: int, weight: str) -> str:
    """Split heads as torch's exporters do: view(batch, sequence, -1, head size), and back."""
    shape = writer.node("Shape", ["input_ids"])
    batch = writer.node("Unsqueeze", [writer.node("Gather", [shape, writer.constant(0)]), writer.constant([0])])
    tokens = writer.node("Slice", [writer.node("Shape", [x]), *(writer.constant([i]) for i in (1, 2, 0))])
    dims = [batch, tokens, writer.constant([-1]), writer.constant([writer.spec.head_size])]
    heads = writer.node("Reshape", [x, writer.node("Concat", dims, axis=0)])
    normed = writer.node("SimplifiedLayerNormalization", [heads, weight], axis=-1, epsilon=1e-6, stash_type=1)
    rows = writer.node("Mul", [batch, tokens])
    flat = writer.node("Reshape", [normed, writer.node("Concat", [rows, writer.constant([size])], axis=0)])
    return writer.node("Reshape", [flat, writer.node("Concat", [batch, tokens, writer.constant([-1])], axis=0)])


def _rotate(writer: Writer, x: str, heads: int, tables: tuple[str, str]) -> str:
    if writer.spec.rope == "lookups":
        return _rotate_by_lookups(writer, x, heads, tables)
    attributes = {"num_heads": heads, "interleaved": writer.spec.interleaved}
    if writer.spec.rotary_size != writer.spec.head_size:
        attributes["rotary_embedding_dim"] = writer.spec.rotary_size
    if writer.spec.rope == "standard":
        return writer.node("RotaryEmbedding", [x, *tables, "position_ids"], **attributes)
    return writer.node("RotaryEmbedding", [x, "position_ids", *tables], domain=MICROSOFT, **attributes)


def _rotate_by_lookups(writer: Writer, x: str, heads: int, tables: tuple[str, str]) -> str:
    half, axis = writer.spec.head_size // 2, writer.constant([2])
    rows = (writer.node("Gather", [table, "position_ids"]) for table in tables)
    cosine, sine = (writer.node("Unsqueeze", [row, axis]) for row in rows)
    first, second = (f"{x}/half_{i}" for i in range(2))
    whole = writer.node("Reshape", [x, writer.constant([0, 0, heads, 2 * half])])
    writer.node("Split", [whole, writer.constant([half, half])], [first, second], axis=-1)
    signs = (("Sub", first, second), ("Add", second, first))
    turned = [writer.node(op, [writer.node("Mul", [a, cosine]), writer.node("Mul", [b, sine])]) for op, a, b in signs]
    joined = writer.node("Concat", turned, axis=-1)
    return writer.node("Reshape", [joined, writer.constant([0, 0, heads * 2 * half])])


def _skip_norm(writer: Writer, skip: str, x: str, *, gives_sum: bool = True) -> tuple[str, str]:
    inputs = [skip, x, writer.weight(writer.spec.hidden, around=1.0)]
    names = [f"/skip_{len(writer.nodes)}/output_{i}" for i in range(2)]
    outputs = [names[0], "", "", names[1]] if gives_sum else names[:1]
    writer.node("SkipSimplifiedLayerNormalization", inputs, outputs, domain=MICROSOFT, epsilon=1e-6)
    return names[0], names[1]


def _block_embedding(writer: Writer) -> str:
    integers = np.random.default_rng(1).integers(0, 256, (VOCABULARY, writer.spec.hidden // 2), np.uint8)
    scales = np.random.default_rng(2).random((VOCABULARY, writer.spec.hidden // 16)).astype(writer.spec.dtype)
    inputs = [writer.initializer(integers), "input_ids", writer.initializer(scales)]
    attributes = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    return writer.node("GatherBlockQuantized", inputs, domain=MICROSOFT, **attributes)


def _experts(writer: Writer, x: str) -> str:
    count, hidden, size = writer.spec.experts, writer.spec.hidden, 32
    scores = writer.node("Reshape", [writer.linear(x, hidden, count), writer.constant([-1, count])])
    inputs = [x, scores, writer.weight(count, 2 * size, hidden), writer.weight(count, 2 * size)]
    inputs += [writer.weight(count, hidden, size), writer.weight(count, hidden)]
    attributes = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
    return writer.node("MoE", inputs, domain=MICROSOFT, **attributes)


def _mlp(writer: Writer, x: str) -> str:
    if writer.spec.experts:
        return _experts(writer, x)
    hidden, size = writer.spec.hidden, 64
    gate, up = writer.linear(x, hidden, size), writer.linear(x, hidden, size)
    activated = writer.node("Mul", [gate, writer.node("Sigmoid", [gate])])
    return writer.linear(writer.node("Mul", [activated, up]), size, hidden)


def _head(writer: Writer, x: str, weight: str) -> None:
    if writer.spec.head == "gather":
        x = writer.node("Gather", [x, writer.constant(-1)], axis=1)
        x = writer.node("Unsqueeze", [x, writer.constant([1])])
    if writer.spec.head == "slice":
        x = writer.node("Slice", [x, writer.constant([-1]), writer.constant([2**63 - 1]), writer.constant([1])])
    if writer.spec.head != "softcap":
        writer.node("MatMul", [x, weight], ["logits"])
        return
    cap = writer.constant(np.array(3.0, writer.spec.dtype))
    capped = writer.node("Tanh", [writer.node("Div", [writer.node("MatMul", [x, weight]), cap])])
    writer.node("Mul", [capped, cap], ["logits"])


def _model(writer: Writer) -> onnx.ModelProto:
    spec = writer.spec
    element = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    tokens = ["batch_size", "sequence_length"]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, tokens)]
    inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total"]))
    if spec.rope in ROPE_NODES:
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, tokens))
    outputs = [helper.make_tensor_value_info("logits", element, ["batch_size", "rows", VOCABULARY])]
    for layer in range(len(spec.windows)):
        for kind in ("key", "value"):
            shape = ["batch_size", spec.num_kv_heads, "past", spec.head_size]
            inputs.append(helper.make_tensor_value_info(f"past_key_values.{layer}.{kind}", element, shape))
            shape = ["batch_size", spec.num_kv_heads, "total", spec.head_size]
            outputs.append(helper.make_tensor_value_info(f"present.{layer}.{kind}", element, shape))
    graph = helper.make_graph(writer.nodes, "main_graph", inputs, outputs, writer.weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="onnxruntime-genai")


def write(spec: Foreign, folder: Path, **config: object) -> Path:
    """Write a folder as the model builder does; `config` goes into the section "model" of genai_config.json."""
    folder.mkdir()
    save(build(spec), folder)
    decoder = {"filename": "model.onnx", "inputs": {"input_ids": "input_ids"}, "outputs": {"logits": "logits"}}
    section = {"type": "tiny", "context_length": spec.positions, "eos_token_id": [2, 7], "bos_token_id": 1}
    decoder.update(config.pop("decoder", {}))
    text = json.dumps({"model": {**section, "decoder": decoder, **config}, "search": {}})
    (folder / "genai_config.json").write_text(text)
    write_byte_tokenizer(folder)
    return folder


def save(model: onnx.ModelProto, folder: Path, threshold_bytes: int = 64) -> None:
    """Save a graph with its weights, from that size on, in one file beside it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    options = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": threshold_bytes}
    onnx.save(copy, folder / "model.onnx", **options)


def source_logits(folder: Path, tokens: Sequence[int], head_size: int = 16) -> np.ndarray:
    """Return the foreign graph's own logits of every row of one prompt, [T, V] float32, without a past.

    `head_size` is for graphs that do not say it.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.array([tokens], np.int64), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name == "position_ids":
            feeds[value.name] = np.arange(len(tokens))[None]
        elif value.name.startswith("past"):
            dtype = np.float16 if "float16" in value.type else np.float32
            size = value.shape[3] if isinstance(value.shape[3], int) else head_size
            feeds[value.name] = np.zeros((1, value.shape[1], 0, size), dtype)
    return session.run(["logits"], feeds)[0][0].astype(np.float32)
