"""FusedLinear on a GPU against the float64 reference."""

import devices
import numpy as np
import pytest
from fused_cases import (
    LinearCase,
    linear_chain,
    linear_feeds,
    linear_outputs,
    plain_linear,
    run_fused,
    run_model,
)
from tolerances import assert_as_good_as_plain

from ortolan.custom_ops import fused_reference

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_target")]

ROWS = ("x", "residual", "factor")  # inputs that have a row for each token
TOKENS = (1, 2, 5, 8, 16, 17, 32, 64, 128, 129, 300)
# (I, O): Llama 3.2 1B's key and value, Gemma 3 1B's hidden size, a tiny model's MLP and vocabulary, a wide head.
SIZES = [(2048, 512), (1152, 1024), (104, 40), (48, 131)]
HEAD = (64, 20011)
# Rows whose slices are whole and cut, that are too short or too odd to be cut, and the longest that are.
SIZES_BY_SLICES = [1024, 1160, 2048, 2056, 2560, 4096, 6208, 8192, 1027, 10240, 14344, 16384]
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
    LinearCase(activation="gelu_tanh_mul", factor=True),
    LinearCase(activation="silu_mul", factor=True, norm=True, bias=True),
    LinearCase(activation="gelu_mul", factor=True, float32=True),
]

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
        expected = fused_reference.fused_linear(**feeds, **case.attributes)
        assert_as_good_as_plain(y, plain_linear(case, feeds), expected)


GATES = [c for c in LINEARS if c.is_two_part and not c.bias and not c.residual]


@pytest.mark.parametrize("tokens", [240, 241, 255, 256, 257, 482, 511, 723, 1000, 4099])  # two tiles have 256 rows
@pytest.mark.parametrize(("size", "outputs"), [(8, 8), (64, 64), (200, 136), (1160, 72), (2048, 1032)])
@pytest.mark.parametrize("case", GATES, ids=str)
def test_gates_of_many_rows_are_as_good_as_plain_operators(case, size, outputs, tokens):
    if devices.element() == np.float32:
        pytest.skip("the tiles are those of the 16-bit kernel")
    feeds = linear_feeds(case, tokens, size, outputs)
    (y,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    assert_as_good_as_plain(y, plain_linear(case, feeds), fused_reference.fused_linear(**feeds, **case.attributes))


@pytest.mark.parametrize("case", GATES, ids=str)
def test_a_row_of_a_gated_layer_does_not_depend_on_the_others(case):
    if devices.element() == np.float32 or devices.compute_capability() != 90:
        pytest.skip("cuBLAS, which multiplies here, sums in an order that it chooses by the number of rows")
    feeds = linear_feeds(case, 5000, 1160, 264)
    every = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes)["y"]
    for first, count in [(0, 256), (77, 500), (3, 1024), (4010, 990), (1, 4999)]:
        some = feeds | {"x": feeds["x"][first : first + count]}
        y = run_fused("FusedLinear", some, linear_outputs(case, some), **case.attributes)["y"]
        devices.assert_same_bits(y, every[first : first + count])


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
    devices.assert_same_bits(many[:, -kept:], less)


@pytest.mark.parametrize("size", [48, 1152, 2056, 4096, 12288, 24576, 50])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_two_tokens_get_what_each_gets_alone(case, size):
    feeds = linear_feeds(case, 2, size, 131)
    (both,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    for token in range(2):
        rows = {name: feeds[name][token : token + 1] for name in ROWS if name in feeds}
        alone = feeds | rows
        (y,) = run_fused("FusedLinear", alone, linear_outputs(case, alone), **case.attributes).values()
        devices.assert_same_bits(both[token : token + 1], y)
    assert_as_good_as_plain(both, plain_linear(case, feeds), fused_reference.fused_linear(**feeds, **case.attributes))


def rows_of(feeds, rows):
    """Feeds of some rows of a layer."""
    return feeds | {name: np.ascontiguousarray(feeds[name][rows]) for name in ROWS if name in feeds}


def assert_rows_do_not_know_each_other(case, size, outputs):
    if devices.element() != np.float32 and devices.compute_capability() != 90:
        pytest.skip("cuBLAS, which multiplies three rows and more here, chooses the order of sums by their number")
    feeds = linear_feeds(case, 8, size, outputs)
    (every,) = run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes).values()
    for rows in (*(slice(0, count) for count in range(1, 8)), [5], [7, 3], [6, 6, 1, 2, 6]):
        some = rows_of(feeds, rows)
        (y,) = run_fused("FusedLinear", some, linear_outputs(case, some), **case.attributes).values()
        devices.assert_same_bits(y, every[rows])
    assert_as_good_as_plain(every, plain_linear(case, feeds), fused_reference.fused_linear(**feeds, **case.attributes))


@pytest.mark.parametrize("size", SIZES_BY_SLICES)
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
    devices.assert_same_bits(again["y"], apart["y"])
    devices.assert_same_bits(in_place["y"], apart["y"])


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
    devices.assert_same_bits(results["y4"], values["y4"])


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
    expected = fused_reference.fused_linear(**some, **case.attributes)
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


REFUSALS = {
    "exactly one of the outputs": ({}, {"y": (2, 8), "y_float32": (2, 8)}, {}),
    "at least one feature": ({"x": (2, 0), "weight": (8, 0)}, {"y": (2, 8)}, {}),
    "weight' has shape": ({"weight": (8, 15)}, {"y": (2, 8)}, {}),
    "even number of rows": ({"weight": (7, 16)}, {"y": (2, 3)}, {"activation": "silu_mul"}),
    "norm_weight' has shape": ({"norm_weight": (8,)}, {"y": (2, 8)}, {}),
    "bias' has shape": ({"bias": (4,)}, {"y": (2, 8)}, {}),
    "residual' has shape": ({"residual": (1, 8)}, {"y": (2, 8)}, {}),
    "'factor' needs a gated activation": ({"factor": (2, 8)}, {"y": (2, 8)}, {}),
    "'factor' needs .* no residual": (
        {"factor": (2, 8), "residual": (2, 8)},
        {"y": (2, 8)},
        {"activation": "silu_mul"},
    ),
    "factor' has shape .*1 \\+ 8 columns": (
        {"factor": (2, 8)},
        {"y": (2, 8)},
        {"activation": "silu_mul", "factor_offset": 1},
    ),
    "factor' has shape .*T = 2 rows": ({"factor": (1, 8)}, {"y": (2, 8)}, {"activation": "silu_mul"}),
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
