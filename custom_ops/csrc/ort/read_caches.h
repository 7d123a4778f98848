// Reads what the operators on caches of keys and values have in common, by the names of their ports.
#pragma once

#include "call.h"
#include "checks.h"

namespace ortolan {

template <typename Op>
Tensor value_cache_like(const Call<Op>& call, const Tensor& key_cache) {
  return call.input(Op::In::kValueCache,
                    {key_cache.dim(0), key_cache.dim(1), key_cache.dim(2), key_cache.dim(3)});
}

// Sets element types, packing, lengths and cache of a step of so many tokens.
template <typename Op, typename Params>
void read_cached_step(const Call<Op>& call, const Tensor& key_cache, int64_t num_tokens, Params& params) {
  params.element = call.node().element;
  params.cache_element = call.node().cache_element;
  params.packing = read_packing(call, Op::In::kQueryStart, num_tokens);
  params.past_len = read_lengths(call, Op::In::kPastLen, params.packing.num_sequences, key_cache.dim(1));
  params.cache =
      read_cache(call, key_cache,
                 {Op::In::kKeyCache, Op::In::kBlockTable, call.attributes().capacity, call.attributes().sink},
                 params.packing.num_sequences);
}

// Sets the caches that the operator updates, and their scales where they hold codes.
template <typename Op, typename Params>
void read_updated_caches(const Call<Op>& call, const Tensor& key_cache, const Tensor& value_cache,
                         Params& params) {
  const Tensor key_scale = read_scale(call, Op::In::kKeyScale, key_cache);
  const Tensor value_scale = read_scale(call, Op::In::kValueScale, key_cache);
  params.key_scale = call.aliased_output(Op::Out::kKeyScaleOut, key_scale).template as<float>();
  params.value_scale = call.aliased_output(Op::Out::kValueScaleOut, value_scale).template as<float>();
  const CacheOutputs caches = read_cache_outputs(call, Op::Out::kKeyCacheOut, key_cache, value_cache);
  params.key_cache = caches.key;
  params.value_cache = caches.value;
}

}  // namespace ortolan
