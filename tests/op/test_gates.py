"""GateMul and DeltaGates: the reference against standard operators, and kernels against the reference."""

import devices
import numpy as np
import pytest
from fused_cases import run_expanded, run_fused
from gate_cases import GateCase, delta_feeds, gate_feeds, plain_gate_mul
from tolerances import FLOAT32, FLOAT32_SUMS, assert_as_good_as_plain

from ortolan.custom_ops import fused_reference

FLOAT = np.dtype(np.float32)
CASES = (
    *(GateCase(activation=name) for name in ("silu", "sigmoid", "softplus", "gelu", "gelu_tanh")),
    GateCase(norm=16, residual=True),
    GateCase(norm=48, x_offset=8, gate_offset=4, beyond=4),
    GateCase(size=45, norm=15, x_offset=1, gate_offset=3, beyond=2),
    GateCase(gate_size=1, activation="sigmoid", residual=True, gate_offset=2),
    GateCase(gate_size=6, activation="softplus"),
    GateCase(size=4096, norm=128, gate_offset=0, beyond=64),
    GateCase(size=1536, activation="gelu_tanh", x_offset=512, beyond=256),
    GateCase(size=2049, activation="sigmoid"),
)


def outputs_of(case, tokens, element):
    return {"y": ((tokens, case.size), np.dtype(element))}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gate_is_standard_operators(case):
    feeds = gate_feeds(case, 5, np.float32)
    (y,) = run_expanded("GateMul", feeds, outputs_of(case, 5, np.float32), **case.attributes).values()
    assert_as_good_as_plain(y, plain_gate_mul(case, feeds), fused_reference.gate_mul(**feeds, **case.attributes))


@pytest.mark.parametrize("offsets", [(0, 0), (7, 2)])
def test_delta_gates_are_standard_operators(offsets):
    feeds = delta_feeds(5, 6, np.float32, offsets)
    attributes = {"decay_offset": offsets[0], "beta_offset": offsets[1], "beta_scale": 2.0}
    outputs = dict.fromkeys(("decay", "beta"), ((5, 6), FLOAT))
    found = run_expanded("DeltaGates", feeds, outputs, **attributes)
    for ours, wide in zip(found.values(), fused_reference.delta_gates(**feeds, **attributes), strict=True):
        np.testing.assert_allclose(ours, wide, rtol=FLOAT32_SUMS, atol=FLOAT32)


@pytest.mark.parametrize("tokens", [0, 1, 3, 300])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gate_is_as_good_as_plain_operators(case, tokens, isa):
    feeds = gate_feeds(case, tokens, devices.element(), seed=tokens)
    y = run_fused("GateMul", feeds, outputs_of(case, tokens, devices.element()), **case.attributes)["y"]
    assert_as_good_as_plain(y, plain_gate_mul(case, feeds), fused_reference.gate_mul(**feeds, **case.attributes))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("tokens", [0, 1, 33, 4097])
@pytest.mark.parametrize(("heads", "offsets"), [(32, (4096, 4128)), (5, (0, 1)), (1, (0, 0))])
def test_delta_gates_are_right(tokens, heads, offsets):
    feeds = delta_feeds(tokens, heads, devices.element(), offsets, seed=tokens)
    attributes = {"decay_offset": offsets[0], "beta_offset": offsets[1], "beta_scale": 1.5}
    outputs = dict.fromkeys(("decay", "beta"), ((tokens, heads), FLOAT))
    found = run_fused("DeltaGates", feeds, outputs, **attributes)
    for ours, wide in zip(found.values(), fused_reference.delta_gates(**feeds, **attributes), strict=True):
        np.testing.assert_allclose(ours, wide, rtol=FLOAT32_SUMS, atol=FLOAT32)


@pytest.mark.usefixtures("target")
def test_the_largest_gates_are_finite():
    feeds = {"x": np.ones((1, 8)), "gate": np.array([[-1e4, -100, -20, 0, 20, 30, 100, 1e4]])}
    feeds = {name: values.astype(devices.element()) for name, values in feeds.items()}
    for activation in fused_reference.ROW_GATES:
        case = GateCase(size=8, activation=activation)
        y = run_fused("GateMul", feeds, outputs_of(case, 1, devices.element()), **case.attributes)["y"]
        assert np.isfinite(y.astype(np.float32)).all(), activation


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 0}, "attribute size is 0"),
        ({"size": 49}, "with 0 . 49 columns or more"),
        ({"gate_offset": 1}, "with 1 . 48 columns or more"),
        ({"gate_size": 7}, "gate_size is 7, which does not divide size = 48"),
    ],
)
def test_columns_that_rows_do_not_have_are_refused(changed, message):
    case = GateCase()
    feeds = gate_feeds(case, 2, devices.element())
    with pytest.raises(Exception, match=message):
        run_fused("GateMul", feeds, outputs_of(case, 2, devices.element()), **case.attributes | changed)
