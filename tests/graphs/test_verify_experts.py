"""verify_model accepts mixtures of experts, and says what is wrong with a broken one."""

import copy

import onnx
import pytest
from families import shared_checkpoint, shared_model

from ortolan.errors import ContractMismatchError
from ortolan.graphs import verify_model
from ortolan.manifest import FUSED_FILE, MODEL_FILE

HIDDEN, EXPERTS = 48, 6


@pytest.fixture(scope="module", params=[MODEL_FILE, FUSED_FILE])
def graph(request):
    folder = shared_model(shared_checkpoint("qwen3_moe", seed=5), max_context=512, chunk_size=16)
    return onnx.load(folder / request.param, load_external_data=False)


def find(model, ending):
    return next(node for node in model.graph.node if node.name.endswith(ending))


def weight(model, ending):
    return next(t for t in model.graph.initializer if t.name.endswith(ending))


def narrow_down(model):
    weight(model, "0.mlp.experts.down").dims[2] -= 1


def odd_gate_up(model):
    weight(model, "0.mlp.experts.gate_up").dims[1] -= 1


def gate_up_of_a_norm(model):
    find(model, "0/mlp/MoeExperts").input[3] = "layers.0.mlp_norm.weight"


def experts_of_another_gate(model):
    find(model, "2/mlp/MoeExperts").input[1] = find(model, "0/mlp/MoeGate").output[0]


def fewer_routed(model):
    weight(model, "0.mlp.router.weight").dims[0] -= 1


def take_more_than_there_are(model):
    gate = find(model, "0/mlp/MoeGate")
    next(a for a in gate.attribute if a.name == "top_k").i = EXPERTS + 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (narrow_down, rf"rule 9.*0.mlp.experts.down' must be a weight \[6, {HIDDEN}, 40\]; it is \[6, {HIDDEN}, 39\]"),
        (odd_gate_up, rf"rule 9.*gate_up' must be a weight \[E, 2 \* I, H\]; it is \[6, 79, {HIDDEN}\]"),
        (gate_up_of_a_norm, r"rule 1.*'gate_up' has rank 1"),
        (experts_of_another_gate, "rule 9.*2/mlp/MoeExperts.* must be the outputs of one MoeGate"),
        (fewer_routed, "rule 9.*0/mlp/MoeGate.*router.weight' has 5 rows, and .* has 6 experts"),
        (take_more_than_there_are, "rule 9.*top_k is 7; it must be between 1 and the 6 experts"),
    ],
)
def test_what_does_not_fit_is_refused(graph, break_it, message):
    verify_model(graph)
    broken = copy.deepcopy(graph)
    break_it(broken)
    with pytest.raises(ContractMismatchError, match=message):
        verify_model(broken)
