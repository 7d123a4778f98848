// Decode attention: a few query rows per sequence against all of its keys, at the speed of memory.
//
// Grid: as many blocks as are resident at once; decode_plan.cuh says which tiles each takes. A block of 4
// warps keeps several tiles of keys and values in flight (cp.async), across the borders of sequences. The
// query heads of a group and a sequence's tokens are the rows of one matrix product, so keys and values are
// read once for up to 16 * kRowTiles of them. Per tile, each warp multiplies all rows with its share of the
// keys, maxima and weights meet in shared memory, and each warp sums its share of the values' columns. A
// tile's sum starts afresh and is then merged: see decode_plan.cuh for the order, which fixes the bits.
// Source of the split over keys: Dao et al., Flash-Decoding (2023); of the packed heads: the GQA packing of
// FlashAttention.
#pragma once

#include "decode_plan.cuh"
#include "key_rows.cuh"
#include "ptx.cuh"

namespace ortolan::cuda {

template <int kHeadSize, int kRowTiles>
struct DecodeTile {
  static constexpr int kWarps = 4;  // that compute; one more loads
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = kHeadSize <= 256 ? 64 : 32;
  static constexpr int kKeysPerWarp = kKeys / kWarps;
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kColumns = kHeadSize / kWarps;  // of the values, per warp
  static constexpr int kColumnsAtOnce =
      kHeadSize <= 256 ? kColumns < 32 ? kColumns : 32 : 16;  // bounds the sums of one tile
  static constexpr int kStride = kHeadSize + 8;               // elements; spreads rows over all banks
  static constexpr int kWeightStride = kKeys + 8;
  static constexpr int kStageBytes = 2 * kKeys * kStride * 2;
  static constexpr int kFixedBytes = kRows * (kStride + kWeightStride) * 2 + 2 * kWarps * kRows * 4;
};

// Where partial sums go: sums [places, rows, kHeadSize], states [places, rows].
struct DecodeWorkspace {
  int* starts;  // [entries + 1]
  RowState* states;
  float* sums;

  static size_t starts_bytes(const DecodeShape& shape) {
    return (shape.entries + 1) * sizeof(int) + 255 & ~size_t{255};
  }
  static size_t states_bytes(const DecodeShape& shape) {
    return shape.partials() * shape.entry_rows * sizeof(RowState) + 255 & ~size_t{255};
  }
  static size_t bytes(const DecodeShape& shape, int head_size) {
    return starts_bytes(shape) + states_bytes(shape) +
           static_cast<size_t>(shape.partials()) * shape.entry_rows * head_size * sizeof(float);
  }
  static DecodeWorkspace of(void* memory, const DecodeShape& shape) {
    auto* bytes = static_cast<unsigned char*>(memory);
    return {reinterpret_cast<int*>(bytes), reinterpret_cast<RowState*>(bytes + starts_bytes(shape)),
            reinterpret_cast<float*>(bytes + starts_bytes(shape) + states_bytes(shape))};
  }
};

// Number of a span among those that an entry visits.
__device__ __forceinline__ int span_number(const KeyTiles& tiles, int span, int max_spans) {
  const int sink_spans = (tiles.sink_end + kSpanTiles - 1) / kSpanTiles;
  const int gap = tiles.begin / kSpanTiles - sink_spans;
  const int number = span < sink_spans || gap < 0 ? span : span - gap;
  return number < max_spans ? number : max_spans - 1;
}

// Tiles before each entry, in shared memory; for a whole block.
__device__ __forceinline__ void count_tiles(const SwaAttentionParams& params, const DecodeShape& shape,
                                            int* starts) {
  __shared__ int warp_totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int before = 0;
  for (int first = 0; first < shape.entries; first += blockDim.x) {
    const int index = first + static_cast<int>(threadIdx.x);
    const int tiles = index < shape.entries ? DecodeEntry::of(params, shape, index).tiles.count() : 0;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_totals[warp] = sum;
    __syncthreads();
    int earlier = before;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) earlier += warp_totals[w];
      before += warp_totals[w];
    }
    if (index < shape.entries) starts[index] = earlier + sum - tiles;
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[shape.entries] = before;
  __syncthreads();
}

// A place on the line of tiles, moving forward.
struct DecodeCursor {
  int tile;            // on the line
  bool is_new = true;  // whether the tile is the first of its entry, or of the block
  int entry = 0;
  int number = 0;  // of the tile among those of its entry
  int end = 0;     // of the entry on the line
  DecodeEntry of{};

  // Looks the entry up where it is new; returns whether it was.
  __device__ __forceinline__ bool settle(const SwaAttentionParams& params, const DecodeShape& shape,
                                         const DecodeLine& line) {
    if (!is_new) return false;
    entry = line.entry_of(tile);
    number = tile - line.starts[entry];
    end = line.starts[entry + 1];
    of = DecodeEntry::of(params, shape, entry);
    is_new = false;
    return true;
  }
  __device__ __forceinline__ void advance() {
    ++number;
    is_new = ++tile == end;
  }
  __device__ __forceinline__ int key_tile() const { return of.tiles.at(number); }
};

// The segment and the span that a tile belongs to, as one block sees them.
struct DecodeGroups {
  TileRange segment{};
  TileRange span{};
  bool segment_is_whole = false;  // the block sums all of it
  bool span_is_whole = false;

  // Moves on to the groups of the cursor's tile; `begin` and `end` bound the block's piece of the line.
  __device__ __forceinline__ void settle(const DecodeCursor& cursor, bool is_new, int begin, int end) {
    if (!is_new && cursor.number < segment.end) return;
    const int start = cursor.tile - cursor.number;
    const int key_tile = cursor.key_tile();
    segment = TileRange::of(cursor.of.tiles, key_tile / kSegmentTiles * kSegmentTiles, kSegmentTiles);
    span = TileRange::of(cursor.of.tiles, key_tile / kSpanTiles * kSpanTiles, kSpanTiles);
    segment_is_whole = start + segment.begin >= begin && start + segment.end <= end;
    span_is_whole = start + span.begin >= begin && start + span.end <= end;
  }
};

template <typename Element, int kHeadSize, int kRowTiles>
struct Decode {
  using Tile = DecodeTile<kHeadSize, kRowTiles>;
  static constexpr int kChunks = kHeadSize / 8;
  static constexpr int kKeyTiles = Tile::kKeysPerWarp / 8;
  static constexpr int kPasses = Tile::kColumns / Tile::kColumnsAtOnce;
  static constexpr int kPassTiles = Tile::kColumnsAtOnce / 8;
  using Sums = float[kPasses][kRowTiles][kPassTiles][4];

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  Element* queries;  // [kRows, kStride]
  Element* weights;  // [kRows, kWeightStride]
  float* maxima;     // [kWarps, kRows]
  float* totals;     // [kWarps, kRows]
  Element* stages;
  Visibility visibility;
  Logits logits;

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ Element* keys(int stage) const {
    return stages + stage * (Tile::kStageBytes / 2);
  }
  __device__ __forceinline__ Element* values(int stage) const {
    return keys(stage) + Tile::kKeys * Tile::kStride;
  }

  __device__ __forceinline__ int64_t row_offset(const DecodeEntry& entry, int row) const {
    const int number = entry.first_row + row;
    const int64_t token = params.packing.first(entry.sequence) + number / shape.group;
    return (token * params.num_heads + entry.kv_head * shape.group + number % shape.group) *
           params.cache.head_size;
  }

  __device__ __forceinline__ void load_tile(const DecodeCursor& cursor, int stage) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = SeenPositions::of(visibility, entry.first_position, entry.last_position);
    const int32_t first = cursor.key_tile() * Tile::kKeys;
    const KeyTileCopy<kHeadSize, Tile::kKeys, Tile::kStride, 32> copy(rows, seen, first);
    copy.start(keys(stage), params.key_cache, lane());
    copy.start(values(stage), params.value_cache, lane());
  }

  __device__ __forceinline__ void load_queries(const DecodeEntry& entry) const {
    const auto* query = static_cast<const Element*>(params.query);
    for (int i = threadIdx.x; i < Tile::kRows * kChunks; i += Tile::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      uint4 piece{};
      if (row < entry.rows && chunk * 8 < params.cache.head_size)
        piece = *reinterpret_cast<const uint4*>(query + row_offset(entry, row) + chunk * 8);
      *reinterpret_cast<uint4*>(queries + row * Tile::kStride + chunk * 8) = piece;
    }
  }

  __device__ __forceinline__ void find_positions(int32_t (&positions)[kRowTiles][2],
                                                 const DecodeEntry& entry) const {
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r)
      positions[r / 2][r % 2] = entry.first_position + (entry.first_row + r * 8 + lane() / 4) / shape.group;
  }

  // Products of all rows with the warp's keys.
  __device__ __forceinline__ void multiply_keys(float (&z)[kRowTiles][kKeyTiles][4], int stage) const {
    const uint32_t query_address = shared_address(queries + lane() % 16 * Tile::kStride + lane() / 16 * 8);
    const Element* first = keys(stage) + warp() * Tile::kKeysPerWarp * Tile::kStride;
    // 16 keys: two tiles of keys by two of columns. 8 keys: one by four, which serves two steps.
    const uint32_t key_address = shared_address(
        kKeyTiles == 2 ? first + (lane() / 16 * 8 + lane() % 8) * Tile::kStride + lane() / 8 % 2 * 8
                       : first + lane() % 8 * Tile::kStride + lane() / 8 * 8);
    uint32_t key[4];
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      if (kKeyTiles == 2 || k % 2 == 0) load_matrix_x4(key, key_address + k * 32);
      const int pair = kKeyTiles == 2 ? 0 : k % 2 * 2;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        uint32_t query[4];
        load_matrix_x4(query, query_address + (r * 16 * Tile::kStride + k * 16) * 2);
        Half<Element>::multiply_add(z[r][0], query, key[pair], key[pair + 1]);
        if (kKeyTiles == 2) Half<Element>::multiply_add(z[r][kKeyTiles - 1], query, key[2], key[3]);
      }
    }
  }

  // Logits in units of log2, -inf where the row does not see the key.
  __device__ __forceinline__ void finish_logits(float (&z)[kRowTiles][kKeyTiles][4], const DecodeEntry& entry,
                                                const int32_t (&positions)[kRowTiles][2],
                                                int32_t first_key) const {
    constexpr int kCount = kRowTiles * kKeyTiles * 4;
    if (logits.mapped) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) (&z[0][0][0])[n] = logits.map((&z[0][0][0])[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) (&z[0][0][0])[n] *= logits.factor;
    }
    if (!visibility.cuts(entry.first_position, entry.last_position, first_key, first_key + Tile::kKeys))
      return;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int32_t j = first_key + warp() * Tile::kKeysPerWarp + n * 8 + lane() % 4 * 2 + e % 2;
          if (!visibility.sees(positions[r][e / 2], j)) z[r][n][e] = -INFINITY;
        }
  }

  // Leaves the tile's weights in shared memory; returns each row's maximum and denominator.
  __device__ __forceinline__ void weigh(float (&z)[kRowTiles][kKeyTiles][4],
                                        RowState (&tile)[kRowTiles][2]) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
          maximum = fmaxf(maximum, fmaxf(z[r][n][2 * half], z[r][n][2 * half + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
        if (lane() % 4 == 0) maxima[warp() * Tile::kRows + r * 16 + half * 8 + lane() / 4] = maximum;
      }
    sync_threads<1, Tile::kThreads>();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r * 16 + half * 8 + lane() / 4;
        float maximum = maxima[row];
#pragma unroll
        for (int w = 1; w < Tile::kWarps; ++w) maximum = fmaxf(maximum, maxima[w * Tile::kRows + row]);
        tile[r][half].maximum = maximum;
        float total = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const float low = fast_exp2(z[r][n][2 * half] - finite_max(maximum));
          const float high = fast_exp2(z[r][n][2 * half + 1] - finite_max(maximum));
          total += low + high;
          const int column = warp() * Tile::kKeysPerWarp + n * 8 + lane() % 4 * 2;
          *reinterpret_cast<uint32_t*>(weights + row * Tile::kWeightStride + column) =
              Half<Element>::pack(low, high);
        }
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (lane() % 4 == 0) totals[warp() * Tile::kRows + row] = total;
      }
    sync_threads<1, Tile::kThreads>();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r * 16 + half * 8 + lane() / 4;
        float total = totals[row];
#pragma unroll
        for (int w = 1; w < Tile::kWarps; ++w) total += totals[w * Tile::kRows + row];
        tile[r][half].total = total;
      }
  }

  // Sums of the warp's columns over the tile's keys, one pass of columns.
  __device__ __forceinline__ void multiply_values(float (&o)[kRowTiles][kPassTiles][4], int pass,
                                                  int stage) const {
    const int column = warp() * Tile::kColumns + pass * Tile::kColumnsAtOnce;
    const uint32_t weight_address =
        shared_address(weights + lane() % 16 * Tile::kWeightStride + lane() / 16 * 8);
    const uint32_t value_address =
        shared_address(values(stage) + lane() % 16 * Tile::kStride + column + lane() / 16 * 8);
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
      uint32_t weight[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        load_matrix_x4(weight[r], weight_address + (r * 16 * Tile::kWeightStride + k * 16) * 2);
#pragma unroll
      for (int n = 0; n < kPassTiles / 2; ++n) {
        uint32_t value[4];
        load_matrix_x4_transposed(value, value_address + (k * 16 * Tile::kStride + n * 16) * 2);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Half<Element>::multiply_add(o[r][2 * n], weight[r], value[0], value[1]);
          Half<Element>::multiply_add(o[r][2 * n + 1], weight[r], value[2], value[3]);
        }
      }
    }
  }

  // sums = merge(sums, o), by each row's factors.
  static __device__ __forceinline__ void merge_sums(float (&sums)[kRowTiles][kPassTiles][4],
                                                    const float (&o)[kRowTiles][kPassTiles][4],
                                                    const Merge (&merge)[kRowTiles][2]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int n = 0; n < kPassTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[r][n][e] = merge[r][e / 2].apply(sums[r][n][e], o[r][n][e]);
  }

  using PassSums = float[kRowTiles][kPassTiles][4];
  static __device__ __forceinline__ void take(PassSums& target, const PassSums& source) {
#pragma unroll
    for (int n = 0; n < kRowTiles * kPassTiles * 4; ++n) (&target[0][0][0])[n] = (&source[0][0][0])[n];
  }
  static __device__ __forceinline__ void clear(PassSums& sums) {
#pragma unroll
    for (int n = 0; n < kRowTiles * kPassTiles * 4; ++n) (&sums[0][0][0])[n] = 0;
  }

  // Hands one pass of columns of a partial sum on.
  __device__ __forceinline__ void store_partial(const DecodeWorkspace& workspace, int64_t place, int rows,
                                                int pass, const float (&sums)[kRowTiles][kPassTiles][4],
                                                const RowState (&states)[kRowTiles][2]) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r * 16 + half * 8 + lane() / 4;
        if (row >= rows) continue;
        const int64_t target = place * shape.entry_rows + row;
        if (pass == 0 && warp() == 0 && lane() % 4 == 0) workspace.states[target] = states[r][half];
        float* line =
            workspace.sums + target * kHeadSize + warp() * Tile::kColumns + pass * Tile::kColumnsAtOnce;
#pragma unroll
        for (int n = 0; n < kPassTiles; ++n)
          *reinterpret_cast<float2*>(line + n * 8 + lane() % 4 * 2) =
              make_float2(sums[r][n][2 * half], sums[r][n][2 * half + 1]);
      }
  }

  // An entry that one block summed whole needs no combining.
  __device__ __forceinline__ void store_output(const DecodeEntry& entry, int pass,
                                               const float (&sums)[kRowTiles][kPassTiles][4],
                                               const RowState (&states)[kRowTiles][2]) const {
    auto* output = static_cast<Element*>(params.output);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r * 16 + half * 8 + lane() / 4;
        if (row >= entry.rows) continue;
        const int64_t offset = row_offset(entry, row);
        const int64_t token_head = offset / params.cache.head_size;
        const int64_t head = token_head % params.num_heads;
        const Denominator denominator =
            Denominator::of(states[r][half].total, states[r][half].maximum, params.sink_logits, head);
        const float inverse = denominator.inverse;
        if (params.lse && pass == 0 && warp() == 0 && lane() % 4 == 0)
          params.lse[head * params.packing.num_tokens + token_head / params.num_heads] = denominator.lse;
#pragma unroll
        for (int n = 0; n < kPassTiles; ++n) {
          const int column = warp() * Tile::kColumns + pass * Tile::kColumnsAtOnce + n * 8 + lane() % 4 * 2;
          if (column < params.cache.head_size)
            *reinterpret_cast<uint32_t*>(output + offset + column) =
                Half<Element>::pack(sums[r][n][2 * half] * inverse, sums[r][n][2 * half + 1] * inverse);
        }
      }
  }
};

constexpr int kMaxDecodeStages = 4;

template <typename Element, int kHeadSize, int kRowTiles>
__global__ void __launch_bounds__(160, kHeadSize* kRowTiles <= 128 ? 2 : 1)
    decode_kernel(const __grid_constant__ SwaAttentionParams params,
                  const __grid_constant__ DecodeShape shape,
                  const __grid_constant__ DecodeWorkspace workspace, int num_stages) {
  using Tile = DecodeTile<kHeadSize, kRowTiles>;
  using Kernel = Decode<Element, kHeadSize, kRowTiles>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ Barrier full[kMaxDecodeStages], empty[kMaxDecodeStages];
  if (threadIdx.x < num_stages) {
    full[threadIdx.x].init(32);
    empty[threadIdx.x].init(Tile::kWarps);
  }
  wait_for_previous_kernel();
  launch_dependents();

  auto* queries = reinterpret_cast<Element*>(shared_memory);
  Element* weights = queries + Tile::kRows * Tile::kStride;
  auto* maxima = reinterpret_cast<float*>(weights + Tile::kRows * Tile::kWeightStride);
  auto* stages = reinterpret_cast<Element*>(shared_memory + Tile::kFixedBytes);
  auto* starts = reinterpret_cast<int*>(shared_memory + Tile::kFixedBytes + num_stages * Tile::kStageBytes);
  const Kernel kernel{.params = params,
                      .shape = shape,
                      .queries = queries,
                      .weights = weights,
                      .maxima = maxima,
                      .totals = maxima + Tile::kWarps * Tile::kRows,
                      .stages = stages,
                      .visibility = Visibility::of(params),
                      .logits = Logits::of(params.scale, params.softcap)};

  count_tiles(params, shape, starts);
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i <= shape.entries; i += blockDim.x) workspace.starts[i] = starts[i];
  const DecodeLine line(starts, shape);
  const int begin = line.begin(blockIdx.x), end = line.begin(blockIdx.x + 1);
  const PartialPlaces places = PartialPlaces::of(shape);
  DecodeCursor cursor{.tile = begin};
  int stage = 0;
  uint32_t parity = 0;  // of the stages' current phase
  const auto next_stage = [&] {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  };
  if (threadIdx.x >= Tile::kThreads) {  // the warp that loads
    for (; cursor.tile < end; cursor.advance(), next_stage()) {
      cursor.settle(params, shape, line);
      empty[stage].wait(parity ^ 1);
      kernel.load_tile(cursor, stage);
      full[stage].arrive_after_copies();
    }
    copy_async_wait<0>();
    return;
  }

  DecodeGroups groups;
  typename Kernel::Sums segment = {}, span = {};
  RowState segment_state[kRowTiles][2], span_state[kRowTiles][2];
  int32_t positions[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) segment_state[r / 2][r % 2] = span_state[r / 2][r % 2] = kNoKeys;
  for (; cursor.tile < end; cursor.advance(), next_stage()) {
    const bool is_new = cursor.settle(params, shape, line);
    if (is_new) {
      sync_threads<1, Tile::kThreads>();
      kernel.load_queries(cursor.of);
      kernel.find_positions(positions, cursor.of);
      sync_threads<1, Tile::kThreads>();
    }
    full[stage].wait(parity);

    const DecodeEntry& entry = cursor.of;
    const int key_tile = cursor.key_tile();
    float z[kRowTiles][Kernel::kKeyTiles][4] = {};
    kernel.multiply_keys(z, stage);
    kernel.finish_logits(z, entry, positions, key_tile * Tile::kKeys);
    RowState state[kRowTiles][2];
    kernel.weigh(z, state);

    groups.settle(cursor, is_new, begin, end);
    const int start = cursor.tile - cursor.number;
    const bool ends_segment = cursor.number + 1 == groups.segment.end;
    const bool ends_span = cursor.number + 1 == groups.span.end;
    // A tile, a segment or a span is handed on; `handed` is the first tile of the group above it.
    const bool hands_on = !groups.segment_is_whole || (ends_segment && (!groups.span_is_whole || ends_span));
    int64_t place = 0;
    if (hands_on && groups.span_is_whole) {
      place = places.span(cursor.entry, span_number(entry.tiles, key_tile / kSpanTiles, shape.max_spans));
    } else if (hands_on) {
      const int handed = start + (groups.segment_is_whole ? groups.span.begin : groups.segment.begin);
      const int owner = handed >= begin ? static_cast<int>(blockIdx.x) : line.owner(handed);
      place = groups.segment_is_whole ? places.segment(owner, key_tile) : places.tile(owner, key_tile);
    }
    Merge into_segment[kRowTiles][2], into_span[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        into_segment[r][half] = Merge::of(segment_state[r][half], state[r][half]);
        if (groups.segment_is_whole) state[r][half] = segment_state[r][half] = into_segment[r][half].state;
        if (ends_segment && groups.span_is_whole) {
          into_span[r][half] = Merge::of(span_state[r][half], segment_state[r][half]);
          state[r][half] = span_state[r][half] = into_span[r][half].state;
        }
      }
#pragma unroll
    for (int pass = 0; pass < Kernel::kPasses; ++pass) {
      float o[kRowTiles][Kernel::kPassTiles][4] = {};
      kernel.multiply_values(o, pass, stage);
      if (groups.segment_is_whole) Kernel::merge_sums(segment[pass], o, into_segment);
      if (groups.segment_is_whole && ends_segment) {
        if (groups.span_is_whole) {
          Kernel::merge_sums(span[pass], segment[pass], into_span);
          Kernel::take(o, span[pass]);
        } else {
          Kernel::take(o, segment[pass]);
        }
        Kernel::clear(segment[pass]);
        if (ends_span) Kernel::clear(span[pass]);
      }
      if (!hands_on) continue;
      const bool is_all = groups.span_is_whole && groups.span.end - groups.span.begin == entry.tiles.count();
      if (is_all)
        kernel.store_output(entry, pass, o, state);
      else
        kernel.store_partial(workspace, place, entry.rows, pass, o, state);
    }
    if (ends_segment)
#pragma unroll
      for (int r = 0; r < 2 * kRowTiles; ++r) {
        segment_state[r / 2][r % 2] = kNoKeys;
        if (ends_span) span_state[r / 2][r % 2] = kNoKeys;
      }
    __syncwarp();
    if (kernel.lane() == 0) empty[stage].arrive();
  }
}

}  // namespace ortolan::cuda
