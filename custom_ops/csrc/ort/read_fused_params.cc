// Reads one call's tensors into the parameters of the fused operators' kernels, checked.
#include <algorithm>

#include "call.h"
#include "checks.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// The one output that the node asks for: y in the element type, or y_float32.
void read_linear_output(const Call<ops::FusedLinear>& call, FusedLinearParams& params) {
  using Op = ops::FusedLinear;
  const std::vector<int64_t> shape{params.num_tokens, params.num_outputs};
  const Tensor rounded = call.output(Op::Out::kY, shape), exact = call.output(Op::Out::kYFloat32, shape);
  if (rounded.present == exact.present)
    call.node().fail(
        std::string("exactly one of the outputs 'y' and 'y_float32' must be requested; the node requests ") +
        (rounded.present ? "both" : "neither"));
  params.output_float32 = exact.present;
  params.output = exact.present ? exact.data : rounded.data;
}

// Sets where the factor of each row begins.
void read_factor(const Call<ops::FusedLinear>& call, const Tensor& factor, FusedLinearParams& params) {
  using Op = ops::FusedLinear;
  const int64_t offset = call.attributes().factor_offset;
  if (params.activation == GatedActivation::kNone || params.residual)
    call.node().fail("input 'factor' needs a gated activation, and no residual");
  if (factor.dim(0) != params.num_tokens || factor.dim(1) < offset + params.num_outputs)
    call.bad_shape(Op::In::kFactor, factor,
                   "of T = " + number(params.num_tokens) + " rows, with " + number(offset) + " + " +
                       number(params.num_outputs) + " columns or more");
  params.factor_stride = factor.dim(1);
  params.factor = factor.as<char>() + offset * static_cast<int64_t>(element_bytes(params.element));
}

// Where the last sequence may end: with its rows, behind which rows of nobody may follow, and where rows have
// positions, with those; 0 where that is not known here.
int64_t last_end(const Call<ops::NarrowStep>& call, const Tensor& positions) {
  const Tensor starts = call.input(ops::NarrowStep::In::kQueryStart, {-1});
  if (!call.values_readable() || starts.dim(0) < 1) return 0;
  const int64_t end = starts.as<int32_t>()[starts.dim(0) - 1];
  return positions.present ? std::min(end, positions.dim(0)) : end;
}

}  // namespace

FusedLinearParams read_params(const Call<ops::FusedLinear>& call) {
  using Op = ops::FusedLinear;
  const Tensor factor = call.input(Op::In::kFactor, {-1, -1});
  const bool gated = call.attributes().activation != GatedActivation::kNone;
  const bool two_part = gated && !factor.present;
  const Tensor input = call.input(Op::In::kX, {-1, -1});
  const Tensor weight = call.input(Op::In::kWeight, {-1, input.dim(1)});
  if (input.dim(1) == 0) call.bad_shape(Op::In::kX, input, "with at least one feature");
  if (two_part && weight.dim(0) % 2 != 0)
    call.bad_shape(Op::In::kWeight, weight, "with an even number of rows: the gate's, then the factor's");
  FusedLinearParams params{};
  params.element = call.node().element;
  params.num_tokens = input.dim(0);
  params.num_inputs = input.dim(1);
  params.num_outputs = two_part ? weight.dim(0) / 2 : weight.dim(0);
  params.input = input.data;
  params.weight = weight.data;
  params.norm_weight = call.input(Op::In::kNormWeight, {params.num_inputs}).data;
  params.epsilon = call.attributes().epsilon;
  params.bias = call.input(Op::In::kBias, {weight.dim(0)}).data;
  params.residual = call.input(Op::In::kResidual, {params.num_tokens, params.num_outputs}).data;
  params.activation = call.attributes().activation;
  if (factor.present) read_factor(call, factor, params);
  params.batch_invariant = call.attributes().batch_invariant != 0;
  read_linear_output(call, params);
  return params;
}

NarrowStepParams read_params(const Call<ops::NarrowStep>& call) {
  using Op = ops::NarrowStep;
  const Tensor past_len = call.input(Op::In::kPastLen), rows = call.input(Op::In::kRowIndices, {-1});
  const Tensor positions = call.input(Op::In::kPositions, {-1});
  const Packing packing = read_packing(call, Op::In::kQueryStart, last_end(call, positions));
  NarrowStepParams params{};
  params.num_sequences = packing.num_sequences;
  params.num_indices = rows.dim(0);
  const bool per_head = past_len.shape.size() == 2;
  params.lengths = per_head ? past_len.dim(1) : 1;
  params.query_start = packing.query_start;
  params.past_len =
      read_lengths(call, Op::In::kPastLen, params.num_sequences, per_head ? params.lengths : 0).values;
  params.row_indices = rows.as<int64_t>();
  params.query_start_out = call.output(Op::Out::kQueryStartOut, {packing.num_sequences + 1}).as<int32_t>();
  params.past_len_out = call.output(Op::Out::kPastLenOut, past_len.shape).as<int32_t>();
  const Tensor wanted = call.output(Op::Out::kPositionsOut, {params.num_indices});
  if (positions.present != wanted.present)
    call.node().fail("input 'positions' must be given exactly where output 'positions_out' is requested");
  if (!positions.present) return params;
  params.num_tokens = positions.dim(0);
  params.positions = positions.as<int64_t>();
  params.positions_out = wanted.as<int64_t>();
  return params;
}

}  // namespace ortolan
