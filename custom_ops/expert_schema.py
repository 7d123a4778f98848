"""The operators of mixtures of experts, as `ortolan.custom_ops.schema` lists them."""

from __future__ import annotations

from ortolan.custom_ops.schema_parts import ELEMENT, FLOAT, INT32, Attribute, Operator, Port

MOE_EXPERTS = Operator(
    name="MoeExperts",
    doc="The gated MLPs of each token's experts: y = residual + the sum over k, in order, of weights[t, k] * "
    "(down @ h + down_bias), with h = act(gate_up @ x + gate_up_bias) of expert experts[t, k]. Sums are float32; h "
    "and y are rounded to T1. The first I rows of an expert's gate_up are the gate, the last I the factor: "
    "act(gate) * factor. clamped_silu_mul: with gate = min(gate, limit) and factor between -limit and limit, "
    "gate * sigmoid(alpha * gate) * (factor + 1). Deterministic. A token's result does not depend on the other "
    "tokens, as long as one kernel family serves the step: on CUDA, steps of up to 8 (or E / 8) pairs of token "
    "and expert have one, larger ones of 16-bit elements another, which rounds each expert's down @ h + down_bias to "
    "T1. An expert outside 0 .. E - 1 is refused on the CPU; on CUDA it adds nothing.",
    inputs=(
        Port(name="x", shape="[T, H]", type=ELEMENT, doc="Rows of H features."),
        Port(name="experts", shape="[T, K]", type=INT32, doc="Experts of each token."),
        Port(name="weights", shape="[T, K]", type=FLOAT, doc="Their weights."),
        Port(name="gate_up", shape="[E, 2 * I, H]", type=ELEMENT, doc="First weight of each expert."),
        Port(name="down", shape="[E, H, I]", type=ELEMENT, doc="Second weight of each expert."),
        Port(
            name="gate_up_bias",
            shape="[E, 2 * I]",
            type=ELEMENT,
            doc="Added to the first product.",
            optional=True,
        ),
        Port(name="down_bias", shape="[E, H]", type=ELEMENT, doc="Added to the second product.", optional=True),
        Port(name="residual", shape="[T, H]", type=ELEMENT, doc="Added to the sum.", optional=True),
    ),
    outputs=(Port(name="y", shape="[T, H]", type=ELEMENT, doc="The result.", spends=7),),
    attributes=(
        Attribute(
            name="activation",
            default="silu_mul",
            choices=("silu_mul", "gelu_mul", "gelu_tanh_mul", "clamped_silu_mul"),
            enumeration="GatedActivation",
            allowed='"silu_mul", "gelu_mul" (erf), "gelu_tanh_mul" or "clamped_silu_mul"',
            doc="Gated activation.",
        ),
        Attribute(
            name="limit", default=7.0, least=0, allowed="0 or more", doc="Of clamped_silu_mul: bounds its inputs."
        ),
        Attribute(name="alpha", default=1.702, allowed="any finite number", doc="Of clamped_silu_mul: in its sigmoid."),
    ),
    workspace=True,
    params_header="expert_params.h",
)

EXPERT_OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="MoeGate",
        doc="Chooses the experts of each token, best first: the K largest logits; of equals, the lower expert. With a "
        "selection_bias, the K largest sums of score and bias. A weight is the chosen expert's score (softmax over all "
        "experts, or sigmoid), divided by the sum of the chosen scores if asked for (a sum of 0 gives weights of 0), "
        "times scale, times expert_scale. All in float32. Where a logit is NaN, the weights of softmax are NaN, and "
        "which experts are chosen is open; they are K different ones all the same.",
        inputs=(
            Port(name="router_logits", shape="[T, E]", type=ELEMENT, doc="A logit per token and expert."),
            Port(
                name="selection_bias",
                shape="[E]",
                type=FLOAT,
                doc="Added to the scores by which experts are chosen, not to the weights.",
                optional=True,
            ),
            Port(name="expert_scale", shape="[E]", type=FLOAT, doc="Factor of each expert's weight.", optional=True),
        ),
        outputs=(
            Port(name="experts", shape="[T, K]", type=INT32, doc="The chosen experts."),
            Port(name="weights", shape="[T, K]", type=FLOAT, doc="Their weights."),
        ),
        attributes=(
            Attribute(
                name="top_k", symbol="K", default=1, least=1, allowed="1 to E", doc="K: experts that a token takes."
            ),
            Attribute(
                name="scoring",
                default="softmax",
                choices=("softmax", "sigmoid"),
                enumeration="GateScoring",
                allowed='"softmax" or "sigmoid"',
                doc="How logits become scores.",
            ),
            Attribute(
                name="normalise",
                default=0,
                least=0,
                most=1,
                allowed="0 or 1",
                doc="1: the chosen scores are divided by their sum.",
            ),
            Attribute(name="scale", default=1.0, allowed="any finite number", doc="Factor of all weights."),
        ),
        params_header="expert_params.h",
    ),
    MOE_EXPERTS,
)
