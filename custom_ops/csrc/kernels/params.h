// What each operator's kernels take: raw pointers, sizes and attributes. No tensor type, no runtime.
#pragma once

#include <cstdint>

#include "cache_layout.h"
#include "element_types.h"

namespace ortolan {

enum class GroupReduce { kMean, kMax, kSum };
enum class QueryReduce { kMean, kMax };

// Tokens already held per sequence, [B] or [B, Hkv].
struct Lengths {
  const int32_t* values = nullptr;
  int64_t stride = 1;       // elements between sequences: 1, or Hkv
  int64_t head_stride = 0;  // 0, or 1 where each kv head has its own length

  ORTOLAN_HOST_DEVICE int64_t at(int64_t sequence, int64_t head) const {
    return values[sequence * stride + head * head_stride];
  }
};

// Rows of the packed tokens: sequence b owns query_start[b] .. query_start[b + 1].
struct Packing {
  const int32_t* query_start = nullptr;  // [B+1]
  int64_t num_sequences = 0;             // B
  int64_t num_tokens = 0;                // T

  ORTOLAN_HOST_DEVICE int64_t first(int64_t sequence) const { return query_start[sequence]; }
  ORTOLAN_HOST_DEVICE int64_t count(int64_t sequence) const {
    return query_start[sequence + 1] - query_start[sequence];
  }
};

struct RingKvAppendParams {
  ElementType element;
  ElementType cache_element;
  CacheLayout cache;
  Packing packing;
  Lengths past_len;
  const void* key;     // [T, Hkv, D]
  const void* value;   // [T, Hkv, D]
  void* key_cache;     // [N, Hkv, P, D]
  void* value_cache;   // [N, Hkv, P, D]
  float* key_scale;    // [N, Hkv, P]; null unless caches hold codes
  float* value_scale;  // [N, Hkv, P]; the same
};

struct SwaAttentionParams {
  ElementType element;
  ElementType cache_element;
  CacheLayout cache;
  Packing packing;
  Lengths past_len;
  int64_t num_heads;  // Hq
  int64_t window;     // W; -1: none
  float scale;        // resolved, never 0
  float softcap;      // 0: none
  bool causal;
  const void* query;          // [T, Hq, D]
  const void* key_cache;      // [N, Hkv, P, D]
  const void* value_cache;    // [N, Hkv, P, D]
  const float* key_scale;     // [N, Hkv, P]; null unless caches hold codes
  const float* value_scale;   // [N, Hkv, P]; the same
  const float* sink_logits;   // [Hq] or null
  const int32_t* prefix_end;  // [B] or null
  void* output;               // [T, Hq, D]
  float* lse;                 // [Hq, T] or null
  int64_t max_kv_len = 0;     // most tokens of a sequence after the step, by the caller's promise; 0: none
  int64_t max_query_len = 0;  // the same of its tokens in the step
};

struct SnapKvCaptureParams {
  ElementType element;
  Packing packing;
  Lengths past_len;
  int64_t window_rows;  // Wq
  int64_t row_size;     // Hq * D
  const void* query;    // [T, Hq, D]
  void* capture;        // [B, Wq, Hq, D]
};

struct SnapKvScoreParams {
  ElementType element;
  ElementType cache_element;
  CacheLayout cache;
  Lengths kv_len;
  int64_t num_sequences;  // B
  int64_t num_heads;      // Hq
  int64_t window_rows;    // Wq
  float scale;            // resolved, never 0
  float softcap;          // 0: none
  GroupReduce group_reduce;
  QueryReduce query_reduce;
  const void* capture;     // [B, Wq, Hq, D]
  const void* key_cache;   // [N, Hkv, P, D]
  const float* key_scale;  // [N, Hkv, P]; null unless the cache holds codes
  float* score;            // [B, Hkv, C]
};

struct KvSelectParams {
  int64_t num_sequences;  // B
  int64_t num_lists;      // Hkv or 1
  int64_t num_kv_heads;   // Hkv
  int64_t capacity;       // C
  int64_t keep_count;     // K = min(budget, C)
  int64_t window;
  int64_t sink;
  const float* score;     // [B, Hkv or 1, C]
  const int32_t* kv_len;  // [B, Hkv]
  int32_t* keep;          // [B, Hkv or 1, K], -1 pads the tail
  int32_t* kept_len;      // [B, Hkv]
};

struct KvCompactParams {
  ElementType cache_element;
  CacheLayout cache;
  int64_t num_sequences;  // B
  int64_t keep_heads;     // Hkv or 1
  int64_t keep_count;     // K
  const int32_t* keep;    // [B, Hkv or 1, K], -1 pads the tail
  void* key_cache;        // [N, Hkv, P, D]
  void* value_cache;      // [N, Hkv, P, D]
  float* key_scale;       // [N, Hkv, P]; null unless caches hold codes
  float* value_scale;     // [N, Hkv, P]; the same
};

}  // namespace ortolan
