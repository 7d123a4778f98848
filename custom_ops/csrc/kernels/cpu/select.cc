// KvSelect on the CPU: the rank of the last position that fits, then one walk over all.
#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/cpu/operators.generated.h"
#include "kernels/selection.h"

namespace ortolan::cpu {
namespace {

int64_t select_list(const KvSelectParams& p, int64_t list) {
  const Selection selection = Selection::of(p, list);
  std::vector<uint32_t> ranks(selection.length), sorted;
  for (int64_t i = 0; i < selection.length; ++i) ranks[i] = selection.rank(i);
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(sorted), [](uint32_t r) { return r > 0; });
  uint32_t lowest = 0;  // kept ranks lie above it, and `equals` of those that are equal
  int64_t equals = 0;
  if (p.keep_count > 0 && static_cast<int64_t>(sorted.size()) > p.keep_count) {
    std::nth_element(sorted.begin(), sorted.begin() + (p.keep_count - 1), sorted.end(), std::greater<>());
    lowest = sorted[p.keep_count - 1];
    equals = p.keep_count;
    for (uint32_t rank : ranks) equals -= rank > lowest;
  }
  int32_t* keep = p.keep + list * p.keep_count;
  int64_t kept = 0;
  for (int64_t i = 0; i < selection.length && kept < p.keep_count; ++i) {
    if (ranks[i] < lowest || ranks[i] == kNeverKept) continue;
    if (ranks[i] == lowest && equals-- <= 0) continue;
    keep[kept++] = static_cast<int32_t>(i);
  }
  std::fill(keep + kept, keep + p.keep_count, -1);
  return kept;
}

}  // namespace

void kv_select(const KvSelectParams& params, ParallelFor& parallel) {
  parallel.each(params.num_sequences * params.num_lists, [&](int64_t list) {
    const auto kept = static_cast<int32_t>(select_list(params, list));
    const int64_t heads = params.num_lists == 1 ? params.num_kv_heads : 1;
    std::fill_n(params.kept_len + list * heads, heads, kept);
  });
}

}  // namespace ortolan::cpu
