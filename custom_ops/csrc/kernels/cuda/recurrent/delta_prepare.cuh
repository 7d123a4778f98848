// The first kernel of the gated delta rule by chunks: what does not depend on the state.
//
// Grid: one block per (value head, chunk number of the round). Four warps multiply keys by keys and four
// queries by keys. Then each thread solves the triangular system for one column of W or U by forward
// substitution in float32, its column in registers and the matrix in shared memory.
#pragma once

#include "delta_chunks.cuh"

namespace ortolan::cuda {

constexpr int kPrepareThreads = 256;
constexpr int kMatrixStride = kChunk + 4;  // floats; 16 bytes divide a row

template <typename Element, int kKeySize>
struct PrepareShared {
  Element keys[kChunk][kKeySize + kSharedPad];
  Element queries[kChunk][kKeySize + kSharedPad];
  float matrix[kChunk][kMatrixStride];
  float sums[kChunk];  // G
  float betas[kChunk];
  float key_factors[kChunk];
  float query_factors[kChunk];
};

template <typename Element, int kKeySize>
class ChunkPreparation {
 public:
  using Shared = PrepareShared<Element, kKeySize>;

  __device__ ChunkPreparation(const GatedDeltaRuleParams& p, const DeltaSequence& sequence, int64_t chunk,
                              const ChunkScratch<Element>& scratch, Shared& shared)
      : p_(p),
        scratch_(scratch),
        shared_(shared),
        head_(blockIdx.x),
        first_(sequence.first + chunk * kChunk),
        rows_(static_cast<int>(sequence.count - chunk * kChunk < kChunk ? sequence.count - chunk * kChunk
                                                                        : kChunk)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    const int64_t stride = p_.num_key_heads * kKeySize;
    const int64_t head = p_.key_head(head_);
    copy_rows_async(shared_.keys[0], kKeySize + kSharedPad, key_row<Element>(p_, p_.key, first_, head),
                    stride, kKeySize, rows_, kPrepareThreads);
    copy_rows_async(shared_.queries[0], kKeySize + kSharedPad, key_row<Element>(p_, p_.query, first_, head),
                    stride, kKeySize, rows_, kPrepareThreads);
    copy_async_commit();
    if (warp_ == 0) sum_decays();
    copy_async_wait<0>();
    __syncthreads();
    measure_rows();
    __syncthreads();
    write_scalars();
    warp_ < 4 ? multiply<false>(shared_.keys, warp_) : multiply<true>(shared_.queries, warp_ - 4);
    __syncthreads();
    for (int64_t column = threadIdx.x; column < kKeySize + p_.value_size; column += kPrepareThreads)
      column < kKeySize ? solve_key(static_cast<int>(column)) : solve_value(column - kKeySize);
  }

 private:
  __device__ __forceinline__ void sum_decays() {
    float low = 0, high = 0;
    const auto row = [&](int t) { return (first_ + t) * p_.num_value_heads + head_; };
    if (2 * lane_ < rows_) low = p_.decay[row(2 * lane_)];
    if (2 * lane_ + 1 < rows_) high = p_.decay[row(2 * lane_ + 1)];
    const float sum = inclusive_sum(low + high, lane_);
    shared_.sums[2 * lane_] = sum - high;
    shared_.sums[2 * lane_ + 1] = sum;
    shared_.betas[2 * lane_] = 2 * lane_ < rows_ ? p_.beta[row(2 * lane_)] : 0.0f;
    shared_.betas[2 * lane_ + 1] = 2 * lane_ + 1 < rows_ ? p_.beta[row(2 * lane_ + 1)] : 0.0f;
  }

  __device__ __forceinline__ void measure_rows() {
    for (int row = warp_; row < kChunk; row += kPrepareThreads / 32) {
      const float key = unit_factor(p_, shared_.keys[row], lane_);
      const float query = unit_factor(p_, shared_.queries[row], lane_);
      if (lane_ == 0) shared_.key_factors[row] = key, shared_.query_factors[row] = query;
    }
  }

  __device__ __forceinline__ void write_scalars() {
    const int t = threadIdx.x;
    if (t >= kChunk) return;
    const float last = shared_.sums[kChunk - 1];
    scratch_.rows->query[t] = p_.scale * shared_.query_factors[t] * expf(shared_.sums[t]);
    scratch_.rows->key[t] = shared_.key_factors[t] * expf(last - shared_.sums[t]);
    if (t == 0) scratch_.rows->last = expf(last);
  }

  // 16 rows of `left` times the keys, in the lower triangle: of queries to P, of keys to the matrix.
  template <bool kQueries>
  __device__ __forceinline__ void multiply(const Element (&left)[kChunk][kKeySize + kSharedPad], int warp) {
    float sums[8][4] = {};
    const TileLane at;
#pragma unroll
    for (int k = 0; k < kKeySize; k += 16) {
      uint32_t a[4];
      load_matrix_x4(a, shared_address(&left[16 * warp + at.by_row][k + at.by_row_column]));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n > warp) continue;
        uint32_t b[4];
        load_matrix_x4(b, shared_address(&shared_.keys[16 * n + at.by_column][k + at.by_column_column]));
        Half<Element>::multiply_add(sums[2 * n], a, b[0], b[1]);
        Half<Element>::multiply_add(sums[2 * n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + 8 * half + lane_ / 4, column = 8 * n + lane_ % 4 * 2;
        const float first = weighted<kQueries>(row, column, sums[n][2 * half]);
        const float second = weighted<kQueries>(row, column + 1, sums[n][2 * half + 1]);
        if constexpr (kQueries)
          *reinterpret_cast<uint32_t*>(scratch_.products + row * kChunk + column) =
              Half<Element>::pack(first, second);
        else
          *reinterpret_cast<float2*>(&shared_.matrix[row][column]) = make_float2(first, second);
      }
  }

  template <bool kQueries>
  __device__ __forceinline__ float weighted(int row, int column, float product) const {
    if (column > row - (kQueries ? 0 : 1)) return 0;
    const float weight = kQueries
                             ? p_.scale * shared_.query_factors[row]
                             : shared_.betas[row] * shared_.key_factors[row] * shared_.key_factors[column];
    return weight * expf(shared_.sums[row] - shared_.sums[column]) * product *
           (kQueries ? shared_.key_factors[column] : 1.0f);
  }

  __device__ __forceinline__ void solve_key(int column) {
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      x[i] = shared_.betas[i] * shared_.key_factors[i] * expf(shared_.sums[i]) *
             to_float(shared_.keys[i][column]);
    solve(x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) write(x[i], scratch_.keys + i * kKeySize + column);
  }

  __device__ __forceinline__ void solve_value(int64_t column) {
    float x[kChunk];
    const Element* values = static_cast<const Element*>(p_.value) +
                            (first_ * p_.num_value_heads + head_) * p_.value_size + column;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      x[i] = i < rows_ ? to_float(values[i * p_.num_value_heads * p_.value_size]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] *= shared_.betas[i];
    solve(x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) write(x[i], scratch_.updates + i * p_.value_size + column);
  }

  static __device__ __forceinline__ void write(float x, Element* target) {
    const uint32_t pair = Half<Element>::pack(x, 0.0f);
    *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(pair);
  }

  // x := (1 + matrix)^-1 x.
  __device__ __forceinline__ void solve(float (&x)[kChunk]) const {
#pragma unroll
    for (int i = 1; i < kChunk; ++i) {
      float sums[4] = {x[i], 0, 0, 0};
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 row = *reinterpret_cast<const float4*>(&shared_.matrix[i][j]);
        sums[0] = fmaf(-row.x, x[j], sums[0]);
        if (j + 1 < i) sums[1] = fmaf(-row.y, x[j + 1], sums[1]);
        if (j + 2 < i) sums[2] = fmaf(-row.z, x[j + 2], sums[2]);
        if (j + 3 < i) sums[3] = fmaf(-row.w, x[j + 3], sums[3]);
      }
      x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
  }

  const GatedDeltaRuleParams& p_;
  const ChunkScratch<Element>& scratch_;
  Shared& shared_;
  int64_t head_;
  int64_t first_;
  int rows_;
  int warp_;
  int lane_;
};

template <typename Element, int kKeySize>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    prepare_chunks(const GatedDeltaRuleParams p, ChunkRound round, void* workspace) {
  extern __shared__ __align__(16) unsigned char memory[];
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t number = round.first + blockIdx.y;
  const int64_t index = sequence_of_chunk(p, number);
  const DeltaSequence sequence(p, index);
  const int64_t chunk = number - first_chunk(p, index);
  if (chunk < 0 || chunk * kChunk >= sequence.count || p.keeps_updates(sequence.count)) return;
  const ChunkScratch<Element> scratch(p, workspace, blockIdx.y, blockIdx.x);
  ChunkPreparation<Element, kKeySize>(p, sequence, chunk, scratch,
                                      *reinterpret_cast<PrepareShared<Element, kKeySize>*>(memory))
      .run();
}

}  // namespace ortolan::cuda
