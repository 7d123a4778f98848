// Reads one call's tensors into the parameters of the kernels of mixtures of experts, checked.
#include "call.h"
#include "low_bit_weight.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Experts are read where they lie in host memory; on CUDA the kernels pass over those that do not exist.
void check_experts(const Context& context, const ExpertStep& step) {
  if (!context.values_readable()) return;
  for (int64_t i = 0; i < step.num_tokens * step.top_k; ++i)
    if (step.experts[i] < 0 || step.experts[i] >= step.num_experts)
      context.node().fail("input 'experts' holds " + number(step.experts[i]) + " for token " +
                          number(i / step.top_k) +
                          "; it must be between 0 and E - 1 = " + number(step.num_experts - 1));
}

// What all mixtures read alike, with the sizes of the weights known.
template <typename Op>
void read_step(const Call<Op>& call, ExpertStep& step, int64_t num_experts, int64_t inner_size) {
  using In = typename Op::In;
  const Tensor x = call.input(In::kX, {-1, -1});
  const Tensor experts = call.input(In::kExperts, {x.dim(0), -1});
  step.element = call.node().element;
  step.num_tokens = x.dim(0);
  step.hidden_size = x.dim(1);
  step.top_k = experts.dim(1);
  step.num_experts = num_experts;
  step.inner_size = inner_size;
  step.activation = call.attributes().activation;
  step.limit = call.attributes().limit;
  step.alpha = call.attributes().alpha;
  step.x = x.data;
  step.experts = experts.template as<int32_t>();
  step.weights = call.input(In::kWeights, {x.dim(0), experts.dim(1)}).template as<float>();
  step.gate_up_bias = call.input(In::kGateUpBias, {num_experts, 2 * inner_size}).data;
  step.down_bias = call.input(In::kDownBias, {num_experts, x.dim(1)}).data;
  step.residual = call.input(In::kResidual, {x.dim(0), x.dim(1)}).data;
  check_experts(call, step);
  step.y = call.output(Op::Out::kY, x.shape).data;
}

// Half the rows of the first weight.
int64_t half_rows(const Context& context, size_t port, const Tensor& weight) {
  if (weight.dim(1) % 2 != 0)
    context.bad_shape(port, weight, "with an even number of rows: the gate's, then the factor's");
  return weight.dim(1) / 2;
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
  const int64_t hidden = call.input(Op::In::kX, {-1, -1}).dim(1);
  const Tensor gate_up = call.input(Op::In::kGateUp, {-1, -1, hidden});
  const int64_t inner = half_rows(call, Op::In::kGateUp, gate_up);
  MoeExpertsParams params{};
  params.gate_up = gate_up.data;
  params.down = call.input(Op::In::kDown, {gate_up.dim(0), hidden, inner}).data;
  read_step(call, params, gate_up.dim(0), inner);
  return params;
}

LowBitExpertsParams read_params(const Call<ops::LowBitExperts>& call) {
  using In = ops::LowBitExperts::In;
  const auto& options = call.attributes();
  const int64_t hidden = call.input(In::kX, {-1, -1}).dim(1);
  const Tensor codes = call.input(In::kGateUpCodes, {-1, -1, -1});
  const int64_t experts = codes.dim(0), inner = half_rows(call, In::kGateUpCodes, codes);
  const auto stack = [&](const WeightPorts& ports, const char* symbol, int64_t rows, int64_t columns) {
    return StackedWeight::of_first(
        read_low_bit_weight(call, ports, {options.format, options.group_size, options.scale_rows, symbol},
                            {experts}, rows, columns),
        call.node().element);
  };
  LowBitExpertsParams params{};
  params.gate_up = stack({In::kGateUpCodes, In::kGateUpScales, In::kGateUpZeroPoints, In::kGateUpScaleCodes,
                          In::kGateUpFloatScales},
                         "H", 2 * inner, hidden);
  params.down =
      stack({In::kDownCodes, In::kDownScales, In::kDownZeroPoints, In::kDownScaleCodes, In::kDownFloatScales},
            "I", hidden, inner);
  read_step(call, params, experts, inner);
  return params;
}

}  // namespace ortolan
