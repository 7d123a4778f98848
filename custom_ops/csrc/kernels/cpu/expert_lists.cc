#include "expert_lists.h"

namespace ortolan::cpu {

ExpertLists ExpertLists::of(const ExpertStep& params) {
  const int64_t count = params.num_tokens * params.top_k;
  std::vector<int64_t> next(params.num_experts + 1);
  for (int64_t i = 0; i < count; ++i) ++next[params.experts[i] + 1];
  ExpertLists lists;
  for (int64_t e = 0; e < params.num_experts; ++e) {
    if (next[e + 1] > 0) {
      lists.experts.push_back(e);
      lists.begin.push_back(next[e]);
    }
    next[e + 1] += next[e];
  }
  lists.begin.push_back(count);
  lists.pairs.resize(count);
  for (int64_t i = 0; i < count; ++i) lists.pairs[next[params.experts[i]]++] = i;
  return lists;
}

}  // namespace ortolan::cpu
