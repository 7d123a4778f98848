// Reads one call's tensors into the parameters of the kernels of low-bit weights, checked.
#include <numeric>

#include "call.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

using Op = ops::LowBitLinear;

std::string number(int64_t value) { return std::to_string(value); }

// Columns that share a scale: the attribute, or all of a row.
int64_t read_group_size(const Call<Op>& call, LowBitFormat format, int64_t columns) {
  const int64_t given = call.attributes().group_size;
  const int64_t fixed = format == LowBitFormat::kMxfp4 ? 32 : format == LowBitFormat::kNvfp4 ? 16 : 0;
  if (fixed && given != fixed)
    call.node().fail("attribute group_size = " + number(given) + " must be " + number(fixed) +
                     " in this format");
  const int64_t size = given ? given : columns;
  if (columns == 0 || columns % size != 0 || (code_bits(format) == 4 && size % 2 != 0))
    call.node().fail("attribute group_size = " + number(given) +
                     " must be 0 or an even divisor of I = " + number(columns));
  return size;
}

// What a format needs is there, and nothing else is.
void check_port(const Call<Op>& call, const Tensor& tensor, const char* name, bool needed, bool allowed) {
  if (needed && !tensor.present)
    call.node().fail(std::string("input '") + name + "' is missing; this format needs it");
  if (!allowed && tensor.present)
    call.node().fail(std::string("input '") + name + "' is given; this format does not have it");
}

LowBitWeight read_weight(const Call<Op>& call, int64_t columns) {
  LowBitWeight weight;
  weight.format = call.attributes().format;
  weight.columns = columns;
  weight.group_size = read_group_size(call, weight.format, columns);
  weight.scale_rows = call.attributes().scale_rows;
  const bool integer = weight.format == LowBitFormat::kInt4 || weight.format == LowBitFormat::kInt8;
  const bool fp8 = weight.format == LowBitFormat::kFp8, nvfp4 = weight.format == LowBitFormat::kNvfp4;
  const int64_t groups = weight.groups(), bits = code_bits(weight.format);
  const Tensor codes = call.input(Op::In::kCodes, {-1, columns * bits / 8});
  weight.rows = codes.dim(0);
  if (!fp8 && weight.scale_rows != 1)
    call.node().fail("attribute scale_rows = " + number(weight.scale_rows) + " must be 1 except in fp8");
  const int64_t blocks = (weight.rows + weight.scale_rows - 1) / weight.scale_rows;
  const Tensor scales = call.input(Op::In::kScales, {weight.rows, groups});
  const Tensor zeros = call.input(Op::In::kZeroPoints, {weight.rows, (groups * bits + 7) / 8});
  const Tensor scale_codes = call.input(Op::In::kScaleCodes, {weight.rows, groups});
  const Tensor floats = call.input(Op::In::kFloatScales, {blocks, nvfp4 ? 1 : groups});
  check_port(call, scales, "scales", integer, integer);
  check_port(call, zeros, "zero_points", false, integer);
  check_port(call, scale_codes, "scale_codes", !integer && !fp8, !integer && !fp8);
  check_port(call, floats, "float_scales", fp8 || nvfp4, fp8 || nvfp4);
  weight.codes = codes.as<uint8_t>();
  weight.scales = scales.data;
  weight.zero_points = zeros.as<uint8_t>();
  weight.scale_codes = scale_codes.as<uint8_t>();
  weight.float_scales = floats.as<float>();
  return weight;
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
  params.weight = read_weight(call, params.num_inputs);
  params.activation = call.attributes().activation;
  const bool gated = params.activation != GatedActivation::kNone;
  const int64_t rows = params.weight.rows;
  if (gated && rows % 2 != 0)
    call.bad_shape(Op::In::kCodes, call.input(Op::In::kCodes),
                   "with an even number of rows: the gate's, then the factor's");
  params.num_outputs = gated ? rows / 2 : rows;
  params.epsilon = call.attributes().epsilon;
  params.norm_weight = call.input(Op::In::kNormWeight, {params.num_inputs}).data;
  params.bias = call.input(Op::In::kBias, {rows}).data;
  params.residual = call.input(Op::In::kResidual, {params.num_tokens, params.num_outputs}).data;
  read_output(call, params);
  return params;
}

}  // namespace ortolan
