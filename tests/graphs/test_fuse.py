"""The fused graphs compute what the plain one does, over the same weights, for every family."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from expand_fused import expanded_folder
from families import FAMILIES, shared_checkpoint, shared_model, tiny_checkpoint
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import contract
from ortolan.custom_ops import register_schemas
from ortolan.graphs import count_fusions
from ortolan.graphs.external_data import read_external_data
from ortolan.graphs.summary import default_inputs
from ortolan.graphs.verify import without_weights
from ortolan.manifest import CPU_FILE, FUSED_FILE, MODEL_FILE, read_manifest

LAYERS = 4
PROJECTION_NORM = ("olmo2", "olmo3", "olmoe")
POST_NORM = ("olmo2", "olmo3", "exaone4")
SANDWICH_OR_POST_NORM = ("gemma2", "gemma3", "gemma4", "gemma4_unified", "gemma4_moe", *POST_NORM)
PARALLEL = ("cohere2",)  # and LayerNorms, which nothing folds
PER_LAYER_EMBEDDINGS = ("gemma4",)
KEYS_AS_VALUES = ("gemma4_unified", "gemma4_moe")  # in full layers
MIXTURES = dict.fromkeys(("mixtral", "olmoe", "granitemoe", "granitemoe_swa", "gpt_oss"), range(4)) | {
    "qwen3_moe": (0, 2, 3),
    "mellum": (1, 2, 3),
    "mimo_v2_flash": (1, 2, 3),
    "laguna": (1, 2, 3),
}
BESIDE = ("gemma4_moe",)  # mixtures that have a gated MLP beside them
SCALED_RESIDUALS = ("granite", "granite_swa", "granitemoe", "granitemoe_swa")
SHARED_EXPERT = ("granitemoe_swa", "laguna")  # beside the mixture in each of their layers that has one
GATED_HEADS = ("laguna",)
CAPPED_ROUTERS = ("laguna",)
SCALED_QUERIES = ("ministral3",)
HYBRIDS = {"qwen3_next": (0, 2, 3), "qwen3_5": (), "qwen3_5_moe": range(4), "olmo_hybrid": ()}  # and their mixtures


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def exported(request):
    """Export one tiny checkpoint; yields (family, model folder)."""
    return request.param, shared_model(shared_checkpoint(request.param, seed=5), max_context=512, chunk_size=16)


def load_graphs(folder, names=(MODEL_FILE, FUSED_FILE)):
    return [onnx.load(folder / name, load_external_data=False) for name in names]


def models_of(folder, tmp_path):
    """Open the plain graph, that for the CPU, and that for CUDA in standard operators."""
    expanded = expanded_folder(folder, tmp_path / "fused")
    plain, cpu = (ortolan.load(folder, device="cpu", fused=fused) for fused in (False, True))
    return plain, cpu, ortolan.load(expanded, device="cpu")


def test_logits_are_those_of_the_plain_graph(exported, tmp_path):
    _, folder = exported
    prompt = np.random.default_rng(7).integers(3, 100, 77).tolist()
    sessions = [model.session(chunk_size=16) for model in models_of(folder, tmp_path)]
    rows = [[session.prefill(prompt)] for session in sessions]
    for token in range(3, 15):
        for session, logits in zip(sessions, rows, strict=True):
            logits.append(session.step(token))
    for fused in rows[1:]:
        differences = [relative_difference(ours, plain) for plain, ours in zip(rows[0], fused, strict=True)]
        assert max(differences) <= LOGITS_RELATIVE, differences


def test_an_eviction_reads_the_same_captures(exported, tmp_path):
    _, folder = exported
    if not any(layer.evictable for layer in read_manifest(folder).layers):
        pytest.skip("this family has no full-attention layer")
    snapkv = ortolan.SnapKv(budget=24, window=8)
    sessions = [model.session(chunk_size=16, snapkv=snapkv) for model in models_of(folder, tmp_path)]
    for session in sessions:
        session.prefill(list(range(3, 70)))
    plain, *fused = (session.step(5) for session in sessions)
    assert max(relative_difference(ours, plain) for ours in fused) <= LOGITS_RELATIVE


def test_patterns_fuse_wherever_they_hold(exported):
    family, folder = exported
    if family in HYBRIDS:
        pytest.skip("hybrids have a test of their own")
    plain, fused = load_graphs(folder)
    counts = count_fusions(fused)
    projection = family in PROJECTION_NORM
    manifest = read_manifest(folder)
    layers, embedded = len(manifest.layers), family in PER_LAYER_EMBEDDINGS
    sharing = sum(layer.cache_of is not None for layer in manifest.layers)
    mixtures = len(MIXTURES.get(family, ()))  # a router has the place of a gate and its down
    beside = layers if family in BESIDE else 0
    shared = 2 * mixtures if family in SHARED_EXPERT else 0
    gates = layers if family in GATED_HEADS else 0
    norms = 2 * beside + (0 if family in SCALED_RESIDUALS else mixtures)
    assert counts == {
        "FusedLinear": 4 * layers + 1 + (2 * layers + 1) * embedded + beside + shared + gates - mixtures,
        "QkvRopeAppend": layers if family in SCALED_QUERIES else 0,
        "QkvAttention": 0 if projection or family in SCALED_QUERIES else layers - sharing,
        "NormRope": 2 * layers if projection else sharing,
        "RopeAngles": (len(manifest.ropes) if len(manifest.rope_limits) == 1 else 0) * (2 if sharing else 1),
        "NarrowStep": 2 if sharing else 0,  # lengths of layers with a window, and of those that can be evicted
        "GatherRows": 2 + 2 * embedded,  # of tokens in a table, hidden states; the same of per-layer embeddings
        "RmsNormAdd": ((2 + embedded) * layers + beside if family in SANDWICH_OR_POST_NORM else 0)
        + (2 * layers if projection else 0)
        + norms
        + embedded,  # of shares of per-layer embeddings
        "GateMul": gates,
        "DeltaGates": 0,
        "Gemm": 0,
        "RMSNormalization": 0,
        "RotaryEmbedding": 0,
        "RingKvAppend": layers if projection else 0,
    }
    assert json.loads(next(p.value for p in fused.metadata_props if p.key == "ortolan.fusions")) == counts
    assert len(fused.graph.node) < len(plain.graph.node)


def test_the_graph_for_the_cpu_fuses_all_but_products(exported):
    family, folder = exported
    cuda, cpu = (count_fusions(graph) for graph in load_graphs(folder, (FUSED_FILE, CPU_FILE)))
    folded = ("gate_up/FusedLinear", "layer_input/gate/FusedLinear")
    gates = sum(node.name.endswith(folded) for node in load_graphs(folder)[1].graph.node)
    sums = ("SkipSimplifiedLayerNormalization", "RmsNormAdd")
    operators = [node.op_type for node in load_graphs(folder, (CPU_FILE,))[0].graph.node]
    assert (cpu["FusedLinear"], cpu["Gemm"]) == (0, cuda["FusedLinear"])
    assert cpu["GateMul"] == cuda["GateMul"] + gates
    assert sum(operators.count(name) for name in sums) >= cuda["RmsNormAdd"]
    tables = 1 + (family in PER_LAYER_EMBEDDINGS)
    assert cpu["GatherRows"] == cuda["GatherRows"] - tables, "ONNX Runtime looks tokens up on the CPU"
    equal = ("QkvRopeAppend", "QkvAttention", "NormRope", "RopeAngles", "NarrowStep", "DeltaGates")
    for name in (*equal, "RotaryEmbedding", "RingKvAppend"):
        assert cpu[name] == cuda[name], name


def describe(node):
    """Say which operator a node is; of a FusedLinear also where it stands and what is folded in."""
    if node.op_type != "FusedLinear":
        return node.op_type
    ports = dict(zip(("x", "weight", "norm", "bias", "residual", "factor"), node.input, strict=False))
    folded = [port for port in ("norm", "bias", "residual", "factor") if ports.get(port)]
    activation = next(a.s.decode() for a in node.attribute if a.name == "activation")
    return " ".join([node.name.split("/")[-2], *folded, *([activation] if activation != "none" else [])])


def expected_layer(family, index, layer):
    """List what `describe` says of a layer of a family, a SnapKvCapture aside."""
    before = "" if family in (*POST_NORM, *PARALLEL) else " norm"
    after = ["RmsNormAdd"] if family in SANDWICH_OR_POST_NORM else []
    bias = " bias" if family in ("llama_biased", "granite", "gpt_oss") else ""
    qkv_bias = " bias" if family in ("llama_biased", "granite", "qwen2", "gpt_oss", "cohere2") else ""
    output_bias = " bias" if family in ("llama_biased", "granite", "gpt_oss", "cohere2") else ""
    residual = "" if after or family in SCALED_RESIDUALS else " residual"
    attends = ["QkvAttention"]
    if family in (*PROJECTION_NORM, *SCALED_QUERIES):
        attends = ["RingKvAppend" if family in PROJECTION_NORM else "QkvRopeAppend", "SwaAttention"]
    activation = "gelu_tanh_mul" if family.startswith("gemma") else "silu_mul"
    whole = "qk" if family in KEYS_AS_VALUES and layer.window < 0 else "qkv"
    head_norms = ["RmsNormAdd", "RmsNormAdd", "NormRope", "NormRope"] if family in PROJECTION_NORM else []
    query = [f"{whole}{before}{qkv_bias}", *head_norms, *attends]
    query = query if layer.cache_of is None else ["query norm", "NormRope", "SwaAttention"]
    query[1:1] = ["gate norm"] * (family in GATED_HEADS)
    gated = ["GateMul"] * (family in GATED_HEADS)
    attention = [*query, *gated, f"output{output_bias}{residual}", *after]
    embedded = [f"gate factor {activation}", "out", *after] if family in PER_LAYER_EMBEDDINGS else []
    if index in MIXTURES.get(family, ()):
        shared = [f"gate_up {activation}"] if family in SHARED_EXPERT else []
        down = [f"down{residual}"] if family in SHARED_EXPERT else []
        norm = ["RmsNormAdd"] * (family not in SCALED_RESIDUALS)
        return [*attention, *norm, *shared, f"router{bias}", *down, "MoeGate", "MoeExperts"]
    gate_up, down = f"gate_up{before}{bias} {activation}", f"down{bias}{residual}"
    if family in BESIDE:
        return [*attention, gate_up, *after, "router norm", down, "MoeGate", *after, "MoeExperts", *after, *after]
    if family in PARALLEL:
        return [attention[0], gate_up, *attention[1:], down]
    return [*attention, gate_up, down, *after, *embedded]


def expected_plain(family, index, layer):
    """List the standard operators that are left of a layer: heads are flattened, and little else."""
    query = [] if layer.cache_of is None else ["Reshape"]
    is_mixture = index in MIXTURES.get(family, ())
    norms = ["LayerNormalization"] * (family in PARALLEL)
    sums = ["Mul", "Add", "Mul", *["Add"] * (not is_mixture)] if family in SCALED_RESIDUALS else []
    gates = ["Reshape"] if family in GATED_HEADS else []
    caps = ["Div", "Tanh", "Mul"] if is_mixture and family in CAPPED_ROUTERS else []
    factors = ["Mul"] * ((family in BESIDE) + (family in SCALED_QUERIES))
    return [*query, "Reshape", *norms, *sums, *gates, *caps, *factors]


def test_layers_are_these_operators(exported):
    family, folder = exported
    if family in HYBRIDS:
        pytest.skip("hybrids have a test of their own")
    fused = load_graphs(folder)[1]
    ours = [node for node in fused.graph.node if node.domain == "ortolan" and node.op_type != "SnapKvCapture"]
    for index, layer in enumerate(read_manifest(folder).layers):
        found = [describe(node) for node in ours if node.name.startswith(f"layers.{index}/")]
        assert found == expected_layer(family, index, layer), f"layer {index}"
        left = [n.op_type for n in fused.graph.node if n.name.startswith(f"layers.{index}/") and not n.domain]
        assert family in PROJECTION_NORM or sorted(left) == sorted(expected_plain(family, index, layer)), (
            f"layer {index}"
        )
    assert describe(ours[-1]) == ("head" if family in PARALLEL else "head norm")
    captures = [node for node in fused.graph.node if node.op_type == "SnapKvCapture"]
    assert family in PROJECTION_NORM or not captures, "the operator that appends captures"


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_hybrids_are_these_operators(family):
    folder = shared_model(shared_checkpoint(family, seed=5), max_context=512, chunk_size=16)
    fused = load_graphs(folder)[1]
    delta = ["qkv norm", "gates norm", "CausalConv", "DeltaGates", "GatedDeltaRule", "GateMul", "output residual"]
    attention = ["gate norm", "qkv norm", "QkvAttention", "GateMul", "output residual"]
    if family == "olmo_hybrid":
        attention = [
            "qkv",
            "RmsNormAdd",
            "RmsNormAdd",
            "RingKvAppend",
            "SnapKvCapture",
            "SwaAttention",
            "output",
            "RmsNormAdd",
        ]
    mixture = ["RmsNormAdd", "shared_gate", "gate_up silu_mul", "down", "GateMul", "router", "MoeGate", "MoeExperts"]
    for index, layer in enumerate(read_manifest(folder).layers):
        ours = [n for n in fused.graph.node if n.domain == "ortolan" and n.name.startswith(f"layers.{index}/")]
        mlp = mixture if index in HYBRIDS[family] else ["gate_up norm silu_mul", "down residual"]
        if family == "olmo_hybrid" and layer.state == "attention":
            mlp = ["gate_up silu_mul", "down", "RmsNormAdd"]
        mixer = attention if layer.state == "attention" else delta
        assert sorted(map(describe, ours)) == sorted([*mixer, *mlp]), f"layer {index}"


def test_the_whole_graph_is_these_operators_in_this_order(exported):
    """ONNX Runtime's order of execution, and with it which launches overlap, follows the order of the list."""
    family, folder = exported
    golden = json.loads(Path(__file__).with_name("fused_operators.json").read_text())[family]
    found = []
    for node in load_graphs(folder)[1].graph.node:
        layer = f"{node.name.split('/')[0].removeprefix('layers.')} " if node.name.startswith("layers.") else ""
        found.append(f"{layer}{node.op_type}")
    assert found == golden


def test_sums_can_be_formed_in_the_buffers_of_their_residuals(exported):
    family, folder = exported
    fused = load_graphs(folder)[1]
    register_schemas()  # of which the embedding's shape follows; another process may have exported the folder
    graph = onnx.shape_inference.infer_shapes(without_weights(fused)).graph
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.value_info}
    readers = {name: index for index, node in enumerate(fused.graph.node) for name in node.input}
    ports = {"FusedLinear": 4, "MoeExperts": 7}  # of residuals
    sums = [
        (i, n.input[ports[n.op_type]], n.output[0])
        for i, n in enumerate(fused.graph.node)
        if len(n.input) > ports.get(n.op_type, 99) and n.input[ports[n.op_type]]
    ]
    hidden = 0 if family in (*SANDWICH_OR_POST_NORM, *SCALED_RESIDUALS) else 2 * LAYERS
    hidden -= 2 * (family == "olmo_hybrid")  # its layer with attention has norms behind
    shared = len(MIXTURES[family]) if family in SHARED_EXPERT else 0
    assert len(sums) == hidden + shared
    tokens = next(v for v in fused.graph.input if v.name == "token_ids").type.tensor_type.shape.dim[0].dim_param
    for index, residual, total in sums:
        assert shapes[total] == shapes[residual]
        assert shapes[total][0] == tokens
        assert readers[residual] == index, "the residual is read later"


def test_angles_are_computed_before_the_first_layer(exported):
    _, folder = exported
    fused = load_graphs(folder)[1]
    order = {node.name: index for index, node in enumerate(fused.graph.node)}
    producers = {name: order[node.name] for node in fused.graph.node for name in node.output if name}
    for node in (n for n in fused.graph.node if n.op_type == "RopeAngles"):
        reader = min(order[n.name] for n in fused.graph.node if set(n.input) & set(node.output))
        assert order[node.name] == reader - 1
        inputs = [producers[name] for name in fused.graph.node[reader].input if name in producers]
        assert max(inputs) == order[node.name], "of a node's inputs the last listed is computed first"


def test_no_standard_operator_stands_where_rows_are_dropped(exported):
    _, folder = exported
    fused = load_graphs(folder)[1]
    operators = {node.op_type for node in fused.graph.node if node.name.startswith("readers/")}
    sharing = any(layer.cache_of is not None for layer in read_manifest(folder).layers)
    assert operators == ({"GatherRows", "NarrowStep", "RopeAngles"} if sharing else set())


def test_bindings_and_metadata_stay(exported):
    _, folder = exported
    plain, *others = load_graphs(folder, (MODEL_FILE, FUSED_FILE, CPU_FILE))
    for fused in others:
        defaults = default_inputs(fused.graph)
        assert set(defaults) <= {contract.MAX_KV_LEN, contract.MAX_QUERY_LEN}
        for side in ("input", "output"):
            given = [[v for v in getattr(model.graph, side) if v.name not in defaults] for model in (plain, fused)]
            values = [[v.SerializeToString() for v in each] for each in given]
            assert values[0] == values[1]
        metadata = [{p.key: p.value for p in model.metadata_props} for model in (plain, fused)]
        assert metadata[0].items() <= metadata[1].items()
        assert all(node.doc_string for node in fused.graph.node if node.domain == "ortolan")


def test_every_byte_of_the_weights_is_read_once(exported):
    _, folder = exported
    covered = []
    for model in load_graphs(folder, (MODEL_FILE, FUSED_FILE, CPU_FILE)):
        places = [read_external_data(t) for t in model.graph.initializer if t.external_data]
        bytes_read = np.zeros((folder / "model.onnx.data").stat().st_size, np.uint8)
        for place in places:
            bytes_read[place.offset : place.end] += 1
        assert bytes_read.max() == 1
        covered.append(bytes_read)
    for fused in covered[1:]:
        np.testing.assert_array_equal(covered[0], fused)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rotates_by_unrounded_angles(tmp_path, dtype):
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf")
    folder = ortolan.export(checkpoint, tmp_path / "model", dtype=dtype, max_context=64)
    _, fused = load_graphs(folder)
    producers = {name: node for node in fused.graph.node for name in node.output}
    attentions = [node for node in fused.graph.node if node.op_type == "QkvAttention"]
    assert len(attentions) == LAYERS
    angles = {name for node in attentions for name in node.input[8:10]}
    assert {producers[name].op_type for name in angles} == {"RopeAngles"}
    head = next(node for node in fused.graph.node if node.name == "head/FusedLinear")
    assert list(head.output) == ["", "logits"], "the head gives float32 without a Cast"
