// How decode attention is cut up: which block sums which key tiles, and where its partial sums go.
//
// The tiles of all entries (sequence, kv head, tile of query rows) form one line, and each block takes an
// equal, contiguous piece of it. A block cannot go on with the sums of another, and the order of additions
// must not depend on the cuts. So sums are built in a tree that is fixed by key position: a tile's sum starts
// afresh, tiles are merged into spans in ascending order, and spans into the row. A span that a block holds
// whole it hands on as one partial sum, else tile by tile; the combine kernel merges the rest in the same
// order. At most one span straddles the end of a block's piece, so the place of a tile's partial sum follows
// from that block's number. A span's follows from its entry: memory is set aside for all spans of the cache's
// capacity in every entry that may hold rows, and does not grow with the lengths. Those are read on the
// device: the cuts move as the context grows, the bits of the result do not.
//
// An entry is a strip and a kv head; a strip is a row tile of a sequence. The host knows how many tokens
// there are, and may have been told how many a sequence has at most, but not whose they are. Where each
// sequence has at most one row tile, or there is one sequence, strips are numbered row tile * sequences +
// sequence. Else only row tiles that hold rows are numbered, in order of sequences: the device counts them,
// and a table says that other number, the holder, of each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <numeric>
#include <type_traits>

#include "kernels/cuda/attention/in_vain.cuh"
#include "kernels/cuda/attention/key_tiles.cuh"
#include "kernels/cuda/common/divisor.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/softmax.cuh"
#include "rows.cuh"

namespace ortolan::cuda {

constexpr int kMostSpanTiles = 8;
constexpr int kMostGuessed = 64;  // sequences whose lengths have room

// Row tiles of all sequences together, at most: a sequence of n tokens has divide_up(n * group, rows), and
// one of more than `most_tokens` has none.
constexpr int64_t most_row_tiles(int64_t sequences, int64_t tokens, int64_t most_tokens, int64_t group,
                                 int64_t rows) {
  const auto tiles_of = [&](int64_t n) { return (n * group + rows - 1) / rows; };
  const int64_t held = tokens < sequences * most_tokens ? tokens : sequences * most_tokens;
  const int64_t holders = held < sequences ? held : sequences;
  // The rows that the last tile of a sequence lacks are less than all by a multiple of what divides both.
  const int64_t packed = (held * group + holders * (rows - std::gcd(group, rows))) / rows;
  const int64_t of_tokens = held * tiles_of(1);
  const int64_t of_sequences = sequences * tiles_of(tokens < most_tokens ? tokens : most_tokens);
  const int64_t smaller = of_tokens < of_sequences ? of_tokens : of_sequences;
  return packed < smaller ? packed : smaller;
}
static_assert(most_row_tiles(128, 128, 16, 4, 8) == 128);  // a token each
static_assert(most_row_tiles(300, 300, 16, 8, 8) == 300);
static_assert(most_row_tiles(32, 32, 16, 3, 8) == 32);
static_assert(most_row_tiles(2, 17, 16, 4, 8) == 9);         // 16 and 1
static_assert(most_row_tiles(128, 4096, 16, 4, 16) == 512);  // 16 each

// Sizes that the host knows.
struct DecodeShape {
  int most_tokens;  // of a sequence: one of more is not decode's
  int group;        // query heads per kv head
  int kv_heads;
  int warps;      // that multiply
  int stages;     // tiles in flight
  int buffers;    // tiles whose sums wait to be merged, at most
  int tile_keys;  // a power of two
  int tile_shift;
  PowerOfTwo span_tiles;  // kMostSpanTiles at most
  int entry_rows;         // query rows (token, head of the group) that an entry may hold, a multiple of 4
  int row_tiles;          // of a sequence, at most
  int sequences;
  int counted_strips;  // that the device may number; 0: all are numbered already
  int entries;         // strips * kv heads, strips outermost
  int blocks;
  int cluster;   // blocks of the cluster that each entry has to itself; 0: all blocks share all entries
  int received;  // bytes of a block's shared memory before sums that others send; 0: none. See received.cuh
  int received_tiles;  // whose sums have room there
  int max_spans;       // per entry
  bool may_snap;       // pieces may end where spans do; see LineCounts
  int own_entries;     // that a block has to itself where pieces end with entries; 0: they never do
  bool guesses;        // a block's first tile before the kernel in front has ended; see prefetch.cuh
  bool is_behind;      // as Launch says
  bool guesses_all;    // lengths of all sequences, kMostGuessed at most; see DecodeLine
  Divisor by_group, by_kv_heads, by_sequences;
  Divisor by_page;  // its slots, for token.cuh
  Divisor by_line;  // blocks that share a line of tiles: all, or those of a cluster

  // Numbers of a table of tiles before each entry, [entries + 1], and holders of strips behind it,
  // [counted_strips].
  __host__ __device__ int table_size() const { return entries + 1 + counted_strips; }
  // Whether lines may be cut otherwise than anywhere.
  __device__ bool cuts() const { return may_snap || own_entries; }
  __host__ __device__ int64_t partials() const {
    return static_cast<int64_t>(entries) * max_spans + (static_cast<int64_t>(blocks) << span_tiles.shift);
  }
};

template <typename Element>
__device__ __forceinline__ void store_output(const SwaAttentionParams& params, int64_t index, float value) {
  if constexpr (!std::is_same_v<Element, AnyHalf>)
    static_cast<Element*>(params.output)[index] = Element(value);
  else if (params.element == ElementType::kFloat16)
    store_output<__half>(params, index, value);
  else
    store_output<__nv_bfloat16>(params, index, value);
}

// Whether the step has no rows; see in_vain.cuh.
__device__ __forceinline__ bool is_in_vain(const SwaAttentionParams& params, const DecodeShape& shape) {
  return shape.is_behind && is_in_vain(params.packing, {0, shape.most_tokens});
}

// What an entry asks of memory.
struct EntryLengths {
  int first_token;  // of the sequence, among all
  int tokens;
  int32_t past;

  static __device__ __forceinline__ EntryLengths of(const SwaAttentionParams& params, int sequence,
                                                    int kv_head) {
    return {static_cast<int>(params.packing.first(sequence)),
            static_cast<int>(params.packing.count(sequence)),
            static_cast<int32_t>(params.past_len.at(sequence, kv_head))};
  }
  // The same where another kernel may be writing them, of sequences whose kv heads are alike: none that would
  // lead outside of memory.
  static __device__ __forceinline__ EntryLengths guess(const SwaAttentionParams& params, int sequence) {
    constexpr int32_t kMostPast = 1 << 30;
    const int32_t first = load_relaxed(params.packing.query_start + sequence);
    const int32_t end = load_relaxed(params.packing.query_start + sequence + 1);
    const int32_t past = load_relaxed(params.past_len.values + sequence * params.past_len.stride);
    const bool may_be =
        0 <= past && past < kMostPast && 0 <= first && first <= end && end <= params.packing.num_tokens;
    return may_be ? EntryLengths{first, end - first, past} : EntryLengths{};
  }
  __device__ __forceinline__ bool operator==(const EntryLengths& other) const {
    return first_token == other.first_token && tokens == other.tokens && past == other.past;
  }
};

// Of one entry: its sequence's rows and the tiles that they visit.
struct DecodeEntry {
  int sequence;
  int first_token;  // of the sequence, among all
  int kv_head;
  int first_row;  // first query row; rows count tokens outermost, heads of the group innermost
  int rows;
  int32_t first_position;  // of the sequence's first new token
  int32_t last_position;
  Visibility visibility;
  KeyTiles tiles;

  static __device__ __forceinline__ DecodeEntry of(const SwaAttentionParams& params, const DecodeShape& shape,
                                                   int sequence, int row_tile, int kv_head) {
    return of(params, shape, sequence, row_tile, kv_head, EntryLengths::of(params, sequence, kv_head));
  }
  static __device__ __forceinline__ DecodeEntry of(const SwaAttentionParams& params, const DecodeShape& shape,
                                                   int sequence, int row_tile, int kv_head,
                                                   const EntryLengths& lengths) {
    DecodeEntry entry;
    entry.first_token = lengths.first_token;
    entry.sequence = sequence;
    entry.kv_head = kv_head;
    entry.first_row = row_tile * shape.entry_rows;
    const int tokens = lengths.tokens;
    entry.first_position = lengths.past;
    const int rows = tokens <= shape.most_tokens ? tokens * shape.group - entry.first_row : 0;
    entry.rows = rows < 0 ? 0 : rows < shape.entry_rows ? rows : shape.entry_rows;
    entry.last_position = entry.first_position + tokens - 1;
    entry.visibility = Visibility::of(params, sequence, entry.last_position);
    entry.tiles = entry.rows ? KeyTiles::of(entry.seen(), PowerOfTwo{shape.tile_shift}) : KeyTiles{};
    return entry;
  }
  // Positions that some of the sequence's queries see, and those that each of them sees.
  __device__ __forceinline__ SeenPositions seen() const {
    return visibility.of_queries(first_position, last_position);
  }
  __device__ __forceinline__ SeenPositions seen_by_each() const {
    return visibility.of_each(first_position, last_position);
  }
  // `holders`: of strips, where they are counted. `lengths`: of sequences, where they have been read.
  static __device__ __forceinline__ DecodeEntry of(const SwaAttentionParams& params, const DecodeShape& shape,
                                                   int index, const int* holders = nullptr,
                                                   const EntryLengths* lengths = nullptr) {
    const int strip = shape.by_kv_heads.divide(index), kv_head = index - strip * shape.kv_heads;
    const int holder = shape.counted_strips ? holders[strip] : strip;
    const int row_tile = shape.by_sequences.divide(holder), sequence = holder - row_tile * shape.sequences;
    return of(params, shape, sequence, row_tile, kv_head,
              lengths ? lengths[sequence] : EntryLengths::of(params, sequence, kv_head));
  }

  // Of a row: its token in the sequence, and its query head.
  __device__ __forceinline__ int token(const DecodeShape& shape, int row) const {
    return shape.by_group.divide(first_row + row);
  }
  __device__ __forceinline__ int head(const DecodeShape& shape, int row) const {
    return kv_head * shape.group + first_row + row - token(shape, row) * shape.group;
  }
  // Number of a row among those of the queries and the output.
  __device__ __forceinline__ int64_t row_number(const SwaAttentionParams& params, const DecodeShape& shape,
                                                int row) const {
    return (first_token + token(shape, row)) * params.num_heads + head(shape, row);
  }

  // Finishes one column of a row; the first column's thread also writes the row's LSE.
  template <typename Element>
  __device__ __forceinline__ void store_row(const SwaAttentionParams& params, const DecodeShape& shape,
                                            int row, int column, SoftmaxState state, float sum) const {
    const int64_t head = this->head(shape, row);
    const Denominator denominator = Denominator::of(state.total, state.maximum, params.sink_logits, head);
    if (params.lse && column == 0)
      params.lse[head * params.packing.num_tokens + first_token + token(shape, row)] = denominator.lse;
    if (column < params.cache.head_size)
      store_output<Element>(params, row_number(params, shape, row) * params.cache.head_size + column,
                            sum * denominator.inverse);
  }
};

// Whether the lengths of all sequences are those that were guessed, once the kernel in front has ended; for
// whole warps.
__device__ __forceinline__ bool are_lengths(const EntryLengths* guessed, const SwaAttentionParams& params,
                                            const DecodeShape& shape) {
  bool is_same = true;
#pragma unroll 1
  for (auto sequence = static_cast<int>(threadIdx.x) % 32; sequence < shape.sequences; sequence += 32)
    is_same &= EntryLengths::of(params, sequence, 0) == guessed[sequence];
  return __all_sync(~0u, is_same);
}

// A line of tiles, cut into pieces of two lengths, the longer ones first.
struct EvenCut {
  unsigned quotient;   // tiles of a shorter piece
  unsigned remainder;  // number of longer pieces

  static __device__ __forceinline__ EvenCut of(const DecodeShape& shape, int tiles, int pieces) {
    const int quotient = shape.by_line.divide(tiles);
    return {static_cast<unsigned>(quotient), static_cast<unsigned>(tiles - quotient * pieces)};
  }
  __device__ __forceinline__ int begin(unsigned piece) const {
    return static_cast<int>(piece * quotient + min(piece, remainder));
  }
  // The piece that holds a tile.
  __device__ __forceinline__ int owner(unsigned tile) const {
    const unsigned in_longer = remainder * (quotient + 1);
    return static_cast<int>(tile < in_longer ? tile / (quotient + 1)
                                             : remainder + (tile - in_longer) / quotient);
  }
};

// Where the pieces of a line end.
enum class Cut : int { kAnywhere, kWithSpans, kWithEntries };

// The line of all tiles, cut for all blocks.
struct DecodeLine {
  const int* starts;  // [entries + 1]: tiles before each entry; holders of strips behind it
  int entries;
  int own_entries;              // of a block, where pieces end with them
  const EntryLengths* guessed;  // [sequences], by which tiles are counted; null: by what they are
  EvenCut even;
  bool snaps;                                // pieces end where spans do
  static constexpr bool kOfCluster = false;  // and so of one entry

  __device__ __forceinline__ DecodeLine(const int* starts, const DecodeShape& shape, Cut cut,
                                        const EntryLengths* guessed = nullptr)
      : starts(starts),
        entries(shape.entries),
        own_entries(cut == Cut::kWithEntries ? shape.own_entries : 0),
        guessed(guessed),
        even(EvenCut::of(shape, starts[shape.entries], shape.blocks)),
        snaps(cut != Cut::kAnywhere) {}
  __device__ __forceinline__ int begin(int block) const {
    return own_entries ? starts[min(block * own_entries, entries)] : even.begin(block);
  }
  __device__ __forceinline__ int owner(int tile) const { return even.owner(tile); }
  __device__ __forceinline__ int first(int entry) const { return starts[entry]; }
  __device__ __forceinline__ int end(int entry) const { return starts[entry + 1]; }
  __device__ __forceinline__ DecodeEntry entry(const SwaAttentionParams& params, const DecodeShape& shape,
                                               int index) const {
    return DecodeEntry::of(params, shape, index, starts + entries + 1, guessed);
  }
  __device__ __forceinline__ int entry_of(int tile) const {
    int low = 0, high = entries;  // starts[low] <= tile < starts[high]; the last entries may be empty
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= tile)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};

// The tiles of a span that an entry visits: order numbers begin .. end within the entry.
struct SpanTiles {
  int begin;
  int end;

  static __device__ __forceinline__ SpanTiles of(const KeyTiles& tiles, int span, PowerOfTwo span_tiles) {
    return {tiles.rank(span << span_tiles.shift), tiles.rank((span + 1) << span_tiles.shift)};
  }
};

// Where a block's piece of a line begins.
template <typename Line>
__device__ __forceinline__ int snapped_begin(const SwaAttentionParams& params, const DecodeShape& shape,
                                             const Line& line, int block) {
  const int begin = line.begin(block);
  // Behind the last tile there are no entries either, where strips are counted.
  if (!line.snaps || block == 0 || begin >= line.first(shape.entries)) return begin;
  const int index = line.entry_of(begin);
  const DecodeEntry entry = line.entry(params, shape, index);
  const int number = begin - line.first(index);
  if (number >= entry.tiles.count()) return begin;
  const SpanTiles span =
      SpanTiles::of(entry.tiles, entry.tiles.at(number) / shape.span_tiles, shape.span_tiles);
  const bool is_early = 2 * (number - span.begin) < span.end - span.begin;
  return line.first(index) + (is_early ? span.begin : span.end);
}

// Number of a span among those that an entry visits: sinks' spans come before the window's.
__device__ __forceinline__ int span_number(const KeyTiles& tiles, int span, PowerOfTwo span_tiles,
                                           int max_spans) {
  const int sink_spans = divide_up(tiles.sink_end, span_tiles);
  const int gap = tiles.begin / span_tiles - sink_spans;
  const int number = span < sink_spans || gap < 0 ? span : span - gap;
  return number < max_spans ? number : max_spans - 1;
}

// Where partial sums lie between the kernels: states [places, entry_rows], sums [places, entry_rows, head
// size].
struct DecodeWorkspace {
  int* starts;        // [entries + 1]: tiles before each entry; holders of strips behind it, -1: none
  int* first_strips;  // [sequences], where strips are counted
  Cut* cut;           // of the line
  SoftmaxState* states;
  float* sums;
  int rows;  // of an entry
  int max_spans;
  PowerOfTwo span_tiles;
  int64_t first_tile;  // place of the first tile's sums; spans' come before

  static size_t starts_bytes(const DecodeShape& shape) {
    return (shape.table_size() + shape.sequences + 1) * sizeof(int) + 255 & ~size_t{255};
  }
  static size_t states_bytes(const DecodeShape& shape) {
    return shape.partials() * shape.entry_rows * sizeof(SoftmaxState);
  }
  static size_t bytes(const DecodeShape& shape, int head_size) {
    return starts_bytes(shape) + states_bytes(shape) +
           static_cast<size_t>(shape.partials()) * shape.entry_rows * head_size * sizeof(float);
  }
  static DecodeWorkspace of(void* memory, const DecodeShape& shape) {
    auto* states = static_cast<unsigned char*>(memory) + starts_bytes(shape);
    auto* counts = static_cast<int*>(memory);
    return {counts,
            counts + shape.table_size(),
            reinterpret_cast<Cut*>(counts + shape.table_size() + shape.sequences),
            reinterpret_cast<SoftmaxState*>(states),
            reinterpret_cast<float*>(states + states_bytes(shape)),
            shape.entry_rows,
            shape.max_spans,
            shape.span_tiles,
            static_cast<int64_t>(shape.entries) * shape.max_spans};
  }
  // Once the kernel that cuts has ended.
  __device__ __forceinline__ Cut read_cut(const DecodeShape& shape) const {
    return shape.cuts() ? *cut : Cut::kAnywhere;
  }
  __device__ __forceinline__ int64_t span_place(int entry, int number) const {
    return static_cast<int64_t>(entry) * max_spans + number;
  }
  // `owner` is the block that holds the first tile of the tile's span.
  __device__ __forceinline__ int64_t tile_place(int owner, int tile) const {
    const int64_t first = first_tile + (static_cast<int64_t>(owner) << span_tiles.shift);
    return first + (tile & ((1 << span_tiles.shift) - 1));
  }
};

}  // namespace ortolan::cuda
