// The warp of an sm_90a decode block that loads: keys and values by turns, some steps ahead and across the
// borders of sequences.
//
// The tensor unit copies boxes of adjacent rows, 64 columns wide; what they have beyond the head size or the
// page becomes zeros. A box at the end of what is written also brings rows that nobody sees: products with
// such keys are masked, such values become zeros before they are multiplied. Boxes without any seen row read
// nothing. Where a box would run over the wrap of a ring or the end of a page, rows are copied one by one.
// Maps promote nothing in L2: that costs a tenth of the bus.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "sm90_shape.cuh"

namespace ortolan::cuda {

template <typename Element, typename Shape>
struct Sm90DecodeLoad {
  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const DecodeWorkspace& workspace;
  const Sm90DecodeMaps& maps;
  const Sm90DecodeShared& shared;
  int lane;

  // Where a lane's box of a step lies.
  struct Box {
    int32_t row;
    int32_t plane;
    bool is_whole;  // copied by the tensor unit
  };
  __device__ __forceinline__ Box find_box(const DecodeEntry& entry, const KeyRows& rows,
                                          const SeenPositions& seen, int32_t begin) const {
    const auto page_slots = static_cast<int32_t>(params.cache.page_slots);
    if (!seen.hold_any(begin, begin + maps.box_rows)) return {page_slots, 0, true};  // beyond the page
    const int32_t slot = rows.first_slot(begin);
    const int32_t written = min(maps.box_rows, entry.last_position + 1 - begin);
    const bool is_whole = rows.are_adjacent(slot, written);
    const auto kv_heads = static_cast<int32_t>(params.cache.num_kv_heads);
    if (!rows.pages) return {slot, entry.sequence * kv_heads + entry.kv_head, is_whole};
    const int32_t page = slot / page_slots;
    return {slot - page * page_slots, rows.pages[page] * kv_heads + entry.kv_head, is_whole};
  }

  // Keys and then values of one step, to the next places of the ring: all columns to one, or as many to each
  // as a warpgroup has. With the keys comes what is known of the tile.
  __device__ __forceinline__ void load(const DecodeEntry& entry, int32_t first, const TileWork& work,
                                       RingPlace& at) const {
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = entry.seen();
    const int boxes = Shape::kKeys / maps.box_rows;
    const Box box = find_box(entry, rows, seen, first + lane % boxes * maps.box_rows);
    const bool is_whole = __all_sync(~0u, box.is_whole);
#pragma unroll
    for (int n = 0; n < 2 * Shape::kColumnParts; ++n) {
      const bool is_values = n >= Shape::kColumnParts;
      const int first_column = n % Shape::kColumnParts * Shape::kBoxes * 64;
      Barrier& full = shared.full[at.place];
      shared.empty[at.place].wait(at.parity ^ 1);
      const uint32_t target = shared.buffer<Shape>(at.place);
      if (!is_values && lane == 0) shared.works[at.place] = work;
      if (is_whole) {
        if (lane == 0) full.arrive_expecting(Shape::kBufferBytes);
        __syncwarp();
        if (lane < boxes)
          copy_boxes(target + lane * maps.box_rows * 128, is_values ? maps.values : maps.keys, first_column,
                     box, full);
      } else {
        copy_rows(target, rows, seen,
                  static_cast<const Element*>(is_values ? params.value_cache : params.key_cache),
                  first_column, first, full);
      }
      at.advance(shape.stages);
    }
  }
  __device__ __forceinline__ void copy_boxes(uint32_t target, const CUtensorMap& map, int first_column,
                                             const Box& box, Barrier& full) const {
    const uint64_t policy = evict_first_policy();
#pragma unroll
    for (int n = 0; n < Shape::kBoxes; ++n)
      copy_box(target + n * Shape::kKeys * 128, map, first_column + n * 64, box.row, box.plane, full, policy);
  }
  __device__ __forceinline__ void copy_rows(uint32_t target, const KeyRows& rows, const SeenPositions& seen,
                                            const Element* source, int first_column, int32_t first,
                                            Barrier& full) const {
    constexpr int kPieces = Shape::kBoxes * 8;  // of a row
    const int32_t first_slot = rows.first_slot(first);
#pragma unroll 1
    for (int i = lane; i < Shape::kKeys * kPieces; i += 32) {
      const int row = i / kPieces, piece = i % kPieces, column = first_column + piece * 8;
      const bool is_there = seen.holds(first + row) && column < params.cache.head_size;
      const int64_t offset = is_there ? rows.offset(first_slot + row) + column : 0;
      copy_async_16(swizzled_place(target, Shape::kKeys, row, piece), source + offset, is_there);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) full.arrive();
  }

  template <typename Line>
  __device__ __forceinline__ void run(const Line& line, int begin, int end) const {
    RingPlace at;
    each_run(
        params, shape, line, begin, end, [&](const DecodeCursor& cursor, const DecodeSpan& span, int count) {
          const SeenPositions seen = cursor.of.seen();
          const int entry_tiles = cursor.of.tiles.count();
          TileWork work{
              .place = static_cast<int>(span.is_whole ? workspace.span_place(cursor.entry, span.number)
                                                      : workspace.tile_place(span.owner, cursor.key_tile())),
              .is_merged = span.is_merged,
              .is_all = span.is_whole && span.tiles.end - span.tiles.begin == entry_tiles};
          const int behind = cursor.number + count;
#pragma unroll 1
          for (int number = cursor.number; number < behind; ++number) {
            work.first = cursor.of.tiles.at(number) * Shape::kTileKeys;
            const int next = number + Shape::kTileStep;
            work.next_entry =
                next < entry_tiles ? cursor.entry : line.entry_of(cursor.end + next - entry_tiles);
            work.begins = number == span.tiles.begin;
            work.ends = number + 1 == behind;
#pragma unroll 1
            for (int32_t first = work.first; first < work.first + Shape::kTileKeys; first += Shape::kKeys)
              if (Shape::kSteps == 1 || seen.hold_any(first, first + Shape::kKeys))
                load(cursor.of, first, work, at);
          }
        });
    copy_async_wait<0>();
  }
};

}  // namespace ortolan::cuda
