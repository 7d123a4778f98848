// What a block of token.cuh works on: its token, its tiles and its shared memory.
#pragma once

#include "cluster.cuh"
#include "shared.cuh"

namespace ortolan::cuda {

// Warps that share the same keys of a tile, each with columns of them and of the values: two of long heads,
// where `kShare` blocks on a multiprocessor leave them registers.
template <int kHeadSize, int kShare>
constexpr int kKeySharers = kHeadSize > 128 && kShare == 1 ? 2 : 1;
template <int kHeadSize, int kShare>
constexpr int kTokenThreads = (kHeadSize <= 128 ? 8 : 4) * kKeySharers<kHeadSize, kShare> * 32;
// Threads that a block is compiled for. Warps that share keys need more registers than others: compiled for
// so many threads, they leave as many as a block of the joint projection has.
template <int kHeadSize, int kShare>
constexpr int kTokenBound = kKeySharers<kHeadSize, kShare> == 1 ? kTokenThreads<kHeadSize, kShare> : 384;

// The token's position, and whether the sequence has it.
struct TokenPlace {
  int32_t past;
  bool exists;

  static __device__ __forceinline__ TokenPlace of(const SwaAttentionParams& params, int kv_head) {
    const int64_t place = kv_head * params.past_len.head_stride;
    const int32_t first = load_relaxed(params.packing.query_start);
    const int32_t end = load_relaxed(params.packing.query_start + 1);
    const int32_t past = load_relaxed(params.past_len.values + place);
    return {past, first == 0 && end == 1 && past >= 0};
  }
  __device__ __forceinline__ bool operator==(const TokenPlace& other) const {
    return past == other.past && exists == other.exists;
  }
};

// The line of the token's tiles, whose sums all are sent.
//
// A window of whole tiles that begins within a tile ends within one, too: the rows of the first that the
// token sees no longer are those of the last that it sees. Where a block would have another tile for the last
// alone, one sums both at once: their rows have room in one tile. The token's queries are there twice, the
// second time as those of a token so much earlier, which sees the last tile's rows in the place of the
// first's.
struct TokenLine : ClusterLine {
  int32_t distance;    // positions from the first tile to the last, where one block sums both; else 0
  DecodeEntry summed;  // own, or with the rows of the token so much earlier, too

  TokenLine() = default;
  // Without tiles where there is no token, or a cache cannot have as many.
  __device__ __forceinline__ TokenLine(const SwaAttentionParams& params, const DecodeShape& shape,
                                       bool may_join, int index, const TokenPlace& place)
      : ClusterLine(DecodeEntry::of(params, shape, 0, 0, index, {0, place.exists ? 1 : 0, place.past}), shape,
                    index),
        distance(0) {
    const int tiles = own.tiles.count();
    if (tiles > shape.received_tiles) {
      own.rows = 0;
      own.tiles = {};
      cut = {};
    }
    summed = own;
    const int32_t way = tiles - 1 << shape.tile_shift;
    if (!may_join || cut.remainder != 1 || cut.quotient == 0 || own.last_position - way >= own.seen().oldest)
      return;
    cut.remainder = 0;
    distance = way;
    summed.first_position -= way;
    summed.rows *= 2;
  }
  // Whether tiles begin .. end, of which there are some, have the last position.
  __device__ __forceinline__ bool hold_last(int begin, int end) const {
    return distance ? begin == 0 : end == own.tiles.count();
  }
};

constexpr int32_t kNoRow = -1;

// Number of the row [D] of the pool that holds a position of the only sequence, or kNoRow where its page is
// not one of the pool's. Numbers have 32 bits: no device holds more rows.
__device__ __forceinline__ int32_t row_of(const CacheLayout& cache, const Divisor& by_page, int kv_head,
                                          int32_t position) {
  const auto page_slots = static_cast<int32_t>(cache.page_slots);
  const auto capacity = static_cast<int32_t>(cache.capacity), sink = static_cast<int32_t>(cache.sink);
  const int32_t slot = position < capacity ? position : sink + (position - sink) % (capacity - sink);
  if (!cache.block_table) return kv_head * page_slots + slot;
  const int number = by_page.divide(slot);
  const int32_t page = cache.block_table[number];
  if (page < 0 || page >= cache.num_pages) return kNoRow;
  return (page * static_cast<int32_t>(cache.num_kv_heads) + kv_head - number) * page_slots + slot;
}

// Of a block's shared memory.
struct TokenSizes {
  int received_bytes;  // for partial sums that are sent
  int merge_bytes;     // for the spans of a round
  int spans;           // of a round, at most
  bool may_join;       // see TokenLine
};

// The shared memory of a block: one tile, whose keys make room for those of the next one before its values
// do.
template <typename Rows>
struct TokenShared : DecodeShared {
  using Element = typename Rows::Element;
  static constexpr int kHeads = kDecodeTileRows + 2;
  static constexpr int kHeadBytes = Rows::kHeadSize * static_cast<int>(sizeof(Element));

  unsigned char* heads;   // [kHeads, head size]: queries, the key, the value
  unsigned char* rounds;  // a SpanRound

  // Where sums are received: behind a tile, heads, and the sums of a tile.
  static __host__ __device__ int received_offset(const DecodeShape& shape) {
    const int warp_floats = DecodeSums<Rows>::floats(shape.entry_rows) + 2 * kDecodeTileRows;
    return DecodeStage<Rows>::bytes(shape.tile_keys) + kHeads * kHeadBytes +
           shape.warps * warp_floats * static_cast<int>(sizeof(float));
  }
  static __host__ __device__ int bytes(const DecodeShape& shape, const TokenSizes& sizes) {
    return received_offset(shape) + sizes.received_bytes + sizes.merge_bytes +
           (2 * shape.warps + 1) * static_cast<int>(sizeof(Barrier));
  }
  __device__ __forceinline__ TokenShared(unsigned char* memory, const DecodeShape& shape,
                                         const TokenSizes& sizes)
      : DecodeShared{.stages = memory} {
    heads = memory + DecodeStage<Rows>::bytes(shape.tile_keys);
    sums = reinterpret_cast<float*>(heads + kHeads * kHeadBytes);
    maxima = sums + shape.warps * DecodeSums<Rows>::floats(shape.entry_rows);
    totals = maxima + shape.warps * kDecodeTileRows;
    rounds = memory + received_offset(shape) + sizes.received_bytes;
    received = reinterpret_cast<Barrier*>(rounds + sizes.merge_bytes);
    loaded = received + 1;  // [keys or values, warps with other keys]
  }
  __device__ __forceinline__ Element* head(int number) const {
    return reinterpret_cast<Element*>(heads + number * kHeadBytes);
  }
};

}  // namespace ortolan::cuda
