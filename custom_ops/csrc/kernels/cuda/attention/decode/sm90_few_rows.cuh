// A warpgroup of sm_90a decode attention that multiplies in the order of decode.cuh: up to 32 query rows of
// an entry with all keys and values of a tile.
//
// Keys are the rows of the first product, [keys, queries], and the columns of values those of the second,
// [columns, queries], as there: queries cost as many eights as there are. Each warp has the logits of its own
// parts of a tile's keys; their weights go through shared memory, and all warps add the parts up in ascending
// order. Sums of 16 products have the same bits in both instructions, so rows get the bits that they get from
// decode.cuh, and keys are read once for all of them. The two warpgroups share keys and values and nothing
// else: while one is in its softmax, the other multiplies.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "rows.cuh"
#include "sm90_shape.cuh"

namespace ortolan::cuda {

// kGroupRows: query rows of a warpgroup, 16 or 32.
template <int kHeadSize_, int kGroupRows_>
struct Sm90FewShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kGroupRows = kGroupRows_;
  static constexpr int kGroups = 2;  // warpgroups that share tiles
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
  static constexpr int kGroupBytes = kQueryBytes + 2 * kWeightBytes + kFactorBytes;
  static constexpr int kFrontBytes = kGroups * kGroupBytes;
  static constexpr int kStreams = 1;
  static constexpr int kMostTokens = kDecodeTokens;
  static constexpr int kSnapsFrom = 1 << kSpanTiles.shift;
  static constexpr bool kHasClusters = false;
  static constexpr int kThreads = 384;
  // Of a thread; together what the block is launched with.
  static constexpr int kEvenRegisters = 168, kLoadRegisters = 56, kComputeRegisters = 224;
};

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

template <typename Element_, int kHeadSize, int kGroupRows>
struct Sm90FewRows {
  using Element = Element_;
  using Shape = Sm90FewShape<kHeadSize, kGroupRows>;
  using Products = FewColumns<Element, kGroupRows>;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kPartKeys = Shape::kPartKeys;
  static constexpr int kPasses = kParts / 4;      // a warp has one part of each
  static constexpr int kOctets = kPartKeys / 8;   // keys of a part
  static constexpr int kBlocks = kPartKeys / 16;  // products of a pass, 64 keys each
  static constexpr int kRowOctets = kGroupRows / 8;
  static constexpr int kColumnBlocks = kHeadSize / 64;
  static constexpr int kSums = kGroupRows / 2;  // of a thread in a product
  // Columns of a part that are multiplied at once, in 64s, and how many such are under way.
  static constexpr int kChunk = kColumnBlocks * kSums <= 32 ? kColumnBlocks : 1;
  static constexpr int kFreeRegisters = 130 - 2 * kColumnBlocks * kSums;
  static constexpr int kMostDepth = kFreeRegisters / (kChunk * kSums);
  static constexpr int kDepth = kMostDepth < 2 ? 2 : kMostDepth < kParts ? kMostDepth : kParts;
  static constexpr int kUnits = kColumnBlocks / kChunk * kParts;
  // Of those that find factors: how many have a row, and how many parts each has.
  static constexpr int kRowLanes = kGroupRows == 32 ? 4 : 8;
  static constexpr int kOwnParts = kParts > kRowLanes ? kParts / kRowLanes : 1;
  using Factors = FewFactors<kParts, kGroupRows>;
  using Sums = float[kChunk][kSums];
  static_assert(sizeof(Factors) <= Shape::kFactorBytes);

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const DecodeWorkspace& workspace;
  const Sm90DecodeShared& shared;
  Logits logits;
  int stream;
  int group;
  int thread;  // of the warpgroup
  RingPlace at;
  int turn;                          // of the weights' buffers
  SeenPositions seen, seen_by_each;  // by the entry's queries
  float tile_sums[kColumnBlocks][kSums];
  float span_sums[kColumnBlocks][kSums];
  SoftmaxState span_state;  // of row thread / kRowLanes

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  // Of a sum of a product: its row in the warpgroup.
  __device__ __forceinline__ int row(int n) const { return n / 4 * 8 + thread % 4 * 2 + n % 2; }
  __device__ __forceinline__ uint32_t queries() const {
    return shared.queries() + group * Shape::kGroupBytes;
  }
  __device__ __forceinline__ uint32_t weights() const {
    return queries() + Shape::kQueryBytes + turn * Shape::kWeightBytes;
  }
  __device__ __forceinline__ Factors& factors() const {
    return *reinterpret_cast<Factors*>(shared.memory + group * Shape::kGroupBytes + Shape::kQueryBytes +
                                       2 * Shape::kWeightBytes);
  }
  __device__ __forceinline__ void sync() const { sync_warps<128>(1 + group); }
  __device__ __forceinline__ void release() {
    shared.empty[at.place].arrive_once(lane());
    at.advance(shape.stages);
  }

  __device__ __forceinline__ void take_queries(const DecodeEntry& entry) {
    constexpr int kPieces = kHeadSize / 8;
    const auto* source = static_cast<const Element*>(params.query);
    sync();  // all have multiplied with the last entry's
#pragma unroll 4
    for (int i = thread; i < kGroupRows * kPieces; i += 128) {
      const int place = i / kPieces, piece = i % kPieces, row = group * kGroupRows + place;
      uint4 value{};
      if (row < entry.rows && piece * 8 < params.cache.head_size)
        value = *reinterpret_cast<const uint4*>(
            source + entry.row_number(params, shape, row) * params.cache.head_size + piece * 8);
      store_shared_16(swizzled_place(queries(), kGroupRows, place, piece), value);
    }
    if (thread == 0) factors().entry = entry;
    seen = entry.seen();
    seen_by_each = entry.seen_by_each();
    fence_async_shared();
    sync();
  }

  // Logits of a pass: of the even and the odd steps' products two sums. Two products for a warp's 32 keys
  // take the even and the odd eights of keys.
  using LogitTile = float[kBlocks][kSums];
  __device__ __forceinline__ void multiply_keys(LogitTile& even, LogitTile& odd, uint32_t keys) const {
    const uint64_t b = wgmma_tile(descriptor_address(queries()), 16);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t a = wgmma_tile(descriptor_address(keys + block * 1024), 16, kBlocks * 1024);
#pragma unroll
      for (int k = 0; k < kHeadSize / 16; ++k)
        Products::products(k % 2 ? odd[block] : even[block], moved_tile(a, k / 4 * kKeys * 128 + k % 4 * 32),
                           moved_tile(b, k / 4 * kGroupRows * 128 + k % 4 * 32), k > 1);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_logits(LogitTile& z, LogitTile& odd, int32_t first) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        asm volatile("" : "+f"(z[block][n]), "+f"(odd[block][n]));
        z[block][n] += odd[block][n];
      }
      if (logits.mapped) {
        logits.map(z[block]);
      } else {
#pragma unroll
        for (int n = 0; n < kSums; ++n) z[block][n] = __fmul_rn(z[block][n], logits.factor);
      }
    }
    if (seen_by_each.hold_all(first, first + kPartKeys)) return;
    const DecodeEntry& entry = factors().entry;
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      if (n % 4 / 2) continue;
      const int32_t position = entry.first_position + entry.token(shape, group * kGroupRows + row(n));
      const SeenPositions own = entry.visibility.of_query(position);
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet)
        if (!own.holds(first + octet * 8 + lane() / 4)) logit(z, octet, n) = -INFINITY;
    }
  }
  // Of a key of the part's eighth, and of the query of a sum's column.
  static __device__ __forceinline__ float& logit(LogitTile& z, int octet, int n) {
    return z[octet % kBlocks][n / 4 * 4 + octet / kBlocks * 2 + n % 2];
  }

  // Reduces two values over the lanes that share lane % 4; lanes with bit 2 clear end with the first.
  template <typename Operation>
  __device__ __forceinline__ float reduce(float first, float second, Operation operation) const {
    const bool is_second = thread & 4;
    float value = operation(is_second ? second : first, __shfl_xor_sync(~0u, is_second ? first : second, 4));
    return fold_lanes<8, 16>(value, operation);
  }

  // Logits of a part become weights, in shared memory; so do its maxima and totals.
  __device__ __forceinline__ void weigh(LogitTile& z, int part) {
    uint32_t packed[kRowOctets][kOctets];
#pragma unroll
    for (int n = 0; n < kRowOctets; ++n) {
      float highest[2] = {-INFINITY, -INFINITY}, sums[2] = {};
#pragma unroll
      for (int i = 0; i < 2 * kOctets; ++i)
        highest[i % 2] = fmaxf(highest[i % 2], logit(z, i / 2, n * 4 + i % 2));
      const float maximum = reduce(highest[0], highest[1], Max());
      const float mine = finite_max(maximum), other = __shfl_xor_sync(~0u, mine, 4);
      const float base[2] = {thread & 4 ? other : mine, thread & 4 ? mine : other};
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        const float low = fast_exp2(__fsub_rn(logit(z, octet, n * 4), base[0]));
        const float high = fast_exp2(__fsub_rn(logit(z, octet, n * 4 + 1), base[1]));
        packed[n][octet] = Half<Element>::pack(low, high);
        sums[0] += low;
        sums[1] += high;
      }
      const float total = reduce(sums[0], sums[1], Add());
      if (lane() < 8) {
        const int row = n * 8 + lane() % 4 * 2 + lane() / 4;
        factors().maxima[row][part] = maximum;
        factors().totals[row][part] = total;
      }
    }
    store_weights(packed, part);
  }
  // [queries, keys]: eighths of keys are pieces of a query's row.
  __device__ __forceinline__ void store_weights(const uint32_t (&packed)[kRowOctets][kOctets],
                                                int part) const {
    const int matrix = lane() / 8;
    if constexpr (kOctets == 4) {
#pragma unroll
      for (int n = 0; n < kRowOctets; ++n)
        store_matrix_x4_transposed(
            swizzled_place(weights(), kGroupRows, n * 8 + lane() % 8, part * kOctets + matrix), packed[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kRowOctets; n += 2) {
        const uint32_t tiles[4] = {packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]};
        store_matrix_x4_transposed(swizzled_place(weights(), kGroupRows, n * 8 + lane() / 16 * 8 + lane() % 8,
                                                  part * kOctets + matrix % 2),
                                   tiles);
      }
    }
  }

  // Weights of all parts, and their maxima and totals, for the whole warpgroup.
  __device__ __forceinline__ void weigh_tile(int32_t first) {
    LogitTile z[kPasses], odd[kPasses];
    shared.full[at.place].wait(at.parity);
    const uint32_t keys = shared.template buffer<Shape>(at.place);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      multiply_keys(z[pass], odd[pass], keys + pass * kBlocks * 64 * 128);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass + 1 < kPasses) {
        wgmma_wait<kPasses - 1>();
      } else {
        wgmma_wait<0>();
        release();
      }
      const int part = pass * 4 + warp();
      finish_logits(z[pass], odd[pass], first + part * kPartKeys);
      weigh(z[pass], part);
    }
    fence_async_shared();
    sync();
  }

  // Factors of the tile's parts, and of the tile in its span. Parts are added in a tree, which fixes their
  // order.
  __device__ __forceinline__ void find_factors(bool is_whole) {
    const int row = thread / kRowLanes, first = thread % kRowLanes * kOwnParts;
    const bool is_there = row < kGroupRows && first < kParts;
    SoftmaxState parts[kOwnParts], tile = kNoKeys;
    float weights[kOwnParts];
#pragma unroll
    for (int i = 0; i < kOwnParts; ++i) {
      parts[i] = is_there ? SoftmaxState{factors().maxima[row][first + i], factors().totals[row][first + i]}
                          : kNoKeys;
      tile.maximum = fmaxf(tile.maximum, parts[i].maximum);
    }
    tile.maximum = fold_lanes<1, kRowLanes / 2>(tile.maximum, Max());
#pragma unroll
    for (int i = 0; i < kOwnParts; ++i) {
      weights[i] = fast_exp2(parts[i].maximum - finite_max(tile.maximum));
      const float total = __fmul_rn(parts[i].total, weights[i]);
      tile.total = i ? tile.total + total : total;
    }
    tile.total = fold_lanes<1, kRowLanes / 2>(tile.total, Add());
    const Merge merge = Merge::of(span_state, tile);
    if (is_whole) span_state = tile = merge.state;
    if (is_there) {
#pragma unroll
      for (int i = 0; i < kOwnParts; ++i) factors().weights[first + i][row] = weights[i];
      if (first == 0) {
        factors().kept[row] = merge.kept;
        factors().added[row] = merge.added;
        factors().states[row] = tile;
      }
    }
    sync();
  }

  // A unit: a part of the keys, and a chunk of the columns.
  __device__ __forceinline__ void multiply_unit(Sums& sums, uint32_t values, int unit) const {
    const int part = unit % kParts, block = unit / kParts * kChunk;
    const uint64_t b = wgmma_tile(descriptor_address(weights()), 16);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kChunk; ++c) {
      const uint64_t a = wgmma_tile(descriptor_address(values + (block + c) * kKeys * 128), 16);
#pragma unroll
      for (int k = 0; k < kPartKeys / 16; ++k) {
        const int step = part * (kPartKeys / 16) + k;
        Products::sums(sums[c], moved_tile(a, step * 2048),
                       moved_tile(b, step / 4 * kGroupRows * 128 + step % 4 * 32), k > 0);
      }
    }
    wgmma_commit();
  }
  using PartWeights = float2[kSums / 4];  // of the thread's queries
  __device__ __forceinline__ void load_weights(PartWeights& weights, int unit) const {
#pragma unroll
    for (int n = 0; n < kSums; n += 4)
      weights[n / 4] = *reinterpret_cast<const float2*>(&factors().weights[unit % kParts][row(n)]);
  }
  __device__ __forceinline__ void add_unit(Sums& sums, const PartWeights& weights, int unit) {
#pragma unroll
    for (int c = 0; c < kChunk; ++c)
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        asm volatile("" : "+f"(sums[c][n]));
        float& sum = tile_sums[unit / kParts * kChunk + c][n];
        const float weight = n % 2 ? weights[n / 4].y : weights[n / 4].x;
        sum = fmaf(sums[c][n], weight, unit % kParts ? sum : 0.0f);
      }
  }
  // The first units are multiplied while factors are found.
  __device__ __forceinline__ void multiply_values(int32_t first, bool is_whole) {
    shared.full[at.place].wait(at.parity);
    const uint32_t values = shared.template buffer<Shape>(at.place);
    if (!seen.hold_all(first, first + kKeys)) clear_unseen(values, first);
    Sums sums[kDepth];
#pragma unroll
    for (int unit = 0; unit < kDepth; ++unit) multiply_unit(sums[unit], values, unit);
    find_factors(is_whole);
    PartWeights weights[2];
    load_weights(weights[0], 0);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit + 1 < kUnits) load_weights(weights[(unit + 1) % 2], unit + 1);
      if (unit + kDepth <= kUnits)
        wgmma_wait<kDepth - 1>();
      else if (unit + kDepth == kUnits + 1)
        wgmma_wait<0>();
      add_unit(sums[unit % kDepth], weights[unit % 2], unit);
      if (unit + kDepth < kUnits) multiply_unit(sums[unit % kDepth], values, unit + kDepth);
    }
    release();
    turn ^= 1;
  }
  // Values that nobody sees may be anything: a weight of 0 does not silence NaN.
  __device__ __forceinline__ void clear_unseen(uint32_t values, int32_t first) const {
    constexpr int kPieces = kHeadSize / 8;
#pragma unroll 1
    for (int i = group * 128 + thread; i < kKeys * kPieces; i += 256)
      if (!seen.holds(first + i / kPieces))
        store_shared_16(swizzled_place(values, kKeys, i / kPieces, i % kPieces), uint4{});
    fence_async_shared();
    sync_warps<256>(3);
  }

  __device__ __forceinline__ void clear_span() {
    span_state = kNoKeys;
#pragma unroll
    for (int n = 0; n < kColumnBlocks * kSums; ++n) span_sums[n / kSums][n % kSums] = 0;
  }
  __device__ __forceinline__ void merge() {
#pragma unroll
    for (int n = 0; n < kSums; n += 4) {
      const float2 kept = *reinterpret_cast<const float2*>(&factors().kept[row(n)]);
      const float2 added = *reinterpret_cast<const float2*>(&factors().added[row(n)]);
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          span_sums[c][n + i] = fmaf(span_sums[c][n + i], i % 2 ? kept.y : kept.x,
                                     tile_sums[c][n + i] * (i % 2 ? added.y : added.x));
    }
  }

  // Calls f(row of the entry, its state, each) for the rows that the thread stores, each(store) store(column,
  // pair of sums): lanes 4 apart have a column each of two rows, and then two columns of one.
  template <typename Function>
  __device__ __forceinline__ void each_row(const float (&sums)[kColumnBlocks][kSums],
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
      const int of_group = row(octet * 4) + is_odd, row = group * kGroupRows + of_group;
      if (row >= factors().entry.rows) continue;
      f(row, factors().states[of_group], [&](const auto& store) {
#pragma unroll
        for (int i = 0; i < 2 * kColumnBlocks; ++i)
          store(i / 2 * 64 + warp() * 16 + i % 2 * 8 + lane() / 8 * 2, pairs[i / 2][i % 2]);
      });
    }
  }
  __device__ __forceinline__ void store_partial(const float (&sums)[kColumnBlocks][kSums],
                                                int64_t place) const {
    each_row(sums, [&](int row, const SoftmaxState& state, const auto& each) {
      const int64_t target = place * workspace.rows + row;
      if (thread < 8) workspace.states[target] = state;
      float* to = workspace.sums + target * kHeadSize;
      each([&](int column, const float2& pair) { *reinterpret_cast<float2*>(to + column) = pair; });
    });
  }
  // An entry that one block summed whole needs no combining.
  __device__ __forceinline__ void store_output() const {
    const DecodeEntry& entry = factors().entry;
    each_row(span_sums, [&](int row, const SoftmaxState& state, const auto& each) {
      const int64_t head = entry.head(shape, row);
      const Denominator denominator = Denominator::of(state.total, state.maximum, params.sink_logits, head);
      if (params.lse && thread < 8)
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

  // So many tiles of a span, from the cursor's on.
  __device__ __forceinline__ void sum_tiles(const DecodeCursor& cursor, const DecodeSpan& span, int count) {
    const KeyTiles tiles = cursor.of.tiles;
#pragma unroll 1
    for (int number = cursor.number; number < cursor.number + count; ++number) {
      const int tile = tiles.at(number);
      weigh_tile(tile * kKeys);
      multiply_values(tile * kKeys, span.is_whole);
      if (span.is_whole)
        merge();
      else
        store_partial(tile_sums, workspace.tile_place(span.owner, tile));
    }
    if (!span.is_whole) return;
    if (span.tiles.end - span.tiles.begin == tiles.count())
      store_output();
    else
      store_partial(span_sums, workspace.span_place(cursor.entry, span.number));
    clear_span();
  }

  template <typename Line>
  __device__ __forceinline__ void run(const Line& line, int begin, int end) {
    turn = 0;
    clear_span();
    int entry = -1;  // whose queries are there
    each_run_of_stream(params, shape, line, begin, end, stream,
                       [&](const DecodeCursor& cursor, const DecodeSpan& span, int count) {
                         if (entry != cursor.entry) take_queries(cursor.of);
                         entry = cursor.entry;
                         sum_tiles(cursor, span, count);
                       });
  }
};

}  // namespace ortolan::cuda
