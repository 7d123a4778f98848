// What the kernels between the joint projection and what attention returns take: raw pointers, sizes and
// attributes.
#pragma once

#include <cstdint>

#include "params.h"

namespace ortolan {

// A token's row of `qkv` holds Hq query heads, Hkv key heads and Hkv value heads; where values are keys, it
// has no value heads, and these are the key heads as the row has them. Query and key heads are normalised
// (where they have a weight: x * rsqrt(mean(x^2) + epsilon) * weight) and rotated, value heads are normalised
// without a weight where that is asked for, in float32, and rounded once; queries go to `query`, keys and
// values to the slots of their positions. The last Wq queries of a sequence also go to `capture`, the one at
// position p to row p mod Wq. Rotation, where R > 0: elements i < R and i + R of a head become x_i * cos -
// x_(i+R) * sin and x_(i+R) * cos + x_i * sin; those from 2R on stay. Where caches hold codes, a row of them
// is made of the rounded key or value.
struct QkvRopeAppendParams {
  ElementType element = ElementType::kFloat32;
  ElementType cache_element = ElementType::kFloat32;
  CacheLayout cache;
  Packing packing;
  Lengths past_len;
  int64_t num_heads = 0;     // Hq
  int64_t rotary_pairs = 0;  // R
  float epsilon = 0.0f;
  bool value_norm = false;
  bool value_is_key = false;
  const void* qkv = nullptr;                // [T, (Hq + 2 * Hkv) * D], or [T, (Hq + Hkv) * D]
  const void* query_norm_weight = nullptr;  // [D] or null; no earlier kernel writes it
  const void* key_norm_weight = nullptr;    // [D] or null; no earlier kernel writes it
  const float* cosine = nullptr;            // [T, R] or null
  const float* sine = nullptr;              // [T, R] or null
  void* query = nullptr;                    // [T, Hq, D]
  void* key_cache = nullptr;                // [N, Hkv, P, D]
  void* value_cache = nullptr;              // [N, Hkv, P, D]
  float* key_scale = nullptr;               // [N, Hkv, P]; null unless caches hold codes
  float* value_scale = nullptr;             // [N, Hkv, P]; the same
  int64_t capture_rows = 0;                 // Wq; 0: no query is captured
  Lengths capture_past_len;                 // [B]: tokens of each sequence, whatever the caches hold
  void* capture = nullptr;                  // [B, Wq, Hq, D] or null
};

// The same, and then attention of its queries over the caches that it has written: both parts have one
// packing, one cache and one `query`. The bound is the caller's promise, by which no result may change.
struct QkvAttentionParams {
  QkvRopeAppendParams heads;
  SwaAttentionParams attention;
  int64_t max_kv_len = 0;  // most tokens of a sequence after the step; 0: the capacity
};

// Heads that are normalised, where they have a weight, and rotated as query heads are above.
struct NormRopeParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;             // T
  int64_t num_heads = 0;              // H
  int64_t head_size = 0;              // D
  int64_t rotary_pairs = 0;           // R
  const void* heads = nullptr;        // [T, H, D]
  const void* norm_weight = nullptr;  // [D] or null; no earlier kernel writes it
  const float* cosine = nullptr;      // [T, R]
  const float* sine = nullptr;        // [T, R]
  float epsilon = 0.0f;
  void* rotated = nullptr;  // [T, H, D]
};

// The same as query heads of tokens that belong to no sequence, beside no key and no value.
inline QkvRopeAppendParams as_queries(const NormRopeParams& p) {
  QkvRopeAppendParams queries{};
  queries.element = p.element;
  queries.cache.head_size = p.head_size;
  queries.packing.num_tokens = p.num_tokens;
  queries.num_heads = p.num_heads;
  queries.rotary_pairs = p.rotary_pairs;
  queries.epsilon = p.epsilon;
  queries.qkv = p.heads;
  queries.query_norm_weight = p.norm_weight;
  queries.cosine = p.cosine;
  queries.sine = p.sine;
  queries.query = p.rotated;
  return queries;
}

}  // namespace ortolan
