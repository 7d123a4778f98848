// Turns tensors into kernel parameters and refuses what breaks the operator contract.
//
// What lengths, row boundaries, block tables and keep-lists hold is checked where they lie in host memory. On
// CUDA they stay on the device: shapes and attributes are checked here, and the kernels leave memory outside
// the pool alone.
#pragma once

#include "context.h"
#include "kernels/params.h"

namespace ortolan {

// Reads [B+1] row boundaries that rise from 0 to num_tokens; on CUDA only the shape is checked, by which no
// sequences have no tokens.
Packing read_packing(const Context& context, size_t index, int64_t num_tokens);

// Reads [B] or, where heads > 0, also [B, heads]; entries are not negative.
Lengths read_lengths(const Context& context, size_t index, int64_t num_sequences, int64_t heads);

// Refuses a number below 0.
void check_not_negative(const Context& context, size_t index, int64_t value);

// Reads one number that lies in host memory on every device, 0 and more; 0 where it is not given.
template <typename Number>
int64_t read_number(const Context& context, size_t index) {
  const Tensor tensor = context.input(index, {1});
  const int64_t value = tensor.present ? *tensor.as<Number>() : 0;
  check_not_negative(context, index, value);
  return value;
}

// Where a cache's pool and block table are among the inputs, and what the node's attributes say of it.
struct CachePorts {
  size_t pool;
  size_t block_table;
  int64_t capacity = 0;  // 0: M * P
  int64_t sink = 0;
};
// Describes a cache pool and its optional block table; checks pages, sinks and capacity.
CacheLayout read_cache(const Context& context, const Tensor& pool, const CachePorts& ports,
                       int64_t num_sequences);

// Reads the scales [N, Hkv, P] of a pool of codes; a pool of other elements has none.
Tensor read_scale(const Context& context, size_t index, const Tensor& pool);

// The buffers that caches are written to: those of the inputs, or copies.
struct CacheOutputs {
  void* key;
  void* value;
};
// Takes both outputs, from `index` on.
CacheOutputs read_cache_outputs(const Context& context, size_t index, const Tensor& key_cache,
                                const Tensor& value_cache);

// `block_table` is that input's index here and below. The pages of a sequence's positions first .. end must
// be in the pool. Entries of the block table that nothing follows may hold anything.
void check_pages(const Context& context, const CacheLayout& cache, size_t block_table, int64_t sequence,
                 int64_t first, int64_t end);
// The same for every position that an append writes.
void check_appended_pages(const Context& context, const CacheLayout& cache, const Packing& packing,
                          const Lengths& past_len, size_t block_table);
// The same for every position that some query sees.
void check_attended_pages(const Context& context, const SwaAttentionParams& params, size_t block_table);

// Checks what attention asks of a head size.
void check_head_size(const Context& context, int64_t head_size);
// The same, and what it asks of the query heads' groups.
void check_heads(const Context& context, size_t query_index, const Tensor& query, int64_t num_heads,
                 const CacheLayout& cache, int64_t head_size);

// A window's keys must still be in the ring when its queries attend.
// Reads where each sequence's prefix ends; null where none is given.
const int32_t* read_prefixes(const Context& context, size_t index, const SwaAttentionParams& p);
void check_window(const Context& context, const SwaAttentionParams& params);

// Reads the caller's promise of the most tokens that a sequence with tokens in the step has after it, for any
// kv head; 0: none. Refuses one that is seen to be false.
int64_t read_max_kv_len(const Context& context, size_t index, const SwaAttentionParams& params);
// The same of the most tokens that a sequence has in the step.
int64_t read_max_query_len(const Context& context, size_t index, const Packing& packing);

// A sequence cannot hold more than its cache has slots.
void check_scored_lengths(const Context& context, const SnapKvScoreParams& params, size_t block_table);

// The same for the lists of a selection, whose kv heads exist.
void check_selected_lengths(const Context& context, const KvSelectParams& params);

// Each list is strictly ascending, inside the cache, and padded by -1 at its tail only.
void check_keep(const Context& context, const KvCompactParams& params, size_t block_table);

}  // namespace ortolan
