#include "read_params.h"

#include <algorithm>
#include <cmath>

#include "checks.h"

namespace ortolan {
namespace {

float resolved_scale(const NodeInfo& node, int64_t head_size) {
  return node.scale != 0 ? node.scale : 1.0f / std::sqrt(static_cast<float>(head_size));
}

Tensor value_cache_like(const Context& context, size_t index, const Tensor& key_cache) {
  return context.input(index, {key_cache.dim(0), key_cache.dim(1), key_cache.dim(2), key_cache.dim(3)});
}

// One number that lies in host memory, 0 and more.
int64_t read_number(const Context& context, size_t index) {
  const int64_t value = *context.input(index, {1}).as<int64_t>();
  if (value < 0)
    context.node().fail(std::string("input '") + context.node().schema->inputs[index].name + "' is " +
                        std::to_string(value) + "; it must be at least 0");
  return value;
}

}  // namespace

RingKvAppendParams read_ring_kv_append(const Context& context) {
  const Tensor key_cache = context.input(2, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(context, 3, key_cache);
  const Tensor key = context.input(0, {-1, key_cache.dim(1), key_cache.dim(3)});
  const Tensor value = context.input(1, {key.dim(0), key.dim(1), key.dim(2)});
  RingKvAppendParams params{};
  params.element = context.node().element;
  params.packing = read_packing(context, 4, key.dim(0));
  params.past_len = read_lengths(context, 5, params.packing.num_sequences, key.dim(1));
  params.cache = read_cache(context, key_cache, 2, 6, params.packing.num_sequences);
  check_appended_pages(context, params);
  params.key = key.data;
  params.value = value.data;
  const CacheOutputs caches = read_cache_outputs(context, 0, key_cache, value_cache);
  params.key_cache = caches.key;
  params.value_cache = caches.value;
  return params;
}

SwaAttentionParams read_swa_attention(const Context& context) {
  const NodeInfo& node = context.node();
  const Tensor query = context.input(0, {-1, -1, -1});
  const Tensor key_cache = context.input(1, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(context, 2, key_cache);
  SwaAttentionParams params{};
  params.element = node.element;
  params.packing = read_packing(context, 3, query.dim(0));
  params.past_len = read_lengths(context, 4, params.packing.num_sequences, key_cache.dim(1));
  params.cache = read_cache(context, key_cache, 1, 5, params.packing.num_sequences);
  params.num_heads = query.dim(1);
  check_heads(context, 0, query, query.dim(1), params.cache, query.dim(2));
  params.window = node.window;
  params.scale = resolved_scale(node, query.dim(2));
  params.softcap = node.softcap;
  check_window(context, params);
  check_attended_pages(context, params);
  params.query = query.data;
  params.key_cache = key_cache.data;
  params.value_cache = value_cache.data;
  params.sink_logits = context.input(6, {query.dim(1)}).as<float>();
  params.output = context.output(0, query.shape).data;
  params.lse = context.output(1, {query.dim(1), query.dim(0)}).as<float>();
  return params;
}

SnapKvCaptureParams read_snapkv_capture(const Context& context) {
  const Tensor query = context.input(0, {-1, -1, -1});
  const Tensor capture = context.input(1, {-1, -1, query.dim(1), query.dim(2)});
  SnapKvCaptureParams params{};
  params.element = context.node().element;
  params.packing = read_packing(context, 2, query.dim(0));
  if (capture.dim(0) != params.packing.num_sequences)
    context.bad_shape(1, capture, "with B = " + std::to_string(params.packing.num_sequences));
  params.past_len = read_lengths(context, 3, params.packing.num_sequences, 0);
  params.window_rows = capture.dim(1);
  params.row_size = query.dim(1) * query.dim(2);
  params.query = query.data;
  params.capture = context.aliased_output(0, capture).data;
  return params;
}

SnapKvScoreParams read_snapkv_score(const Context& context) {
  const NodeInfo& node = context.node();
  const Tensor capture = context.input(0, {-1, -1, -1, -1});
  const Tensor key_cache = context.input(1, {-1, -1, -1, -1});
  SnapKvScoreParams params{};
  params.element = node.element;
  params.num_sequences = capture.dim(0);
  params.window_rows = capture.dim(1);
  params.num_heads = capture.dim(2);
  params.cache = read_cache(context, key_cache, 1, 3, params.num_sequences);
  params.kv_len = read_lengths(context, 2, params.num_sequences, key_cache.dim(1));
  check_heads(context, 0, capture, params.num_heads, params.cache, capture.dim(3));
  check_scored_lengths(context, params);
  params.scale = resolved_scale(node, capture.dim(3));
  params.softcap = node.softcap;
  params.group_reduce = node.group_reduce;
  params.capture = capture.data;
  params.key_cache = key_cache.data;
  params.score =
      context.output(0, {params.num_sequences, key_cache.dim(1), params.cache.capacity}).as<float>();
  return params;
}

KvSelectParams read_kv_select(const Context& context) {
  const Tensor score = context.input(0, {-1, -1, -1});
  const Tensor kv_len = context.input(1, {score.dim(0), -1});
  KvSelectParams params{};
  params.num_sequences = score.dim(0);
  params.num_lists = score.dim(1);
  params.capacity = score.dim(2);
  params.num_kv_heads = kv_len.dim(1);
  if (score.dim(1) != 1 && score.dim(1) != kv_len.dim(1))
    context.bad_shape(0, score, "with Hkv = " + std::to_string(kv_len.dim(1)));
  params.kv_len = read_lengths(context, 1, params.num_sequences, params.num_kv_heads).values;
  check_selected_lengths(context, params);
  params.window = read_number(context, 3);
  params.sink = read_number(context, 4);
  params.keep_count = std::min(read_number(context, 2), params.capacity);
  params.score = score.as<float>();
  params.keep = context.output(0, {params.num_sequences, params.num_lists, params.keep_count}).as<int32_t>();
  params.kept_len = context.output(1, kv_len.shape).as<int32_t>();
  return params;
}

KvCompactParams read_kv_compact(const Context& context) {
  const Tensor key_cache = context.input(0, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(context, 1, key_cache);
  const Tensor keep = context.input(2, {-1, -1, -1});
  KvCompactParams params{};
  params.element = context.node().element;
  params.num_sequences = keep.dim(0);
  params.keep_heads = keep.dim(1);
  params.keep_count = keep.dim(2);
  params.keep = keep.as<int32_t>();
  if (keep.dim(1) != 1 && keep.dim(1) != key_cache.dim(1))
    context.bad_shape(2, keep, "with Hkv = " + std::to_string(key_cache.dim(1)));
  params.cache = read_cache(context, key_cache, 0, 3, params.num_sequences);
  check_keep(context, params);
  const CacheOutputs caches = read_cache_outputs(context, 0, key_cache, value_cache);
  params.key_cache = caches.key;
  params.value_cache = caches.value;
  return params;
}

}  // namespace ortolan
