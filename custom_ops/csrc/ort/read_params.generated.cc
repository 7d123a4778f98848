// clang-format off
// Reads the calls of operators whose shapes say all that is to check; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`.
#include "call.h"
#include "operators.generated.h"

namespace ortolan {

RopeAnglesParams read_params(const Call<ops::RopeAngles>& call) {
  using Op = ops::RopeAngles;
  RopeAnglesParams params{};
  const Tensor positions_tensor = call.input(Op::In::kPositions, {-1});
  params.num_tokens = positions_tensor.dim(0);
  params.positions = positions_tensor.as<int64_t>();
  const Tensor inv_freq_tensor = call.input(Op::In::kInvFreq, {1, -1});
  params.rotary_pairs = inv_freq_tensor.dim(1);
  params.inv_freq = inv_freq_tensor.as<float>();
  params.factor = call.attributes().factor;
  params.cosine = call.output(Op::Out::kCosine, {1, params.num_tokens, params.rotary_pairs}).as<float>();
  params.sine = call.output(Op::Out::kSine, {1, params.num_tokens, params.rotary_pairs}).as<float>();
  return params;
}

GatherRowsParams read_params(const Call<ops::GatherRows>& call) {
  using Op = ops::GatherRows;
  GatherRowsParams params{};
  params.element = call.node().element;
  const Tensor rows_tensor = call.input(Op::In::kRows, {-1, -1});
  params.num_rows = rows_tensor.dim(0);
  params.row_size = rows_tensor.dim(1);
  params.rows = rows_tensor.data;
  const Tensor row_indices_tensor = call.input(Op::In::kRowIndices, {-1});
  params.num_indices = row_indices_tensor.dim(0);
  params.row_indices = row_indices_tensor.as<int64_t>();
  params.output = call.output(Op::Out::kOutput, {params.num_indices, params.row_size}).data;
  return params;
}

RmsNormAddParams read_params(const Call<ops::RmsNormAdd>& call) {
  using Op = ops::RmsNormAdd;
  RmsNormAddParams params{};
  params.element = call.node().element;
  const Tensor x_tensor = call.input(Op::In::kX, {-1, -1});
  params.num_tokens = x_tensor.dim(0);
  params.row_size = x_tensor.dim(1);
  params.x = x_tensor.data;
  const Tensor norm_weight_tensor = call.input(Op::In::kNormWeight, {params.row_size});
  params.norm_weight = norm_weight_tensor.data;
  const Tensor residual_tensor = call.input(Op::In::kResidual, {params.num_tokens, params.row_size});
  params.residual = residual_tensor.data;
  const Tensor scale_tensor = call.input(Op::In::kScale, {1});
  params.scale = scale_tensor.data;
  params.epsilon = call.attributes().epsilon;
  params.y = call.output(Op::Out::kY, {params.num_tokens, params.row_size}).data;
  return params;
}

}  // namespace ortolan
