// Which pairs of token and choice each expert has.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/expert_params.h"

namespace ortolan::cpu {

// The pairs (t * K + k) of each expert that has any, in ascending order.
struct ExpertLists {
  std::vector<int64_t> experts;  // those that some token takes, ascending
  std::vector<int64_t> begin;    // of each of them in `pairs`, and the end
  std::vector<int64_t> pairs;

  static ExpertLists of(const ExpertStep& params);

  int64_t num_chosen() const { return static_cast<int64_t>(experts.size()); }
};

}  // namespace ortolan::cpu
