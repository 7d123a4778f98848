// The first kernel of the gated delta rule by chunks: what does not depend on the state.
//
// Grid: one block per (value head, chunk number of the round). Four warps multiply keys by keys and four
// queries by keys. The inverse of the triangular matrix then multiplies keys and values.
#pragma once

#include "delta_chunks.cuh"
#include "delta_inverse.cuh"

namespace ortolan::cuda {

constexpr int kPrepareThreads = 256;
constexpr int kMatrixStride = kChunk + 4;  // floats; 16 bytes divide a row

template <typename Element, int kKeySize>
struct PrepareShared {
  Element keys[kChunk][kKeySize + kSharedPad];
  Element queries[kChunk][kKeySize + kSharedPad];
  Element inverse[kChunk][kChunk + kSharedPad];        // T, its columns as the keys' rows need
  Element value_factors[kChunk][kChunk + kSharedPad];  // T, its columns as the values' rows need
  float matrix[kChunk][kMatrixStride];
  float sums[kChunk];  // G
  float betas[kChunk];
  float key_factors[kChunk];
  float query_factors[kChunk];
  float key_scales[kChunk];  // beta * |k|^-1 * exp(G)
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
    copy_values(0);
    TriangleInverse<kMatrixStride>(shared_.matrix).run();
    scale_inverse();
    copy_async_wait<0>();
    __syncthreads();
    solve(shared_.inverse, shared_.keys, kKeySize, scratch_.keys, kKeySize);
    for (int64_t first = 0; first < p_.value_size; first += kKeySize) {
      if (first > 0) {
        __syncthreads();
        copy_values(first);
        copy_async_wait<0>();
        __syncthreads();
      }
      solve(shared_.value_factors, shared_.queries, panel_columns(first), scratch_.updates + first,
            p_.value_size);
    }
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

  // Four threads measure a row of keys and one of queries, 16 bytes after 16 bytes.
  __device__ __forceinline__ void measure_rows() {
    const int row = threadIdx.x / 4;
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = threadIdx.x % 4 * 8; i < kKeySize; i += 32) {
      const uint4 key = *reinterpret_cast<const uint4*>(&shared_.keys[row][i]);
      const uint4 query = *reinterpret_cast<const uint4*>(&shared_.queries[row][i]);
      sums[0] = add_products(key, key, sums[0], Element());
      sums[1] = add_products(query, query, sums[1], Element());
    }
    fold_lanes<1, 2>(sums, Add());
    if (threadIdx.x % 4 != 0) return;
    shared_.key_factors[row] = length_factor(p_, sums[0]);
    shared_.query_factors[row] = length_factor(p_, sums[1]);
  }

  __device__ __forceinline__ void write_scalars() {
    const int t = threadIdx.x;
    if (t >= kChunk) return;
    const float last = shared_.sums[kChunk - 1];
    scratch_.rows->query[t] = p_.scale * shared_.query_factors[t] * expf(shared_.sums[t]);
    scratch_.rows->key[t] = shared_.key_factors[t] * expf(last - shared_.sums[t]);
    if (t == 0) scratch_.rows->last = expf(last);
    shared_.key_scales[t] = shared_.betas[t] * shared_.key_factors[t] * expf(shared_.sums[t]);
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
    const int row = 16 * warp + lane_ / 4;
    const float weights[2] = {row_weight<kQueries>(row), row_weight<kQueries>(row + 8)};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = 8 * n + lane_ % 4 * 2;
      const float2 factors = *reinterpret_cast<const float2*>(&shared_.key_factors[column]);
      const float2 sums_before = *reinterpret_cast<const float2*>(&shared_.sums[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half, last = own - (kQueries ? 0 : 1);
        const float sum = shared_.sums[own];
        float first = 0, second = 0;
        if (n < 2 * warp + 2) {
          first = weights[half] * factors.x * __expf(sum - sums_before.x) * sums[n][2 * half];
          second = weights[half] * factors.y * __expf(sum - sums_before.y) * sums[n][2 * half + 1];
        }
        first = column <= last ? first : 0.0f;
        second = column + 1 <= last ? second : 0.0f;
        if constexpr (kQueries)
          *reinterpret_cast<uint32_t*>(scratch_.products + own * kChunk + column) =
              Half<Element>::pack(first, second);
        else
          *reinterpret_cast<float2*>(&shared_.matrix[own][column]) = make_float2(first, second);
      }
    }
  }

  template <bool kQueries>
  __device__ __forceinline__ float row_weight(int row) const {
    return kQueries ? p_.scale * shared_.query_factors[row] : shared_.betas[row] * shared_.key_factors[row];
  }

  // T with its columns scaled, once for the keys and once for the values.
  __device__ __forceinline__ void scale_inverse() {
    for (int i = threadIdx.x; i < kChunk * kChunk / 2; i += kPrepareThreads) {
      const int row = i / (kChunk / 2), column = i % (kChunk / 2) * 2;
      float2 pair = *reinterpret_cast<const float2*>(&shared_.matrix[row][column]);
      if (column > row) pair.x = 0;
      if (column + 1 > row) pair.y = 0;
      const float2 beta = *reinterpret_cast<const float2*>(&shared_.betas[column]);
      const float2 scale = *reinterpret_cast<const float2*>(&shared_.key_scales[column]);
      *reinterpret_cast<uint32_t*>(&shared_.value_factors[row][column]) =
          Half<Element>::pack(pair.x * beta.x, pair.y * beta.y);
      *reinterpret_cast<uint32_t*>(&shared_.inverse[row][column]) =
          Half<Element>::pack(pair.x * scale.x, pair.y * scale.y);
    }
  }

  // A lower triangle [64, 64] times `columns` columns of rows in shared memory: four warps take half of them.
  __device__ __forceinline__ void solve(const Element (&left)[kChunk][kChunk + kSharedPad],
                                        const Element (&right)[kChunk][kKeySize + kSharedPad], int columns,
                                        Element* target, int64_t target_stride) {
    constexpr int kPairs = kKeySize / 32;
    const TileLane at;
    const int tile = warp_ % 4, first = warp_ / 4 * columns / 2;
    float sums[kPairs][8] = {};
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      if (k > 16 * tile) break;
      uint32_t a[4];
      load_matrix_x4(a, shared_address(&left[16 * tile + at.by_row][k + at.by_row_column]));
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        if (16 * n >= columns / 2) continue;
        uint32_t b[4];
        load_matrix_x4_transposed(b,
                                  shared_address(&right[k + at.by_row][first + 16 * n + at.by_row_column]));
        Half<Element>::multiply_add(reinterpret_cast<float (&)[4]>(sums[n][0]), a, b[0], b[1]);
        Half<Element>::multiply_add(reinterpret_cast<float (&)[4]>(sums[n][4]), a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (16 * n >= columns / 2) continue;
        const int row = 16 * tile + pair % 2 * 8 + lane_ / 4;
        const int column = first + 16 * n + pair / 2 * 8 + lane_ % 4 * 2;
        *reinterpret_cast<uint32_t*>(target + row * target_stride + column) =
            Half<Element>::pack(sums[n][2 * pair], sums[n][2 * pair + 1]);
      }
  }

  __device__ __forceinline__ int panel_columns(int64_t first) const {
    return static_cast<int>(p_.value_size - first < kKeySize ? p_.value_size - first : kKeySize);
  }
  __device__ __forceinline__ void copy_values(int64_t first) {
    const Element* values =
        static_cast<const Element*>(p_.value) + (first_ * p_.num_value_heads + head_) * p_.value_size + first;
    copy_rows_async(shared_.queries[0], kKeySize + kSharedPad, values, p_.num_value_heads * p_.value_size,
                    panel_columns(first), rows_, kPrepareThreads);
    copy_async_commit();
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
__global__ void __launch_bounds__(kPrepareThreads, 3)
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
