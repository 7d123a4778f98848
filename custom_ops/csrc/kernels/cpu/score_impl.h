// SnapKvScore on the CPU: two passes over the keys, the first for each query's softmax denominator, the
// second for the sum, or the largest, of the queries' probabilities.
//
// Spans of 1024 positions are independent tasks in both passes; partial denominators are combined in
// ascending order, so equal inputs give equal bits on any number of threads.
// Source: SnapKV, arXiv 2404.14469, section 4; the largest: KVzip, arXiv 2505.23416, section 3.2.
#pragma once

#include <cmath>
#include <vector>

#include "attention_impl.h"

namespace ortolan::cpu::ORTOLAN_ISA {

// The captured queries that one kv head serves, as float32 rows ordered by (query, head of the group).
template <typename Element>
class ScoreHead {
 public:
  ScoreHead(const SnapKvScoreParams& p, int64_t sequence, int64_t head)
      : p_(p),
        sequence_(sequence),
        head_(head),
        size_(p.cache.head_size),
        group_(p.num_heads / p.cache.num_kv_heads),
        length_(p.kv_len.at(sequence, head)),
        num_queries_(std::min(p.window_rows, length_)),
        queries_(num_rows() * size_),
        states_(num_rows()) {
    for (int64_t r = 0; r < num_rows(); ++r) {
      const int64_t capture_row = sequence * p.window_rows + position(r) % p.window_rows;
      const int64_t query_head = head * group_ + r % group_;
      load_row(static_cast<const Element*>(p.capture) + (capture_row * p.num_heads + query_head) * size_,
               size_, &queries_[r * size_]);
    }
  }

  int64_t num_rows() const { return num_queries_ * group_; }
  int64_t num_spans() const { return (length_ + kSpanKeys - 1) / kSpanKeys; }

  // First pass: each row's softmax state over the keys of one span.
  std::vector<RowState> reduce_span(int64_t span) const {
    std::vector<RowState> states(num_rows());
    for_each_block(span, length_, [&](int64_t row, int64_t rows, int64_t first, float* logits) {
      for (int64_t r = 0; r < rows; ++r) accumulate(logits + r * kTileKeys, row + r, first, states[row + r]);
    });
    return states;
  }

  void fold(const std::vector<RowState>& span) {
    for (int64_t r = 0; r < num_rows(); ++r) {
      if (span[r].largest == kNegativeInfinity) continue;
      const float largest = std::max(states_[r].largest, span[r].largest);
      states_[r].sum = states_[r].sum * std::exp(states_[r].largest - largest) +
                       span[r].sum * std::exp(span[r].largest - largest);
      states_[r].largest = largest;
    }
  }

  // Second pass: scores of one span's positions.
  void score_span(int64_t span, float* score) const {
    if (p_.query_reduce == QueryReduce::kMax)
      reduce_queries(span, score, [](Register a, Register b) { return maximum(a, b); });
    else
      reduce_queries(span, score, [](Register a, Register b) { return a + b; });
  }

 private:
  int64_t position(int64_t row) const { return length_ - num_queries_ + row / group_; }

  // `join` takes what is known of a position, which begins with 0, and one more query's probabilities.
  template <typename Join>
  void reduce_queries(int64_t span, float* score, Join join) const {
    const int64_t scored = length_ - num_queries_;  // the window itself gets 0
    std::vector<float> joined(group_ * kTileKeys);
    int64_t tile = -1;
    auto flush = [&] {
      if (tile < 0) return;
      for (int64_t j = 0; j < kTileKeys && tile + j < scored; ++j) score[tile + j] = reduce_group(&joined[j]);
      std::fill(joined.begin(), joined.end(), 0.0f);
    };
    for_each_block(span, scored, [&](int64_t row, int64_t rows, int64_t first, float* logits) {
      if (first != tile) {
        flush();
        tile = first;
      }
      for (int64_t r = 0; r < rows; ++r) {
        const RowState& state = states_[row + r];
        const float inverse = 1.0f / state.sum;
        float* known = &joined[(row + r) % group_ * kTileKeys];
        sum_exponentials(logits + r * kTileKeys, state.largest, [&](int64_t key, Register weights) {
          store_register(known + key, join(load_register(known + key), weights * inverse));
        });
      }
    });
    flush();
  }

  // Calls body(first row, rows, first position, logits [rows, 64]) for the tiles of a span below `limit`.
  template <typename Body>
  void for_each_block(int64_t span, int64_t limit, Body body) const {
    std::vector<float> rows(kTileKeys * size_), columns(kTileKeys * size_);
    const int64_t end = std::min((span + 1) * kSpanKeys, limit);
    const Visible all{{}, {0, length_}};
    for (int64_t first = span * kSpanKeys; first < end; first += kTileKeys) {
      const float* keys = tile_rows<Element>(p_.cache, {p_.key_cache, p_.key_scale, p_.cache_element},
                                             sequence_, head_, first, all, rows.data());
      transpose_tile(keys, size_, columns.data());
      float logits[kRowBlock * kTileKeys];
      int64_t row = 0;
      for (; row + kRowBlock <= num_rows(); row += kRowBlock) {
        dot_tile<kRowBlock>(&queries_[row * size_], size_, columns.data(), size_, logits);
        finish_scores(logits, kRowBlock * kTileKeys, p_.scale, p_.softcap);
        body(row, kRowBlock, first, logits);
      }
      for (; row < num_rows(); ++row) {
        dot_tile<1>(&queries_[row * size_], size_, columns.data(), size_, logits);
        finish_scores(logits, kTileKeys, p_.scale, p_.softcap);
        body(row, 1, first, logits);
      }
    }
  }

  void accumulate(float* logits, int64_t row, int64_t first, RowState& state) const {
    for (int64_t j = std::max<int64_t>(0, position(row) + 1 - first); j < kTileKeys; ++j)
      logits[j] = kNegativeInfinity;
    const float largest = std::max(state.largest, largest_logit(logits));
    if (largest == kNegativeInfinity) return;
    const float sum = sum_exponentials(logits, largest, [](int64_t, Register) {});
    state.sum = state.sum * std::exp(state.largest - largest) + sum;
    state.largest = largest;
  }

  // Reduces what the group's heads have for one position, `kTileKeys` apart: sums, or largest probabilities.
  float reduce_group(const float* sums) const {
    float result = p_.group_reduce == GroupReduce::kMax ? sums[0] : 0.0f;
    for (int64_t g = 0; g < group_; ++g) {
      const float sum = sums[g * kTileKeys];
      result = p_.group_reduce == GroupReduce::kMax ? std::max(result, sum) : result + sum;
    }
    const float divisor = p_.group_reduce == GroupReduce::kMean ? static_cast<float>(group_) : 1.0f;
    const float queries = p_.query_reduce == QueryReduce::kMax ? 1.0f : static_cast<float>(num_queries_);
    return result / (divisor * queries);
  }

  const SnapKvScoreParams& p_;
  const int64_t sequence_, head_, size_, group_, length_, num_queries_;
  std::vector<float> queries_;
  std::vector<RowState> states_;
};

template <typename Element>
void score(const SnapKvScoreParams& p, ParallelFor& parallel) {
  const int64_t heads = p.cache.num_kv_heads;
  std::fill_n(p.score, p.num_sequences * heads * p.cache.capacity, 0.0f);
  for (int64_t index = 0; index < p.num_sequences * heads; ++index) {
    ScoreHead<Element> head(p, index / heads, index % heads);
    if (head.num_rows() == 0) continue;
    std::vector<std::vector<RowState>> spans(head.num_spans());
    parallel.each(head.num_spans(), [&](int64_t span) { spans[span] = head.reduce_span(span); });
    for (const std::vector<RowState>& span : spans) head.fold(span);
    parallel.each(head.num_spans(),
                  [&](int64_t span) { head.score_span(span, p.score + index * p.cache.capacity); });
  }
}

inline void snap_kv_score(const SnapKvScoreParams& p, ParallelFor& parallel) {
  if (p.element == ElementType::kFloat32) return score<float>(p, parallel);
  score<Half>(p, parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
