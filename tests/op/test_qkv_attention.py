"""QkvAttention has the bits of QkvRopeAppend and SwaAttention, over the same caches."""

import dataclasses

import devices
import ml_dtypes
import numpy as np
import onnx
import pytest
from fused_cases import run_model
from joint_cases import JointCase, joint_feeds, run_apart, run_joint

from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters

pytestmark = pytest.mark.usefixtures("target")

BOTH = ("query", "key")
CODES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
RING = {"window": 100, "sink": 4, "slots": 160}
LLAMA = {"heads": 32, "kv_heads": 8, "size": 64, "pairs": 32}
QWEN = {"heads": 16, "kv_heads": 8, "size": 128, "pairs": 64, "norms": BOTH}


def assert_same(case, feeds, **options):
    joint, apart = run_joint(case, feeds, **options), run_apart(case, feeds)
    assert joint.keys() == apart.keys() >= {"output", "query", "key_cache_out", "value_cache_out"}
    for name, wanted in apart.items():
        devices.assert_same_bits(joint[name], wanted)
    assert np.isfinite(joint["output"].astype(np.float32)).all()


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_one_token(size, group):
    """Lengths around tiles, the ends of a cache, and what a ring's wrap moves."""
    sizes = {"heads": 2 * group, "kv_heads": 2, "size": size, "pairs": size // 2}
    full, ring = JointCase(**sizes, slots=1024), JointCase(**sizes, **RING, norms=BOTH)
    lengths = {full: (0, 1, 15, 16, 127, 128, 1000, 1023), ring: (3, 99, 100, 159, 160, 161, 315, 520, 1000)}
    for case, past in ((case, past) for case, pasts in lengths.items() for past in pasts):
        step = dataclasses.replace(case, past=(past,))
        assert_same(step, joint_feeds(step, seed=past))


@pytest.mark.parametrize("page_slots", [16, 48, 256])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_one_token_over_pages(size, page_slots):
    """Lengths around the ends of pages, tiles and rings; pages that no token has reached are no pages of the pool."""
    sizes = {"heads": 8, "kv_heads": 2, "size": size, "pairs": size // 2, "page_slots": page_slots}
    full = JointCase(**sizes, slots=4 * 256 if 256 % page_slots == 0 else 20 * page_slots)
    ring = JointCase(**sizes, window=100, sink=4, slots=-(-150 // page_slots) * page_slots, norms=BOTH)
    ends = (0, page_slots - 1, page_slots, 127, 128, 2 * page_slots + 1, full.slots - 1)
    lengths = {full: ends, ring: (3, 100, ring.slots - 1, ring.slots, 2 * ring.slots + 7, 5000)}
    for case, past in ((case, past) for case, pasts in lengths.items() for past in pasts):
        step = dataclasses.replace(case, past=(past,))
        feeds = joint_feeds(step, seed=past)
        feeds["block_table"][:, past // page_slots + 1 :] = (-7, 2**30)[past % 2]
        assert_same(step, feeds)


WINDOW = {"heads": 4, "kv_heads": 1, "size": 256, "pairs": 128, "norms": BOTH, "window": 1000, "slots": 1100}


@pytest.mark.parametrize(
    "case",
    [
        JointCase(past=(8100,), **QWEN, slots=8192),
        JointCase(past=(1000,), **QWEN, slots=8192),
        JointCase(past=(15990,), **LLAMA, slots=16384),
        JointCase(past=(33000,), **WINDOW),
        JointCase(past=(33000,), **WINDOW, sink=40),
        JointCase(past=(1300,), heads=16, kv_heads=1, size=64, pairs=32, slots=1400),
        JointCase(past=(8100,), **LLAMA, slots=8192, page_slots=64),
        JointCase(past=(33000,), **WINDOW | {"slots": 1104}, sink=40, page_slots=16),
    ],
    ids=[
        "long",
        "short-in-long",
        "narrow",
        "window",
        "window-and-sinks",
        "many-heads-of-one",
        "pages",
        "pages-of-a-window",
    ],
)
def test_one_token_of_many_tiles(case):
    """Tiles that a block takes one after another, and sums of tiles far apart."""
    assert_same(case, joint_feeds(case))


@pytest.mark.parametrize(
    "case",
    [
        JointCase(heads=8, kv_heads=4, size=256, pairs=128, norms=BOTH, window=1024, slots=1100),
        JointCase(heads=8, kv_heads=4, size=256, pairs=128, norms=BOTH, window=1000, slots=1008, page_slots=16),
        JointCase(heads=4, kv_heads=1, size=256, pairs=128, window=2048, slots=2048, sink_logits=True),
        JointCase(heads=8, kv_heads=8, size=128, pairs=64, window=2048, slots=2100, capture_rows=64),
        JointCase(heads=12, kv_heads=4, size=128, pairs=64, window=4096, slots=5000),
        JointCase(heads=8, kv_heads=2, size=64, pairs=32, window=2048, slots=2100, code=CODES["int8"]),
        JointCase(heads=16, kv_heads=2, size=64, pairs=32, window=2048, slots=2100),
    ],
    ids=["gemma-3", "pages", "two-tiles-each", "one-head", "three-heads", "codes", "eight-heads"],
)
def test_one_token_of_a_window_that_ends_in_two_tiles(case):
    """Keys of the window's first and last tile may be summed at once, where they have different rows."""
    start = 2 * case.slots // 128 * 128
    for past in (case.window - 1, case.window, *(start + row for row in (0, 15, 16, 23, 24, 40, 62, 63, 64, 100, 127))):
        step = dataclasses.replace(case, past=(past,))
        assert_same(step, joint_feeds(step, seed=past))


def test_one_token_of_heads_whose_windows_end_anywhere():
    """One head's window ends in two tiles, another's does not."""
    case = JointCase(heads=8, kv_heads=4, size=256, pairs=128, window=1024, slots=1100, past=((1023, 3000, 3007, 5),))
    assert_same(case, joint_feeds(case))


CASES = {
    "llama": JointCase(past=(300,), **LLAMA, slots=512, capture_rows=64),
    "lengths-of-heads": JointCase(past=((70, 3, 0, 64, 63, 1, 127, 30),), **QWEN, slots=128, capture_rows=8),
    "lengths-of-heads-in-a-batch": JointCase(tokens=(1, 5), past=((9, 2), (0, 33)), capture_rows=4),
    "no-rope": JointCase(past=(40,), size=64, pairs=0),
    "norm-without-rope": JointCase(past=(40,), pairs=0, norms=BOTH),
    "one-norm": JointCase(past=(40,), size=128, pairs=64, norms=("key",)),
    "partial-rope": JointCase(past=(40,), size=80, pairs=16, norms=BOTH),
    "partial-rope-of-a-batch": JointCase(tokens=(20, 1), past=(3, 50), size=128, pairs=30, slots=128),
    "odd-pairs": JointCase(past=(40,), size=72, pairs=7),
    "head-512": JointCase(tokens=(1,), past=(40,), heads=2, kv_heads=1, size=512, pairs=256, norms=BOTH),
    "value-norm": JointCase(past=(40,), heads=8, kv_heads=1, size=256, pairs=128, norms=BOTH, value_norm=True),
    "value-is-key": JointCase(past=(40,), size=64, pairs=32, value_is_key=True),
    "normed-keys": JointCase(past=(40,), size=128, pairs=64, norms=BOTH, value_norm=True, value_is_key=True),
    "masks": JointCase(past=(400,), **QWEN, **RING, softcap=20.0, scale=0.1, sink_logits=True),
    "sink-logits": JointCase(past=(500,), **LLAMA, window=128, slots=300, sink_logits=True),
    "prefix": JointCase(tokens=(40, 1), past=(0, 30), size=64, pairs=32, window=16, prefix_end=(30, 31)),
    "both-directions": JointCase(tokens=(9,), past=(20,), size=64, pairs=32, causal=False),
    "few-tokens": JointCase(tokens=(5,), past=(120,), **QWEN, slots=128, capture_rows=3),
    "chunk": JointCase(tokens=(70,), past=(200,), **LLAMA, slots=300, capture_rows=8),
    "chunk-in-a-ring": JointCase(tokens=(50,), past=(400,), **QWEN, **RING),
    "batch": JointCase(tokens=(1, 1, 1, 1), past=(0, 63, 200, 17), **LLAMA, slots=256, capture_rows=16),
    "mixed-batch": JointCase(tokens=(1, 40, 0, 3), past=(300, 61, 5, 9), **QWEN, **RING, capture_rows=8),
    "paged": JointCase(past=(70,), **QWEN, slots=112, page_slots=16),
    "paged-batch": JointCase(tokens=(30, 1), past=(70, 12), **LLAMA, slots=112, page_slots=16),
    "paged-ring": JointCase(past=(500,), **QWEN, **RING, page_slots=32, sink_logits=True),
    "no-tokens": JointCase(tokens=(0,), past=(7,)),
}


@pytest.mark.parametrize("name", CASES)
def test_features(name):
    assert_same(CASES[name], joint_feeds(CASES[name]))


def test_outputs_may_have_buffers_of_their_own():
    case = CASES["mixed-batch"]
    assert_same(case, joint_feeds(case), in_place=False)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["llama", "lengths-of-heads", "partial-rope", "masks", "mixed-batch", "paged-ring"])
def test_codes(name, code):
    case = dataclasses.replace(CASES[name], code=CODES[code])
    assert_same(case, joint_feeds(case))


def assert_same_with_bounds(case, feeds, bounds, port="max_kv_len"):
    """Compare a step with the same one whose longest length, or most tokens of a sequence, are promised."""
    without = run_joint(case, feeds)
    for bound in bounds:
        for name, array in run_joint(case, {**feeds, port: np.array([bound], np.int32)}).items():
            devices.assert_same_bits(array, without[name])


SIZES = {"llama": LLAMA, "qwen": QWEN, "wide": {"heads": 8, "kv_heads": 4, "size": 256, "pairs": 128}}
TILE = 128  # keys


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bound", [1, TILE, 2 * TILE - 1, 4096])
def test_a_true_bound_changes_no_bit(sizes, bound):
    """Lengths up to the bound, in a cache of more tiles than the kernel of one token takes."""
    case = JointCase(**SIZES[sizes], slots=8192)
    for length in sorted({1, bound // 2 + 1, max(1, bound - 1), bound}):
        step = dataclasses.replace(case, past=(length - 1,))
        assert_same_with_bounds(step, joint_feeds(step, seed=length), [bound])


def test_a_bound_of_nothing_or_above_the_capacity_changes_no_bit():
    case = JointCase(past=(299,), **LLAMA, slots=512)
    assert_same_with_bounds(case, joint_feeds(case), (0, case.slots, np.iinfo(np.int32).max))


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("lengths-of-heads", 128),
        ("masks", 401),
        ("mixed-batch", 301),
        ("chunk", 270),
        ("paged-batch", 100),
        ("no-tokens", 1),
    ],
)
def test_a_bound_of_other_steps_changes_no_bit(name, bound):
    """Nor where other kernels take the step: rings, lengths of heads, several sequences or tokens."""
    assert_same_with_bounds(CASES[name], joint_feeds(CASES[name]), [bound])


FEW = {"tokens": (8, 1, 0, 3, 8), "past": (200, 61, 5, 9, 130)}


@pytest.mark.parametrize("code", [None, *CODES])
@pytest.mark.parametrize(
    "case",
    [
        JointCase(**FEW, **LLAMA, slots=256),
        JointCase(**FEW, **QWEN, **RING),
        JointCase(**FEW, **QWEN, slots=256, page_slots=16),
        JointCase(**FEW | {"tokens": (40, 1, 0, 64, 8)}, **LLAMA, slots=304),
        CASES["chunk"],
        CASES["no-tokens"],
    ],
    ids=["few-tokens", "few-tokens-of-rings", "few-tokens-of-pages", "short-chunks", "chunk", "no-tokens"],
)
def test_a_true_bound_of_tokens_changes_no_bit(case, code):
    """Bounds by which CUDA leaves out all kernels for chunks, or those for long ones, and such as leave out none."""
    case = dataclasses.replace(case, code=CODES.get(code))
    most = max(1, *case.tokens)
    bounds = [bound for bound in (most, 16, 64, 1000) if bound >= most]
    assert_same_with_bounds(case, joint_feeds(case), [0, *bounds], "max_query_len")


STEPS = (20, 1, 1, 15, 1, 3, 1, 1)  # past the wrap
LAYERS = 3
STACK = JointCase(heads=4, kv_heads=2, size=64, pairs=32, norms=BOTH, window=16, sink=2, slots=37)
SHARED = ("query_start", "past_len", "cosine", "sine", "query_norm_weight", "key_norm_weight")


def build_stack(*, joint):
    """Build layers of a projection, attention and another projection, as decoders have them."""
    attributes, mask = STACK.attributes, STACK.mask
    ring = {name: attributes[name] for name in ("sink", "capacity")}
    names, nodes, x = {name: name for name in SHARED}, [], "x"
    for i in range(LAYERS):
        own = names | {name: f"{name}.{i}" for name in ("qkv", "key_cache", "value_cache")}
        updated = (f"key_cache_out.{i}", f"value_cache_out.{i}")
        nodes.append(emitters.fused_linear(x, f"qkv_weight.{i}", outputs=(f"qkv.{i}",), name=f"project.{i}"))
        if joint:
            outputs = (f"attended.{i}", *updated, f"query.{i}")
            nodes.append(emitters.qkv_attention(**own, outputs=outputs, name=f"attend.{i}", **attributes, **mask))
        else:
            outputs = (f"query.{i}", *updated)
            nodes.append(emitters.qkv_rope_append(**own, outputs=outputs, name=f"append.{i}", **attributes))
            read = (f"query.{i}", *updated, "query_start", "past_len")
            nodes.append(emitters.swa_attention(*read, outputs=(f"attended.{i}",), name=f"attend.{i}", **ring, **mask))
        nodes.append(onnx.helper.make_node("Reshape", [f"attended.{i}", "flat"], [f"flat.{i}"], name=f"flatten.{i}"))
        ports = {"x": f"flat.{i}", "weight": f"output_weight.{i}", "residual": x}
        x = "y" if i == LAYERS - 1 else f"x.{i}"
        nodes.append(emitters.fused_linear(**ports, outputs=(x,), name=f"output.{i}"))
    return nodes


def run_stack(nodes, feeds, tokens):
    """Run the layers with caches in place; returns what they give, and the caches."""
    caches = {name: array for name, array in feeds.items() if "_cache." in name}
    outputs = {"y": ((tokens, STACK.heads * STACK.size), devices.element())}
    bound = {name.replace("_cache", "_cache_out"): name for name in caches}
    outputs |= {name: (feeds[source].shape, devices.element()) for name, source in bound.items()}

    def declare(name, dtype, rank):
        dims = [f"{name}_{axis}" for axis in range(rank)]
        return onnx.helper.make_tensor_value_info(name, devices.ONNX_TYPES[dtype], dims)

    inputs = [declare(name, array.dtype, array.ndim) for name, array in feeds.items()]
    results = [declare(name, dtype, len(shape)) for name, (shape, dtype) in outputs.items()]
    flat = onnx.numpy_helper.from_array(np.array([0, STACK.heads * STACK.size]), "flat")
    graph = onnx.helper.make_graph(nodes, "stack", inputs, results, [flat])
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
    return run_model(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds, outputs, bound)


def test_layers_behind_each_other_in_steps_behind_each_other():
    rng, wide = np.random.default_rng(0), STACK.heads * STACK.size
    rows = (STACK.heads + 2 * STACK.kv_heads) * STACK.size

    def draw(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(devices.element())

    weights = {f"qkv_weight.{i}": draw(rows, wide) for i in range(LAYERS)}
    weights |= {f"output_weight.{i}": draw(wide, wide) for i in range(LAYERS)}
    empty = joint_feeds(STACK)["key_cache"]
    held = {
        joint: {f"{n}_cache.{i}": empty for n in ("key", "value") for i in range(LAYERS)} for joint in (True, False)
    }
    past = 0
    for tokens in STEPS:
        drawn = joint_feeds(dataclasses.replace(STACK, tokens=(tokens,), past=(past,)), seed=past)
        step = {name: drawn[name] for name in SHARED} | {"x": 8 * draw(tokens, wide)}
        results = {
            joint: run_stack(build_stack(joint=joint), {**step, **weights, **held[joint]}, tokens) for joint in held
        }
        for name, wanted in results[False].items():
            devices.assert_same_bits(results[True][name], wanted)
        assert np.isfinite(results[True]["y"].astype(np.float32)).all()
        for joint, caches in held.items():
            held[joint] = {name: results[joint][name.replace("_cache", "_cache_out")] for name in caches}
        past += tokens


SMALL = JointCase(past=(5,))
WIDE = JointCase(size=264, pairs=132)
CODED = JointCase(past=(5,), code=CODES["int8"])
REFUSALS = {
    "num_heads Hq = 3": (SMALL, {"num_heads": 3}, {}),
    "qkv' has shape": (SMALL, {"num_heads": 2}, {}),
    "'sine' is missing": (SMALL, {}, {"sine": None}),
    "'capture_past_len' is missing": (JointCase(capture_rows=4), {}, {"capture_past_len": None}),
    "2 \\* R at most D = 16": (JointCase(pairs=9), {}, {}),
    "multiple of 8 up to 512": (JointCase(size=12, pairs=6), {}, {}),
    "multiple of 8 up to 256, or 512": (WIDE, {}, {}),
    "input 'key_scale' is missing": (CODED, {}, {"key_scale": None, "value_scale": None}),
    "must be at least sink S \\+ window W = 4 \\+ 61": (SMALL, {"sink": 4, "window": 61}, {}),
    "between 1 and M \\* P = 64": (SMALL, {"capacity": 65}, {}),
    "sink_logits' has shape": (SMALL, {}, {"sink_logits": np.zeros(3, np.float32)}),
    "prefix_end' has shape": (SMALL, {}, {"prefix_end": np.zeros(2, np.int32)}),
    "needs causal = 1": (SMALL, {"causal": 0}, {"prefix_end": np.zeros(1, np.int32)}),
}
BOUNDS = ("max_kv_len", "max_query_len")
for port in BOUNDS:
    REFUSALS |= {
        f"'{port}' is -2; it must be at least 0": (SMALL, {}, {port: np.array([-2], np.int32)}),
        f"{port}' has shape \\[2\\]; expected \\[1\\]": (SMALL, {}, {port: np.array([9, 9], np.int32)}),
        f"{port}' has shape \\[\\]; expected \\[1\\]": (SMALL, {}, {port: np.array(9, np.int32)}),
    }
HOST_REFUSALS = {
    "'query_start' must rise": (SMALL, {}, {"query_start": np.array([0, 2], np.int32)}),
    "more than capacity C = 64": (JointCase(past=(64,)), {}, {}),
    "use smaller chunks": (JointCase(tokens=(30,), past=(64,), window=50), {}, {}),
    "'prefix_end' holds -1": (SMALL, {}, {"prefix_end": np.array([-1], np.int32)}),
    "need the prefix's first ones": (JointCase(past=(70,), window=8, prefix_end=(71,)), {}, {}),
    "'capture_past_len' holds -3": (
        JointCase(capture_rows=4),
        {},
        {"capture_past_len": np.array([-3], np.int32)},
    ),
    "sequence 0 has 6 tokens, more than input 'max_kv_len' = 5": (SMALL, {}, {"max_kv_len": np.array([5], np.int32)}),
    "sequence 1 has 33 tokens, more than input 'max_kv_len' = 32": (
        JointCase(tokens=(1, 2), past=((9, 2), (0, 31)), kv_heads=2, heads=4),
        {},
        {"max_kv_len": np.array([32], np.int32)},
    ),
    "sequence 1 has 9 tokens in the step, more than input 'max_query_len' = 8": (
        JointCase(tokens=(1, 9), past=(3, 0)),
        {},
        {"max_query_len": np.array([8], np.int32)},
    ),
    "names page 9": (JointCase(past=(5,), page_slots=16), {}, {"block_table": np.full((1, 4), 9, np.int32)}),
}


@pytest.mark.parametrize("message", REFUSALS | HOST_REFUSALS)
def test_refuses(message, target):
    if message in HOST_REFUSALS and target.device == "cuda":
        pytest.skip("values that lie on a GPU are not checked")
    case, attributes, changed = (REFUSALS | HOST_REFUSALS)[message]
    feeds = joint_feeds(case) | changed
    with pytest.raises(Exception, match=message) as error:
        run_joint(case, {k: v for k, v in feeds.items() if v is not None}, **attributes)
    assert "test/QkvAttention" in str(error.value)


@pytest.mark.parametrize("port", BOUNDS)
def test_refuses_a_bound_of_another_type(port):
    feeds = joint_feeds(SMALL) | {port: np.array([9], np.int64)}
    with pytest.raises(Exception, match=rf"{port}|tensor\(int64\)") as error:
        run_joint(SMALL, feeds)
    assert "test/QkvAttention" in str(error.value)
