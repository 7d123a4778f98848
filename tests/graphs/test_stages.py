"""A graph that is cut by layers: each value is made in one stage, and what later stages read is carried to them."""

from onnx import TensorProto, helper

from ortolan.graphs import cut_by_layer

NODES = [
    ("embedding/Gather", "Gather", ["embedding", "token_ids"], ["hidden"]),
    ("rope/Cos", "Cos", ["angles"], ["cosine"]),
    ("layers.0/norm", "Abs", ["hidden"], ["normed.0"]),
    ("layers.0/up", "Mul", ["normed.0", "cosine"], ["up.0"]),
    ("layers.0/mlp", "Add", ["up.0", "weight.0"], ["layer.0"]),
    ("layers.1/mlp", "Clip", ["layer.0", "", "cosine"], ["layer.1"]),
    ("rows/Gather", "Gather", ["layer.1", "rows"], ["wanted_rows"]),
    ("layers.2/mlp", "Sum", ["wanted_rows", "up.0"], ["layer.2"]),
    ("layers.2/idle", "Abs", ["layer.2"], ["idle"]),
    ("head", "Abs", ["layer.2"], ["logits"]),
]


def cut(*wanted):
    nodes = [helper.make_node(kind, inputs, outputs, name) for name, kind, inputs, outputs in NODES]
    graph = helper.make_graph(nodes, "decoder", [], [])
    return cut_by_layer(graph, wanted)


def names(stage):
    return [node.name for node in stage.nodes]


def test_nodes_outside_of_layers_join_the_stage_of_what_they_read():
    first, second, third = cut("layer.2")
    assert names(first) == ["embedding/Gather", "rope/Cos", "layers.0/norm", "layers.0/up", "layers.0/mlp"]
    assert names(second) == ["layers.1/mlp", "rows/Gather"]
    assert names(third) == ["layers.2/mlp"]


def test_values_are_carried_until_the_last_stage_that_reads_them():
    first, second, third = cut("layer.2", "normed.0")
    assert (first.inputs, second.inputs, third.inputs) == ((), ("cosine", "layer.0"), ("up.0", "wanted_rows"))
    assert first.outputs == ("cosine", "normed.0", "up.0", "layer.0")
    assert first.carried == {"cosine", "up.0", "layer.0"}
    assert (second.outputs, second.carried) == (("wanted_rows",), {"up.0", "wanted_rows"})
    assert (third.outputs, third.carried) == (("layer.2",), set())


def test_what_no_wanted_value_needs_is_left_out():
    (only,) = cut("normed.0")
    assert names(only) == ["embedding/Gather", "layers.0/norm"]
    assert cut() == []


def test_a_stage_is_a_model_of_its_own():
    float_input = helper.make_tensor_value_info("angles", TensorProto.FLOAT, [None])
    weight = helper.make_tensor("weight.0", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph([], "decoder", [float_input], [], [weight])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    first, second, _ = cut("layer.2")
    model = first.model(whole, {})
    assert [value.name for value in model.graph.input] == ["angles"]
    assert [tensor.name for tensor in model.graph.initializer] == ["weight.0"]
    assert [value.name for value in model.graph.output] == list(first.outputs)
    assert (model.ir_version, list(model.opset_import)) == (whole.ir_version, list(whole.opset_import))
    types = {"cosine": TensorProto.FLOAT, "layer.0": TensorProto.FLOAT16}
    inputs = second.model(whole, types).graph.input
    assert {value.name: value.type.tensor_type.elem_type for value in inputs} == types
