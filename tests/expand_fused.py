"""Writes the operators of the fused graph for CUDA out in standard operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortolan.custom_ops import emitters
from ortolan.manifest import MANIFEST_FILE, MODEL_FILE, Manifest

GATES = {"silu_mul": None, "gelu_mul": "none", "gelu_tanh_mul": "tanh"}


def expand_fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a float32 fused model without fused operators; weights stay external."""
    expanded = onnx.ModelProto()
    expanded.CopyFrom(model)
    expander = _Expander(expanded)
    nodes = [new for node in model.graph.node for new in expander.expand(node)]
    del expanded.graph.node[:]
    expanded.graph.node.extend(nodes)
    return expanded


def expanded_folder(folder: Path, target: Path) -> Path:
    """Copy a model folder, with the expanded fused graph in the place of model.onnx."""
    copytree(folder, target)
    manifest = Manifest.from_json((folder / MANIFEST_FILE).read_text())
    model = onnx.load(folder / manifest.fused_model, load_external_data=False)
    (target / MODEL_FILE).write_bytes(expand_fused(model).SerializeToString())
    manifest.files[MODEL_FILE] = (target / MODEL_FILE).stat().st_size
    manifest = dataclasses.replace(manifest, cpu_model=None)
    (target / MANIFEST_FILE).write_text(manifest.to_json())
    return target


class _Expander:
    """Expands nodes one by one; constants go into the model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._sizes = {t.name: list(t.dims) for t in model.graph.initializer}
        for value in model.graph.input:
            self._sizes[value.name] = [d.dim_value for d in value.type.tensor_type.shape.dim]
        shapes = {t.name: t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT64}
        for node in model.graph.node:
            if node.op_type == "Reshape" and node.input[1] in shapes:
                self._sizes[node.output[0]] = numpy_helper.to_array(shapes[node.input[1]]).tolist()

    def expand(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        by_name = {"FusedLinear": self._linear, "QkvRopeAppend": self._qkv, "QkvAttention": self._qkv_attention}
        by_name |= {"GatherRows": self._gather_rows, "NormRope": self._norm_rope, "NarrowStep": self._narrow}
        by_name |= {"RopeAngles": self._angles, "RmsNormAdd": self._norm_add}
        by_name |= {"GateMul": self._gate_mul, "DeltaGates": self._delta_gates}
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        inputs = [*node.input, *[""] * 16]
        yield from by_name[node.op_type](node, inputs, attributes) if node.op_type in by_name else [node]

    def _constant(self, name: str, values) -> str:
        self._graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _norm(self, path: str, x: str, weight: str, epsilon: float) -> onnx.NodeProto:
        return helper.make_node(
            "RMSNormalization", [x, weight], [f"{path}/normed"], name=f"{path}/norm", epsilon=epsilon
        )

    def _linear(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        path = node.name
        x, weight, norm_weight, bias, residual, factor = inputs[:6]
        if norm_weight:
            yield self._norm(path, x, norm_weight, attributes["epsilon"])
            x = f"{path}/normed"
        last = f"{path}/product"
        yield helper.make_node(
            "Gemm", [x, weight, bias] if bias else [x, weight], [last], name=f"{path}/gemm", transB=1
        )
        activation = attributes["activation"].decode()
        if activation != "none":
            gate, up, size = f"{path}/gate", f"{path}/up", self._sizes[weight][0]
            if factor:
                yield helper.make_node("Identity", [last], [gate], name=gate)
                yield from self._columns(up, factor, attributes["factor_offset"], size, [size])
            else:
                sizes = self._constant(f"{path}/sizes", [size // 2, size // 2])
                yield helper.make_node("Split", [last, sizes], [gate, up], name=f"{path}/split", axis=1)
            yield from self._gate(path, gate, up, activation)
            last = f"{path}/gated"
        output = next(name for name in node.output if name)
        if residual:
            yield helper.make_node("Add", [residual, last], [output], name=f"{path}/add")
        else:
            yield helper.make_node("Identity", [last], [output], name=f"{path}/identity")

    def _gate(self, path: str, gate: str, up: str, activation: str) -> Iterator[onnx.NodeProto]:
        active = f"{path}/active"
        if activation == "silu_mul":
            yield helper.make_node("Sigmoid", [gate], [f"{path}/sigmoid"], name=f"{path}/sigmoid")
            yield helper.make_node("Mul", [gate, f"{path}/sigmoid"], [active], name=f"{path}/silu")
        else:
            yield helper.make_node("Gelu", [gate], [active], name=f"{path}/gelu", approximate=GATES[activation])
        yield helper.make_node("Mul", [active, up], [f"{path}/gated"], name=f"{path}/mul")

    def _angles(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        path, to_float = node.name, {"to": onnx.TensorProto.FLOAT}
        axes = [self._constant(f"{path}/axis_{axis}", [axis]) for axis in (0, 1)]
        self._graph.initializer.append(numpy_helper.from_array(np.float32(attributes["factor"]), f"{path}/factor"))
        yield helper.make_node("Cast", [inputs[0]], [f"{path}/positions"], name=f"{path}/cast", **to_float)
        yield helper.make_node(
            "Unsqueeze", [f"{path}/positions", axes[1]], [f"{path}/column"], name=f"{path}/unsqueeze"
        )
        yield helper.make_node("Mul", [f"{path}/column", inputs[1]], [f"{path}/angles"], name=f"{path}/mul")
        for function, output in zip(("Cos", "Sin"), node.output, strict=True):
            here = f"{path}/{function}"
            yield helper.make_node(function, [f"{path}/angles"], [f"{here}/plain"], name=here)
            yield helper.make_node("Mul", [f"{here}/plain", f"{path}/factor"], [f"{here}/scaled"], name=f"{here}/mul")
            yield helper.make_node("Unsqueeze", [f"{here}/scaled", axes[0]], [output], name=f"{here}/unsqueeze")

    def _norm_add(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        x, weight, residual, scale = inputs[:4]
        y = f"{node.name}/normed"
        yield self._norm(node.name, x, weight, attributes["epsilon"])
        if residual:
            yield helper.make_node("Add", [residual, y], [f"{node.name}/sum"], name=f"{node.name}/add")
            y = f"{node.name}/sum"
        if scale:
            yield helper.make_node("Mul", [y, scale], [f"{node.name}/scaled"], name=f"{node.name}/scale")
            y = f"{node.name}/scaled"
        yield helper.make_node("Identity", [y], list(node.output), name=f"{node.name}/result")

    def _columns(self, path: str, rows: str, offset: int, count: int, shape: list[int]) -> Iterator[onnx.NodeProto]:
        """Take columns of rows, as heads of that shape."""
        edges = [self._constant(f"{path}/edge{n}", [edge]) for n, edge in enumerate((offset, offset + count))]
        axis = self._constant(f"{path}/axis", [1])
        yield helper.make_node("Slice", [rows, *edges, axis], [f"{path}/taken"], name=f"{path}/slice")
        heads = self._constant(f"{path}/shape", [-1, *shape])
        yield helper.make_node("Reshape", [f"{path}/taken", heads], [path], name=f"{path}/reshape")

    def _gate_mul(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        x, gate, weight, residual = inputs[:4]
        size, path = attributes["size"], node.name
        gates = attributes["gate_size"] or size
        width = self._sizes[weight][0] if weight else size
        yield from self._columns(f"{path}/x", x, attributes["x_offset"], size, [size // width, width])
        yield from self._columns(f"{path}/g", gate, attributes["gate_offset"], gates, [gates, 1])
        y = f"{path}/x"
        if weight:
            yield self._norm(path, y, weight, attributes["epsilon"])
            y = f"{path}/normed"
        opened, activation = f"{path}/opened", attributes["activation"].decode()
        if activation == "silu":
            yield helper.make_node("Sigmoid", [f"{path}/g"], [f"{path}/logistic"], name=f"{path}/sigmoid")
            yield helper.make_node("Mul", [f"{path}/g", f"{path}/logistic"], [opened], name=f"{path}/silu")
        elif activation.startswith("gelu"):
            kind = "tanh" if activation == "gelu_tanh" else "none"
            yield helper.make_node("Gelu", [f"{path}/g"], [opened], name=f"{path}/gelu", approximate=kind)
        else:
            name = {"sigmoid": "Sigmoid", "softplus": "Softplus"}[activation]
            yield helper.make_node(name, [f"{path}/g"], [opened], name=f"{path}/activation")
        shared = self._constant(f"{path}/shared", [-1, gates, size // gates])
        flat = self._constant(f"{path}/flat", [-1, size])
        yield helper.make_node("Reshape", [y, shared], [f"{path}/grouped"], name=f"{path}/group")
        yield helper.make_node("Mul", [f"{path}/grouped", opened], [f"{path}/product"], name=f"{path}/multiply")
        last = [f"{path}/flattened"] if residual else list(node.output)
        yield helper.make_node("Reshape", [f"{path}/product", flat], last, name=f"{path}/flatten")
        if residual:
            yield helper.make_node("Add", [residual, *last], list(node.output), name=f"{path}/add")

    def _delta_gates(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        decays, betas, a_log, dt_bias = inputs[:4]
        heads, path = self._sizes[a_log][0], node.name
        yield from self._columns(f"{path}/d", decays, attributes["decay_offset"], heads, [heads])
        yield from self._columns(f"{path}/b", betas, attributes["beta_offset"], heads, [heads])
        steps = [
            ("Add", [f"{path}/d", dt_bias], f"{path}/shifted"),
            ("Softplus", [f"{path}/shifted"], f"{path}/soft"),
            ("Exp", [a_log], f"{path}/exp"),
            ("Neg", [f"{path}/exp"], f"{path}/rate"),
            ("Mul", [f"{path}/rate", f"{path}/soft"], node.output[0]),
            ("Sigmoid", [f"{path}/b"], f"{path}/opened"),
            ("Mul", [f"{path}/opened", f"{path}/scale"], node.output[1]),
        ]
        scale = np.array(attributes["beta_scale"], np.float32)
        self._graph.initializer.append(numpy_helper.from_array(scale, f"{path}/scale"))
        for op, given, output in steps:
            yield helper.make_node(op, given, [output], name=f"{output}/{op}")

    def _gather_rows(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        yield helper.make_node("Gather", inputs[:2], list(node.output), name=f"{node.name}/gather")

    def _narrow(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        path, (starts, lengths, rows, positions) = node.name, inputs[:4]
        to_int32, to_int64 = {"to": onnx.TensorProto.INT32}, {"to": onnx.TensorProto.INT64}
        zero, one, last, end = (self._constant(f"{path}/{n}", [n]) for n in (0, 1, -1, 2**31))
        column, kept = f"{path}/column", node.output[0]
        steps = [
            ("Unsqueeze", [starts, one], f"{path}/edges", {}),
            ("Cast", [f"{path}/edges"], column, to_int64),
            ("Less", [rows, column], f"{path}/less", {}),
            ("Cast", [f"{path}/less"], f"{path}/before", to_int32),
            ("ReduceSum", [f"{path}/before", one], f"{path}/count", {"keepdims": 0}),
            ("Min", [f"{path}/count", starts], kept, {}),
            ("Sub", [starts, kept], f"{path}/gone", {}),
            ("Slice", [f"{path}/gone", one, end, zero], f"{path}/gone_after", {}),
            ("Slice", [f"{path}/gone", zero, last, zero], f"{path}/gone_before", {}),
            ("Sub", [f"{path}/gone_after", f"{path}/gone_before"], f"{path}/dropped", {}),
        ]
        dropped = f"{path}/dropped"
        if len(self._sizes[lengths]) == 2:  # a length for each kv head
            steps.append(("Unsqueeze", [dropped, one], f"{dropped}/column", {}))
            dropped = f"{dropped}/column"
        steps.append(("Add", [lengths, dropped], node.output[1], {}))
        if positions:
            steps.append(("Gather", [positions, rows], node.output[2], {}))
        for op, given, output, options in steps:
            yield helper.make_node(op, given, [output], name=f"{output}/{op}", **options)

    def _qkv(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        path, caches = node.name, inputs[1:6]
        query_norm, key_norm, cosine, sine = inputs[6:10]
        _, kv_heads, _, size = self._sizes[caches[0]]
        heads = [attributes["num_heads"], kv_heads, kv_heads]
        parts = [f"{path}/{name}" for name in ("q", "k", "v")]
        split = 2 if attributes["value_is_key"] else 3
        sizes = self._constant(f"{path}/sizes", [size * count for count in heads[:split]])
        yield helper.make_node("Split", [inputs[0], sizes], parts[:split], name=f"{path}/split", axis=1)
        if split == 2:
            yield helper.make_node("Identity", parts[1:2], parts[2:], name=f"{path}/value_is_key")
        norms, outputs = [query_norm, key_norm, ""], [node.output[0], f"{path}/key", f"{path}/value"]
        if attributes["value_norm"]:
            norms[2] = f"{path}/ones"
            self._graph.initializer.append(numpy_helper.from_array(np.ones(size, np.float32), norms[2]))
        for part, count, norm, output in zip(parts, heads, norms, outputs, strict=True):
            rotation = [] if part == parts[2] or not cosine else [cosine, sine]
            yield from self._heads(part, count, size, norm, rotation, attributes["epsilon"], output)
        scales = {"key_scale": inputs[12], "value_scale": inputs[13]} if inputs[12] else {}
        yield emitters.ring_kv_append(
            *outputs[1:],
            *caches,
            **scales,
            outputs=(*node.output[1:3], *node.output[4:]),
            name=f"{path}/append",
            sink=attributes["sink"],
            capacity=attributes["capacity"],
        )
        if inputs[10]:
            rows = (outputs[0], inputs[10], inputs[3], inputs[11])
            yield emitters.snap_kv_capture(*rows, outputs=(node.output[3],), name=f"{path}/capture")

    def _qkv_attention(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        output, *updated, query, captured, key_scale, value_scale = [*node.output, "", "", ""][:7]
        ring = {name: attributes[name] for name in ("sink", "capacity")}
        mask = {name: attributes[name] for name in ("window", "scale", "softcap", "causal")}
        scales = (key_scale, value_scale) if key_scale else ()
        append = emitters.qkv_rope_append(
            *inputs[:14],
            outputs=(query, *updated, captured, *scales),
            name=f"{node.name}/heads",
            **{name: value for name, value in attributes.items() if name not in mask},
        )
        yield from self._qkv(append, inputs, attributes)
        read = (query, *updated, *inputs[3:6], *inputs[14:16], *scales)
        yield emitters.swa_attention(*read, outputs=(output,), name=f"{node.name}/attend", **ring, **mask)

    def _norm_rope(self, node, inputs, attributes) -> Iterator[onnx.NodeProto]:
        heads, cosine, sine, weight = inputs[:4]
        yield helper.make_node("Identity", [heads], [f"{node.name}/heads"], name=f"{node.name}/identity")
        _, count, size = self._sizes[heads]
        rotation, epsilon = [cosine, sine], attributes["epsilon"]
        yield from self._heads(f"{node.name}/heads", count, size, weight, rotation, epsilon, node.output[0])

    def _heads(self, part, count, size, norm, rotation, epsilon, output) -> Iterator[onnx.NodeProto]:
        shape, last = self._constant(f"{part}/shape", [-1, count, size]), f"{part}/heads"
        yield helper.make_node("Reshape", [part, shape], [last], name=f"{part}/reshape")
        if norm:
            yield self._norm(part, last, norm, epsilon)
            last = f"{part}/normed"
        if rotation:
            flat = self._constant(f"{part}/flat_shape", [1, -1, count * size])
            yield helper.make_node("Reshape", [last, flat], [f"{part}/flat"], name=f"{part}/flatten")
            attributes = {"num_heads": count, "rotary_embedding_dim": 2 * self._rotary_half(rotation[0], size)}
            if attributes["rotary_embedding_dim"] == size:
                del attributes["rotary_embedding_dim"]
            names = [f"{part}/flat", *rotation]
            yield helper.make_node("RotaryEmbedding", names, [f"{part}/rotated"], name=f"{part}/rope", **attributes)
            yield helper.make_node("Reshape", [f"{part}/rotated", shape], [output], name=f"{part}/unflatten")
        else:
            yield helper.make_node("Identity", [last], [output], name=f"{part}/identity")

    def _rotary_half(self, cosine: str, size: int) -> int:
        """Read R from the cosine, where it is an input, or from the frequencies that it comes from."""
        if cosine in self._sizes:
            return self._sizes[cosine][-1]
        rope = cosine.removeprefix("readers/").split("/")[0]
        names = (f"{rope}/inv_freq", f"{rope}.cosine")  # of frequencies, or of a table
        found = [t.dims[-1] for t in self._graph.initializer if t.name in names]
        return found[0] if found else size // 2
