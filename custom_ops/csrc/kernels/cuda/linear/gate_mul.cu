// GateMul: a warp per token and piece of its row, which with a norm is what it normalises.
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// The logistic function of z; results of 16 bits are rounded far more than the fast instructions err.
template <typename Element>
__device__ __forceinline__ float sigmoid(float z) {
  if constexpr (sizeof(Element) == 2) return __fdividef(1.0f, 1.0f + __expf(-z));
  return 1.0f / (1.0f + expf(-z));
}

template <typename Element>
__device__ __forceinline__ float open_gate(GateActivation activation, float z) {
  switch (activation) {
    case GateActivation::kSilu:
      return z * sigmoid<Element>(z);
    case GateActivation::kSigmoid:
      return sigmoid<Element>(z);
    case GateActivation::kSoftplus:
      return z > 20.0f ? z : log1pf(expf(z));
    case GateActivation::kGelu:
      return 0.5f * z * (1.0f + erff(z * 0.70710678118654752f));
    case GateActivation::kGeluTanh:  // (1 + tanh(u)) / 2 = sigmoid(2 u)
      return z * sigmoid<Element>(1.5957691216057308f * (z + 0.044715f * z * z * z));
  }
  return z;
}

// Consecutive columns, moved at once.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Columns {
  Element values[kCount];
};

// kCount: columns of a lane at a time. `piece`: columns of a warp.
template <typename Element, int kCount>
__global__ void __launch_bounds__(kThreads)
    gate_mul_kernel(const __grid_constant__ GateMulParams p, int piece, int pieces) {
  using Vector = Columns<Element, kCount>;
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, token = unit / pieces;
  if (token >= p.num_tokens) return;
  const int first = static_cast<int>(unit % pieces) * piece, size = static_cast<int>(p.size);
  const int end = min(first + piece, size), share = static_cast<int>(p.gate_columns);
  const int begin = first + static_cast<int>(threadIdx.x) % 32 * kCount;
  const auto* x = static_cast<const Element*>(p.x) + token * p.x_stride;
  const auto* gate = static_cast<const Element*>(p.gate) + token * p.gate_stride;
  const auto* norm = static_cast<const Element*>(p.norm_weight);
  const auto* residual = static_cast<const Element*>(p.residual);
  const auto load = [](const Element* from) { return *reinterpret_cast<const Vector*>(from); };
  float factor = 1.0f;
  if (norm) {
    float squares = 0;
    for (int column = begin; column < end; column += 32 * kCount) {
      const Vector values = load(x + column);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const float value = to_float(values.values[n]);
        squares = fmaf(value, value, squares);
      }
    }
    factor = rsqrtf(warp_sum(squares) / static_cast<float>(piece) + p.epsilon);
  }
  for (int column = begin; column < end; column += 32 * kCount) {
    const Vector values = load(x + column);
    Vector gates{}, weights{}, added{}, result;
    if (share == 1) gates = load(gate + column);
    if (norm) weights = load(norm + column - first);
    if (residual) added = load(residual + token * size + column);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const Element own = share == 1 ? gates.values[n] : gate[(column + n) / share];
      float value = to_float(values.values[n]);
      if (norm) value *= factor * to_float(weights.values[n]);
      value *= open_gate<Element>(p.activation, to_float(own));
      if (residual) value += to_float(added.values[n]);
      result.values[n] = Element(value);
    }
    *reinterpret_cast<Vector*>(static_cast<Element*>(p.y) + token * size + column) = result;
  }
}

template <typename Element, int kCount>
cudaError_t launch_gate_mul(const GateMulParams& p, const Launch& launch) {
  const int piece = p.norm_weight ? static_cast<int>(p.norm_size) : 32 * kCount;
  const int64_t pieces = divide_up(p.size, piece);
  const dim3 blocks(static_cast<unsigned>(divide_up(p.num_tokens * pieces, kWarps)));
  return launch_overlapped(gate_mul_kernel<Element, kCount>, blocks, dim3(kThreads), 0, launch, p, piece,
                           static_cast<int>(pieces));
}

template <typename Element>
cudaError_t launch_gate_mul_of(const GateMulParams& p, const Launch& launch) {
  constexpr int kCount = 8 / sizeof(Element);
  const bool whole_gates = p.gate_columns > 1 || p.gate_stride % kCount == 0;
  const bool whole =
      p.size % kCount == 0 && p.x_stride % kCount == 0 && whole_gates && p.norm_size % kCount == 0 &&
      vector_bytes(8, {p.x, p.gate_columns > 1 ? p.x : p.gate, p.norm_weight, p.residual, p.y}) == 8;
  return whole ? launch_gate_mul<Element, kCount>(p, launch) : launch_gate_mul<Element, 1>(p, launch);
}

}  // namespace

cudaError_t gate_mul(const GateMulParams& p, const Launch& launch) {
  if (p.num_tokens == 0) return cudaSuccess;
  return with_element(p.element, [&]<typename Element>() { return launch_gate_mul_of<Element>(p, launch); });
}

}  // namespace ortolan::cuda
