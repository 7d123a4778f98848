// A tile of 64 consecutive key positions, unpacked from the cache, and products with it.
//
// Tile edges are multiples of 64 in *position*, whatever the ring's wrap or the pages, and every row of
// queries meets its visible keys in ascending position, one at a time. So a row's result never depends on
// which rows share its block, its chunk or its batch.
#pragma once

#include <algorithm>

#include "element.h"
#include "kernels/low_bit_rows.h"
#include "kernels/params.h"
#include "vec.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kMaxHeadSize = 512;
constexpr int64_t kRowBlock = 4;

struct KeyRange {
  int64_t begin = 0, end = 0;  // half-open

  bool empty() const { return begin >= end; }
  KeyRange clip(int64_t low, int64_t high) const { return {std::max(begin, low), std::min(end, high)}; }
};

// Keys that a query sees: those around it, and the sinks before them.
struct Visible {
  KeyRange sinks, window;

  // The query at `position` of a sequence with `length` tokens.
  static Visible of(const SwaAttentionParams& p, int64_t sequence, int64_t position, int64_t length) {
    const int64_t prefix = p.prefix_end ? std::min<int64_t>(p.prefix_end[sequence], length) : 0;
    if (position < prefix) return {{0, 0}, {0, prefix}};
    const bool limited = p.window >= 0;
    const int64_t oldest = limited ? std::max<int64_t>(0, position - p.window + 1) : 0;
    if (p.causal) return {{0, std::min(p.cache.sink, oldest)}, {oldest, position + 1}};
    const int64_t newest_end = limited ? std::min(length, position + p.window) : length;
    // Sinks behind the window, and then also before it, lie next to it.
    const int64_t end = std::max(newest_end, std::min(p.cache.sink, length));
    return {{0, std::min(p.cache.sink, oldest)}, {oldest, end}};
  }

  bool covers(int64_t begin, int64_t end) const {
    return (begin >= window.begin && end <= window.end) || end <= sinks.end;
  }
  bool touches(int64_t begin, int64_t end) const {
    return !window.clip(begin, end).empty() || !sinks.clip(begin, end).empty();
  }
};

// Copies the rows of a cache tile that are `seen` into `rows` [64, D]; other rows become 0, and their pages
// are not followed.
template <typename Element>
void unpack_rows(const CacheLayout& cache, const Element* pool, int64_t sequence, int64_t head, int64_t first,
                 const Visible& seen, float* rows) {
  const int64_t size = cache.head_size;
  for (int64_t j = 0; j < kTileKeys; ++j) {
    const int64_t position = first + j;
    if (!seen.touches(position, position + 1)) {
      std::fill_n(rows + j * size, size, 0.0f);
    } else {
      load_row(pool + cache.row_offset(sequence, head, cache.slot(position)), size, rows + j * size);
    }
  }
}

// The tile's rows where they lie, if they are float32 and adjacent in the cache; else null. Rows that are not
// seen hold anything. Some row of the tile is seen, so its page is there.
inline const float* rows_in_place(const CacheLayout& cache, const float* pool, int64_t sequence, int64_t head,
                                  int64_t first) {
  const int64_t slot = cache.slot(first), last = cache.slot(first + kTileKeys - 1);
  const bool one_page = !cache.block_table || slot / cache.page_slots == last / cache.page_slots;
  if (last != slot + kTileKeys - 1 || !one_page) return nullptr;
  return pool + cache.row_offset(sequence, head, slot);
}

inline const float* rows_in_place(const CacheLayout&, const Half*, int64_t, int64_t, int64_t) {
  return nullptr;
}

// The tile's rows [64, D] as float32: in the cache itself where that is possible, else unpacked to `buffer`.
template <typename Element>
const float* tile_rows(const CacheLayout& cache, const Element* pool, int64_t sequence, int64_t head,
                       int64_t first, const Visible& seen, float* buffer) {
  const float* rows = rows_in_place(cache, pool, sequence, head, first);
  if (rows) return rows;
  unpack_rows(cache, pool, sequence, head, first, seen, buffer);
  return buffer;
}

// A pool of rows [D]: elements, or codes with a scale for each row.
struct RowPool {
  const void* rows;
  const float* scales;
  ElementType element;
};

// Writes scale * code of the tile's seen rows to `rows` [64, D], 0 to others.
inline void unpack_codes(const CacheLayout& cache, const RowPool& pool, int64_t sequence, int64_t head,
                         int64_t first, const Visible& seen, float* rows) {
  const int64_t size = cache.head_size;
  for (int64_t j = 0; j < kTileKeys; ++j, rows += size) {
    if (!seen.touches(first + j, first + j + 1)) {
      std::fill_n(rows, size, 0.0f);
      continue;
    }
    const int64_t row = cache.row_index(sequence, head, cache.slot(first + j));
    const uint8_t* codes = static_cast<const uint8_t*>(pool.rows) + row * size;
    const float scale = pool.scales[row];
    if (pool.element == ElementType::kInt8)
      for (int64_t d = 0; d < size; ++d) rows[d] = scale * static_cast<float>(static_cast<int8_t>(codes[d]));
    else
      for (int64_t d = 0; d < size; ++d) rows[d] = scale * float8_value(codes[d]);
  }
}

// The tile's rows [64, D] as float32, of whatever the pool holds.
template <typename Element>
const float* tile_rows(const CacheLayout& cache, const RowPool& pool, int64_t sequence, int64_t head,
                       int64_t first, const Visible& seen, float* buffer) {
  if (!is_code(pool.element))
    return tile_rows(cache, static_cast<const Element*>(pool.rows), sequence, head, first, seen, buffer);
  unpack_codes(cache, pool, sequence, head, first, seen, buffer);
  return buffer;
}

// rows [64, D] -> columns [D, 64].
inline void transpose_tile(const float* rows, int64_t size, float* columns) {
  constexpr int64_t kBlock = 8;  // head sizes are multiples of 8
  for (int64_t j = 0; j < kTileKeys; j += kBlock)
    for (int64_t d = 0; d < size; d += kBlock)
      transpose_block(rows + j * size + d, size, columns + d * kTileKeys + j, kTileKeys);
}

// Registers of a tile's row that one pass sums in, for kRowBlock rows: few enough for all to stay where they
// are.
#if defined(__AVX512F__)
constexpr int64_t kPassRegisters = 4;
#else
constexpr int64_t kPassRegisters = 2;
#endif

// Columns whose products are summed apart: rounding grows with the terms of one chain of sums.
constexpr int64_t kDotColumns = 32;

// scores[r][0..64) = queries[r] . key j, for kRows rows that lie `query_stride` apart.
template <int64_t kRows>
void dot_tile(const float* queries, int64_t query_stride, const float* columns, int64_t size, float* scores) {
  constexpr int64_t kPass = kPassRegisters * kRegisterLanes;
  for (int64_t first = 0; first < kTileKeys; first += kPass) {
    const float* column = columns + first;
    for (int64_t begin = 0; begin < size; begin += kDotColumns) {
      Register sum[kRows][kPassRegisters] = {};
      const int64_t end = std::min(begin + kDotColumns, size);
      for (int64_t d = begin; d < end; ++d, column += kTileKeys)
        for (int64_t v = 0; v < kPassRegisters; ++v) {
          const Register key = load_register(column + v * kRegisterLanes);
          for (int64_t r = 0; r < kRows; ++r) sum[r][v] = sum[r][v] + queries[r * query_stride + d] * key;
        }
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t v = 0; v < kPassRegisters; ++v) {
          float* place = scores + r * kTileKeys + first + v * kRegisterLanes;
          store_register(place, begin ? load_register(place) + sum[r][v] : sum[r][v]);
        }
    }
  }
}

// sums[r] += the products of kCount columns of as many keys as a register has lanes, rows [lanes, D], in the
// columns' order.
template <int64_t kRows, int64_t kCount>
inline void add_columns(const float* queries, int64_t query_stride, const float* rows, int64_t size,
                        Register (&sums)[kRows]) {
  Register columns[kRegisterLanes];
  transpose_lanes<kCount>(rows, size, columns);
  for (int64_t j = 0; j < kRegisterLanes; ++j)
    __builtin_prefetch(rows + (kLanes + j) * size);  // keys to come
  for (int64_t d = 0; d < kCount; ++d)
    for (int64_t r = 0; r < kRows; ++r) sums[r] = sums[r] + queries[r * query_stride + d] * columns[d];
}

// The same from rows [64, D], bit for bit, for keys in [begin, end) rounded outwards to whole registers;
// others' scores stay as they are. Quicker than by columns for few query rows.
template <int64_t kRows>
void dot_rows(const float* queries, int64_t query_stride, const float* rows, int64_t size, KeyRange keys,
              float* scores) {
  constexpr int64_t kRest = std::min<int64_t>(kRegisterLanes, 8);  // head sizes are multiples of 8
  for (int64_t j = keys.begin / kRegisterLanes * kRegisterLanes; j < keys.end; j += kRegisterLanes) {
    Register total[kRows] = {};
    for (int64_t begin = 0; begin < size; begin += kDotColumns) {
      Register sums[kRows] = {};
      const int64_t end = std::min(begin + kDotColumns, size);
      int64_t d = begin;
      for (; d + kRegisterLanes <= end; d += kRegisterLanes)
        add_columns<kRows, kRegisterLanes>(queries + d, query_stride, rows + j * size + d, size, sums);
      if (d < end) add_columns<kRows, kRest>(queries + d, query_stride, rows + j * size + d, size, sums);
      for (int64_t r = 0; r < kRows; ++r) total[r] = begin ? total[r] + sums[r] : sums[r];
    }
    for (int64_t r = 0; r < kRows; ++r) store_register(scores + r * kTileKeys + j, total[r]);
  }
}

// Adds kCount registers from column d on: sums[r][d..] += sum over `keys` of weights[r][j] * rows[j][d..].
template <int64_t kRows, int64_t kCount>
void add_weighted_registers(const float* weights, const float* rows, int64_t size, KeyRange keys,
                            float* sums) {
  Register sum[kRows][kCount] = {};  // apart, so that rounding does not grow with every tile
  for (int64_t j = keys.begin; j < keys.end; ++j)
    for (int64_t v = 0; v < kCount; ++v) {
      const Register value = load_register(rows + j * size + v * kRegisterLanes);
      for (int64_t r = 0; r < kRows; ++r) sum[r][v] = sum[r][v] + weights[r * kTileKeys + j] * value;
    }
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t v = 0; v < kCount; ++v) {
      float* place = sums + r * size + v * kRegisterLanes;
      store_register(place, load_register(place) + sum[r][v]);
    }
}

// sums[r][0..D) += sum over keys [begin, end) of weights[r][j] * rows[j].
template <int64_t kRows>
void add_weighted(const float* weights, const float* rows, int64_t size, KeyRange keys, float* sums) {
  constexpr int64_t kWide = kRows <= 2 ? 2 * kPassRegisters : kPassRegisters;
  int64_t d = 0;
  for (; d + kWide * kRegisterLanes <= size; d += kWide * kRegisterLanes)
    add_weighted_registers<kRows, kWide>(weights, rows + d, size, keys, sums + d);
  for (; d + kPassRegisters * kRegisterLanes <= size; d += kPassRegisters * kRegisterLanes)
    add_weighted_registers<kRows, kPassRegisters>(weights, rows + d, size, keys, sums + d);
  for (; d + kRegisterLanes <= size; d += kRegisterLanes)
    add_weighted_registers<kRows, 1>(weights, rows + d, size, keys, sums + d);
  for (; d < size; ++d)
    for (int64_t r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int64_t j = keys.begin; j < keys.end; ++j)
        sum = sum + weights[r * kTileKeys + j] * rows[j * size + d];
      sums[r * size + d] += sum;
    }
}

// The largest of a tile's logits.
inline float largest_logit(const float* logits) {
  Register top[kVecRegisters];
  for (int64_t i = 0; i < kVecRegisters; ++i) {
    top[i] = load_register(logits + i * kRegisterLanes);
    for (int64_t j = kLanes; j < kTileKeys; j += kLanes)
      top[i] = maximum(top[i], load_register(logits + j + i * kRegisterLanes));
  }
  return horizontal_max(as_vec(top));
}

// The sum of exp(logit - largest) over a tile, each of which store(key, weights) gets, a register at a time.
template <typename Store>
float sum_exponentials(const float* logits, float largest, Store store) {
  Register sum[kVecRegisters] = {};
  for (int64_t j = 0; j < kTileKeys; j += kLanes)
    for (int64_t i = 0; i < kVecRegisters; ++i) {
      const int64_t key = j + i * kRegisterLanes;
      const Register weights = exponential(load_register(logits + key) - largest);
      store(key, weights);
      sum[i] = sum[i] + weights;
    }
  return horizontal_sum(as_vec(sum));
}

// scores -> scaled, softcapped logits.
inline void finish_scores(float* scores, int64_t count, float scale, float softcap) {
  for (int64_t i = 0; i < count; i += kRegisterLanes) {
    Register z = load_register(scores + i) * scale;
    if (softcap > 0) z = hyperbolic_tangent(z * (1.0f / softcap)) * softcap;
    store_register(scores + i, z);
  }
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
