// Reads one call's tensors into the parameters of the kernels of gates, checked.
#include "call.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Where `count` columns of the input's rows begin.
const void* columns(const Context& context, size_t index, const Tensor& rows, int64_t offset, int64_t count) {
  if (offset + count > rows.dim(1))
    context.bad_shape(index, rows, "with " + number(offset) + " + " + number(count) + " columns or more");
  if (rows.data == nullptr) return nullptr;
  return static_cast<const char*>(rows.data) +
         offset * static_cast<int64_t>(element_bytes(context.node().element));
}

}  // namespace

GateMulParams read_params(const Call<ops::GateMul>& call) {
  using Op = ops::GateMul;
  const auto& attributes = call.attributes();
  const Tensor x = call.input(Op::In::kX, {-1, -1});
  const Tensor gate = call.input(Op::In::kGate, {x.dim(0), -1});
  GateMulParams params{};
  params.element = call.node().element;
  params.num_tokens = x.dim(0);
  params.size = attributes.size;
  if (params.size < 1) call.node().fail("attribute size is 0; it must be the number of columns of y");
  const int64_t gates = attributes.gate_size == 0 ? params.size : attributes.gate_size;
  if (params.size % gates != 0)
    call.node().fail("attribute gate_size is " + number(gates) +
                     ", which does not divide size = " + number(params.size));
  params.x_stride = x.dim(1);
  params.gate_stride = gate.dim(1);
  params.gate_columns = params.size / gates;
  params.activation = attributes.activation;
  params.epsilon = attributes.epsilon;
  params.x = columns(call, Op::In::kX, x, attributes.x_offset, params.size);
  params.gate = columns(call, Op::In::kGate, gate, attributes.gate_offset, gates);
  const Tensor norm = call.input(Op::In::kNormWeight, {-1});
  if (norm.present && (norm.dim(0) < 1 || params.size % norm.dim(0) != 0))
    call.bad_shape(Op::In::kNormWeight, norm, "with N a divisor of size = " + number(params.size));
  params.norm_weight = norm.data;
  params.norm_size = norm.present ? norm.dim(0) : 0;
  params.residual = call.input(Op::In::kResidual, {params.num_tokens, params.size}).data;
  params.y = call.output(Op::Out::kY, {params.num_tokens, params.size}).data;
  return params;
}

DeltaGatesParams read_params(const Call<ops::DeltaGates>& call) {
  using Op = ops::DeltaGates;
  const auto& attributes = call.attributes();
  const Tensor decays = call.input(Op::In::kDecayRows, {-1, -1});
  const Tensor betas = call.input(Op::In::kBetaRows, {decays.dim(0), -1});
  const Tensor a_log = call.input(Op::In::kALog, {-1});
  DeltaGatesParams params{};
  params.element = call.node().element;
  params.num_tokens = decays.dim(0);
  params.num_heads = a_log.dim(0);
  params.decay_stride = decays.dim(1);
  params.beta_stride = betas.dim(1);
  params.beta_scale = attributes.beta_scale;
  params.decay_rows = columns(call, Op::In::kDecayRows, decays, attributes.decay_offset, params.num_heads);
  params.beta_rows = columns(call, Op::In::kBetaRows, betas, attributes.beta_offset, params.num_heads);
  params.a_log = a_log.data;
  params.dt_bias = call.input(Op::In::kDtBias, {params.num_heads}).data;
  params.decay = call.output(Op::Out::kDecay, {params.num_tokens, params.num_heads}).as<float>();
  params.beta = call.output(Op::Out::kBeta, {params.num_tokens, params.num_heads}).as<float>();
  return params;
}

}  // namespace ortolan
