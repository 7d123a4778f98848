// A warpgroup of sm_90a decode attention that multiplies: up to 64 query rows of an entry with the keys of a
// step, and its columns of the values; products, softmax and sums in registers.
//
// Rows fill the product's rows in eights: every warp gets eight before one gets sixteen, and without a second
// eight half of the softmax is left out. Where two warpgroups share the columns, both multiply with the keys.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "sm90_shape.cuh"

namespace ortolan::cuda {

template <typename Element_, int kHeadSize>
struct Sm90DecodeRows {
  using Element = Element_;
  using Shape = Sm90DecodeShape<kHeadSize>;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kColumns = Shape::kColumns;
  static constexpr bool kMerges = Shape::kSpanTiles.shift > 0;  // tiles into spans

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const DecodeWorkspace& workspace;
  const Sm90DecodeShared& shared;
  Logits logits;
  int stream;
  int group;   // of columns
  int thread;  // of the warpgroup
  RingPlace at;
  int32_t positions[2];  // of the thread's rows
  float z[kKeys / 2];    // logits
  uint32_t weights[kKeys / 16][4];
  float tile_sums[kColumns / 2];
  float maxima[2], totals[2];  // of the tile, before the logits' factor; the thread's own keys' totals
  float span_sums[kMerges ? kColumns / 2 : 2];
  SoftmaxState span_states[2];

  __device__ __forceinline__ int lane() const { return thread % 32; }
  // Of the thread's rows in an entry, the first or the second.
  __device__ __forceinline__ int row(int half) const {
    return (half * 4 + thread / 32) * 8 + thread % 32 / 4;
  }

  __device__ __forceinline__ void take_queries(const DecodeEntry& entry) {
    constexpr int kThreads = Shape::kGroups * 128, kPieces = kHeadSize / 8;
    const auto* source = static_cast<const Element*>(params.query);
    sync_warps<kThreads>(1 + stream);  // all have multiplied with the last entry's
#pragma unroll 4
    for (int i = group * 128 + thread; i < kSm90DecodeRows * kPieces; i += kThreads) {
      const int place = i / kPieces, piece = i % kPieces;
      const int row = (place % 16 / 8 * 4 + place / 16) * 8 + place % 8;
      uint4 value{};
      if (row < entry.rows && piece * 8 < params.cache.head_size)
        value = *reinterpret_cast<const uint4*>(
            source + entry.row_number(params, shape, row) * params.cache.head_size + piece * 8);
      store_piece(swizzled_place(shared.queries(), kSm90DecodeRows, place, piece), value);
    }
    fence_async_shared();
    sync_warps<kThreads>(1 + stream);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      positions[half] = entry.first_position + entry.token(shape, row(half));
  }
  static __device__ __forceinline__ void store_piece(uint32_t address, const uint4& value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
  }

  __device__ __forceinline__ void release() {
    shared.empty[at.place].arrive_once(lane());
    at.advance(shape.stages);
  }

  __device__ __forceinline__ void multiply_keys() {
    shared.full[at.place].wait(at.parity);
    const uint64_t a = wgmma_tile(descriptor_address(shared.queries()), 16);
    const uint64_t b = wgmma_tile(descriptor_address(shared.buffer<Shape>(at.place)), 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k)
      StepProducts<Element, kKeys>::products(z, moved_tile(a, k / 4 * kSm90DecodeRows * 128 + k % 4 * 32),
                                             moved_tile(b, k / 4 * kKeys * 128 + k % 4 * 32), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n) asm volatile("" : "+f"(z[n])::"memory");
    release();
  }

  __device__ __forceinline__ void multiply_values(const SeenPositions& seen, int32_t first) {
    shared.full[at.place].wait(at.parity);
    const uint32_t values = shared.buffer<Shape>(at.place) + group * (kColumns / 64) * kKeys * 128;
    if (!seen.hold_all(first, first + kKeys)) clear_unseen(values, seen, first);
    const uint64_t b = wgmma_tile(descriptor_address(values), kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<Element, kColumns>::sums(tile_sums, weights[k], moved_tile(b, k * 2048));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) asm volatile("" : "+f"(tile_sums[n])::"memory");
    release();
  }
  // Values that nobody sees may be anything: a weight of 0 does not silence NaN.
  __device__ __forceinline__ void clear_unseen(uint32_t values, const SeenPositions& seen,
                                               int32_t first) const {
#pragma unroll 1
    for (int i = thread; i < kKeys * 8; i += 128)
      if (!seen.holds(first + i / 8))
#pragma unroll
        for (int box = 0; box < kColumns / 64; ++box)
          store_piece(values + box * kKeys * 128 + i * 16, uint4{});
    fence_async_shared();
    sync_warps<128>(3 + group + stream);
  }

  // Logits become weights, for the first or both of the thread's rows.
  template <int kHalves>
  __device__ __forceinline__ void weigh(const DecodeEntry& entry, int32_t first) {
    if (logits.mapped) logits.map(z);
    if (!entry.seen_by_each().hold_all(first, first + kKeys)) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const SeenPositions own = entry.visibility.of_query(positions[half]);
#pragma unroll
        for (int n = 0; n < kKeys / 4; ++n)
          if (!own.holds(first + n / 2 * 8 + thread % 4 * 2 + n % 2))
            z[n / 2 * 4 + 2 * half + n % 2] = -INFINITY;
      }
    }
    float maximum[kHalves], base[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float largest[2] = {maxima[half], maxima[half]};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        largest[n % 2] = fmaxf(largest[n % 2], fmaxf(z[4 * n + 2 * half], z[4 * n + 2 * half + 1]));
      maximum[half] = fmaxf(largest[0], largest[1]);
    }
    fold_lanes<1, 2>(maximum, Max());
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      base[half] = __fmul_rn(finite_max(maximum[half]), logits.factor);
      if constexpr (Shape::kSteps > 1) {
        const float rescale = fast_exp2(__fmul_rn(maxima[half], logits.factor) - base[half]);
        totals[half] *= rescale;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          tile_sums[4 * n + 2 * half] *= rescale;
          tile_sums[4 * n + 2 * half + 1] *= rescale;
        }
      }
      maxima[half] = maximum[half];
      float total[2] = {};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float low = fast_exp2(fmaf(z[4 * n + 2 * half], logits.factor, -base[half]));
        const float high = fast_exp2(fmaf(z[4 * n + 2 * half + 1], logits.factor, -base[half]));
        weights[n / 2][n % 2 * 2 + half] = Half<Element>::pack(low, high);
        total[0] += low;
        total[1] += high;
      }
      totals[half] += total[0] + total[1];
    }
  }

  // A tile's sums, and its rows' states.
  __device__ __forceinline__ void sum_tile(const DecodeEntry& entry, int32_t tile,
                                           SoftmaxState (&states)[2]) {
    const SeenPositions seen = entry.seen();
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) tile_sums[n] = 0;
    maxima[0] = maxima[1] = -INFINITY;
    totals[0] = totals[1] = 0;
#pragma unroll 1
    for (int step = 0; step < Shape::kSteps; ++step) {
      const int32_t first = tile * Shape::kTileKeys + step * kKeys;
      if (Shape::kSteps > 1 && !seen.hold_any(first, first + kKeys)) continue;
      multiply_keys();
#pragma unroll
      for (int k = 0; k < kKeys / 4; ++k) weights[k / 4][k % 4] = 0;
      if (entry.rows > 32)
        weigh<2>(entry, first);
      else if (entry.rows > thread / 32 * 8)
        weigh<1>(entry, first);
      multiply_values(seen, first);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      states[half] = {__fmul_rn(maxima[half], logits.factor), quad_sum(totals[half])};
  }

  __device__ __forceinline__ void clear_span() {
    span_states[0] = span_states[1] = kNoKeys;
    if constexpr (kMerges)
#pragma unroll
      for (int n = 0; n < kColumns / 2; ++n) span_sums[n] = 0;
  }
  __device__ __forceinline__ void merge(const SoftmaxState (&states)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Merge merge = Merge::of(span_states[half], states[half]);
      span_states[half] = merge.state;
      if constexpr (kMerges)
#pragma unroll
        for (int n = 0; n < kColumns / 4; ++n) {
          float& sum = span_sums[n / 2 * 4 + 2 * half + n % 2];
          sum = merge.apply(sum, tile_sums[n / 2 * 4 + 2 * half + n % 2]);
        }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store_partial(const float (&sums)[kCount], const SoftmaxState (&states)[2],
                                                const DecodeEntry& entry, int64_t place) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= entry.rows) return;
      const int64_t target = place * workspace.rows + row(half);
      if (group == 0 && thread % 4 == 0) workspace.states[target] = states[half];
      float* to = workspace.sums + target * kHeadSize + group * kColumns + thread % 4 * 2;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n)
        *reinterpret_cast<float2*>(to + n * 8) =
            make_float2(sums[n * 4 + 2 * half], sums[n * 4 + 2 * half + 1]);
    }
  }
  // An entry that one block summed whole needs no combining.
  template <int kCount>
  __device__ __forceinline__ void store_output(const float (&sums)[kCount], const SoftmaxState (&states)[2],
                                               const DecodeEntry& entry) const {
    const auto head_size = static_cast<int>(params.cache.head_size);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->row(half);
      if (row >= entry.rows) return;
      const int64_t head = entry.head(shape, row);
      const Denominator denominator =
          Denominator::of(states[half].total, states[half].maximum, params.sink_logits, head);
      if (params.lse && group == 0 && thread % 4 == 0)
        params.lse[head * params.packing.num_tokens + params.packing.first(entry.sequence) +
                   entry.token(shape, row)] = denominator.lse;
      Element* to = static_cast<Element*>(params.output) + entry.row_number(params, shape, row) * head_size;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        const int column = group * kColumns + n * 8 + thread % 4 * 2;
        if (column < head_size)
          *reinterpret_cast<uint32_t*>(to + column) = Half<Element>::pack(
              sums[n * 4 + 2 * half] * denominator.inverse, sums[n * 4 + 2 * half + 1] * denominator.inverse);
      }
    }
  }

  // The sums of a tile or, at its end, of a span that the block holds whole.
  __device__ __forceinline__ void hand_on(const DecodeCursor& cursor, const DecodeSpan& span,
                                          const SoftmaxState (&states)[2]) {
    if (!span.is_whole) {
      store_partial(tile_sums, states, cursor.of, workspace.tile_place(span.owner, cursor.key_tile()));
      return;
    }
    merge(states);
    if (cursor.number + 1 != span.tiles.end) return;
    const auto hand = [&](const auto& sums) {
      if (span.tiles.end - span.tiles.begin == cursor.of.tiles.count())
        store_output(sums, span_states, cursor.of);
      else
        store_partial(sums, span_states, cursor.of, workspace.span_place(cursor.entry, span.number));
    };
    if constexpr (kMerges)
      hand(span_sums);
    else
      hand(tile_sums);
    clear_span();
  }

  template <typename Line>
  __device__ __forceinline__ void run(const Line& line, int begin, int end) {
    int entry = -1;  // whose queries are there
    clear_span();
    each_run_of_stream(params, shape, line, begin, end, stream,
                       [&](DecodeCursor cursor, const DecodeSpan& span, int count) {
                         if (entry != cursor.entry) take_queries(cursor.of);
                         entry = cursor.entry;
#pragma unroll 1
                         for (; count > 0; --count, cursor.skip(1)) {
                           SoftmaxState states[2];
                           sum_tile(cursor.of, cursor.key_tile(), states);
                           hand_on(cursor, span, states);
                         }
                       });
  }
};

}  // namespace ortolan::cuda
