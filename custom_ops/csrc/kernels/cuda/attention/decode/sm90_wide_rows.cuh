// A warpgroup of sm_90a decode attention over long heads: up to 64 query rows of an entry with the keys of a
// step, and half of the values' columns.
//
// Keys are the rows of the first product, [keys, queries], and the columns of values those of the second,
// [columns, queries]. The two warpgroups multiply half of the head's columns each. Each hands its part of the
// logits of half of the queries to the other, and finds the weights of the other half; both then sum their
// columns of the values. A tile is two steps, whose logits are brought to their common maximum; its sums are
// handed on as those of a span.
#pragma once

#include "kernels/cuda/attention/key_rows.cuh"
#include "sm90_few_group.cuh"

namespace ortolan::cuda {

// What is known of the rows, in shared memory: maxima and totals by warp, and what follows from them.
template <int kRows>
struct WideFactors {
  alignas(8) float maxima[4][kRows];
  float totals[4][kRows];
  float kept[kRows];           // of the tile's step before
  SoftmaxState states[kRows];  // of the tile
  DecodeEntry entry;
};

template <int kHeadSize_, int kRows>
struct Sm90WideShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kGroupRows = kRows;
  static constexpr int kRowParts = 1, kColumnParts = 2;
  static constexpr int kTileStep = 1;
  static constexpr int kKeys = 64;  // of a step
  static constexpr int kSteps = 2;  // of a tile
  static constexpr int kTileKeys = kKeys * kSteps;
  static constexpr PowerOfTwo kSpanTiles{0};
  static constexpr int kBoxes = kHeadSize / kColumnParts / 64;  // of 64 columns, 128 bytes
  static constexpr int kBufferBytes = kKeys * kBoxes * 128;     // keys or values of a step, for a warpgroup
  using Factors = WideFactors<kRows>;
  static constexpr int kWeightBytes = kGroupRows * kKeys * 2;
  static constexpr int kFactorBytes = (static_cast<int>(sizeof(Factors)) + 1023) / 1024 * 1024;
  static constexpr int kLogitBytes = kGroupRows / 2 * kKeys * 4;  // that a warpgroup hands over
  static constexpr int kQueryStride = kGroupRows * kBoxes * 128, kRowStride = 0;
  static constexpr int kWeightPlace = 2 * kQueryStride, kFactorPlace = kWeightPlace + kWeightBytes;
  static constexpr int kLogitPlace = kFactorPlace + kFactorBytes;
  static constexpr int kFrontBytes = kLogitPlace + 2 * kLogitBytes;
  static constexpr int kMostTokens = kShortTokens;
  static constexpr int kLeastStages = 2;
};

template <typename Element_, int kHeadSize, int kRows>
struct Sm90WideRows : Sm90FewGroup<Element_, Sm90WideShape<kHeadSize, kRows>> {
  using Base = Sm90FewGroup<Element_, Sm90WideShape<kHeadSize, kRows>>;
  using Base::at, Base::factors, Base::group, Base::lane, Base::logits, Base::params, Base::queries,
      Base::release, Base::row, Base::shape, Base::shared, Base::sync, Base::thread, Base::tile_sums,
      Base::warp, Base::weights, Base::workspace;
  using Base::kColumnBlocks, Base::kColumns, Base::kRowOctets, Base::kSums;
  using typename Base::Element;
  using typename Base::Shape;
  using Products = FewColumns<Element, kRows>;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kOwnOctets = kRowOctets / 2;  // of the rows whose weights the warpgroup finds
  // Logits of keys warp * 16 + lane / 4 and + 8: of sum n, the key's half is n % 4 / 2.
  using LogitTile = float[kSums];
  using OwnLogits = float[kSums / 2];

  float maxima[kOwnOctets][2], totals[kOwnOctets][2];  // of the tile's keys, and of the thread's among them

  // Of the warpgroup's columns; the next buffer is the other's.
  __device__ __forceinline__ void pass_buffer() {
    release();
    at.advance(shape.stages);
  }
  __device__ __forceinline__ void multiply_keys(LogitTile& z) {
    shared.full[at.place].wait(at.parity);
    const uint64_t a = wgmma_tile(shared.template buffer<Shape>(at.place), 16), b = wgmma_tile(queries(), 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k)
      Products::products(z, moved_tile(a, k / 4 * kKeys * 128 + k % 4 * 32),
                         moved_tile(b, k / 4 * kRows * 128 + k % 4 * 32), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kSums; ++n) asm volatile("" : "+f"(z[n])::"memory");
    pass_buffer();
  }
  __device__ __forceinline__ float* handed_logits(int by_group) const {
    return reinterpret_cast<float*>(shared.memory + Shape::kLogitPlace + by_group * Shape::kLogitBytes) +
           thread;
  }
  // Hands the logits of the other warpgroup's rows over, and adds what that has found for its own columns.
  __device__ __forceinline__ void exchange(OwnLogits& own, const LogitTile& z) const {
    float* to = handed_logits(group);
    const float* from = handed_logits(group ^ 1);
#pragma unroll
    for (int n = 0; n < kSums / 2; ++n) {
      own[n] = group ? z[kSums / 2 + n] : z[n];
      to[n * 128] = group ? z[n] : z[kSums / 2 + n];
    }
    this->sync_sharers();
#pragma unroll
    for (int n = 0; n < kSums / 2; ++n) own[n] += from[n * 128];
  }

  // Row of the query that one of the warpgroup's own logits belongs to.
  __device__ __forceinline__ int own_row(int n) const { return group * (kRows / 2) + row(n); }
  __device__ __forceinline__ int own_lane_row(int octet) const {
    return group * (kRows / 2) + this->lane_row(octet);
  }

  // In units of log2, -inf where the query does not see the key.
  __device__ __forceinline__ void finish_logits(OwnLogits& z, int32_t first) const {
    logits.finish(z);
    first += warp() * 16;
    if (this->seen_by_each.hold_all(first, first + 16)) return;
    const DecodeEntry& entry = factors().entry;
#pragma unroll
    for (int n = 0; n < kSums / 2; ++n) {
      if (n % 4 / 2) continue;
      const SeenPositions own =
          entry.visibility.of_query(entry.first_position + entry.token(shape, own_row(n)));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (!own.holds(first + half * 8 + lane() / 4)) z[n + half * 2] = -INFINITY;
    }
  }

  template <typename Operation>
  __device__ __forceinline__ void reduce_rows(float (&of_warp)[kRows], const float (&own)[kOwnOctets][2],
                                              Operation operation) const {
#pragma unroll
    for (int octet = 0; octet < kOwnOctets; ++octet) {
      const float value = fold_pair(own[octet][0], own[octet][1], operation, lane());
      if (lane() < 8) of_warp[own_lane_row(octet)] = value;
    }
  }
  // The step's, of two rows that are neighbours.
  __device__ __forceinline__ float2 highest_of_warps(int row) const {
    float2 highest = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int of_warp = 0; of_warp < 4; ++of_warp) {
      const float2 found = *reinterpret_cast<const float2*>(&factors().maxima[of_warp][row]);
      highest = make_float2(fmaxf(highest.x, found.x), fmaxf(highest.y, found.y));
    }
    return highest;
  }

  // Logits become weights, in shared memory, where it also says what is kept of the keys before.
  __device__ __forceinline__ void weigh(const OwnLogits& z) {
    float highest[kOwnOctets][2];
#pragma unroll
    for (int n = 0; n < 2 * kOwnOctets; ++n)
      highest[n / 2][n % 2] = fmaxf(z[n / 2 * 4 + n % 2], z[n / 2 * 4 + 2 + n % 2]);
    reduce_rows(factors().maxima[warp()], highest, Max());
    sync();
#pragma unroll
    for (int octet = 0; octet < kOwnOctets; ++octet) {
      const float2 step = highest_of_warps(own_row(octet * 4));
      float p[2][2], kept[2];  // of the queries; weights by the key's half
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float maximum = fmaxf(maxima[octet][e], e ? step.y : step.x), base = finite_max(maximum);
        kept[e] = fast_exp2(maxima[octet][e] - base);
        maxima[octet][e] = maximum;
#pragma unroll
        for (int half = 0; half < 2; ++half) p[e][half] = fast_exp2(z[octet * 4 + half * 2 + e] - base);
        totals[octet][e] = fmaf(totals[octet][e], kept[e], p[e][0] + p[e][1]);
      }
      if (thread < 4)
        *reinterpret_cast<float2*>(&factors().kept[own_row(octet * 4)]) = make_float2(kept[0], kept[1]);
      // [queries, keys]: the warp's eighths of keys are pieces of a query's row.
      const uint32_t tiles[2] = {Half<Element>::pack(p[0][0], p[1][0]),
                                 Half<Element>::pack(p[0][1], p[1][1])};
      store_matrix_x2_transposed(
          swizzled_place(weights(), kRows, group * (kRows / 2) + octet * 8 + lane() % 8,
                         warp() * 2 + lane() / 8 % 2),
          tiles);
    }
    fence_async_shared();
    this->sync_sharers();
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int n = 0; n < kSums; n += 4) {
      const float2 kept = *reinterpret_cast<const float2*>(&factors().kept[row(n)]);
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) tile_sums[c][n + i] *= i % 2 ? kept.y : kept.x;
    }
  }

  __device__ __forceinline__ void multiply_values(int32_t first) {
    shared.full[at.place].wait(at.parity);
    const uint32_t values = shared.template buffer<Shape>(at.place);
    if (!this->seen.hold_all(first, first + kKeys)) this->clear_unseen(values, first);
    const uint64_t b = wgmma_tile(weights(), 16);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      const uint64_t a = wgmma_tile(values + c * kKeys * 128, 16);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        Products::sums(tile_sums[c], moved_tile(a, k * 2048), moved_tile(b, k * 32), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kColumnBlocks * kSums; ++n)
      asm volatile("" : "+f"(tile_sums[n / kSums][n % kSums])::"memory");
    pass_buffer();
  }
  __device__ __forceinline__ void sum_tile(int32_t begin) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks * kSums; ++n) tile_sums[n / kSums][n % kSums] = 0;
#pragma unroll
    for (int n = 0; n < 2 * kOwnOctets; ++n) {
      maxima[n / 2][n % 2] = -INFINITY;
      totals[n / 2][n % 2] = 0;
    }
#pragma unroll 1
    for (int step = 0; step < Shape::kSteps; ++step) {
      const int32_t first = begin + step * kKeys;
      if (!this->seen.hold_any(first, first + kKeys)) continue;
      LogitTile z;
      OwnLogits own;
      multiply_keys(z);
      exchange(own, z);
      finish_logits(own, first);
      weigh(own);
      if (step > 0) rescale();
      multiply_values(first);
    }
    find_states();
  }
  // The tile's, of all rows.
  __device__ __forceinline__ void find_states() {
    reduce_rows(factors().totals[warp()], totals, Add());
    sync();
    if (thread < 8) {
#pragma unroll
      for (int octet = 0; octet < kOwnOctets; ++octet) {
        const auto total = [&](int of_warp) { return factors().totals[of_warp][own_lane_row(octet)]; };
        factors().states[own_lane_row(octet)] = {lane() / 4 ? maxima[octet][1] : maxima[octet][0],
                                                 (total(0) + total(1)) + (total(2) + total(3))};
      }
    }
    this->sync_sharers();
  }

  // So many tiles; `entry`: of the first.
  __device__ __forceinline__ void run(int count, int entry) {
    if (group) at.advance(shape.stages);
    this->held = -1;
#pragma unroll 1
    for (; count > 0; --count) {
      const TileWork work = this->take_tile(entry);
      sum_tile(work.first);
      this->store(tile_sums, factors().states, work);
    }
  }
};

}  // namespace ortolan::cuda
