// How the tokens of a call are cut so that scratch memory is bounded, and what a slice keeps between kernels.
#pragma once

#include <algorithm>

#include "instances.h"
#include "kernels/cuda/common/row_vectors.cuh"

namespace ortolan::cuda {

constexpr int64_t kSliceBytes = int64_t{384} << 20;  // of what the pairs of a slice keep

// Slices of about equal size: a small last one would read all weights for a few tokens.
struct ExpertSlices {
  int64_t tokens;  // of a slice
  int64_t inner_bytes, order_bytes, offset_bytes, product_bytes;

  // `keeps_products`: each pair's result waits to be added; pairs may be grouped by expert.
  static ExpertSlices of(const ExpertStep& p, bool keeps_products) {
    const int64_t inner = p.top_k * p.inner_size * element_bytes(p.element);
    const int64_t products = keeps_products ? p.top_k * p.hidden_size * element_bytes(p.element) : 0;
    const int64_t most = std::max<int64_t>(kSliceBytes / std::max<int64_t>(inner + products, 1), 1);
    const int64_t tokens = divide_up(p.num_tokens, divide_up(p.num_tokens, most));
    const int64_t order = keeps_products ? tokens * p.top_k * int64_t{sizeof(int32_t)} : 0;
    const int64_t offsets = keeps_products ? (p.num_experts + 1) * int64_t{sizeof(int32_t)} : 0;
    return {tokens, aligned_bytes(tokens * inner), aligned_bytes(order), aligned_bytes(offsets),
            aligned_bytes(tokens * products)};
  }

  int64_t bytes() const { return inner_bytes + order_bytes + offset_bytes + product_bytes; }

  ExpertScratch scratch(void* workspace) const {
    auto* inner = static_cast<char*>(workspace);
    char* order = inner + inner_bytes;
    char* offsets = order + order_bytes;
    return {inner, reinterpret_cast<int32_t*>(offsets), reinterpret_cast<int32_t*>(order),
            offsets + offset_bytes};
  }

  // Calls multiply(slice) for each slice.
  template <typename Params, typename Multiply>
  cudaError_t each(const Params& p, Multiply multiply) const {
    for (int64_t first = 0; first < p.num_tokens; first += tokens)
      if (const cudaError_t error = multiply(p.slice(first, std::min(tokens, p.num_tokens - first)));
          error != cudaSuccess)
        return error;
    return cudaSuccess;
  }
};

}  // namespace ortolan::cuda
