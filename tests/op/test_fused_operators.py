"""The fused graph's operators on a GPU against the float64 reference; a CPU has no kernels for them."""

import dataclasses

import devices
import numpy as np
import pytest
from expand_fused import expand_fused
from fused_cases import (
    LinearCase,
    QkvCase,
    angle_feeds,
    angle_outputs,
    build_fused_model,
    linear_chain,
    linear_feeds,
    linear_outputs,
    plain_heads,
    plain_linear,
    plain_norm,
    qkv_feeds,
    qkv_outputs,
    run_fused,
    run_model,
)
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import reference

CUDA_TARGETS = {name: target for name, target in devices.TARGETS.items() if target.device == "cuda"}
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("target")]

TOKENS = (1, 2, 5, 8, 16, 17, 32, 64, 128, 129, 300)
# (I, O): Llama 3.2 1B's key and value, Gemma 3 1B's hidden size, a tiny model's MLP and vocabulary, a wide head.
SIZES = [(2048, 512), (1152, 1024), (104, 40), (48, 131)]
HEAD = (64, 20011)
LINEARS = [
    LinearCase(),
    LinearCase(norm=True),
    LinearCase(bias=True),
    LinearCase(residual=True),
    LinearCase(norm=True, bias=True, residual=True),
    LinearCase(float32=True),
    LinearCase(float32=True, norm=True, bias=True),
    LinearCase(activation="silu_mul"),
    LinearCase(activation="silu_mul", norm=True, bias=True),
    LinearCase(activation="gelu_mul", norm=True),
    LinearCase(activation="gelu_tanh_mul", norm=True),
    LinearCase(activation="gelu_tanh_mul", bias=True, residual=True),
]


@pytest.fixture(scope="module", params=CUDA_TARGETS)
def target(request):
    """Run the module's tests with each element type of the GPU."""
    with devices.using(CUDA_TARGETS[request.param]):
        yield request.param


LINEARS_OF_SIZES = [
    pytest.param(case, *sizes, id="-".join(map(str, (case, *sizes))))
    for case in LINEARS
    for sizes in ([*SIZES, HEAD] if case.activation == "none" else SIZES)
]


@pytest.mark.parametrize(("case", "size", "outputs"), LINEARS_OF_SIZES)
def test_linear_is_as_good_as_plain_operators(case, size, outputs):
    for tokens in TOKENS:
        feeds = linear_feeds(case, tokens, size, outputs)
        (y,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
        expected = reference.fused_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(y, plain_linear(case, feeds), expected)


GATES = [c for c in LINEARS if c.activation != "none" and not c.bias and not c.residual]


@pytest.mark.parametrize("tokens", [240, 241, 255, 256, 257, 482, 511, 723, 1000, 4099])  # two tiles have 256 rows
@pytest.mark.parametrize(("size", "outputs"), [(8, 8), (64, 64), (200, 136), (1160, 72), (2048, 1032)])
@pytest.mark.parametrize("case", GATES, ids=str)
def test_gates_of_many_rows_are_as_good_as_plain_operators(case, size, outputs, tokens):
    if devices.element() == np.float32:
        pytest.skip("the tiles are those of the 16-bit kernel")
    feeds = linear_feeds(case, tokens, size, outputs)
    (y,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    assert_as_good_as_plain(y, plain_linear(case, feeds), reference.fused_linear(**feeds, **case.attributes))


@pytest.mark.parametrize("case", GATES, ids=str)
def test_a_row_of_a_gated_layer_does_not_depend_on_the_others(case):
    if devices.element() == np.float32 or devices.compute_capability() != 90:
        pytest.skip("cuBLAS, which multiplies here, sums in an order that it chooses by the number of rows")
    feeds = linear_feeds(case, 5000, 1160, 264)
    every = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes)["y"]
    for first, count in [(0, 256), (77, 500), (3, 1024), (4010, 990), (1, 4999)]:
        some = feeds | {"x": feeds["x"][first : first + count]}
        y = run_fused("FusedLinear", some, linear_outputs(case, some), **case.attributes)["y"]
        np.testing.assert_array_equal(bits(y), bits(every[first : first + count]))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("activation", ["none", "silu_mul"])
def test_an_output_does_not_depend_on_how_many_there_are(activation, tokens):
    case, outputs, kept = LinearCase(norm=True, residual=True, activation=activation), 4501, 40
    feeds = linear_feeds(case, tokens, 2104, outputs)
    parts = feeds["weight"].reshape(-1, outputs, 2104)
    few = feeds | {
        "weight": np.ascontiguousarray(parts[:, -kept:]).reshape(-1, 2104),
        "residual": np.ascontiguousarray(feeds["residual"][:, -kept:]),
    }
    many, less = (run_fused("FusedLinear", f, linear_outputs(case, f), **case.attributes)["y"] for f in (feeds, few))
    np.testing.assert_array_equal(bits(many[:, -kept:]), bits(less))


@pytest.mark.parametrize("size", [48, 1152, 2056, 4096, 12288, 24576, 50])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_two_tokens_get_what_each_gets_alone(case, size):
    feeds = linear_feeds(case, 2, size, 131)
    (both,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    for token in range(2):
        rows = {name: feeds[name][token : token + 1] for name in ("x", "residual") if name in feeds}
        alone = feeds | rows
        (y,) = run_fused("FusedLinear", alone, linear_outputs(case, alone), **case.attributes).values()
        np.testing.assert_array_equal(bits(both[token : token + 1]), bits(y))
    assert_as_good_as_plain(both, plain_linear(case, feeds), reference.fused_linear(**feeds, **case.attributes))


def rows_of(feeds, rows):
    """Feeds of some rows of a layer."""
    return feeds | {name: np.ascontiguousarray(feeds[name][rows]) for name in ("x", "residual") if name in feeds}


def assert_rows_do_not_know_each_other(case, size, outputs):
    if devices.element() != np.float32 and devices.compute_capability() != 90:
        pytest.skip("cuBLAS, which multiplies three rows and more here, chooses the order of sums by their number")
    feeds = linear_feeds(case, 8, size, outputs)
    (every,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    for rows in (*(slice(0, count) for count in range(1, 8)), [5], [7, 3], [6, 6, 1, 2, 6]):
        some = rows_of(feeds, rows)
        (y,) = run_fused("FusedLinear", some, linear_outputs(case, some), **case.attributes).values()
        np.testing.assert_array_equal(bits(y), bits(every[rows]))
    assert_as_good_as_plain(every, plain_linear(case, feeds), reference.fused_linear(**feeds, **case.attributes))


@pytest.mark.parametrize("size", [1024, 1160, 2048, 2056, 2560, 4096, 6208, 8192, 1027])  # slices whole and cut
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_a_row_gets_the_same_bits_among_up_to_eight(case, size):
    assert_rows_do_not_know_each_other(case, size, 131)


@pytest.mark.parametrize(("size", "outputs"), [(2048, 12808), (4096, 6403), (2688, 9000)])
@pytest.mark.parametrize("case", [LinearCase(norm=True, residual=True), LinearCase(activation="silu_mul")], ids=str)
def test_so_it_does_in_wide_layers(case, size, outputs):
    assert_rows_do_not_know_each_other(case, size, outputs)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("case", [LinearCase(residual=True), LinearCase(activation="silu_mul", residual=True)], ids=str)
def test_linear_may_write_over_its_residual(case, tokens):
    feeds = linear_feeds(case, tokens, 1152, 256)
    outputs = linear_outputs(case, feeds)
    apart = run_fused("FusedLinear", feeds, outputs, **case.attributes)
    again = run_fused("FusedLinear", feeds, outputs, **case.attributes)
    in_place = run_fused("FusedLinear", feeds, outputs, {"y": "residual"}, **case.attributes)
    np.testing.assert_array_equal(bits(again["y"]), bits(apart["y"]))
    np.testing.assert_array_equal(bits(in_place["y"]), bits(apart["y"]))


CHAIN = {  # of each sum: x, weight, residual; y0 is read twice, y2 and y3 may take the buffers of y0 and y1
    "y0": ("x", "weight_a", ""),
    "y1": ("x", "weight_b", "y0"),
    "y2": ("y1", "weight_a", "y0"),
    "y3": ("y2", "weight_b", "y1"),
    "y4": ("y3", "weight_a", ""),
}


@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_sums_in_the_buffers_of_their_residuals_are_the_same(tokens):
    attributes = LinearCase().attributes
    values = {"x": linear_feeds(LinearCase(), tokens, 64, 64)["x"]}
    values |= {f"weight_{n}": linear_feeds(LinearCase(), 1, 64, 64, seed)["weight"] for seed, n in enumerate("ab")}
    inputs, outputs = dict(values), {"y": (values["x"].shape, devices.element())}
    for name, ports in CHAIN.items():
        given = {port: values[v] for port, v in zip(("x", "weight", "residual"), ports, strict=True) if v}
        values[name] = run_fused("FusedLinear", given, outputs, **attributes)["y"]
    results = run_model(linear_chain(CHAIN, 64, attributes), inputs, {"y4": outputs["y"]})
    np.testing.assert_array_equal(bits(results["y4"]), bits(values["y4"]))


@pytest.mark.parametrize(
    ("case", "size", "outputs"),
    [
        (LinearCase(norm=True, bias=True), 64, 9600),
        (LinearCase(norm=True, activation="silu_mul"), 64, 4800),
        (LinearCase(norm=True, bias=True, activation="silu_mul"), 64, 4800),
        (LinearCase(norm=True, activation="silu_mul"), 4200, 24),  # normalised rows fill slices
    ],
    ids=str,
)
def test_a_step_of_several_slices_has_no_seam(case, size, outputs):
    tokens = 12_301
    feeds = linear_feeds(case, tokens, size, outputs)
    y = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes)["y"]
    rows = np.unique([*range(0, tokens, 97), *range(0, tokens, 128), *range(127, tokens, 128), tokens - 1])
    some = feeds | {"x": feeds["x"][rows]}
    expected = reference.fused_linear(**some, **case.attributes)
    assert_as_good_as_plain(y[rows], plain_linear(case, some), expected)


def test_linear_of_no_tokens_is_empty():
    case = LinearCase(norm=True)
    feeds = linear_feeds(case, 0, 64, 32)
    assert run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes)["y"].shape == (0, 32)


@pytest.mark.parametrize("tokens", [*TOKENS, 250])
@pytest.mark.parametrize("activation", ["none", "silu_mul"])
def test_a_row_of_nan_stays_in_its_row(activation, tokens):
    case = LinearCase(norm=True, activation=activation)
    feeds = linear_feeds(case, tokens, 104, 40)
    feeds["x"][tokens // 2] = np.nan
    y = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes)["y"]
    wrong = np.isnan(y.astype(np.float32))
    assert wrong[tokens // 2].all()
    assert not np.delete(wrong, tokens // 2, axis=0).any()


BOTH = ("query", "key")
NORMED_KEYS = {"value_norm": True, "value_is_key": True}
QKVS = {
    "llama": QkvCase(tokens=(1,), past=(5,), heads=32, kv_heads=8, size=64, pairs=32),
    "qwen3": QkvCase(tokens=(3, 1), past=(5, 0), heads=16, kv_heads=8, size=128, pairs=64, norms=BOTH),
    "gemma3": QkvCase(tokens=(70,), past=(20,), heads=4, kv_heads=1, size=256, pairs=128, norms=BOTH, slots=128),
    "no-rope": QkvCase(tokens=(9, 0, 2), past=(0, 3, 60), pairs=0, slots=128),
    "norm-without-rope": QkvCase(tokens=(9,), past=(3,), pairs=0, norms=BOTH),
    "one-norm": QkvCase(tokens=(4,), past=(3,), norms=("key",)),
    "partial-rotary": QkvCase(tokens=(20,), past=(3,), size=80, pairs=30, norms=BOTH),
    "odd-pairs": QkvCase(tokens=(20,), past=(3,), size=72, pairs=7),
    "ring": QkvCase(tokens=(1, 40, 7), past=(300, 61, 63), slots=64, sink=4),
    "chunk-longer-than-the-ring": QkvCase(tokens=(150, 3), past=(10, 0), slots=64, sink=5, norms=BOTH),
    "paged": QkvCase(tokens=(30, 1), past=(70, 12), slots=112, page_slots=16),
    "paged-ring": QkvCase(tokens=(30, 1), past=(170, 12), slots=60, sink=2, page_slots=16, norms=BOTH),
    "per-head-lengths": QkvCase(tokens=(5, 1), past=((9, 2), (0, 33))),
    "head-512": QkvCase(tokens=(2,), past=(0,), heads=2, kv_heads=1, size=512, pairs=256, norms=BOTH),
    "gemma4": QkvCase(
        tokens=(3, 70), past=(5, 0), heads=8, kv_heads=1, size=256, pairs=128, norms=BOTH, value_norm=True
    ),
    "gemma4-full": QkvCase(tokens=(5,), past=(2,), heads=4, size=512, pairs=256, norms=BOTH, **NORMED_KEYS),
    "normed-keys-as-values": QkvCase(tokens=(20,), past=(3,), size=72, pairs=7, capture_rows=6, **NORMED_KEYS),
    "keys-as-values": QkvCase(tokens=(20, 1), past=(3, 0), value_is_key=True),
    "many-groups": QkvCase(tokens=(6,), past=(0,), heads=16, kv_heads=1, size=64, pairs=32),
    "capture": QkvCase(tokens=(1,), past=(5,), heads=32, kv_heads=8, size=64, pairs=32, capture_rows=64),
    "capture-of-chunks": QkvCase(tokens=(40, 0, 3), past=(0, 5, 9), norms=BOTH, slots=64, capture_rows=8),
    "capture-without-rows": QkvCase(tokens=(9,), past=(3,), capture_rows=0),
    "capture-of-odd-heads": QkvCase(tokens=(20, 1), past=(3, 0), size=72, pairs=7, capture_rows=6),
}


@pytest.mark.parametrize("name", QKVS)
def test_queries_and_keys_are_as_good_as_plain_operators(name):
    case = dataclasses.replace(QKVS[name], tokens=(sum(QKVS[name].tokens),), past=(0,), slots=200, sink=0, page_slots=0)
    feeds = qkv_feeds(case)
    results = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    wide = {cache: feeds[cache].astype(np.float64) for cache in ("key_cache", "value_cache")}
    query, *caches = reference.qkv_rope_append(**{**feeds, **wide}, **case.attributes)
    plain_query, *plain = plain_heads(case, feeds)
    assert_as_good_as_plain(results["query"], plain_query, query)
    for name, plain_rows, cache in zip(("key", "value"), plain, caches, strict=False):
        expected = cache[0, :, : sum(case.tokens)].transpose(1, 0, 2)
        assert_as_good_as_plain(rows_of(case, results, name), plain_rows, expected)


@pytest.mark.parametrize("name", QKVS)
def test_caches_are_those_of_an_append_of_the_same_keys(name):
    case = QKVS[name]
    feeds = qkv_feeds(case)
    results = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
    aliases = {f"{name}_out": name for name in ("key_cache", "value_cache", "capture") if name in feeds}
    in_place = run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), aliases, **case.attributes)
    whole = {"tokens": (sum(case.tokens),), "past": (0,), "slots": 200, "sink": 0, "page_slots": 0}
    straight = dataclasses.replace(case, **whole, capture_rows=None)
    rows = {**feeds, **{k: v for k, v in qkv_feeds(straight).items() if k in POSITIONED}}
    for name in ("block_table", "capture", "capture_past_len"):
        rows.pop(name, None)
    once = run_fused("QkvRopeAppend", rows, qkv_outputs(straight, rows), **straight.attributes)
    key, value = (rows_of(straight, once, name) for name in ("key", "value"))
    if not case.value_norm:
        first = case.heads + (0 if case.value_is_key else case.kv_heads)
        given = feeds["qkv"].reshape(sum(case.tokens), -1, case.size)[:, first : first + case.kv_heads]
        np.testing.assert_array_equal(bits(value), bits(given))
    step = {k: feeds[k] for k in (*POSITIONED, "block_table") if k in feeds}
    append = {"sink": case.sink, "capacity": case.slots}
    expected = reference.ring_kv_append(key, value, **step, **append)
    for got in (results, in_place):
        np.testing.assert_array_equal(bits(got["query"]), bits(once["query"]))
        if "capture" in feeds:
            rows = (got["query"], feeds["capture"], feeds["query_start"], feeds["capture_past_len"])
            np.testing.assert_array_equal(bits(got["capture_out"]), bits(reference.snapkv_capture(*rows)))
        for cache, want in zip(("key_cache_out", "value_cache_out"), expected, strict=True):
            np.testing.assert_array_equal(bits(got[cache]), bits(want))


POSITIONED = ("key_cache", "value_cache", "query_start", "past_len")


def rows_of(case, results, name):
    """Return the keys or values [T, Hkv, D] of a step that began an empty cache."""
    return results[f"{name}_cache_out"][0, :, : sum(case.tokens)].transpose(1, 0, 2)


def bits(array):
    """View values as integers, so that NaN equals itself and zeros have signs."""
    return np.ascontiguousarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
@pytest.mark.parametrize("size", [48, 104, 1151, 1152, 2048, 4096, 5376, 9000])
def test_norm_add_is_as_good_as_plain_operators(tokens, size):
    rng = np.random.default_rng(size)
    shapes = {"x": (tokens, size), "norm_weight": (size,), "residual": (tokens, size)}
    feeds = {name: (3 * rng.standard_normal(shape)).astype(devices.element()) for name, shape in shapes.items()}
    outputs = {"y": ((tokens, size), devices.element())}
    y = run_fused("RmsNormAdd", feeds, outputs, epsilon=1e-6)["y"]
    plain = plain_norm(feeds["x"], feeds["norm_weight"], 1e-6) + feeds["residual"].astype(np.float32)
    assert_as_good_as_plain(y, plain, reference.rms_norm_add(**feeds, epsilon=1e-6))


@pytest.mark.parametrize("size", [1152, 2048, 4096, 5376])
def test_a_norm_does_not_depend_on_how_many_rows_there_are(size):
    rng, tokens, few = np.random.default_rng(size), 4099, 257
    shapes = {"x": (tokens, size), "norm_weight": (size,), "residual": (tokens, size)}
    feeds = {name: rng.standard_normal(shape).astype(devices.element()) for name, shape in shapes.items()}
    whole = run_fused("RmsNormAdd", feeds, {"y": ((tokens, size), devices.element())}, epsilon=1e-6)["y"]
    for begin in (0, 1000, tokens - few):
        part = feeds | {name: feeds[name][begin : begin + few] for name in ("x", "residual")}
        y = run_fused("RmsNormAdd", part, {"y": ((few, size), devices.element())}, epsilon=1e-6)["y"]
        np.testing.assert_array_equal(bits(whole[begin : begin + few]), bits(y))


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("tokens", "pairs"), [(1, 32), (7, 5), (300, 64), (4099, 128), (0, 32)])
def test_angles_have_the_bits_of_standard_operators(tokens, pairs, factor):
    feeds = angle_feeds(tokens, pairs)
    model = build_fused_model("RopeAngles", feeds, angle_outputs(feeds), {"factor": factor})
    results = run_model(model, feeds, angle_outputs(feeds))
    standard = run_model(expand_fused(model), feeds, angle_outputs(feeds))
    expected = reference.rope_angles(**feeds, factor=factor)
    for name, wide in zip(results, expected, strict=True):
        np.testing.assert_array_equal(bits(results[name]), bits(standard[name]))
        assert np.abs(results[name] - wide).max(initial=0) <= 2**-22 * factor


ROWS = {
    "one": (1, [0]),
    "last-of-each": (9, [2, 2, 8]),
    "backwards-and-twice": (5, [4, 0, 3, 0]),
    "every": (300, list(range(300))),
    "more-than-there-are": (3, [2, 1, 0] * 40),
    "outside": (9, [-1, 9, 3, -(2**63), 2**63 - 1, 2**32, 2**32 + 3]),
    "none": (9, []),
    "of-none": (0, [0, -1]),
}


@pytest.mark.parametrize("size", [7, 64, 2048, 5001])
@pytest.mark.parametrize("name", ROWS)
def test_gathered_rows_are_copies(name, size):
    total, indices = ROWS[name]
    rows = np.random.default_rng(0).standard_normal((total, size)).astype(devices.element())
    feeds = {"rows": rows, "row_indices": np.array(indices, np.int64)}
    output = run_fused("GatherRows", feeds, {"output": ((len(indices), size), devices.element())})["output"]
    np.testing.assert_array_equal(bits(output), bits(reference.gather_rows(**feeds)))


@pytest.mark.parametrize(("port", "shape"), [("rows", (3, 4, 2)), ("row_indices", (1, 1))])
def test_gathering_refuses_other_ranks(port, shape):
    feeds = {"rows": np.zeros((3, 4), devices.element()), "row_indices": np.zeros(1, np.int64)}
    feeds[port] = np.zeros(shape, feeds[port].dtype)
    with pytest.raises(Exception, match=f"{port}' has shape") as error:
        run_fused("GatherRows", feeds, {"output": ((1, 4), devices.element())})
    assert "GatherRows" in str(error.value)


REFUSALS = {
    "exactly one of the outputs": ({}, {"y": (2, 8), "y_float32": (2, 8)}, {}),
    "at least one feature": ({"x": (2, 0), "weight": (8, 0)}, {"y": (2, 8)}, {}),
    "weight' has shape": ({"weight": (8, 15)}, {"y": (2, 8)}, {}),
    "even number of rows": ({"weight": (7, 16)}, {"y": (2, 3)}, {"activation": "silu_mul"}),
    "norm_weight' has shape": ({"norm_weight": (8,)}, {"y": (2, 8)}, {}),
    "bias' has shape": ({"bias": (4,)}, {"y": (2, 8)}, {}),
    "residual' has shape": ({"residual": (1, 8)}, {"y": (2, 8)}, {}),
    "activation = 'relu' is not allowed": ({}, {"y": (2, 8)}, {"activation": "relu"}),
    "epsilon = -1": ({}, {"y": (2, 8)}, {"epsilon": -1.0}),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_linear_refuses(message):
    changes, shapes, attributes = REFUSALS[message]
    element = devices.element()
    feeds = {name: np.zeros(shape, element) for name, shape in ({"x": (2, 16), "weight": (8, 16)} | changes).items()}
    types = {"y": element, "y_float32": np.dtype(np.float32)}
    with pytest.raises(Exception, match=message) as error:
        run_fused("FusedLinear", feeds, {k: (shape, types[k]) for k, shape in shapes.items()}, **attributes)
    assert "FusedLinear" in str(error.value)


def test_angles_refuse_two_rows_of_frequencies():
    feeds = {"positions": np.zeros(3, np.int64), "inv_freq": np.zeros((2, 4), np.float32)}
    with pytest.raises(Exception, match="inv_freq' has shape") as error:
        run_fused("RopeAngles", feeds, dict.fromkeys(("cosine", "sine"), ((1, 3, 4), np.dtype(np.float32))))
    assert "RopeAngles" in str(error.value)


QKV_REFUSALS = {
    "num_heads Hq = 3": (QkvCase(), {"num_heads": 3}, ()),
    "num_heads Hq = 0": (QkvCase(), {"num_heads": 0}, ()),
    "qkv' has shape": (QkvCase(), {"num_heads": 2}, ()),
    "'sine' is missing": (QkvCase(), {}, ("sine",)),
    "'cosine' is missing": (QkvCase(), {}, ("cosine",)),
    "'capture' is missing": (QkvCase(capture_rows=4), {}, ("capture",)),
    "'capture_past_len' is missing": (QkvCase(capture_rows=4), {}, ("capture_past_len",)),
    "2 \\* R at most D = 16": (QkvCase(pairs=9), {}, ()),
    "multiple of 8 up to 512": (QkvCase(size=12, pairs=6), {}, ()),
}


@pytest.mark.parametrize("message", QKV_REFUSALS)
def test_qkv_refuses(message):
    case, attributes, missing = QKV_REFUSALS[message]
    feeds = {k: v for k, v in qkv_feeds(case).items() if k not in missing}
    with pytest.raises(Exception, match=message) as error:
        run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **{**case.attributes, **attributes})
    assert "QkvRopeAppend" in str(error.value)
