// Reads the tensors of a weight of few bits, or of a stack of such weights, checked.
#pragma once

#include "context.h"
#include "kernels/low_bit_params.h"

namespace ortolan {

// Where a weight's tensors are among an operator's inputs.
struct WeightPorts {
  size_t codes, scales, zero_points, scale_codes, float_scales;
};

struct WeightOptions {
  LowBitFormat format;
  int64_t group_size;  // the attribute; 0 means a row
  int64_t scale_rows;
  const char* columns_symbol;  // the contract's, for messages
};

// The weight, or the first of the stack; `stack` holds the dimensions before those of a weight. -1 rows are
// any number.
LowBitWeight read_low_bit_weight(const Context& context, const WeightPorts& ports,
                                 const WeightOptions& options, const std::vector<int64_t>& stack,
                                 int64_t rows, int64_t columns);

}  // namespace ortolan
