// Reductions and scans over the lanes of a warp. The order of steps fixes the bits of a float's result.
#pragma once

#include <cstdint>

namespace ortolan::cuda {

// Folds each of some values over the lanes that differ in the bits kFirst .. kLast of their number, in this
// order of bits, into each of them. The values' exchanges are under way together. `lanes`: those that take
// part.
template <int kFirst, int kLast, typename Value, int kCount, typename Operation>
__device__ __forceinline__ void fold_lanes(Value (&values)[kCount], Operation operation,
                                           unsigned lanes = ~0u) {
  constexpr bool kRises = kFirst <= kLast;
#pragma unroll
  for (int step = kFirst; kRises ? step <= kLast : step >= kLast; step = kRises ? step * 2 : step / 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      values[i] = operation(values[i], __shfl_xor_sync(lanes, values[i], step));
}
template <int kFirst, int kLast, typename Value, typename Operation>
__device__ __forceinline__ Value fold_lanes(Value value, Operation operation, unsigned lanes = ~0u) {
  Value values[1] = {value};
  fold_lanes<kFirst, kLast>(values, operation, lanes);
  return values[0];
}

struct Add {
  template <typename Value>
  __device__ __forceinline__ Value operator()(Value a, Value b) const {
    return a + b;
  }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) { return fold_lanes<16, 1>(value, Add()); }

// Sum and maximum over the four lanes that share a row of a matrix product, in each of them.
__device__ __forceinline__ float quad_sum(float value) { return fold_lanes<1, 2>(value, Add()); }
__device__ __forceinline__ float quad_max(float value) { return fold_lanes<1, 2>(value, Max()); }

// Reduces two values over the lanes that share lane % 4; lanes with bit 2 clear end with the first.
template <typename Operation>
__device__ __forceinline__ float fold_pair(float first, float second, Operation operation, int lane) {
  const bool is_second = lane & 4;
  float value = operation(is_second ? second : first, __shfl_xor_sync(~0u, is_second ? first : second, 4));
  return fold_lanes<8, 16>(value, operation);
}

// The sum over this lane and those before it.
template <typename Value>
__device__ __forceinline__ Value inclusive_sum(Value value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Value other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// A thread has one column of four rows, and its three neighbours have the next ones: leaves it four columns
// of row lane % 4. Vector: float4 or uint4.
template <typename Vector>
__device__ __forceinline__ Vector transpose_quad(const Vector& column) {
  const int lane = threadIdx.x;
  const bool odd = lane & 1, high = lane & 2;
  const auto even_row = __shfl_xor_sync(~0u, odd ? column.x : column.y, 1);
  const auto odd_row = __shfl_xor_sync(~0u, odd ? column.z : column.w, 1);
  // Rows lane % 2 and + 2, of columns lane / 2 % 2 * 2 and + 1.
  const auto first = odd ? even_row : column.x, first_next = odd ? column.y : even_row;
  const auto second = odd ? odd_row : column.z, second_next = odd ? column.w : odd_row;
  const auto other = __shfl_xor_sync(~0u, high ? first : second, 2);
  const auto other_next = __shfl_xor_sync(~0u, high ? first_next : second_next, 2);
  return high ? Vector{other, other_next, second, second_next} : Vector{first, first_next, other, other_next};
}

}  // namespace ortolan::cuda
