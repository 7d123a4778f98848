"""A node that is built wrongly is refused when its session is made or run, never read as something else."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from harness import build_model, empty_caches, random_batch

import ortolan.custom_ops
from ortolan.custom_ops import emitters, register_schemas
from ortolan.errors import ConfigError

BATCH = random_batch(np.random.default_rng(0), [4, 2], [0, 3])
CACHES = [np.zeros_like(c) for c in empty_caches(2, 2, 32, 16)]
ATTENTION = {
    "query": BATCH.query,
    "key_cache": CACHES[0],
    "value_cache": CACHES[1],
    "query_start": BATCH.query_start,
    "past_len": BATCH.past_len,
}
SCORE = {"capture": np.zeros((1, 4, 4, 16), np.float32), "key_cache": CACHES[0][:1], "kv_len": np.array([9], np.int32)}
FEEDS = {"SwaAttention": ATTENTION, "SnapKvScore": SCORE}


def open_model(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ortolan.custom_ops.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def with_attribute(operator: str, name: str, value: object) -> onnx.ModelProto:
    """Build a model of one operator, and set an attribute of its node whatever its type."""
    model = build_model(operator, FEEDS[operator], {})
    node = model.graph.node[0]
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
    return model


@pytest.mark.parametrize(
    ("operator", "name", "value", "expected"),
    [
        ("SwaAttention", "window", 4.0, "INT"),
        ("SwaAttention", "sink", "4", "INT"),
        ("SwaAttention", "capacity", 32.0, "INT"),
        ("SwaAttention", "scale", 1, "FLOAT"),
        ("SwaAttention", "softcap", 50, "FLOAT"),
        ("SnapKvScore", "scale", "1", "FLOAT"),
        ("SnapKvScore", "group_reduce", 1, "STRING"),
    ],
)
def test_an_attribute_of_another_type_does_not_become_the_default(operator, name, value, expected):
    with pytest.raises(Exception, match=f"attribute {name} has the wrong type") as error:
        open_model(with_attribute(operator, name, value))
    assert f"({expected})" in str(error.value)
    assert f"test/{operator}" in str(error.value)


@pytest.mark.parametrize("name", ["window", "sink", "capacity"])
def test_an_attribute_past_every_position_is_refused(name):
    with pytest.raises(Exception, match="must be at most 2147483647"):
        open_model(with_attribute("SwaAttention", name, 2**63 - 1))


@pytest.mark.parametrize("value", ["", "Mean", "mean "])
def test_a_reduction_is_spelled_exactly(value):
    with pytest.raises(Exception, match="allowed: 'mean', 'max' or 'sum'"):
        open_model(with_attribute("SnapKvScore", "group_reduce", value))


def test_emitters_type_their_attributes():
    def attention(**attributes: object) -> onnx.NodeProto:
        names = ("q", "k", "v", "rows", "past")
        return emitters.swa_attention(*names, outputs=("o",), name="node", **attributes)

    kinds = {a.name: a.type for a in attention(scale=1, window=np.int64(4)).attribute}
    assert kinds["scale"] == onnx.AttributeProto.FLOAT
    assert kinds["window"] == onnx.AttributeProto.INT
    for wrong in ({"window": 4.0}, {"sink": True}, {"scale": "1"}):
        with pytest.raises(ConfigError, match=f"attribute {next(iter(wrong))} is"):
            attention(**wrong)


@pytest.mark.parametrize(
    ("port", "kind"),
    [("query", np.float16), ("value_cache", np.float16), ("query_start", np.int64), ("past_len", np.float32)],
)
def test_types_that_no_kernel_takes_are_refused_when_the_session_is_made(port, kind):
    model = build_model("SwaAttention", ATTENTION, {})
    value = next(v for v in model.graph.input if v.name == port)
    value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    with pytest.raises(Exception, match="test/SwaAttention"):
        open_model(model)


def test_an_output_bound_to_another_shape_is_refused():
    session = open_model(build_model("SwaAttention", ATTENTION, {}))
    binding = session.io_binding()
    for name, array in ATTENTION.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    small = np.zeros((3, 4, 16), np.float32)
    binding.bind_ortvalue_output("output", ort.OrtValue.ortvalue_from_numpy(small))
    binding.bind_output("lse")
    with pytest.raises(RuntimeError, match=r"test/SwaAttention(.|\n)*shape"):
        session.run_with_iobinding(binding)
    assert not small.any()


@pytest.mark.parametrize(("output", "buffer"), [("key_cache_out", "value_cache"), ("value_cache_out", "key_cache")])
def test_an_output_in_the_buffer_of_another_input_is_refused(output, buffer):
    feeds = {"key": BATCH.key, "value": BATCH.value, **{k: v for k, v in ATTENTION.items() if k != "query"}}
    session = open_model(build_model("RingKvAppend", feeds, {}))
    arrays = {name: array.copy() for name, array in feeds.items()}
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for port in ("key_cache_out", "value_cache_out"):
        if port == output:
            binding.bind_ortvalue_output(port, ort.OrtValue.ortvalue_from_numpy(arrays[buffer]))
        else:
            binding.bind_output(port)
    with pytest.raises(RuntimeError, match=f"'{output}' shares the buffer of input '{buffer}'") as error:
        session.run_with_iobinding(binding)
    assert "test/RingKvAppend" in str(error.value)
    assert np.array_equal(arrays[buffer], feeds[buffer])


def test_an_update_whose_output_is_not_asked_for_is_refused():
    feeds = {"key": BATCH.key, "value": BATCH.value, **{k: v for k, v in ATTENTION.items() if k != "query"}}
    model = build_model("RingKvAppend", feeds, {})
    model.graph.node[0].output[1] = ""
    del model.graph.output[1]
    with pytest.raises(Exception, match=r"test/RingKvAppend(.|\n)*output"):
        open_model(model).run(None, feeds)


def test_an_output_that_continues_an_input_which_is_not_given_is_refused():
    feeds = {"key": BATCH.key, "value": BATCH.value, **{k: v for k, v in ATTENTION.items() if k != "query"}}
    model = build_model("RingKvAppend", feeds, {})
    model.graph.node[0].output.append("key_scale_out")
    model.graph.output.append(onnx.helper.make_tensor_value_info("key_scale_out", onnx.TensorProto.FLOAT, [2, 2, 32]))
    with pytest.raises(Exception, match="'key_scale_out' continues input 'key_scale', which is not given") as error:
        open_model(model).run(None, feeds)
    assert "test/RingKvAppend" in str(error.value)


@pytest.mark.parametrize(
    ("operator", "feeds", "port", "expected"),
    [
        ("SwaAttention", ATTENTION, "output", [6, 4, 16]),
        ("SwaAttention", ATTENTION, "lse", [4, 6]),
        ("SnapKvScore", SCORE, "score", [1, 2, 0]),  # K depends on a block table, so it stays open
    ],
)
def test_shape_inference_carries_dimensions(operator, feeds, port, expected):
    register_schemas()
    model = build_model(operator, feeds, {})
    for value in model.graph.input:
        for dimension, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
            dimension.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    result = next(v for v in inferred.graph.output if v.name == port)
    assert [d.dim_value for d in result.type.tensor_type.shape.dim] == expected


def test_shape_inference_names_an_input_of_another_rank():
    register_schemas()
    model = build_model("SwaAttention", ATTENTION, {})
    model.graph.input[0].type.tensor_type.shape.dim.pop()
    with pytest.raises(onnx.shape_inference.InferenceError, match="input 'query' has rank 2"):
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
