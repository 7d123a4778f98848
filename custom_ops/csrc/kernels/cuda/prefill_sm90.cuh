// Prefill attention for sm_90a: wgmma fed by tensor copies, warps specialised.
//
// As many blocks as multiprocessors, each with tiles of query rows of one head after another. One warpgroup
// loads: queries, then key and value tiles into a ring of stages, running ahead into the block's next work.
// The others hold 64 rows each: products with the keys from shared memory, softmax in registers, weighted
// sums of the values with the weights from registers. While one group is at its softmax the other keeps the
// tensor cores busy. Key tiles are cut by position and taken in ascending order, so equal queries give equal
// bits however a prompt is cut; a group skips tiles that none of its rows sees. Tiles whose rows are adjacent
// (whole pages or parts of them) are copied by the tensor unit; the others - at the wrap of a ring, at the
// end of what is written, where rows may hold anything and must become zeros - row by row. Source of the
// schedule: Shah et al., FlashAttention-3 (arXiv 2407.08608), without its overlap inside a warpgroup.
#pragma once

#include "attention_instances.h"
#include "key_rows.cuh"
#include "key_tiles.cuh"
#include "query_tiles.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace ortolan::cuda {

template <int kHeadSize, int kKeyRows>
struct Sm90Shape {
  static constexpr int kKeys = kKeyRows;                   // of a tile
  static constexpr int kGroups = kHeadSize == 64 ? 3 : 2;  // warpgroups that compute
  static constexpr int kRows = kGroups * 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kBoxes = kHeadSize / 64;  // of 64 columns, 128 bytes
  static constexpr int kTileBytes = kKeys * kHeadSize * 2;
  static constexpr int kQueryBytes = kRows * kHeadSize * 2;
  static constexpr int kStages = kTileBytes <= 16384 ? 4 : 2;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kStages * kTileBytes + 1024;
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : 232;
};

// What the host prepares: tensor maps, and how many rows of a tile one copy takes (pages may be smaller than
// tiles).
struct Sm90Maps {
  CUtensorMap query;   // [T, Hq, D], boxes of 64 rows
  CUtensorMap keys;    // [N * Hkv, P, D], boxes of box_rows slots
  CUtensorMap values;  // the same
  int box_rows;
};

template <int kStages>
struct Sm90Barriers {
  Barrier query_full, query_empty;
  Barrier key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
};

// One tile of query rows and the keys it meets; the same for all warps.
template <typename Shape>
struct Sm90Work {
  QueryTile tile;
  int head;
  int kv_head;
  int32_t first;  // position of the tile's first row
  int32_t end;    // positions of the sequence
  KeyTiles visits;

  // Returns false where there is nothing to do.
  __device__ __forceinline__ bool find(const SwaAttentionParams& params, unsigned number, int tiles,
                                       int section_heads, const Visibility& visibility) {
    const TileAndHead place = TileAndHead::of(number, tiles, section_heads);
    tile = find_query_tile(params.packing, place.tile, Shape::kRows, kDecodeTokens);
    if (tile.sequence < 0) return false;
    head = place.head;
    kv_head = head / static_cast<int>(params.num_heads / params.cache.num_kv_heads);
    const auto past = static_cast<int32_t>(params.past_len.at(tile.sequence, kv_head));
    first = past + tile.offset;
    end = past + static_cast<int32_t>(params.packing.count(tile.sequence));
    visits = of_rows(0, tile.count, visibility);
    return true;
  }
  // Key tiles of some of the rows.
  __device__ __forceinline__ KeyTiles of_rows(int begin, int count, const Visibility& visibility) const {
    return KeyTiles::of(first + begin, first + begin + count - 1,
                        visibility.window == kNoWindow ? -1 : visibility.window, visibility.sink,
                        Shape::kKeys);
  }
};

template <typename Element, int kHeadSize, typename Shape>
struct Sm90Loader {
  const SwaAttentionParams& params;
  const Sm90Maps& maps;

  // Copies a tile of rows to `target`; the whole warp takes part. `full` expects one arrival.
  __device__ __forceinline__ void load(uint32_t target, const CUtensorMap& map, const void* cache,
                                       const Sm90Work<Shape>& work, int32_t first, Barrier& full) const {
    const int lane = threadIdx.x % 32;
    const KeyRows rows(params.cache, work.tile.sequence, work.kv_head);
    const int copies = Shape::kKeys / maps.box_rows;
    const int32_t slot = rows.first_slot(first + lane % copies * maps.box_rows);
    const bool is_plain = first + Shape::kKeys <= work.end && rows.are_adjacent(slot, maps.box_rows);
    if (__all_sync(~0u, is_plain)) {
      if (lane == 0) arrive_expecting(full, Shape::kTileBytes);
      __syncwarp();
      if (lane >= copies) return;
      const int64_t page = params.cache.page(work.tile.sequence, slot);
      const auto plane = static_cast<int32_t>(page * params.cache.num_kv_heads + work.kv_head);
      const int32_t row = rows.pages ? slot % static_cast<int32_t>(params.cache.page_slots) : slot;
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box)
        copy_box(target + box * Shape::kKeys * 128 + lane * maps.box_rows * 128, map, box * 64, row, plane,
                 full);
      return;
    }
    const auto* source = static_cast<const Element*>(cache);
    const int32_t first_slot = rows.first_slot(first);
#pragma unroll 1
    for (int i = lane; i < Shape::kKeys * kHeadSize / 8; i += 32) {
      const int row = i / (kHeadSize / 8), chunk = i % (kHeadSize / 8);
      const bool valid = first + row < work.end;
      const uint32_t place = target + chunk / 8 * Shape::kKeys * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16;
      copy_async_16(place, source + (valid ? rows.offset(first_slot + row) + chunk * 8 : 0), valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) full.arrive();
  }

  __device__ __forceinline__ void load_queries(uint32_t target, const Sm90Work<Shape>& work,
                                               Barrier& full) const {
    if (threadIdx.x % 32) return;
    arrive_expecting(full, Shape::kQueryBytes);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box)
#pragma unroll
      for (int group = 0; group < Shape::kGroups; ++group)
        copy_box(target + (box * Shape::kRows + group * 64) * 128, maps.query, box * 64, work.head,
                 work.tile.first + group * 64, full);
  }
};

// One warpgroup's 64 rows.
template <typename Element, int kHeadSize, typename Shape>
struct Sm90Rows {
  static constexpr int kKeys = Shape::kKeys;
  float sums[kHeadSize / 2];
  float maxima[2];
  float totals[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kHeadSize / 2; ++n) sums[n] = 0;
    maxima[0] = maxima[1] = -INFINITY;
    totals[0] = totals[1] = 0;
  }

  static __device__ __forceinline__ void multiply_keys(float (&z)[kKeys / 2], uint32_t queries,
                                                       uint32_t keys) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      const uint64_t a = wgmma_tile(queries + k / 4 * Shape::kRows * 128 + k % 4 * 32, 16);
      const uint64_t b = wgmma_tile(keys + k / 4 * kKeys * 128 + k % 4 * 32, 16);
      Wgmma<Element, kKeys>::products(z, a, b, k > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[kKeys / 16][4], uint32_t values) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<Element, kHeadSize>::sums(sums, weights[k], wgmma_tile(values + k * 2048, kKeys * 128));
    wgmma_commit();
  }

  // `row` and `key`: positions of the thread's first row and of the tile's first key.
  static __device__ __forceinline__ void mask(float (&z)[kKeys / 2], const Visibility& visibility,
                                              int32_t row, int32_t key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n)
      if (!visibility.sees(row + n / 2 % 2 * 8, key + n / 4 * 8 + lane % 4 * 2 + n % 2)) z[n] = -INFINITY;
  }

  // Turns logits into weights, rounded for the product with the values, and rescales what was summed before.
  __device__ __forceinline__ void weigh(float (&z)[kKeys / 2], uint32_t (&weights)[kKeys / 16][4],
                                        float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = maxima[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        maximum = fmaxf(maximum, fmaxf(z[4 * n + 2 * half], z[4 * n + 2 * half + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
      const float base = __fmul_rn(finite_max(maximum), factor);
      // Rounded before it is subtracted: where the maximum stays, the factor is exactly 1.
      const float rescale = fast_exp2(__fmul_rn(maxima[half], factor) - base);
      maxima[half] = maximum;
      float total = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float low = fast_exp2(fmaf(z[4 * n + 2 * half], factor, -base));
        const float high = fast_exp2(fmaf(z[4 * n + 2 * half + 1], factor, -base));
        total += low + high;
        weights[n / 2][n % 2 * 2 + half] = Half<Element>::pack(low, high);
      }
      totals[half] = fmaf(totals[half], rescale, total);
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        sums[4 * n + 2 * half] *= rescale;
        sums[4 * n + 2 * half + 1] *= rescale;
      }
    }
  }

  // Divides and writes the rows: the four threads of a row exchange what they hold into pieces of 16 bytes.
  __device__ __forceinline__ void store(const SwaAttentionParams& params, const Sm90Work<Shape>& work,
                                        int row, float factor) {
    const int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = totals[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const Denominator denominator =
          Denominator::of(total, __fmul_rn(maxima[half], factor), params.sink_logits, work.head);
      const float inverse = denominator.inverse;
      const int tile_row = row + half * 8;
      const bool exists = tile_row < work.tile.count;
      const int64_t token = work.tile.first + tile_row;
      if (params.lse && part == 0 && exists)
        params.lse[work.head * params.packing.num_tokens + token] = denominator.lse;
      auto* output = static_cast<Element*>(params.output) +
                     (token * params.num_heads + work.head) * kHeadSize + part * 8;
#pragma unroll
      for (int n = 0; n < kHeadSize / 32; ++n) {
        uint32_t mine[4];  // columns part * 2 .. + 2 of four blocks of 8
#pragma unroll
        for (int block = 0; block < 4; ++block)
          mine[block] = Half<Element>::pack(sums[(n * 4 + block) * 4 + 2 * half] * inverse,
                                            sums[(n * 4 + block) * 4 + 2 * half + 1] * inverse);
        uint32_t piece[4];  // block `part`, columns source * 2 .. + 2
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          // Thread p sends block p ^ step to thread p ^ step, and gets block p from it.
          const int other = part ^ step;
          uint32_t sent = mine[0];
#pragma unroll
          for (int block = 1; block < 4; ++block)
            if (other == block) sent = mine[block];
          const uint32_t got = __shfl_xor_sync(~0u, sent, step);
#pragma unroll
          for (int source = 0; source < 4; ++source)
            if (other == source) piece[source] = got;
        }
        if (exists)
          *reinterpret_cast<uint4*>(output + n * 32) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
  }
};

template <typename Element, int kHeadSize, int kKeyRows>
__global__ void __launch_bounds__(Sm90Shape<kHeadSize, kKeyRows>::kThreads, 1)
    sm90_prefill_kernel(const __grid_constant__ SwaAttentionParams params,
                        const __grid_constant__ Sm90Maps maps, int tiles, int section_heads) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = Sm90Shape<kHeadSize, kKeyRows>;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Sm90Barriers<Shape::kStages> barriers;
  const uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023u;
  const uint32_t keys = queries + Shape::kQueryBytes;
  const uint32_t values = keys + Shape::kStages * Shape::kTileBytes;
  const int group = threadIdx.x / 128;  // the last one loads
  if (threadIdx.x == 0) {
    barriers.query_full.init(1);
    barriers.query_empty.init(Shape::kGroups * 4);
    for (int s = 0; s < Shape::kStages; ++s) {
      barriers.key_full[s].init(1);
      barriers.value_full[s].init(1);
      barriers.key_empty[s].init(Shape::kGroups * 4);
      barriers.value_empty[s].init(Shape::kGroups * 4);
    }
    fence_async_proxy();
  }
  __syncthreads();
  wait_for_previous_kernel();
  launch_dependents();

  const Visibility visibility = Visibility::of(params);
  const unsigned works = static_cast<unsigned>(tiles) * static_cast<unsigned>(params.num_heads);
  Sm90Work<Shape> work;
  int stage = 0;
  uint32_t parity = 0, query_parity = 0;
  const auto next_stage = [&] {
    if (++stage < Shape::kStages) return;
    stage = 0;
    parity ^= 1;
  };

  if (group == Shape::kGroups) {
    lower_registers<Shape::kLoadRegisters>();
    if (threadIdx.x % 128 >= 32) return;
    const Sm90Loader<Element, kHeadSize, Shape> loader{params, maps};
    for (unsigned number = blockIdx.x; number < works; number += gridDim.x) {
      if (!work.find(params, number, tiles, section_heads, visibility)) continue;
      barriers.query_empty.wait(query_parity ^ 1);
      loader.load_queries(queries, work, barriers.query_full);
      query_parity ^= 1;
      for (int n = 0; n < work.visits.count(); ++n, next_stage()) {
        const int32_t first = work.visits.at(n) * Shape::kKeys;
        barriers.key_empty[stage].wait(parity ^ 1);
        loader.load(keys + stage * Shape::kTileBytes, maps.keys, params.key_cache, work, first,
                    barriers.key_full[stage]);
        barriers.value_empty[stage].wait(parity ^ 1);
        loader.load(values + stage * Shape::kTileBytes, maps.values, params.value_cache, work, first,
                    barriers.value_full[stage]);
      }
    }
    return;
  }

  raise_registers<Shape::kComputeRegisters>();
  const Logits logits = Logits::of(params.scale, params.softcap);
  const int lane = threadIdx.x % 32;
  const int group_row = group * 64;
  const int row = group_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
  Sm90Rows<Element, kHeadSize, Shape> rows;
  for (unsigned number = blockIdx.x; number < works; number += gridDim.x) {
    if (!work.find(params, number, tiles, section_heads, visibility)) continue;
    rows.clear();
    barriers.query_full.wait(query_parity);
    query_parity ^= 1;
    // The group's own tiles; it only passes the others by.
    const int count = min(64, work.tile.count - group_row);
    const KeyTiles own = count > 0 ? work.of_rows(group_row, count, visibility) : KeyTiles{};
    for (int n = 0; n < work.visits.count(); ++n, next_stage()) {
      const int tile = work.visits.at(n);
      if (tile >= own.end || (tile >= own.sink_end && tile < own.begin)) {
        barriers.key_full[stage].wait(parity);
        if (lane == 0) barriers.key_empty[stage].arrive();
        barriers.value_full[stage].wait(parity);
        if (lane == 0) barriers.value_empty[stage].arrive();
        continue;
      }
      float z[Shape::kKeys / 2];
      barriers.key_full[stage].wait(parity);
      rows.multiply_keys(z, queries + group_row * 128, keys + stage * Shape::kTileBytes);
      wgmma_wait<0>();
      if (lane == 0) barriers.key_empty[stage].arrive();
      if (logits.mapped) {
#pragma unroll
        for (int e = 0; e < Shape::kKeys / 2; ++e) z[e] = logits.map(z[e]);
      }
      const int32_t first_key = tile * Shape::kKeys;
      if (visibility.cuts(work.first + group_row, work.first + group_row + 63, first_key,
                          first_key + Shape::kKeys))
        rows.mask(z, visibility, work.first + row, first_key);
      uint32_t weights[Shape::kKeys / 16][4];
      rows.weigh(z, weights, logits.factor);
      barriers.value_full[stage].wait(parity);
      rows.multiply_values(weights, values + stage * Shape::kTileBytes);
      wgmma_wait<0>();
      if (lane == 0) barriers.value_empty[stage].arrive();
    }
    if (lane == 0) barriers.query_empty.arrive();
    rows.store(params, work, row, logits.factor);
  }
#endif
}

}  // namespace ortolan::cuda
