// What a warpgroup of sm90_few_rows.cuh or sm90_wide_rows.cuh knows, and what it reads and writes outside
// products: queries, and sums that it hands on.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "rows.cuh"
#include "sm90_shape.cuh"

namespace ortolan::cuda {

// What the parts of a tile are multiplied by, and what it follows from, by row: in shared memory. There is
// the entry, too, most of which is asked for once a span.
template <int kParts, int kRows>
struct FewFactors {
  alignas(8) float maxima[kRows][kParts];
  float totals[kRows][kParts];
  float weights[kParts][kRows];  // of each part in the tile
  float kept[kRows];             // of the span's earlier tiles in the span
  float added[kRows];            // of the tile in the span
  SoftmaxState states[kRows];    // of the tile or, where the block holds it whole, of the span so far
  DecodeEntry entry;
};

// kGroupRows: query rows of a warpgroup, 16 or 32.
template <int kHeadSize_, int kGroupRows_>
struct Sm90FewShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kGroupRows = kGroupRows_;
  static constexpr int kSplits = 1;  // of columns, for the warpgroups; here each has rows of its own
  static constexpr int kPartKeys = DenseRows<void, kHeadSize>::kWarpKeys;
  static constexpr int kParts = kHeadSize <= 128 ? 8 : 4;  // of a tile
  static constexpr int kKeys = kParts * kPartKeys;
  static constexpr int kSteps = 1;
  static constexpr int kTileKeys = kKeys;
  static constexpr PowerOfTwo kSpanTiles{3};
  static constexpr int kBoxes = kHeadSize / 64;               // of 64 columns, 128 bytes
  static constexpr int kBufferBytes = kKeys * kHeadSize * 2;  // keys or values of a tile
  // What a warpgroup has to itself: queries, weights of two tiles by turns, and factors.
  static constexpr int kQueryBytes = kGroupRows * kHeadSize * 2;
  static constexpr int kWeightBytes = kGroupRows * kKeys * 2;
  static constexpr int kFactorBytes = ((3 * kParts + 4) * kGroupRows * 4 + 128 + 1023) / 1024 * 1024;
  static constexpr int kWeightPlace = kQueryBytes, kFactorPlace = kWeightPlace + 2 * kWeightBytes;
  static constexpr int kGroupBytes = kFactorPlace + kFactorBytes;
  static constexpr int kQueryStride = kGroupBytes, kRowStride = kGroupBytes;  // from group to group
  static constexpr int kFrontBytes = 2 * kGroupBytes;
  static constexpr int kMostTokens = kDecodeTokens;
  static constexpr int kSnapsFrom = 1 << kSpanTiles.shift;
  using Factors = FewFactors<kParts, kGroupRows>;
  static_assert(sizeof(Factors) <= kFactorBytes);
};

template <typename Element_, typename Shape_>
struct Sm90FewGroup {
  using Element = Element_;
  using Shape = Shape_;
  using Factors = typename Shape::Factors;
  static constexpr int kHeadSize = Shape::kHeadSize;
  static constexpr int kGroupRows = Shape::kGroupRows;
  static constexpr int kColumns = kHeadSize / Shape::kSplits;  // of the warpgroup
  static constexpr int kRowOctets = kGroupRows / 8;
  static constexpr int kColumnBlocks = kColumns / 64;
  static constexpr int kSums = kGroupRows / 2;  // of a thread in a product
  using RowSums = float[kColumnBlocks][kSums];

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const DecodeWorkspace& workspace;
  const Sm90DecodeShared& shared;
  Logits logits;
  int group;
  int thread;  // of the warpgroup
  RingPlace at;
  int turn;                          // of the weights' buffers, where there are two
  SeenPositions seen, seen_by_each;  // by the entry's queries
  RowSums tile_sums;

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  // Of a sum of a product: its row in the warpgroup.
  __device__ __forceinline__ int row(int n) const { return n / 4 * 8 + thread % 4 * 2 + n % 2; }
  // The warpgroup's first row among the entry's, and its first column.
  __device__ __forceinline__ int first_row() const { return Shape::kSplits > 1 ? 0 : group * kGroupRows; }
  __device__ __forceinline__ int first_column() const { return Shape::kSplits > 1 ? group * kColumns : 0; }
  // Each warpgroup has its own place for these, or both share what rows have in common.
  __device__ __forceinline__ uint32_t queries() const {
    return shared.queries() + group * Shape::kQueryStride;
  }
  __device__ __forceinline__ uint32_t weights() const {
    return shared.queries() + group * Shape::kRowStride + Shape::kWeightPlace + turn * Shape::kWeightBytes;
  }
  __device__ __forceinline__ Factors& factors() const {
    return *reinterpret_cast<Factors*>(shared.memory + group * Shape::kRowStride + Shape::kFactorPlace);
  }
  __device__ __forceinline__ void sync() const { sync_warps<128>(1 + group); }
  // For the warpgroups that share rows.
  __device__ __forceinline__ void sync_sharers() const {
    if constexpr (Shape::kSplits == 1)
      sync();
    else
      sync_warps<256>(3);
  }
  __device__ __forceinline__ void release() {
    shared.empty[at.place].arrive_once(lane());
    at.advance(shape.stages);
  }

  // Values that nobody sees may be anything: a weight of 0 does not silence NaN. For all that multiply the
  // buffer, whose first row is `first`.
  __device__ __forceinline__ void clear_unseen(uint32_t values, int32_t first) const {
    constexpr int kPieces = kColumns / 8, kReaders = 256 / Shape::kSplits;
#pragma unroll 1
    for (int i = Shape::kSplits > 1 ? thread : group * 128 + thread; i < Shape::kKeys * kPieces;
         i += kReaders)
      if (!seen.holds(first + i / kPieces))
        store_shared_16(swizzled_place(values, Shape::kKeys, i / kPieces, i % kPieces), uint4{});
    fence_async_shared();
    if constexpr (Shape::kSplits > 1)
      sync();
    else
      sync_warps<256>(3);
  }

  __device__ __forceinline__ void take_queries(const DecodeEntry& entry) {
    constexpr int kPieces = kColumns / 8;
    const auto* source = static_cast<const Element*>(params.query);
    sync_sharers();  // all have multiplied with the last entry's
#pragma unroll 4
    for (int i = thread; i < kGroupRows * kPieces; i += 128) {
      const int place = i / kPieces, piece = i % kPieces;
      const int row = first_row() + place, column = first_column() + piece * 8;
      uint4 value{};
      if (row < entry.rows && column < params.cache.head_size)
        value = *reinterpret_cast<const uint4*>(
            source + entry.row_number(params, shape, row) * params.cache.head_size + column);
      store_shared_16(swizzled_place(queries(), kGroupRows, place, piece), value);
    }
    if (thread == 0) factors().entry = entry;
    seen = entry.seen();
    seen_by_each = entry.seen_by_each();
    fence_async_shared();
    sync_sharers();
  }

  // Calls f(row of the entry, its state, each) for the rows that the thread stores, each(store) store(column,
  // pair of sums): lanes 4 apart have a column each of two rows, and then two columns of one.
  template <typename Function>
  __device__ __forceinline__ void each_row(const RowSums& sums, const Function& f) const {
    const bool is_odd = thread & 4;
#pragma unroll
    for (int octet = 0; octet < kRowOctets; ++octet) {
      float2 pairs[kColumnBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * kColumnBlocks; ++i) {
        const float* own = &sums[i / 2][octet * 4 + i % 2 * 2];
        const float other = __shfl_xor_sync(~0u, is_odd ? own[0] : own[1], 4);
        pairs[i / 2][i % 2] = is_odd ? make_float2(other, own[1]) : make_float2(own[0], other);
      }
      const int of_group = row(octet * 4) + is_odd, row = first_row() + of_group;
      if (row >= factors().entry.rows) continue;
      f(row, factors().states[of_group], [&](const auto& store) {
#pragma unroll
        for (int i = 0; i < 2 * kColumnBlocks; ++i)
          store(first_column() + i / 2 * 64 + warp() * 16 + i % 2 * 8 + lane() / 8 * 2, pairs[i / 2][i % 2]);
      });
    }
  }
  __device__ __forceinline__ bool stores_states() const { return thread < 8 && first_column() == 0; }
  __device__ __forceinline__ void store_partial(const RowSums& sums, int64_t place) const {
    each_row(sums, [&](int row, const SoftmaxState& state, const auto& each) {
      const int64_t target = place * workspace.rows + row;
      if (stores_states()) workspace.states[target] = state;
      float* to = workspace.sums + target * kHeadSize;
      each([&](int column, const float2& pair) { *reinterpret_cast<float2*>(to + column) = pair; });
    });
  }
  // An entry that one block summed whole needs no combining.
  __device__ __forceinline__ void store_output(const RowSums& sums) const {
    const DecodeEntry& entry = factors().entry;
    each_row(sums, [&](int row, const SoftmaxState& state, const auto& each) {
      const int64_t head = entry.head(shape, row);
      const Denominator denominator = Denominator::of(state.total, state.maximum, params.sink_logits, head);
      if (params.lse && stores_states())
        params.lse[head * params.packing.num_tokens + entry.first_token + entry.token(shape, row)] =
            denominator.lse;
      auto* to = static_cast<Element*>(params.output) +
                 entry.row_number(params, shape, row) * params.cache.head_size;
      each([&](int column, const float2& pair) {
        if (column < params.cache.head_size)
          *reinterpret_cast<uint32_t*>(to + column) =
              Half<Element>::pack(pair.x * denominator.inverse, pair.y * denominator.inverse);
      });
    });
  }
};

}  // namespace ortolan::cuda
