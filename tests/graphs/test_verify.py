"""verify_model accepts what build_model makes, and names the rule that a broken graph breaks."""

import copy

import pytest

from ortolan.errors import ContractMismatchError
from ortolan.graphs import (
    ExternalTensor,
    GraphOptions,
    attach_external_data,
    build_model,
    verify_fused_pair,
    verify_model,
)
from ortolan.graphs.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Rope, RopeVariant
from ortolan.graphs.weights import joint_weights, weight_shapes

ROPE = Rope(name="all", variants=(RopeVariant(limit=64, inv_freq=(1.0, 0.5, 0.1, 0.01)),))


def config(qk_norm="none", query_bias=False, **changes) -> ModelConfig:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "qk_norm": qk_norm, "query_bias": query_bias}
    mixers = AttentionConfig(window=12, rope="all", **heads), AttentionConfig(**heads)
    mlp = MlpConfig(intermediate_size=64, activation="silu")
    values = {
        "architecture": "test",
        "vocab_size": 50,
        "hidden_size": 32,
        "norm_epsilon": 1e-6,
        "layers": tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer in mixers),
        "ropes": (ROPE,),
    }
    return ModelConfig(**{**values, **changes})


MODEL = build_model(config(), GraphOptions())


def find(model, op_type):
    return next(node for node in model.graph.node if node.op_type == op_type)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("qk_norm", ["none", "head", "projection"])
@pytest.mark.parametrize("biased", [False, True])
def test_every_kind_of_decoder_verifies(placement, dtype, qk_norm, biased):
    described = config(
        norm_placement=placement, qk_norm=qk_norm, logit_softcap=3.0, embedding_scale=2.0, query_bias=biased
    )
    plain, fused = (
        build_model(described, GraphOptions(dtype=dtype, sink=2, fused_for=device)) for device in (None, "cuda")
    )
    for built in (plain, fused):
        verify_model(built)
    verify_fused_pair(plain, fused)
    weights, joints = set(weight_shapes(described)), joint_weights(described)
    if biased:  # where one of three has a bias, none is joined
        joints = {name: members for name, members in joints.items() if ".attention." not in name}
    queries = {name: members for name, members in joints.items() if ".attention." in name}
    for built, joined in ((plain, queries), (fused, joints)):
        read = {t.name for t in built.graph.initializer if t.data_location}
        assert read == weights - {name for members in joined.values() for name in members} | set(joined)


def test_the_graph_reads_as_the_contract_says():
    inputs = [i.name for i in MODEL.graph.input]
    assert {"token_ids", "positions", "query_start", "past_len", "layer.1.kv_len", "layer.1.capture"} <= set(inputs)
    assert "layer.0.kv_len" not in inputs, "a ring layer is never evicted"
    assert next(o.name for o in MODEL.graph.output) == "logits"
    assert "layers.0/attention/RingKvAppend" in {n.name for n in MODEL.graph.node}
    assert all(n.doc_string for n in MODEL.graph.node if n.domain == "ortolan")


def test_equal_configs_give_equal_bytes():
    again = build_model(config(), GraphOptions())
    assert again.SerializeToString(deterministic=True) == MODEL.SerializeToString(deterministic=True)


def test_without_snapkv_nothing_of_it_is_in_the_graph():
    plain = build_model(config(), GraphOptions(snapkv_window=0))
    verify_model(plain)
    assert not any("kv_len" in i.name or "capture" in i.name for i in plain.graph.input)
    assert not any(n.op_type == "SnapKvCapture" for n in plain.graph.node)


def read_input_cache(model):
    find(model, "SwaAttention").input[1] = "layer.0.key_cache"


def no_window(model):
    next(a for a in find(model, "SwaAttention").attribute if a.name == "window").i = 0


def same_names(model):
    model.graph.node[1].name = model.graph.node[0].name


def unknown_operator(model):
    find(model, "SwaAttention").op_type = "SwaAttentoin"


def no_cache_output(model):
    del model.graph.output[1]


@pytest.mark.parametrize(
    ("rule", "break_it"),
    [(1, unknown_operator), (2, same_names), (3, no_cache_output), (4, no_window), (5, read_input_cache)],
)
def test_broken_graphs_are_refused(rule, break_it):
    broken = copy.deepcopy(MODEL)
    break_it(broken)
    with pytest.raises(ContractMismatchError, match=f"rule {rule}"):
        verify_model(broken)


def test_weights_without_data_are_refused():
    with pytest.raises(ContractMismatchError, match="weights without data"):
        attach_external_data(copy.deepcopy(MODEL), {"stray": ExternalTensor(location="x", offset=0, length=1)})
