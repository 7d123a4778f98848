// What a warpgroup of sm90_few_rows.cuh or sm90_wide_rows.cuh knows, and what it reads and writes outside
// products: queries, and sums that it hands on.
#pragma once

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
  SoftmaxState states[kRows];    // of the tile or, where it is merged, of the span so far
  DecodeEntry entry;
};

// A span's sums between two tiles, of one warpgroup and of the other that has the same rows. A thread and
// its twin have the same columns and rows.
template <int kSums, int kRows>
struct HandedSpan {
  float4 sums[kSums / 4][128];
  SoftmaxState states[4][kRows];  // each warp's own copy
};

// kRows: query rows of an entry, 16, 32 or 64. Of 16 rows the two warpgroups take tiles by turns; of more,
// each has half of the rows.
template <int kHeadSize_, int kRows>
struct Sm90FewShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr bool kTakesTurns = kRows <= 16;
  static constexpr int kTileStep = kTakesTurns ? 2 : 1;  // from a warpgroup's tile to its next one
  static constexpr int kRowParts = kTakesTurns ? 1 : 2, kColumnParts = 1;
  static constexpr int kGroupRows = kRows / kRowParts;
  static constexpr int kPartKeys = DenseRows<void, kHeadSize>::kWarpKeys;
  static constexpr int kParts = kHeadSize <= 128 ? 8 : 4;  // of a tile
  static constexpr int kKeys = kParts * kPartKeys;
  static constexpr int kSteps = 1;
  static constexpr int kTileKeys = kKeys;
  static constexpr PowerOfTwo kSpanTiles{3};
  static constexpr int kBoxes = kHeadSize / 64;               // of 64 columns, 128 bytes
  static constexpr int kBufferBytes = kKeys * kHeadSize * 2;  // keys or values of a tile
  // What a warpgroup has to itself: queries, weights, of two tiles where it takes all, and factors.
  static constexpr int kQueryBytes = kGroupRows * kHeadSize * 2;
  static constexpr int kWeightBytes = kGroupRows * kKeys * 2;
  static constexpr int kFactorBytes = ((3 * kParts + 4) * kGroupRows * 4 + 128 + 1023) / 1024 * 1024;
  static constexpr int kWeightBuffers = kTakesTurns ? 1 : 2;
  static constexpr int kWeightPlace = kQueryBytes;
  static constexpr int kFactorPlace = kWeightPlace + kWeightBuffers * kWeightBytes;
  static constexpr int kGroupBytes = kFactorPlace + kFactorBytes;
  static constexpr int kQueryStride = kGroupBytes, kRowStride = kGroupBytes;  // from group to group
  using Handed = HandedSpan<kHeadSize / 64 * kGroupRows / 2, kGroupRows>;
  static constexpr int kHandedPlace = 2 * kGroupBytes;
  static constexpr int kHandedBytes = kTakesTurns ? static_cast<int>(sizeof(Handed)) : 0;
  static constexpr int kFrontBytes = kHandedPlace + (kHandedBytes + 1023) / 1024 * 1024;
  static constexpr int kMostTokens = kDecodeTokens;
  // By turns, who waits for a tile must know that what had its place before was there: two tiles back.
  static constexpr int kLeastStages = kTakesTurns ? 4 : 2;
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
  static constexpr int kColumns = kHeadSize / Shape::kColumnParts;  // of the warpgroup
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
  RingPlace at{};
  int held;                          // the entry whose queries are there
  SeenPositions seen, seen_by_each;  // by them
  RowSums tile_sums;

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  // Of a sum of a product: its row in the warpgroup.
  __device__ __forceinline__ int row(int n) const { return n / 4 * 8 + thread % 4 * 2 + n % 2; }
  // A row of an eight for each of the first 8 lanes, as fold_pair leaves them.
  __device__ __forceinline__ int lane_row(int octet) const { return octet * 8 + lane() % 4 * 2 + lane() / 4; }
  // The warpgroup's first row among the entry's, and its first column.
  __device__ __forceinline__ int first_row() const { return group % Shape::kRowParts * kGroupRows; }
  __device__ __forceinline__ int first_column() const { return group % Shape::kColumnParts * kColumns; }
  // Each warpgroup has its own place for these, or both share what rows have in common.
  __device__ __forceinline__ uint32_t queries() const {
    return shared.queries() + group * Shape::kQueryStride;
  }
  __device__ __forceinline__ uint32_t weights(int buffer = 0) const {
    return shared.queries() + group * Shape::kRowStride + Shape::kWeightPlace + buffer * Shape::kWeightBytes;
  }
  __device__ __forceinline__ Factors& factors() const {
    return *reinterpret_cast<Factors*>(shared.memory + group * Shape::kRowStride + Shape::kFactorPlace);
  }
  __device__ __forceinline__ void sync() const { sync_warps<128>(1 + group); }
  // For those who have the same queries.
  __device__ __forceinline__ void sync_sharers() const {
    if constexpr (Shape::kColumnParts > 1)
      sync_warps<256>(3);
    else
      sync();
  }
  __device__ __forceinline__ void release() {
    shared.empty[at.place].arrive_once(lane());
    at.advance(shape.stages);
  }

  // Values that nobody sees may be anything: a weight of 0 does not silence NaN. For all that multiply the
  // buffer, whose first row is `first`.
  __device__ __forceinline__ void clear_unseen(uint32_t values, int32_t first) const {
    constexpr int kPieces = kColumns / 8;
    constexpr int kThreads = 128 * Shape::kRowParts;
#pragma unroll 1
    for (int i = group % Shape::kRowParts * 128 + thread; i < Shape::kKeys * kPieces; i += kThreads)
      if (!seen.holds(first + i / kPieces))
        store_shared_16(swizzled_place(values, Shape::kKeys, i / kPieces, i % kPieces), uint4{});
    fence_async_shared();
    if constexpr (Shape::kRowParts > 1)
      sync_warps<256>(3);
    else
      sync();
  }

  __device__ __forceinline__ void take_queries(int index) {
    constexpr int kPieces = kColumns / 8;
    const auto* source = static_cast<const Element*>(params.query);
    const DecodeEntry entry = DecodeEntry::of(params, shape, index, shared.starts(shape) + shape.entries + 1);
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
    held = index;
    seen = entry.seen();
    seen_by_each = entry.seen_by_each();
    fence_async_shared();
    sync_sharers();
  }

  // The warpgroup's next tile of the ring, once its keys are there. `entry`: of it, and then of the one
  // behind it; its queries are asked for before the keys have come.
  __device__ __forceinline__ TileWork take_tile(int& entry) {
    if (entry != held) take_queries(entry);
    shared.full[at.place].wait(at.parity);
    const TileWork work = shared.works[at.place];
    entry = work.next_entry;
    return work;
  }

  // Calls f(row of the entry, its state, each) for the rows that the thread stores, each(store) store(column,
  // pair of sums): lanes 4 apart have a column each of two rows, and then two columns of one. `states`: of
  // the warpgroup's rows.
  template <typename Function>
  __device__ __forceinline__ void each_row(const RowSums& sums, const SoftmaxState* states,
                                           const Function& f) const {
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
      f(row, states[of_group], [&](const auto& store) {
#pragma unroll
        for (int i = 0; i < 2 * kColumnBlocks; ++i)
          store(first_column() + i / 2 * 64 + warp() * 16 + i % 2 * 8 + lane() / 8 * 2, pairs[i / 2][i % 2]);
      });
    }
  }
  __device__ __forceinline__ bool stores_states() const { return thread < 8 && first_column() == 0; }
  __device__ __forceinline__ void store_partial(const RowSums& sums, const SoftmaxState* states,
                                                int64_t place) const {
    const auto store = [](auto* to, const auto& value) {
      if constexpr (kHeadSize <= 256)
        store_kept(to, value);
      else  // sums are as many bytes as keys, too many to stay
        *to = value;
    };
    each_row(sums, states, [&](int row, const SoftmaxState& state, const auto& each) {
      const int64_t target = place * workspace.rows + row;
      if (stores_states()) store(workspace.states + target, state);
      float* to = workspace.sums + target * kHeadSize;
      each([&](int column, const float2& pair) { store(reinterpret_cast<float2*>(to + column), pair); });
    });
  }
  // Of a span that is all there is to the entry, which needs no combining, or of some tiles.
  __device__ __forceinline__ void store(const RowSums& sums, const SoftmaxState* states,
                                        const TileWork& work) const {
    if (work.is_merged && work.is_all)
      store_output(sums, states);
    else
      store_partial(sums, states, work.place);
  }
  __device__ __forceinline__ void store_output(const RowSums& sums, const SoftmaxState* states) const {
    const DecodeEntry& entry = factors().entry;
    each_row(sums, states, [&](int row, const SoftmaxState& state, const auto& each) {
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
