#include "low_bit_weight.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Columns that share a scale: the attribute, or all of a row.
int64_t read_group_size(const Context& context, const WeightOptions& options, int64_t columns) {
  const LowBitFormat format = options.format;
  const int64_t given = options.group_size;
  const int64_t fixed = format == LowBitFormat::kMxfp4 ? 32 : format == LowBitFormat::kNvfp4 ? 16 : 0;
  if (fixed && given != fixed)
    context.node().fail("attribute group_size = " + number(given) + " must be " + number(fixed) +
                        " in this format");
  const int64_t size = given ? given : columns;
  if (columns == 0 || columns % size != 0 || (code_bits(format) == 4 && size % 2 != 0))
    context.node().fail("attribute group_size = " + number(given) + " must be 0 or an even divisor of " +
                        options.columns_symbol + " = " + number(columns));
  return size;
}

// What a format needs is there, and nothing else is.
void check_port(const Context& context, size_t port, const Tensor& tensor, bool needed, bool allowed) {
  const std::string name = context.node().schema->inputs[port].name;
  if (needed && !tensor.present) context.node().fail("input '" + name + "' is missing; this format needs it");
  if (!allowed && tensor.present)
    context.node().fail("input '" + name + "' is given; this format does not have it");
}

// The tensor of one weight, or of a stack of them.
Tensor stacked(const Context& context, size_t port, const std::vector<int64_t>& stack, int64_t rows,
               int64_t columns) {
  std::vector<int64_t> dims = stack;
  dims.insert(dims.end(), {rows, columns});
  return context.input(port, std::span<const int64_t>(dims));
}

}  // namespace

LowBitWeight read_low_bit_weight(const Context& context, const WeightPorts& ports,
                                 const WeightOptions& options, const std::vector<int64_t>& stack,
                                 int64_t rows, int64_t columns) {
  LowBitWeight weight;
  weight.format = options.format;
  weight.columns = columns;
  weight.group_size = read_group_size(context, options, columns);
  weight.scale_rows = options.scale_rows;
  const bool integer = weight.format == LowBitFormat::kInt4 || weight.format == LowBitFormat::kInt8;
  const bool fp8 = weight.format == LowBitFormat::kFp8, nvfp4 = weight.format == LowBitFormat::kNvfp4;
  const int64_t groups = weight.groups(), bits = code_bits(weight.format);
  const Tensor codes = stacked(context, ports.codes, stack, rows, columns * bits / 8);
  weight.rows = codes.dim(stack.size());
  if (!fp8 && weight.scale_rows != 1)
    context.node().fail("attribute scale_rows = " + number(weight.scale_rows) + " must be 1 except in fp8");
  const int64_t blocks = (weight.rows + weight.scale_rows - 1) / weight.scale_rows;
  const Tensor scales = stacked(context, ports.scales, stack, weight.rows, groups);
  const Tensor zeros = stacked(context, ports.zero_points, stack, weight.rows, (groups * bits + 7) / 8);
  const Tensor scale_codes = stacked(context, ports.scale_codes, stack, weight.rows, groups);
  const Tensor floats = stacked(context, ports.float_scales, stack, blocks, nvfp4 ? 1 : groups);
  check_port(context, ports.scales, scales, integer, integer);
  check_port(context, ports.zero_points, zeros, false, integer);
  check_port(context, ports.scale_codes, scale_codes, !integer && !fp8, !integer && !fp8);
  check_port(context, ports.float_scales, floats, fp8 || nvfp4, fp8 || nvfp4);
  weight.codes = codes.as<uint8_t>();
  weight.scales = scales.data;
  weight.zero_points = zeros.as<uint8_t>();
  weight.scale_codes = scale_codes.as<uint8_t>();
  weight.float_scales = floats.as<float>();
  return weight;
}

}  // namespace ortolan
