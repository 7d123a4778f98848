// A warpgroup of sm_90a decode attention that multiplies in the order of decode.cuh: up to 32 query rows of
// an entry with all keys and values of a tile.
//
// Keys are the rows of the first product, [keys, queries], and the columns of values those of the second,
// [columns, queries], as there: queries cost as many eights as there are. Each warp has the logits of its own
// parts of a tile's keys; their weights go through shared memory, and all warps add the parts up in ascending
// order. Sums of 16 products have the same bits in both instructions, so rows get the bits that they get from
// decode.cuh, and keys are read once for all of them. While one warpgroup is in its softmax, the other
// multiplies. Where each has rows of its own they share keys and values and nothing else; where they take
// tiles by turns, a span's sums go from one to the other.
#pragma once

#include "kernels/cuda/attention/key_rows.cuh"
#include "sm90_few_group.cuh"

namespace ortolan::cuda {

template <typename Element_, int kHeadSize, int kRows>
struct Sm90FewRows : Sm90FewGroup<Element_, Sm90FewShape<kHeadSize, kRows>> {
  using Base = Sm90FewGroup<Element_, Sm90FewShape<kHeadSize, kRows>>;
  using Base::at, Base::factors, Base::group, Base::lane, Base::logits, Base::params, Base::queries,
      Base::release, Base::row, Base::shape, Base::shared, Base::sync, Base::thread, Base::tile_sums,
      Base::warp, Base::workspace;
  using Base::kColumnBlocks, Base::kGroupRows, Base::kRowOctets, Base::kSums;
  using typename Base::Element;
  using typename Base::Shape;
  using Products = FewColumns<Element, kGroupRows>;
  static constexpr bool kTakesTurns = Shape::kTakesTurns;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kPartKeys = Shape::kPartKeys;
  static constexpr int kPasses = kParts / 4;      // a warp has one part of each
  static constexpr int kOctets = kPartKeys / 8;   // keys of a part
  static constexpr int kBlocks = kPartKeys / 16;  // products of a pass, 64 keys each
  // Columns of a part that are multiplied at once, in 64s, and how many such are under way.
  static constexpr int kChunk = kColumnBlocks * kSums <= 32 ? kColumnBlocks : 1;
  static constexpr int kFreeRegisters = 130 - (kTakesTurns ? 1 : 2) * kColumnBlocks * kSums;
  static constexpr int kMostDepth = kFreeRegisters / (kChunk * kSums);
  static constexpr int kDepth = kMostDepth < 2 ? 2 : kMostDepth < kParts ? kMostDepth : kParts;
  static constexpr int kUnits = kColumnBlocks / kChunk * kParts;
  // Of those that find factors: how many have a row, and how many parts each has.
  static constexpr int kRowLanes = kGroupRows == 32 ? 4 : 8;
  static constexpr int kOwnParts = kParts > kRowLanes ? kParts / kRowLanes : 1;
  using Sums = float[kChunk][kSums];

  uint32_t turn_parity;  // of the warp
  // Where there are no turns: the buffer of the tile's weights, and the span's tiles so far.
  int buffer;
  typename Base::RowSums span_sums;
  SoftmaxState span_state;  // of row thread / kRowLanes

  // Logits of a pass: of the even and the odd steps' products two sums. Two products for a warp's 32 keys
  // take the even and the odd eights of keys.
  using LogitTile = float[kBlocks][kSums];
  __device__ __forceinline__ uint32_t weights() const { return Base::weights(kTakesTurns ? 0 : buffer); }
  __device__ __forceinline__ void multiply_keys(LogitTile& even, LogitTile& odd, uint32_t keys) const {
    const uint64_t b = wgmma_tile(queries(), 16);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t a = wgmma_tile(keys + block * 1024, 16, kBlocks * 1024);
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
      logits.finish(z[block]);
    }
    if (this->seen_by_each.hold_all(first, first + kPartKeys)) return;
    const DecodeEntry& entry = factors().entry;
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      if (n % 4 / 2) continue;
      const int32_t position = entry.first_position + entry.token(shape, this->first_row() + row(n));
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

  // Logits of a part become weights, in shared memory; so do its maxima and totals.
  __device__ __forceinline__ void weigh(LogitTile& z, int part) {
    uint32_t packed[kRowOctets][kOctets];
#pragma unroll
    for (int n = 0; n < kRowOctets; ++n) {
      float highest[2] = {-INFINITY, -INFINITY}, sums[2] = {};
#pragma unroll
      for (int i = 0; i < 2 * kOctets; ++i)
        highest[i % 2] = fmaxf(highest[i % 2], logit(z, i / 2, n * 4 + i % 2));
      const float maximum = fold_pair(highest[0], highest[1], Max(), lane());
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
      const float total = fold_pair(sums[0], sums[1], Add(), lane());
      if (lane() < 8) {
        factors().maxima[this->lane_row(n)][part] = maximum;
        factors().totals[this->lane_row(n)][part] = total;
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
    const uint32_t keys = shared.template buffer<Shape>(at.place);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      multiply_keys(z[pass], odd[pass], keys + pass * kBlocks * 64 * 128);
    if constexpr (kTakesTurns) sync();  // all have multiplied with the weights before
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
  __device__ __forceinline__ void find_factors(bool is_merged) {
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
    Merge merge;
    if constexpr (!kTakesTurns) {
      merge = Merge::of(span_state, tile);
      if (is_merged) span_state = tile = merge.state;
    }
    if (is_there) {
#pragma unroll
      for (int i = 0; i < kOwnParts; ++i) factors().weights[first + i][row] = weights[i];
      if (first == 0) {
        if constexpr (!kTakesTurns) {
          factors().kept[row] = merge.kept;
          factors().added[row] = merge.added;
        }
        factors().states[row] = tile;
      }
    }
    sync();
  }

  // A unit: a part of the keys, and a chunk of the columns.
  __device__ __forceinline__ void multiply_unit(Sums& sums, uint32_t values, int unit) const {
    const int part = unit % kParts, block = unit / kParts * kChunk;
    const uint64_t b = wgmma_tile(weights(), 16);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kChunk; ++c) {
      const uint64_t a = wgmma_tile(values + (block + c) * kKeys * 128, 16);
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
  __device__ __forceinline__ void multiply_values(int32_t first, bool is_merged) {
    shared.full[at.place].wait(at.parity);
    const uint32_t values = shared.template buffer<Shape>(at.place);
    if (!this->seen.hold_all(first, first + kKeys)) this->clear_unseen(values, first);
    Sums sums[kDepth];
#pragma unroll
    for (int unit = 0; unit < kDepth; ++unit) multiply_unit(sums[unit], values, unit);
    find_factors(is_merged);
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

  __device__ __forceinline__ typename Shape::Handed& handed() const {
    return *reinterpret_cast<typename Shape::Handed*>(shared.memory + Shape::kHandedPlace);
  }
  // Twins of the warpgroups take turns. The first of the first has nobody to wait for.
  __device__ __forceinline__ void take_turn() {
    shared.turns[group * 4 + warp()].wait(turn_parity);
    turn_parity ^= 1;
  }
  __device__ __forceinline__ void end_turn() const {
    shared.turns[(group ^ 1) * 4 + warp()].arrive_once(lane());
  }
  // The tile's sums and states become those of the span so far, in registers and in shared memory.
  __device__ __forceinline__ void add_handed(bool is_first) {
    const int own = lane() % kGroupRows;
    SoftmaxState& handed_state = handed().states[warp()][own];
    SoftmaxState state = kNoKeys;
    if (!is_first) state = handed_state;
    const Merge merge = Merge::of(state, factors().states[own]);
    __syncwarp();
    if (lane() < kGroupRows) handed_state = merge.state;
#pragma unroll
    for (int n = 0; n < kSums; n += 4) {
      float kept[2], added[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        kept[i] = __shfl_sync(~0u, merge.kept, row(n + i));
        added[i] = __shfl_sync(~0u, merge.added, row(n + i));
      }
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        float4& handed_sums = handed().sums[(c * kSums + n) / 4][thread];
        const float4 before = is_first ? float4{} : handed_sums;
        float* sums = &tile_sums[c][n];
        sums[0] = fmaf(before.x, kept[0], sums[0] * added[0]);
        sums[1] = fmaf(before.y, kept[1], sums[1] * added[1]);
        sums[2] = fmaf(before.z, kept[0], sums[2] * added[0]);
        sums[3] = fmaf(before.w, kept[1], sums[3] * added[1]);
        handed_sums = make_float4(sums[0], sums[1], sums[2], sums[3]);
      }
    }
    __syncwarp();
  }
  // The tile's values with its weights, and the tile with its span.
  __device__ __forceinline__ void sum_tile(const TileWork& work) {
    multiply_values(work.first, work.is_merged);
    if constexpr (kTakesTurns) {
      take_turn();
      if (work.is_merged) add_handed(work.begins);
      if (!work.is_merged)
        this->store(tile_sums, factors().states, work);
      else if (work.ends)
        this->store(tile_sums, handed().states[warp()], work);
      end_turn();
    } else {
      buffer ^= 1;
      if (work.is_merged) {
        merge();
        if (!work.ends) return;
        this->store(span_sums, factors().states, work);
        clear_span();
      } else {
        this->store(tile_sums, factors().states, work);
      }
    }
  }

  // So many tiles or, by turns, every other one of them; `entry`: of the first.
  __device__ __forceinline__ void run(int count, int entry) {
    this->held = -1;
    turn_parity = group ^ 1;
    buffer = 0;
    if constexpr (!kTakesTurns) clear_span();
    bool is_own = !kTakesTurns || group == 0;
#pragma unroll 1
    for (; count > 0; --count) {
      if (is_own) {
        const TileWork work = this->take_tile(entry);
        weigh_tile(work.first);
        sum_tile(work);
      } else {
        at.advance(shape.stages);  // keys, and then values
        at.advance(shape.stages);
      }
      if constexpr (kTakesTurns) is_own = !is_own;
    }
  }
};

}  // namespace ortolan::cuda
