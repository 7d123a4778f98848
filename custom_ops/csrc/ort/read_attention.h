// Reads what attention takes beside its queries and its cache, alike for each operator that attends.
#pragma once

#include <cmath>

#include "call.h"
#include "checks.h"

namespace ortolan {

inline float resolved_scale(float scale, int64_t head_size) {
  return scale != 0 ? scale : 1.0f / std::sqrt(static_cast<float>(head_size));
}

// Sets mask, scale, softcap, sink logits, the bound of tokens and output of a call whose packing, lengths,
// cache and Hq are known; refuses a query that needs a position which the cache does not hold.
template <typename Op>
void read_attention(const Call<Op>& call, SwaAttentionParams& params) {
  const int64_t head_size = params.cache.head_size;
  params.window = call.attributes().window;
  params.scale = resolved_scale(call.attributes().scale, head_size);
  params.softcap = call.attributes().softcap;
  params.causal = call.attributes().causal != 0;
  params.prefix_end = read_prefixes(call, Op::In::kPrefixEnd, params);
  check_window(call, params);
  check_attended_pages(call, params, Op::In::kBlockTable);
  params.sink_logits = call.input(Op::In::kSinkLogits, {params.num_heads}).template as<float>();
  params.max_query_len = read_max_query_len(call, Op::In::kMaxQueryLen, params.packing);
  params.output =
      call.output(Op::Out::kOutput, {params.packing.num_tokens, params.num_heads, head_size}).data;
}

}  // namespace ortolan
