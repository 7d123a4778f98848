// RingKvAppend, SnapKvCapture, KvCompact and GatherRows on the CPU: row copies of any element size, bit for
// bit, and codes of rows where a cache holds codes. RopeAngles and NarrowStep, too.
#define ORTOLAN_ISA isa_plain
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/operators.generated.h"
#include "low_bit_append.h"

namespace ortolan::cpu {
namespace {

using isa_plain::append_codes;

char* bytes(void* pointer) { return static_cast<char*>(pointer); }
const char* bytes(const void* pointer) { return static_cast<const char*>(pointer); }

void append_head(const RingKvAppendParams& p, int64_t sequence, int64_t head) {
  const CacheLayout& cache = p.cache;
  const int64_t size = element_bytes(p.element);
  const int64_t row_bytes = cache.head_size * size;
  const int64_t past = p.past_len.at(sequence, head);
  const int64_t count = p.packing.count(sequence);
  const int64_t ring = cache.capacity - cache.sink;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t position = past + t;
    // Of two tokens of this chunk that share a slot, only the later is written.
    if (position >= cache.sink && t + ring < count) continue;
    const int64_t row = cache.row_index(sequence, head, cache.slot(position));
    const int64_t source = ((p.packing.first(sequence) + t) * cache.num_kv_heads + head) * row_bytes;
    if (is_code(p.cache_element)) {
      append_codes(p, bytes(p.key) + source, row, p.key_cache, p.key_scale);
      append_codes(p, bytes(p.value) + source, row, p.value_cache, p.value_scale);
      continue;
    }
    const int64_t target = row * row_bytes;
    std::memcpy(bytes(p.key_cache) + target, bytes(p.key) + source, row_bytes);
    std::memcpy(bytes(p.value_cache) + target, bytes(p.value) + source, row_bytes);
  }
}

void compact_head(const KvCompactParams& p, int64_t sequence, int64_t head) {
  const int64_t row_bytes = p.cache.head_size * element_bytes(p.cache_element);
  const int64_t list = sequence * p.keep_heads + (p.keep_heads == 1 ? 0 : head);
  const int32_t* keep = p.keep + list * p.keep_count;
  // keep is strictly ascending, so keep[k] >= k and no row is overwritten before it is read.
  for (int64_t k = 0; k < p.keep_count && keep[k] >= 0; ++k) {
    if (keep[k] == k) continue;
    const int64_t to = p.cache.row_index(sequence, head, k);
    const int64_t from = p.cache.row_index(sequence, head, keep[k]);
    std::memcpy(bytes(p.key_cache) + to * row_bytes, bytes(p.key_cache) + from * row_bytes, row_bytes);
    std::memcpy(bytes(p.value_cache) + to * row_bytes, bytes(p.value_cache) + from * row_bytes, row_bytes);
    if (p.key_scale) p.key_scale[to] = p.key_scale[from];
    if (p.value_scale) p.value_scale[to] = p.value_scale[from];
  }
}

}  // namespace

void ring_kv_append(const RingKvAppendParams& params, ParallelFor& parallel) {
  const int64_t heads = params.cache.num_kv_heads;
  parallel.each(params.packing.num_sequences * heads,
                [&](int64_t task) { append_head(params, task / heads, task % heads); });
}

void snap_kv_capture(const SnapKvCaptureParams& params, ParallelFor& parallel) {
  if (params.window_rows == 0) return;
  const int64_t row_bytes = params.row_size * element_bytes(params.element);
  parallel.each(params.packing.num_sequences, [&](int64_t sequence) {
    const int64_t count = params.packing.count(sequence);
    const int64_t past = params.past_len.at(sequence, 0);
    for (int64_t t = std::max<int64_t>(0, count - params.window_rows); t < count; ++t) {
      const int64_t row = sequence * params.window_rows + (past + t) % params.window_rows;
      std::memcpy(bytes(params.capture) + row * row_bytes,
                  bytes(params.query) + (params.packing.first(sequence) + t) * row_bytes, row_bytes);
    }
  });
}

void gather_rows(const GatherRowsParams& params, ParallelFor& parallel) {
  const int64_t row_bytes = params.row_size * element_bytes(params.element);
  parallel.each(params.num_indices, [&](int64_t r) {
    const int64_t index = params.row_indices[r];
    char* target = bytes(params.output) + r * row_bytes;
    if (index < 0 || index >= params.num_rows)
      std::memset(target, 0, row_bytes);
    else
      std::memcpy(target, bytes(params.rows) + index * row_bytes, row_bytes);
  });
}

void rope_angles(const RopeAnglesParams& params, ParallelFor& parallel) {
  const int64_t pairs = params.rotary_pairs;
  parallel.each(params.num_tokens, [&](int64_t token) {
    const auto position = static_cast<float>(params.positions[token]);
    for (int64_t r = 0; r < pairs; ++r) {
      const float angle = position * params.inv_freq[r];
      params.cosine[token * pairs + r] = params.factor * std::cos(angle);
      params.sine[token * pairs + r] = params.factor * std::sin(angle);
    }
  });
}

void narrow_step(const NarrowStepParams& params, ParallelFor&) {
  const int64_t* indices = params.row_indices;
  const auto wanted_before = [&](int32_t edge) {
    const auto count =
        std::count_if(indices, indices + params.num_indices, [&](int64_t row) { return row < edge; });
    return std::min(static_cast<int32_t>(count), edge);
  };
  for (int64_t b = 0; b <= params.num_sequences; ++b)
    params.query_start_out[b] = wanted_before(params.query_start[b]);
  for (int64_t b = 0; b < params.num_sequences; ++b) {
    const int32_t rows = params.query_start[b + 1] - params.query_start[b];
    const int32_t dropped = rows - (params.query_start_out[b + 1] - params.query_start_out[b]);
    for (int64_t i = b * params.lengths; i < (b + 1) * params.lengths; ++i)
      params.past_len_out[i] = params.past_len[i] + dropped;
  }
  for (int64_t r = 0; params.positions && r < params.num_indices; ++r)
    params.positions_out[r] = params.position(r);
}

void kv_compact(const KvCompactParams& params, ParallelFor& parallel) {
  const int64_t heads = params.cache.num_kv_heads;
  parallel.each(params.num_sequences * heads,
                [&](int64_t task) { compact_head(params, task / heads, task % heads); });
}

}  // namespace ortolan::cpu
