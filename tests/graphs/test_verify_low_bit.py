"""verify_model accepts graphs with low-bit weights, and says what is wrong with a broken one."""

import copy

import onnx
import pytest
from families import shared_checkpoint, shared_model

from ortolan.errors import ContractMismatchError
from ortolan.graphs import verify_model
from ortolan.manifest import FUSED_FILE, MODEL_FILE

LINEAR, EXPERTS = "0/attention/output/LowBitLinear", "0/mlp/LowBitExperts"


@pytest.fixture(scope="module")
def graph():
    """The fused graph of a mixture with biases, in int4 with zero points."""
    source = shared_checkpoint("gpt_oss", hidden_size=64, intermediate_size=96)
    options = {"weight_format": "int4", "group_size": 32, "asymmetric": True}
    folder = shared_model(source, max_context=128, **options)
    return onnx.load(folder / FUSED_FILE, load_external_data=False)


def find(model, ending):
    return next(node for node in model.graph.node if node.name.endswith(ending))


def attribute(model, ending, name):
    return next(a for a in find(model, ending).attribute if a.name == name)


def dims(model, name):
    return next(t for t in model.graph.initializer if t.name == name).dims


def port(model, ending, index):
    return dims(model, find(model, ending).input[index])


def narrow(ending, index, axis=-1):
    def break_it(model):
        found = port(model, ending, index)
        found[len(found) + axis if axis < 0 else axis] -= 1

    return break_it


def set_number(ending, name, value):
    def break_it(model):
        attribute(model, ending, name).i = value

    return break_it


def set_text(ending, name, value):
    def break_it(model):
        attribute(model, ending, name).s = value

    return break_it


def set_real(ending, name, value):
    def break_it(model):
        attribute(model, ending, name).f = value

    return break_it


def drop(ending, index):
    def break_it(model):
        find(model, ending).input[index] = ""

    return break_it


def give_float_scales(model):
    node = find(model, LINEAR)
    node.input[5] = node.input[2]


def both_outputs(model):
    find(model, LINEAR).output.append("other")


BROKEN = {
    "scales-of-a-linear": (narrow(LINEAR, 2), r"rule 7.*scales '.*' must be a weight \[64, 2\]; it is \[64, 1\]"),
    "zero-points": (narrow(LINEAR, 3, 0), r"rule 7.*zero_points '.*' must be a weight \[64, 1\]; it is \[63, 1\]"),
    "no-scales": (drop(LINEAR, 2), r"rule 7.*scales '' must be a weight .*; it is not a weight"),
    "scales-of-another-format": (give_float_scales, "rule 7.*float_scales '.*' is given, and int4 has none"),
    "bias": (narrow(LINEAR, 7), r"rule 7.*bias '.*' must be a weight \[64\]; it is \[63\]"),
    "input": (narrow(LINEAR, 1), r"rule 7.*LowBitLinear: .*62"),
    "group-size": (
        set_number(LINEAR, "group_size", 48),
        "rule 7.*group_size 48 must be 0 or an even divisor of the 64",
    ),
    "fixed-group-size": (set_text(LINEAR, "format", b"nvfp4"), "rule 7.*group_size is 32; nvfp4 has groups of 16"),
    "format": (
        set_text(LINEAR, "format", b"int3"),
        "rule 7.*format 'int3' is not one of int4, int8, fp8, mxfp4, nvfp4",
    ),
    "scale-rows": (set_number(LINEAR, "scale_rows", 2), "rule 7.*scale_rows is 2; it must be 1, or more in fp8"),
    "input-format": (
        set_text(LINEAR, "input_format", b"fp8"),
        "rule 7.*input_format 'fp8' is not 'none', or 'fp8' with a weight of fp8",
    ),
    "input-scale": (set_real(LINEAR, "input_scale", 0.5), "rule 7.*input_scale is 0.5; it must be 0, or more with"),
    "outputs": (both_outputs, "rule 7.*exactly one of the outputs"),
    "activation": (set_text(LINEAR, "activation", b"relu"), "rule 7.*activation 'relu' is not one of"),
    "experts-scales": (narrow(EXPERTS, 5, 1), r"rule 9.*scales '.*gate_up.scales' must be .*it is \[4, 191, 2\]"),
    "experts-down": (narrow(EXPERTS, 4, 0), r"rule 9.*scales '.*down.scales' must be a weight \[3, "),
    "experts-zero-points": (narrow(EXPERTS, 10), r"rule 9.*zero_points '.*down.zero_points' must be a weight"),
    "experts-bias": (narrow(EXPERTS, 13), r"rule 9.*bias '.*gate_up_bias' must be a weight \[4, 192\]"),
    "experts-format": (set_text(EXPERTS, "format", b"int9"), "rule 9.*format 'int9' is not one of"),
    "experts-group-size": (
        set_number(EXPERTS, "group_size", 64),
        r"rule 9.*gate_up.scales' must be a weight \[4, 192, 1\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_refused(graph, name):
    break_it, message = BROKEN[name]
    verify_model(graph)
    broken = copy.deepcopy(graph)
    break_it(broken)
    with pytest.raises(ContractMismatchError, match=message):
        verify_model(broken)


def test_a_plain_graph_is_checked_too():
    folder = shared_model(shared_checkpoint("mixtral", hidden_size=64), max_context=128, weight_format="fp8")
    plain = onnx.load(folder / MODEL_FILE, load_external_data=False)
    verify_model(plain)
    port(plain, LINEAR, 5)[0] -= 1
    with pytest.raises(ContractMismatchError, match=r"rule 7.*float_scales"):
        verify_model(plain)
