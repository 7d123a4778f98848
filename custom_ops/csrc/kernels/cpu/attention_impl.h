// SwaAttention on the CPU: online softmax over tiles of 64 positions, in spans of 1024 positions.
//
// A task is one (sequence, kv head, block of query rows) when there are many rows or a span holds all keys,
// or one (sequence, kv head, span) when there are few rows, as in decode. Both fold the spans in ascending
// order with the same arithmetic, so a row's bits depend on its visible keys alone. Idea of the online
// softmax: Milakov and Gimelshein, arXiv 1805.02867; of splitting keys in decode: FlashDecoding.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/cpu/operators.generated.h"
#include "tile.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kSpanKeys = 1024;
constexpr int64_t kTaskRows = 64;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Softmax state of one query row: the largest logit, the sum of exp(z - largest), and the weighted values.
struct RowState {
  float largest = kNegativeInfinity;
  float sum = 0;
};

// The query rows of one task: rows [begin, end) of a sequence's (token, head of the group) pairs.
struct RowBlock {
  int64_t sequence, head, begin, end;

  int64_t count() const { return end - begin; }
};

template <typename Element>
class AttentionTask {
 public:
  AttentionTask(const SwaAttentionParams& params, RowBlock rows)
      : p_(params),
        rows_(rows),
        size_(params.cache.head_size),
        group_(params.num_heads / params.cache.num_kv_heads),
        past_(params.past_len.at(rows.sequence, rows.head)),
        length_(past_ + params.packing.count(rows.sequence)),
        queries_(rows.count() * size_),
        total_(rows.count()),
        total_values_(rows.count() * size_),
        span_(rows.count()),
        span_values_(rows.count() * size_) {
    for (int64_t r = 0; r < rows.count(); ++r) load_row(query_row(r), size_, &queries_[r * size_]);
  }

  // Spans that hold a key visible to some row of the block.
  int64_t num_spans() const { return (seen().window.end - 1) / kSpanKeys + 1; }

  bool touches_span(int64_t span) const { return touched(span * kSpanKeys, (span + 1) * kSpanKeys); }

  // Attends to the keys of one span; the result is in span_state / span_values.
  void attend_span(int64_t span) {
    if (!scratch_) scratch_ = std::make_unique_for_overwrite<float[]>(2 * kTileKeys * size_);
    std::fill(span_.begin(), span_.end(), RowState{});
    std::fill(span_values_.begin(), span_values_.end(), 0.0f);
    const int64_t end = std::min((span + 1) * kSpanKeys, length_);
    for (int64_t first = span * kSpanKeys; first < end; first += kTileKeys)
      if (touched(first, first + kTileKeys)) attend_tile(first);
  }

  // Folds one span's result into the block's total. Spans must come in ascending order.
  void fold(const RowState* states, const float* values) {
    for (int64_t r = 0; r < rows_.count(); ++r) {
      RowState& total = total_[r];
      const RowState& span = states[r];
      if (span.largest == kNegativeInfinity) continue;
      const float largest = std::max(total.largest, span.largest);
      const float keep = std::exp(total.largest - largest), add = std::exp(span.largest - largest);
      total.sum = total.sum * keep + span.sum * add;
      total.largest = largest;
      float* sums = &total_values_[r * size_];
      for (int64_t d = 0; d < size_; ++d) sums[d] = sums[d] * keep + values[r * size_ + d] * add;
    }
  }

  const std::vector<RowState>& span_state() const { return span_; }
  const std::vector<float>& span_values() const { return span_values_; }

  // Adds the learned sink, normalises, and writes output and lse.
  void finish() {
    for (int64_t r = 0; r < rows_.count(); ++r) {
      const int64_t head = query_head(r);
      RowState state = total_[r];
      float* sums = &total_values_[r * size_];
      if (p_.sink_logits) add_sink_logit(p_.sink_logits[head], state, sums);
      const bool sees_nothing = state.sum == 0;  // a sum that is NaN shows
      const float inverse = sees_nothing ? 0.0f : 1.0f / state.sum;
      for (int64_t d = 0; d < size_; ++d) sums[d] *= inverse;
      store_row(sums, size_, static_cast<Element*>(p_.output) + (token(r) * p_.num_heads + head) * size_);
      if (p_.lse) {
        const float lse = sees_nothing ? kNegativeInfinity : state.largest + std::log(state.sum);
        p_.lse[head * p_.packing.num_tokens + token(r)] = lse;
      }
    }
  }

 private:
  int64_t token(int64_t r) const { return p_.packing.first(rows_.sequence) + (rows_.begin + r) / group_; }
  int64_t position(int64_t r) const { return past_ + (rows_.begin + r) / group_; }
  int64_t query_head(int64_t r) const { return rows_.head * group_ + (rows_.begin + r) % group_; }
  Visible visible(int64_t r) const { return Visible::of(p_, rows_.sequence, position(r), length_); }

  const Element* query_row(int64_t r) const {
    return static_cast<const Element*>(p_.query) + (token(r) * p_.num_heads + query_head(r)) * size_;
  }

  // What some row of the block sees: windows move with the rows, and the rows of a prefix, which see all of
  // it, come first. So the first and the last row bound it.
  Visible seen() const {
    const Visible first = visible(0), last = visible(rows_.count() - 1);
    return {last.sinks, {first.window.begin, std::max(first.window.end, last.window.end)}};
  }

  bool touched(int64_t begin, int64_t end) const { return seen().touches(begin, end); }

  // Keys of a tile, counted from its first, around those that some row of the block sees; at least one is
  // seen.
  KeyRange seen_in_tile(int64_t first) const {
    const Visible see = seen();
    const KeyRange sinks = see.sinks.clip(first, first + kTileKeys);
    const KeyRange window = see.window.clip(first, first + kTileKeys);
    return {(sinks.empty() ? window : sinks).begin - first, (window.empty() ? sinks : window).end - first};
  }

  void add_sink_logit(float logit, RowState& state, float* sums) const {
    const float largest = std::max(state.largest, logit);
    if (largest == kNegativeInfinity) return;
    const float keep = std::exp(state.largest - largest);
    state.sum = state.sum * keep + std::exp(logit - largest);
    state.largest = largest;
    for (int64_t d = 0; d < size_; ++d) sums[d] *= keep;
  }

  // Whether keys are read from their rows, and not turned into columns first, which many rows share.
  bool by_rows() const { return rows_.count() <= 2 * kRowBlock; }

  void attend_tile(int64_t first) {
    float* const buffer = by_rows() ? columns() : &scratch_[0];
    keys_ = rows_of({p_.key_cache, p_.key_scale, p_.cache_element}, first, buffer);
    if (!by_rows()) transpose_tile(keys_, size_, columns());
    values_ = rows_of({p_.value_cache, p_.value_scale, p_.cache_element}, first, &scratch_[0]);
    int64_t r = 0;
    for (; r + kRowBlock <= rows_.count(); r += kRowBlock) attend_rows<kRowBlock>(r, first);
    for (; r + 2 <= rows_.count(); r += 2) attend_rows<2>(r, first);
    for (; r < rows_.count(); ++r) attend_rows<1>(r, first);
  }

  // Reads only what the ring still holds: between sinks and window a tile may name overwritten positions.
  const float* rows_of(const RowPool& pool, int64_t first, float* buffer) const {
    return tile_rows<Element>(p_.cache, pool, rows_.sequence, rows_.head, first, seen(), buffer);
  }

  float* columns() { return &scratch_[kTileKeys * size_]; }  // [D, 64]

  template <int64_t kRows>
  void attend_rows(int64_t row, int64_t first) {
    float scores[kRows * kTileKeys] = {};
    if (by_rows())
      dot_rows<kRows>(&queries_[row * size_], size_, keys_, size_, seen_in_tile(first), scores);
    else
      dot_tile<kRows>(&queries_[row * size_], size_, columns(), size_, scores);
    finish_scores(scores, kRows * kTileKeys, p_.scale, p_.softcap);
    bool all = true;
    for (int64_t r = 0; r < kRows; ++r) {
      const Visible see = visible(row + r);
      if (!see.covers(first, first + kTileKeys)) {
        all = false;
        hide_invisible(see, first, &scores[r * kTileKeys]);
      }
      softmax_step(&scores[r * kTileKeys], row + r);
    }
    float* sums = &span_values_[row * size_];
    if (all) {
      add_weighted<kRows>(scores, values_, size_, {0, kTileKeys}, sums);
      return;
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const Visible see = visible(row + r);
      for (const KeyRange& part : {see.sinks, see.window}) {
        const KeyRange keys = part.clip(first, first + kTileKeys);
        if (keys.empty()) continue;
        add_weighted<1>(&scores[r * kTileKeys], values_, size_, {keys.begin - first, keys.end - first},
                        sums + r * size_);
      }
    }
  }

  static void hide_invisible(const Visible& see, int64_t first, float* scores) {
    for (int64_t j = 0; j < kTileKeys; ++j)
      if (!see.touches(first + j, first + j + 1)) scores[j] = kNegativeInfinity;
  }

  // Turns one row's logits into weights, and rescales what the row has summed so far.
  void softmax_step(float* scores, int64_t row) {
    RowState& state = span_[row];
    const float largest = std::max(state.largest, largest_logit(scores));
    if (largest == kNegativeInfinity) {  // nothing weighs, unless comparisons passed over NaN
      for (int64_t j = 0; j < kTileKeys; ++j) {
        if (std::isnan(scores[j]))
          state.largest = scores[j];
        else
          scores[j] = 0;
      }
      return;
    }
    const float sum = sum_exponentials(
        scores, largest, [&](int64_t key, Register weights) { store_register(scores + key, weights); });
    if (largest > state.largest) {
      const float keep = std::exp(state.largest - largest);
      state.sum *= keep;
      float* sums = &span_values_[row * size_];
      for (int64_t d = 0; d < size_; ++d) sums[d] *= keep;
      state.largest = largest;
    }
    state.sum += sum;
  }

  const SwaAttentionParams& p_;
  const RowBlock rows_;
  const int64_t size_, group_, past_, length_;
  std::vector<float> queries_;
  std::vector<RowState> total_;
  std::vector<float> total_values_;
  std::vector<RowState> span_;
  std::vector<float> span_values_;
  std::unique_ptr<float[]> scratch_;                 // unpacked rows [64, D], then key columns [D, 64]
  const float *keys_ = nullptr, *values_ = nullptr;  // rows [64, D] of the current tile
};

inline std::vector<RowBlock> row_blocks(const SwaAttentionParams& p) {
  std::vector<RowBlock> blocks;
  const int64_t group = p.num_heads / p.cache.num_kv_heads;
  for (int64_t sequence = 0; sequence < p.packing.num_sequences; ++sequence)
    for (int64_t head = 0; head < p.cache.num_kv_heads; ++head) {
      const int64_t rows = p.packing.count(sequence) * group;
      for (int64_t begin = 0; begin < rows; begin += kTaskRows)
        blocks.push_back({sequence, head, begin, std::min(begin + kTaskRows, rows)});
    }
  return blocks;
}

template <typename Element>
void attend_block(const SwaAttentionParams& p, const RowBlock& block) {
  AttentionTask<Element> task(p, block);
  for (int64_t span = 0; span < task.num_spans(); ++span) {
    if (!task.touches_span(span)) continue;
    task.attend_span(span);
    task.fold(task.span_state().data(), task.span_values().data());
  }
  task.finish();
}

// Few rows: the spans of a block are tasks of their own, and a second pass folds them.
template <typename Element>
void attend_split(const SwaAttentionParams& p, const std::vector<RowBlock>& blocks, ParallelFor& parallel) {
  struct Part {
    size_t block;
    int64_t span;
    std::vector<RowState> states;
    std::vector<float> values;
  };
  std::vector<Part> parts;
  std::vector<size_t> first_part(blocks.size() + 1);
  for (size_t b = 0; b < blocks.size(); ++b) {
    first_part[b] = parts.size();
    const AttentionTask<Element> task(p, blocks[b]);
    for (int64_t span = 0; span < task.num_spans(); ++span)
      if (task.touches_span(span)) parts.push_back({b, span, {}, {}});
  }
  first_part[blocks.size()] = parts.size();
  parallel.each(static_cast<int64_t>(parts.size()), [&](int64_t i) {
    AttentionTask<Element> task(p, blocks[parts[i].block]);
    task.attend_span(parts[i].span);
    parts[i].states = task.span_state();
    parts[i].values = task.span_values();
  });
  parallel.each(static_cast<int64_t>(blocks.size()), [&](int64_t b) {
    AttentionTask<Element> task(p, blocks[b]);
    for (size_t i = first_part[b]; i < first_part[b + 1]; ++i)
      task.fold(parts[i].states.data(), parts[i].values.data());
    task.finish();
  });
}

inline bool fits_a_span(const SwaAttentionParams& p, const RowBlock& block) {
  return p.past_len.at(block.sequence, block.head) + p.packing.count(block.sequence) <= kSpanKeys;
}

template <typename Element>
void attend(const SwaAttentionParams& p, ParallelFor& parallel) {
  constexpr size_t kEnoughBlocks = 16;
  const std::vector<RowBlock> blocks = row_blocks(p);
  const auto is_whole = [&](const RowBlock& block) { return fits_a_span(p, block); };
  if (blocks.size() < kEnoughBlocks && !std::all_of(blocks.begin(), blocks.end(), is_whole))
    return attend_split<Element>(p, blocks, parallel);
  parallel.each(static_cast<int64_t>(blocks.size()), [&](int64_t i) { attend_block<Element>(p, blocks[i]); });
}

inline void swa_attention(const SwaAttentionParams& p, ParallelFor& parallel) {
  if (p.element == ElementType::kFloat32) return attend<float>(p, parallel);
  attend<Half>(p, parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
