// Reads one call's tensors into the parameters of the kernels of the contract's operators, checked.
#include <algorithm>

#include "call.h"
#include "checks.h"
#include "operators.generated.h"
#include "read_attention.h"
#include "read_caches.h"

namespace ortolan {

RingKvAppendParams read_params(const Call<ops::RingKvAppend>& call) {
  using Op = ops::RingKvAppend;
  const Tensor key_cache = call.input(Op::In::kKeyCache, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(call, key_cache);
  const Tensor key = call.input(Op::In::kKey, {-1, key_cache.dim(1), key_cache.dim(3)});
  const Tensor value = call.input(Op::In::kValue, {key.dim(0), key.dim(1), key.dim(2)});
  RingKvAppendParams params{};
  read_cached_step(call, key_cache, key.dim(0), params);
  check_appended_pages(call, params.cache, params.packing, params.past_len, Op::In::kBlockTable);
  params.key = key.data;
  params.value = value.data;
  read_updated_caches(call, key_cache, value_cache, params);
  return params;
}

SwaAttentionParams read_params(const Call<ops::SwaAttention>& call) {
  using Op = ops::SwaAttention;
  const Tensor query = call.input(Op::In::kQuery, {-1, -1, -1});
  const Tensor key_cache = call.input(Op::In::kKeyCache, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(call, key_cache);
  SwaAttentionParams params{};
  read_cached_step(call, key_cache, query.dim(0), params);
  params.num_heads = query.dim(1);
  check_heads(call, Op::In::kQuery, query, query.dim(1), params.cache, query.dim(2));
  params.query = query.data;
  params.key_cache = key_cache.data;
  params.value_cache = value_cache.data;
  params.key_scale = read_scale(call, Op::In::kKeyScale, key_cache).as<float>();
  params.value_scale = read_scale(call, Op::In::kValueScale, key_cache).as<float>();
  read_attention(call, params);
  params.lse = call.output(Op::Out::kLse, {query.dim(1), query.dim(0)}).as<float>();
  return params;
}

SnapKvCaptureParams read_params(const Call<ops::SnapKvCapture>& call) {
  using Op = ops::SnapKvCapture;
  const Tensor query = call.input(Op::In::kQuery, {-1, -1, -1});
  const Tensor capture = call.input(Op::In::kCapture, {-1, -1, query.dim(1), query.dim(2)});
  SnapKvCaptureParams params{};
  params.element = call.node().element;
  params.packing = read_packing(call, Op::In::kQueryStart, query.dim(0));
  if (capture.dim(0) != params.packing.num_sequences)
    call.bad_shape(Op::In::kCapture, capture, "with B = " + std::to_string(params.packing.num_sequences));
  params.past_len = read_lengths(call, Op::In::kPastLen, params.packing.num_sequences, 0);
  params.window_rows = capture.dim(1);
  params.row_size = query.dim(1) * query.dim(2);
  params.query = query.data;
  params.capture = call.aliased_output(Op::Out::kCaptureOut, capture).data;
  return params;
}

SnapKvScoreParams read_params(const Call<ops::SnapKvScore>& call) {
  using Op = ops::SnapKvScore;
  const Tensor capture = call.input(Op::In::kCapture, {-1, -1, -1, -1});
  const Tensor key_cache = call.input(Op::In::kKeyCache, {-1, -1, -1, -1});
  SnapKvScoreParams params{};
  params.element = call.node().element;
  params.cache_element = call.node().cache_element;
  params.key_scale = read_scale(call, Op::In::kKeyScale, key_cache).as<float>();
  params.num_sequences = capture.dim(0);
  params.window_rows = capture.dim(1);
  params.num_heads = capture.dim(2);
  params.cache = read_cache(call, key_cache, {Op::In::kKeyCache, Op::In::kBlockTable}, params.num_sequences);
  params.kv_len = read_lengths(call, Op::In::kKvLen, params.num_sequences, key_cache.dim(1));
  check_heads(call, Op::In::kCapture, capture, params.num_heads, params.cache, capture.dim(3));
  check_scored_lengths(call, params, Op::In::kBlockTable);
  params.scale = resolved_scale(call.attributes().scale, capture.dim(3));
  params.softcap = call.attributes().softcap;
  params.group_reduce = call.attributes().group_reduce;
  params.query_reduce = call.attributes().query_reduce;
  params.capture = capture.data;
  params.key_cache = key_cache.data;
  params.score = call.output(Op::Out::kScore, {params.num_sequences, key_cache.dim(1), params.cache.capacity})
                     .as<float>();
  return params;
}

KvSelectParams read_params(const Call<ops::KvSelect>& call) {
  using Op = ops::KvSelect;
  const Tensor score = call.input(Op::In::kScore, {-1, -1, -1});
  const Tensor kv_len = call.input(Op::In::kKvLen, {score.dim(0), -1});
  KvSelectParams params{};
  params.num_sequences = score.dim(0);
  params.num_lists = score.dim(1);
  params.capacity = score.dim(2);
  params.num_kv_heads = kv_len.dim(1);
  if (score.dim(1) != 1 && score.dim(1) != kv_len.dim(1))
    call.bad_shape(Op::In::kScore, score, "with Hkv = " + std::to_string(kv_len.dim(1)));
  params.kv_len = read_lengths(call, Op::In::kKvLen, params.num_sequences, params.num_kv_heads).values;
  check_selected_lengths(call, params);
  params.window = read_number<int64_t>(call, Op::In::kWindow);
  params.sink = read_number<int64_t>(call, Op::In::kSink);
  params.keep_count = std::min(read_number<int64_t>(call, Op::In::kBudget), params.capacity);
  params.score = score.as<float>();
  params.keep =
      call.output(Op::Out::kKeep, {params.num_sequences, params.num_lists, params.keep_count}).as<int32_t>();
  params.kept_len = call.output(Op::Out::kKeptLen, kv_len.shape).as<int32_t>();
  return params;
}

KvCompactParams read_params(const Call<ops::KvCompact>& call) {
  using Op = ops::KvCompact;
  const Tensor key_cache = call.input(Op::In::kKeyCache, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(call, key_cache);
  const Tensor keep = call.input(Op::In::kKeep, {-1, -1, -1});
  KvCompactParams params{};
  params.cache_element = call.node().cache_element;
  params.num_sequences = keep.dim(0);
  params.keep_heads = keep.dim(1);
  params.keep_count = keep.dim(2);
  params.keep = keep.as<int32_t>();
  if (keep.dim(1) != 1 && keep.dim(1) != key_cache.dim(1))
    call.bad_shape(Op::In::kKeep, keep, "with Hkv = " + std::to_string(key_cache.dim(1)));
  params.cache = read_cache(call, key_cache, {Op::In::kKeyCache, Op::In::kBlockTable}, params.num_sequences);
  check_keep(call, params, Op::In::kBlockTable);
  read_updated_caches(call, key_cache, value_cache, params);
  return params;
}

}  // namespace ortolan
