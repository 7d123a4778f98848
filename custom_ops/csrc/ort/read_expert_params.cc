// Reads one call's tensors into the parameters of the kernels of mixtures of experts, checked.
#include "call.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Experts are read where they lie in host memory; on CUDA the kernels pass over those that do not exist.
void check_experts(const Context& context, const MoeExpertsParams& params) {
  if (!context.values_readable()) return;
  for (int64_t i = 0; i < params.num_tokens * params.top_k; ++i)
    if (params.experts[i] < 0 || params.experts[i] >= params.num_experts)
      context.node().fail("input 'experts' holds " + number(params.experts[i]) + " for token " +
                          number(i / params.top_k) +
                          "; it must be between 0 and E - 1 = " + number(params.num_experts - 1));
}

}  // namespace

MoeGateParams read_params(const Call<ops::MoeGate>& call) {
  using Op = ops::MoeGate;
  const Tensor logits = call.input(Op::In::kRouterLogits, {-1, -1});
  MoeGateParams params{};
  params.element = call.node().element;
  params.num_tokens = logits.dim(0);
  params.num_experts = logits.dim(1);
  params.top_k = call.attributes().top_k;
  if (params.top_k > params.num_experts)
    call.node().fail("attribute top_k K = " + number(params.top_k) +
                     " must be at most E = " + number(params.num_experts));
  params.scoring = call.attributes().scoring;
  params.normalise = call.attributes().normalise != 0;
  params.scale = call.attributes().scale;
  params.router_logits = logits.data;
  params.selection_bias = call.input(Op::In::kSelectionBias, {params.num_experts}).as<float>();
  params.expert_scale = call.input(Op::In::kExpertScale, {params.num_experts}).as<float>();
  params.experts = call.output(Op::Out::kExperts, {params.num_tokens, params.top_k}).as<int32_t>();
  params.weights = call.output(Op::Out::kWeights, {params.num_tokens, params.top_k}).as<float>();
  return params;
}

MoeExpertsParams read_params(const Call<ops::MoeExperts>& call) {
  using Op = ops::MoeExperts;
  const Tensor x = call.input(Op::In::kX, {-1, -1});
  const Tensor experts = call.input(Op::In::kExperts, {x.dim(0), -1});
  const Tensor gate_up = call.input(Op::In::kGateUp, {-1, -1, x.dim(1)});
  if (gate_up.dim(1) % 2 != 0)
    call.bad_shape(Op::In::kGateUp, gate_up, "with an even number of rows: the gate's, then the factor's");
  MoeExpertsParams params{};
  params.element = call.node().element;
  params.num_tokens = x.dim(0);
  params.hidden_size = x.dim(1);
  params.top_k = experts.dim(1);
  params.num_experts = gate_up.dim(0);
  params.inner_size = gate_up.dim(1) / 2;
  params.activation = call.attributes().activation;
  params.limit = call.attributes().limit;
  params.alpha = call.attributes().alpha;
  params.x = x.data;
  params.experts = experts.as<int32_t>();
  params.weights = call.input(Op::In::kWeights, {x.dim(0), experts.dim(1)}).as<float>();
  params.gate_up = gate_up.data;
  params.down = call.input(Op::In::kDown, {gate_up.dim(0), x.dim(1), params.inner_size}).data;
  params.gate_up_bias = call.input(Op::In::kGateUpBias, {gate_up.dim(0), gate_up.dim(1)}).data;
  params.down_bias = call.input(Op::In::kDownBias, {gate_up.dim(0), x.dim(1)}).data;
  params.residual = call.input(Op::In::kResidual, {x.dim(0), x.dim(1)}).data;
  check_experts(call, params);
  params.y = call.output(Op::Out::kY, x.shape).data;
  return params;
}

}  // namespace ortolan
