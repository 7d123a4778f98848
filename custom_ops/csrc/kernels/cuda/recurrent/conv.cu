// CausalConv on CUDA: sums of a feature's last inputs in float32, and the ring of inputs.
//
// Layout: a thread owns four features (one where rows are not whole vectors) of a few consecutive packed
// rows, and keeps their last inputs in registers. Grid: x walks features, y groups of rows. A row's sum adds
// its taps in one order, whatever thread it is in. Tokens of a step that fits the ring go to rows that no
// history is read from, so their threads write them; of longer steps a second launch writes the last ones.
// Safety: rows outside the packing, negative positions and slots outside the buffer are passed over.
// Overlap: weights and bias, which no kernel writes, are read before the kernel in front has ended.
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/packed_rows.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kGroupRows = 16;

__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// The fast instructions are exact enough for elements of 16 bits; the others, not the bus, would set the
// time.
template <typename Element>
__device__ __forceinline__ float silu(float x) {
  if constexpr (sizeof(Element) == 2) return __fdividef(x, 1.0f + __expf(-x));
  return x / (1.0f + expf(-x));
}

// Consecutive features of a row, moved at once.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Features {
  Element values[kCount];
};

// Where a packed row belongs.
struct RowPlace {
  int64_t token = -1;  // in its sequence; negative: nowhere
  int64_t count = 0;
  int64_t position = 0;
  int64_t slot = 0;
};
__device__ RowPlace place_of(const CausalConvParams& p, int64_t row) {
  RowPlace place;
  const int64_t sequence = sequence_of(p.packing, row);
  if (sequence < 0) return place;
  place.slot = p.slots.at(sequence);
  const int64_t past = p.past_len[sequence];
  if (past < 0 || place.slot < 0 || place.slot >= p.slots.num_rows) return place;
  place.token = row - p.packing.first(sequence);
  place.count = p.packing.count(sequence);
  place.position = past + place.token;
  return place;
}

// kWindow: taps that are computed with, K or more; the oldest ones' weights are 0.
template <typename Element, int kCount, int kWindow>
class ConvColumn {
 public:
  using Vector = Features<Element, kCount>;

  __device__ ConvColumn(const CausalConvParams& p, int64_t column) : p_(p), first_(column * kCount) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bias_[i] = p.bias ? to_float(static_cast<const Element*>(p.bias)[first_ + i]) : 0.0f;
#pragma unroll
      for (int k = 0; k < kWindow; ++k) {
        const int64_t tap = k - (kWindow - p.num_taps);
        taps_[k][i] =
            tap < 0 ? 0.0f : to_float(static_cast<const Element*>(p.weight)[(first_ + i) * p.num_taps + tap]);
      }
    }
  }

  __device__ __forceinline__ void run(int64_t first_row, int64_t end_row) {
    RowPlace place;
    for (int64_t first = first_row; first < end_row; first += kBatch) {
      Vector loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < end_row) loaded[i] = input_row(first + i);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < end_row) read_row(place, first + i, loaded[i]);
    }
  }

 private:
  static constexpr int kBatch = 4;  // rows whose loads are under way together

  __device__ __forceinline__ void read_row(RowPlace& place, int64_t row, const Vector& loaded) {
    const bool continues = place.token >= 0 && place.token + 1 < place.count;
    if (continues) {
      ++place.token;
      ++place.position;
    } else {
      place = place_of(p_, row);
      if (place.token >= 0) load_history(place, row);
    }
    if (place.token >= 0) convolve(place, row, loaded);
  }

  __device__ __forceinline__ const Vector& input_row(int64_t row) const {
    return *reinterpret_cast<const Vector*>(static_cast<const Element*>(p_.x) + row * p_.num_features +
                                            first_);
  }
  __device__ __forceinline__ Vector& ring_row(const RowPlace& place, int64_t position) const {
    const int64_t row = place.slot * p_.ring_rows + position % p_.ring_rows;
    return *reinterpret_cast<Vector*>(static_cast<Element*>(p_.conv_state) + row * p_.num_features + first_);
  }

  __device__ __forceinline__ void load_history(const RowPlace& place, int64_t row) {
#pragma unroll
    for (int k = 1; k < kWindow; ++k) {
      const int64_t back = kWindow - k;  // inputs[k] moves to k - 1 before it is used
      const bool exists = place.position >= back && back < p_.num_taps;
      Vector loaded{};
      if (exists)
        loaded = place.token >= back ? input_row(row - back) : ring_row(place, place.position - back);
#pragma unroll
      for (int i = 0; i < kCount; ++i) inputs_[k][i] = exists ? to_float(loaded.values[i]) : 0.0f;
    }
  }

  __device__ __forceinline__ void convolve(const RowPlace& place, int64_t row, const Vector& loaded) {
    Vector result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float sum = bias_[i];
#pragma unroll
      for (int k = 0; k < kWindow; ++k) {
        inputs_[k][i] = k + 1 < kWindow ? inputs_[k + 1][i] : to_float(loaded.values[i]);
        sum = fmaf(taps_[k][i], inputs_[k][i], sum);
      }
      if (p_.activation == ConvActivation::kSilu) sum = silu<Element>(sum);
      from_float(sum, result.values[i]);
    }
    *reinterpret_cast<Vector*>(static_cast<Element*>(p_.y) + row * p_.num_features + first_) = result;
    if (place.count <= p_.ring_rows - p_.num_taps + 1) ring_row(place, place.position) = loaded;
  }

  const CausalConvParams& p_;
  int64_t first_;
  float bias_[kCount];
  float taps_[kWindow][kCount];
  float inputs_[kWindow][kCount];
};

template <typename Element, int kCount, int kWindow>
__global__ void __launch_bounds__(kThreads)
    convolve_rows(const CausalConvParams p, int64_t columns, int group_rows) {
  launch_dependents();
  const int64_t column = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (column >= columns) return;
  ConvColumn<Element, kCount, kWindow> of_column(p, column);
  wait_for_previous_kernel();
  const int64_t first = blockIdx.y * static_cast<int64_t>(group_rows);
  const int64_t end = first + group_rows;
  of_column.run(first, end < p.packing.num_tokens ? end : p.packing.num_tokens);
}

// Block y: sequence and n-th input from its end.
template <typename Element>
__global__ void __launch_bounds__(kThreads) keep_last_rows(const CausalConvParams p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t feature = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t sequence = blockIdx.y, back = blockIdx.z;
  const int64_t count = p.packing.count(sequence), first = p.packing.first(sequence);
  const bool written = count <= p.ring_rows - p.num_taps + 1 || back >= count;
  if (feature >= p.num_features || written || first < 0 || first + count > p.packing.num_tokens) return;
  const RowPlace place = place_of(p, first + count - 1 - back);
  if (place.token < 0) return;
  const int64_t row = place.slot * p.ring_rows + place.position % p.ring_rows;
  static_cast<Element*>(p.conv_state)[row * p.num_features + feature] =
      static_cast<const Element*>(p.x)[(first + place.token) * p.num_features + feature];
}

template <typename Element, int kCount>
cudaError_t launch_conv(const CausalConvParams& p, const Launch& launch) {
  const int64_t columns = p.num_features / kCount, tokens = p.packing.num_tokens;
  const int64_t column_blocks = divide_up(columns, kThreads);
  const bool few = tokens * column_blocks < 8 * launch.device.num_multiprocessors;
  const int group_rows = few ? 1 : kGroupRows;
  const dim3 grid(static_cast<unsigned>(column_blocks), static_cast<unsigned>(divide_up(tokens, group_rows)));
  const auto kernel =
      p.num_taps <= 4 ? convolve_rows<Element, kCount, 4> : convolve_rows<Element, kCount, kMaxConvTaps>;
  return launch_overlapped(kernel, grid, dim3(kThreads), 0, launch, p, columns, group_rows);
}

template <typename Element>
cudaError_t launch_conv_of(const CausalConvParams& p, const Launch& launch) {
  constexpr int kCount = 4;
  const int64_t row_bytes = p.num_features * sizeof(Element);
  const int bytes = vector_bytes(row_bytes, {p.x, p.y, p.conv_state});
  const bool whole = bytes % (kCount * static_cast<int>(sizeof(Element))) == 0;
  const cudaError_t error =
      whole ? launch_conv<Element, kCount>(p, launch) : launch_conv<Element, 1>(p, launch);
  if (error != cudaSuccess || p.packing.num_tokens <= p.ring_rows - p.num_taps + 1) return error;
  const int64_t rows = p.packing.num_tokens < p.ring_rows ? p.packing.num_tokens : p.ring_rows;
  const dim3 grid(static_cast<unsigned>(divide_up(p.num_features, kThreads)),
                  static_cast<unsigned>(p.packing.num_sequences), static_cast<unsigned>(rows));
  return launch_overlapped(keep_last_rows<Element>, grid, dim3(kThreads), 0, launch, p);
}

}  // namespace

cudaError_t causal_conv(const CausalConvParams& p, const Launch& launch) {
  if (p.packing.num_tokens == 0 || p.packing.num_sequences == 0 || p.num_features == 0) return cudaSuccess;
  return with_element(p.element, [&]<typename Element>() { return launch_conv_of<Element>(p, launch); });
}

}  // namespace ortolan::cuda
