// Reads one call's tensors into the parameters of the kernels of low-bit weights, checked.
#include "call.h"
#include "low_bit_weight.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

using Op = ops::LowBitLinear;

constexpr WeightPorts kPorts{Op::In::kCodes, Op::In::kScales, Op::In::kZeroPoints, Op::In::kScaleCodes,
                             Op::In::kFloatScales};

void read_inputs(const Call<Op>& call, LowBitLinearParams& params) {
  params.input_format = call.attributes().input_format;
  params.input_scale = call.attributes().input_scale;
  const bool rounded = params.input_format == InputFormat::kFp8;
  if (rounded && params.weight.format != LowBitFormat::kFp8)
    call.node().fail("attribute input_format = 'fp8' needs a weight of format 'fp8'");
  if (!rounded && params.input_scale != 0)
    call.node().fail("attribute input_scale is given; it needs input_format = 'fp8'");
}

// The one output that the node asks for: y in the element type, or y_float32.
void read_output(const Call<Op>& call, LowBitLinearParams& params) {
  const std::vector<int64_t> shape{params.num_tokens, params.num_outputs};
  const Tensor rounded = call.output(Op::Out::kY, shape), exact = call.output(Op::Out::kYFloat32, shape);
  if (rounded.present == exact.present)
    call.node().fail(
        std::string("exactly one of the outputs 'y' and 'y_float32' must be requested; the node requests ") +
        (rounded.present ? "both" : "neither"));
  params.output_float32 = exact.present;
  params.output = exact.present ? exact.data : rounded.data;
}

}  // namespace

LowBitLinearParams read_params(const Call<Op>& call) {
  const Tensor input = call.input(Op::In::kX, {-1, -1});
  LowBitLinearParams params{};
  params.element = call.node().element;
  params.num_tokens = input.dim(0);
  params.num_inputs = input.dim(1);
  params.input = input.data;
  const auto& options = call.attributes();
  params.weight = read_low_bit_weight(
      call, kPorts, {options.format, options.group_size, options.scale_rows, "I"}, {}, -1, params.num_inputs);
  params.activation = call.attributes().activation;
  const bool gated = params.activation != GatedActivation::kNone;
  const int64_t rows = params.weight.rows;
  if (gated && rows % 2 != 0)
    call.bad_shape(Op::In::kCodes, call.input(Op::In::kCodes),
                   "with an even number of rows: the gate's, then the factor's");
  params.num_outputs = gated ? rows / 2 : rows;
  read_inputs(call, params);
  params.epsilon = call.attributes().epsilon;
  params.norm_weight = call.input(Op::In::kNormWeight, {params.num_inputs}).data;
  params.bias = call.input(Op::In::kBias, {rows}).data;
  params.residual = call.input(Op::In::kResidual, {params.num_tokens, params.num_outputs}).data;
  read_output(call, params);
  return params;
}

}  // namespace ortolan
