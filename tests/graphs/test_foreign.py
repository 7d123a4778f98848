"""What converting a foreign graph checks: tokens stay apart, and what cannot be kept is refused by its name."""

from __future__ import annotations

from collections.abc import Callable

import foreign
import ml_dtypes
import numpy as np
import onnx
import pytest
from foreign import MICROSOFT, Foreign
from onnx import helper, numpy_helper
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.errors import UnsupportedModelError
from ortolan.graphs import ConversionOptions, SourceNames, convert_model
from ortolan.graphs.foreign.rules import RULES

OUTPUTS = {"DynamicQuantizeLinear": 3}  # of operators with more than one


def convert(model: onnx.ModelProto, **options: int):
    return convert_model(model, SourceNames(), ConversionOptions(**options))


def attention(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def add_input(model: onnx.ModelProto, port: int, name: str, shape: list[int | str]) -> None:
    """Give the first attention one more input, which is an input of the graph."""
    node = attention(model)
    node.input.extend([""] * (port + 1 - len(node.input)))
    node.input[port] = name
    model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))


def insert(model: onnx.ModelProto, op: str, *constants: object, domain: str = "", **attributes: object) -> None:
    """Put a node named 'intruder' between the embedding and what reads it."""
    graph = model.graph
    gather = next(n for n in graph.node if n.op_type == "Gather" and "input_ids" in n.input)
    hidden = gather.output[0]
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == hidden:
                node.input[index] = "intruded"
    names = [f"intruder/{i}" for i in range(len(constants))]
    graph.initializer.extend(numpy_helper.from_array(np.array(c), n) for c, n in zip(constants, names, strict=True))
    if domain and domain != MICROSOFT:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    outputs = ["intruded", *(f"intruder/output_{i}" for i in range(1, OUTPUTS.get(op, 1)))]
    node = helper.make_node(op, [hidden, *names], outputs, "intruder", domain=domain, **attributes)
    graph.node.insert(list(graph.node).index(gather) + 1, node)


ATTENTION_EDITS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "not causal": (lambda m: set_attribute(attention(m), "causal", 0), "not causal"),
    "quantized": (lambda m: set_attribute(attention(m), "k_quant_type", "PER_TENSOR"), "quantized"),
    "bit width": (lambda m: set_attribute(attention(m), "kv_cache_bit_width", 8), "quantized"),
    "key scale": (lambda m: add_input(m, 12, "scale", [1]), "quantized"),
    "unknown": (lambda m: set_attribute(attention(m), "alibi", 1), r"not known: \['alibi'\]"),
    "weights as output": (lambda m: set_attribute(attention(m), "qk_output", 1), "attention weights"),
    "bias": (lambda m: add_input(m, 10, "attention_bias", [1, 1, "S", "L"]), "attention bias"),
    "positions": (lambda m: add_input(m, 9, "offsets", [1, "S"]), "positions must be"),
    "half a norm": (lambda m: attention(m).input.extend(["", "", "weight_1"]), "normalise queries and keys"),
    "heads": (lambda m: set_attribute(attention(m), "kv_num_heads", 3), "not a multiple"),
    "packing": (lambda m: set_attribute(attention(m), "kv_num_heads", 1), "of one size"),
    "wide tables": (lambda m: attention(m).input.__setitem__(7, "weight_3"), r"up to 8\], not"),
    "sinks": (lambda m: attention(m).input.__setitem__(11, "weight_0"), "sink logits have the shape"),
    "no tables": (lambda m: attention(m).input.__setitem__(7, ""), "no tables"),
    "no past": (lambda m: attention(m).input.__setitem__(3, ""), "must be a cache"),
    "past of another": (
        lambda m: attention(m).input.__setitem__(3, "past_key_values.1.key"),
        "other nodes read its cache",
    ),
    "no value": (lambda m: attention(m).input.__setitem__(1, attention(m).input[0]), "both be given"),
    "lengths of tokens": (lambda m: attention(m).input.__setitem__(5, attention(m).input[0]), "attention mask"),
}


@pytest.mark.parametrize("edit", sorted(ATTENTION_EDITS))
def test_attention_that_cannot_be_kept_is_named(edit):
    change, message = ATTENTION_EDITS[edit]
    model = foreign.build(Foreign())
    change(model)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        convert(model)
    assert "layers.0/attn/GroupQueryAttention" in str(refused.value)
    assert "\n" not in str(refused.value)


INTRUDERS = {
    "softmax over tokens": (("Softmax",), {"axis": 1}, "runs over tokens"),
    "mean over tokens": (("ReduceMean", [1]), {}, "runs over tokens"),
    "sum of all": (("ReduceSum",), {"keepdims": 1}, "runs over all axes"),
    "transpose": (("Transpose",), {"perm": [1, 0, 2]}, "moves axes"),
    "running sum": (("CumSum", np.int64(1)), {}, "not known to treat tokens one by one"),
    "quantizing all at once": (("DynamicQuantizeLinear",), {}, "not known to treat"),
    "mask of a length": (("Add", np.zeros((1, 7, 1), np.float32)), {}, "axis along the tokens"),
    "fixed tokens": (("Reshape", [1, 4, 48]), {}, "fixes the number of tokens"),
    "joined tokens": (("Reshape", [1, -1, 96]), {}, "tears apart or joins"),
    "batched weight": (("MatMul", np.zeros((1, 48, 48), np.float32)), {}, "must have two axes"),
    "wrong weight": (("MatMul", np.zeros((40, 48), np.float32)), {}, "takes 40 features"),
    "slice of tokens": (("Slice", [0], [3], [1]), {}, "runs over tokens"),
    "some tokens": (("Slice", [-1], [-1], [1]), {}, "only the last one may be kept"),
    "first token": (("Gather", np.int64(0)), {"axis": 1}, "only the last one"),
    "squeeze": (("Squeeze", [1]), {}, "that is not 1"),
    "another domain": (("Mystery",), {"domain": "my.domain"}, "not known to treat tokens one by one"),
    "an operator of another domain": (("MatMul", np.zeros((48, 48), np.float32)), {"domain": "my.domain"}, "not known"),
}


@pytest.mark.parametrize("case", sorted(INTRUDERS))
def test_what_may_mix_tokens_is_named(case):
    arguments, attributes, message = INTRUDERS[case]
    model = foreign.build(Foreign())
    insert(model, *arguments, **attributes)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        convert(model)
    assert f"cannot convert node 'intruder', a {arguments[0]}: " in str(refused.value)


HARMLESS = {
    "norm": (("LayerNormalization", np.ones(48, np.float32)), {"axis": -1}),
    "elementwise": (("Mul", np.full(48, 2, np.float32)), {}),
    "scalar": (("Div", np.float32(2)), {}),
    "clip": (("Clip", np.float32(-1), np.float32(1)), {}),
    "activation": (("FastGelu",), {"domain": MICROSOFT}),
    "product": (("MatMul", np.eye(48, dtype=np.float32)), {}),
    "features back to front": (("Slice", [-1], [-100], [2], [-1]), {}),
    "reshaped": (("Reshape", [0, 0, 48]), {}),
    "cast": (("Cast",), {"to": onnx.TensorProto.FLOAT}),
}


@pytest.mark.parametrize("case", sorted(HARMLESS))
def test_what_treats_tokens_one_by_one_stays(case, tmp_path):
    arguments, attributes = HARMLESS[case]
    source = tmp_path / "source"
    source.mkdir()
    model = foreign.build(Foreign())
    insert(model, *arguments, **attributes)
    foreign.save(model, source)
    folder = ortolan.convert(source, tmp_path / "model", max_context=64, chunk_size=5)
    assert "intruder" in {node.name for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node}
    tokens = list(range(3, 20))
    logits = ortolan.load(folder, device="cpu").session().prefill(tokens)
    assert relative_difference(logits, foreign.source_logits(source, tokens)[-1]) <= LOGITS_RELATIVE


def test_small_tensors_outside_the_graph_are_read(tmp_path):
    model = foreign.build(Foreign())
    insert(model, "Reshape", [0, 0, 48])
    logits = []
    for threshold in (0, 64):
        source = tmp_path / f"source_{threshold}"
        source.mkdir()
        foreign.save(model, source, threshold)
        folder = ortolan.convert(source, tmp_path / f"model_{threshold}", max_context=64)
        logits.append(ortolan.load(folder, device="cpu").session().prefill([5, 6, 7]))
    np.testing.assert_array_equal(*logits)


def test_other_attention_is_named():
    model = foreign.build(Foreign())
    attention(model).op_type = "MultiHeadAttention"
    with pytest.raises(UnsupportedModelError, match="a MultiHeadAttention: only GroupQueryAttention"):
        convert(model)


def test_a_graph_without_attention_is_refused():
    model = foreign.build(Foreign(windows=()))
    with pytest.raises(UnsupportedModelError, match="no GroupQueryAttention"):
        convert(model)


def test_old_opsets_functions_and_odd_caches_are_refused():
    model = foreign.build(Foreign())
    model.opset_import[0].version = 12
    with pytest.raises(UnsupportedModelError, match="opset 12"):
        convert(model)
    model = foreign.build(Foreign())
    model.functions.add(name="norm")
    with pytest.raises(UnsupportedModelError, match=r"local functions \(norm\)"):
        convert(model)
    model = foreign.build(Foreign())
    for value in model.graph.input:
        if value.name == "past_key_values.1.key":
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    with pytest.raises(UnsupportedModelError, match=r"past_key_values\.1\.key"):
        convert(model)


def test_layers_may_differ_in_their_scale_and_heads():
    model = foreign.build(Foreign(packed=False, rope="none"))
    set_attribute(attention(model), "scale", 0.5)
    set_attribute(attention(model), "num_heads", 2)
    set_attribute(attention(model), "kv_num_heads", 1)
    assert [(layer.scale, layer.num_heads, layer.head_size) for layer in convert(model).layers] == [
        (0.5, 2, 32),
        (0.0, 4, 16),
    ]


@pytest.mark.parametrize(("what", "message"), [("tables", "only constant tables"), ("condition", "not a comparison")])
def test_a_choice_of_something_else_is_refused(what, message):
    model = foreign.build(Foreign(rope_limit=16))
    node = next(node for node in model.graph.node if node.op_type == "If")
    if what == "condition":
        node.input[0] = "attention_mask"
    else:
        branch = node.attribute[0].g
        table = branch.node[0].output[0]
        branch.node[0].output[0] = "halved"
        branch.node.append(helper.make_node("Neg", ["halved"], [table]))
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        convert(model)
    assert f"'{node.name}', an If" in str(refused.value)


@pytest.mark.parametrize("size", [12, 264])
def test_head_sizes_that_the_operators_lack_are_named(size):
    model = foreign.build(Foreign(head_size=size, rope="none"))
    with pytest.raises(UnsupportedModelError, match=f"head size {size}"):
        convert(model)


def test_what_onnx_rejects_is_one_line():
    model = foreign.build(Foreign())
    next(node for node in model.graph.node if node.op_type == "Mul").input.pop()
    with pytest.raises(UnsupportedModelError, match="onnx rejects the graph") as refused:
        convert(model)
    assert "\n" not in str(refused.value)


def test_nothing_of_the_mask_is_left_and_names_stay():
    source = foreign.build(Foreign(windows=(8, -1)))
    model = convert(source).model
    names = {name for node in model.graph.node for name in (*node.input, *node.output)}
    assert "attention_mask" not in names
    assert not any(name.startswith(("past_key_values", "present")) for name in names)
    products = [node.name for node in source.graph.node if node.op_type == "MatMul"]
    turned = [node for node in model.graph.node if node.op_type == "FusedMatMul"]
    assert [node.name for node in turned] == products
    assert [node.name for node in model.graph.node if node.op_type == "SwaAttention"] == [
        f"layers.{i}/attention/SwaAttention" for i in range(2)
    ]


def test_the_last_token_is_not_taken_for_all():
    """Attention behind a pick would see one token; a sum with all tokens would spread it."""
    model = foreign.build(Foreign())
    insert(model, "Slice", [-1], [2**31 - 1], [1])
    with pytest.raises(UnsupportedModelError, match=r"must hold tokens|same layout"):
        convert(model)


@pytest.mark.parametrize(
    ("dims", "message"),
    [(["tokens", 96], "tears apart"), (["tokens", "tokens"], "fixes the number"), ([2, "tokens", -1], "tears apart")],
)
def test_computed_shapes_that_mix_tokens_are_refused(dims, message):
    model = foreign.build(Foreign())
    insert(model, "Reshape", [0])
    node = next(node for node in model.graph.node if node.name == "intruder")
    parts = []
    for index, dim in enumerate(dims):
        parts.append("tokens" if dim == "tokens" else f"dim_{index}")
        if dim != "tokens":
            model.graph.initializer.append(numpy_helper.from_array(np.array([dim]), parts[-1]))
    node.input[1] = "shape"
    at = list(model.graph.node).index(node)
    model.graph.node.insert(at, helper.make_node("Concat", parts, ["shape"], "join", axis=0))
    model.graph.node.insert(at, helper.make_node("Shape", [node.input[0]], ["tokens"], "count", start=1, end=2))
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        convert(model)
    assert "'intruder', a Reshape" in str(refused.value)


def test_rows_are_cut_before_the_head():
    model = convert(foreign.build(Foreign(head="softcap"))).model
    gather = next(node for node in model.graph.node if node.name == "head/Gather")
    (reader,) = (node for node in model.graph.node if gather.output[0] in node.input)
    assert reader.op_type == "FusedMatMul"


def test_names_in_the_way_are_moved():
    source = foreign.build(Foreign())
    for node in source.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = {"input_ids": "token_ids", "weight_3": "layer.0.key_cache"}.get(name, name)
    for value in source.graph.input:
        value.name = "token_ids" if value.name == "input_ids" else value.name
    for tensor in source.graph.initializer:
        tensor.name = "layer.0.key_cache" if tensor.name == "weight_3" else tensor.name
    model = convert_model(source, SourceNames(token_ids="token_ids"), ConversionOptions()).model
    assert [value.name for value in model.graph.input].count("token_ids") == 1
    assert [value.name for value in model.graph.input].count("layer.0.key_cache") == 1


def test_types_that_numpy_lacks_stay_what_they_are(capfd):
    source = foreign.build(Foreign(dtype=ml_dtypes.bfloat16, head="softcap", qdq=True))
    conversion = convert(source)
    types = {tensor.name: tensor.data_type for tensor in conversion.model.graph.initializer}
    constants = {
        node.output[0]: node.attribute[0].t.data_type for node in source.graph.node if node.op_type == "Constant"
    }
    before = {tensor.name: tensor.data_type for tensor in source.graph.initializer} | constants
    assert {name: types[name] for name in types if name in before} == {n: before[n] for n in types if n in before}
    assert {onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT4} <= set(types.values())
    assert conversion.options.dtype == "bfloat16"
    assert capfd.readouterr().out == ""


def test_weights_in_fields_of_their_type_keep_their_bytes():
    source = foreign.build(Foreign(qdq=True))
    expected = convert(source).weights
    for tensor in source.graph.initializer:
        values = numpy_helper.to_array(tensor)
        plain = values.astype(np.int32) if values.dtype == ml_dtypes.int4 else values
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, plain.reshape(-1).tolist()))
    assert convert(source).weights == expected


def test_rules_are_of_operators_that_exist():
    """A misspelt name would refuse what it was meant for."""
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    runtime = {
        "BiasGelu", "FastGelu", "QuickGelu", "GatherBlockQuantized", "MatMulNBits", "MoE", "QMoE",
        "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    }  # fmt: skip
    assert set(RULES) <= known | runtime
