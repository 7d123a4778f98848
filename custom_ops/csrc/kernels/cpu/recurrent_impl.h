// CausalConv and GatedDeltaRule on the CPU.
//
// A task of the convolution is a sequence and a block of features; it walks the tokens with the last inputs
// at hand. A task of the delta rule is a sequence and a value head. It holds the state in slices of columns
// that fit the first cache, and walks them once per token: one pass applies the update of the token before
// and reads what this token's key and query find, since
//     k S_t = exp(decay) k S_(t-1)   and   q S_t = exp(decay) q S_(t-1) + (q k) u.
// Columns lie in lanes, so no sum crosses them, and every update of every step runs through the same code:
// what is applied again from kept updates has the same bits. Nothing here depends on how many tokens a step
// has. A scan over chunks would need more products than this does.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/cpu/operators.generated.h"
#include "lanes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kConvBlock = 4 * kLanes;
constexpr int64_t kConvHistory = kMaxConvTaps;  // a power of two
constexpr int64_t kStateColumns = 2 * kLanes;
constexpr int64_t kTokenBlock = 16;  // tokens whose keys and queries are normalised together

// The features first .. first + count of one sequence.
template <typename Element>
class ConvBlock {
 public:
  ConvBlock(const CausalConvParams& p, int64_t first, int64_t count) : p_(p), first_(first), count_(count) {
    const Element* weight = static_cast<const Element*>(p.weight) + first * p.num_taps;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t k = 0; k < p.num_taps; ++k) taps_[k][i] = to_float(weight[i * p.num_taps + k]);
    if (p.bias) load_floats(static_cast<const Element*>(p.bias) + first, count, bias_);
  }

  void run(int64_t sequence) {
    const int64_t past = p_.past_len[sequence], tokens = p_.packing.count(sequence);
    Element* ring = static_cast<Element*>(p_.conv_state) +
                    p_.slots.at(sequence) * p_.ring_rows * p_.num_features + first_;
    const auto ring_row = [&](int64_t position) { return ring + position % p_.ring_rows * p_.num_features; };
    for (int64_t position = past - p_.num_taps + 1; position < past; ++position)
      if (position >= 0) load_floats(ring_row(position), count_, input(position));
    const int64_t start = p_.packing.first(sequence) * p_.num_features + first_;
    const Element* x = static_cast<const Element*>(p_.x) + start;
    Element* y = static_cast<Element*>(p_.y) + start;
    for (int64_t t = 0; t < tokens; ++t) {
      load_floats(x + t * p_.num_features, count_, input(past + t));
      convolve(past + t);
      store_row(sums_, count_, y + t * p_.num_features);
    }
    for (int64_t t = std::max<int64_t>(0, tokens - p_.ring_rows); t < tokens; ++t)
      std::memcpy(ring_row(past + t), x + t * p_.num_features, count_ * sizeof(Element));
  }

 private:
  float* input(int64_t position) { return inputs_[(position + kConvHistory) % kConvHistory]; }

  void convolve(int64_t position) {
    for (int64_t i = 0; i < count_; i += kLanes) {
      Vec sum = load(bias_ + i);
      for (int64_t k = 0; k < p_.num_taps; ++k)
        sum = sum + load(taps_[k] + i) * load(input(position - p_.num_taps + 1 + k) + i);
      store(sums_ + i, p_.activation == ConvActivation::kSilu ? silu(sum) : sum);
    }
  }

  const CausalConvParams& p_;
  int64_t first_, count_;
  float taps_[kMaxConvTaps][kConvBlock] = {};
  float bias_[kConvBlock] = {};
  float inputs_[kConvHistory][kConvBlock] = {};  // of position p in row p mod kConvHistory
  float sums_[kConvBlock];
};

template <typename Element>
void causal_conv_of(const CausalConvParams& p, ParallelFor& parallel) {
  const int64_t blocks = (p.num_features + kConvBlock - 1) / kConvBlock;
  parallel.each(p.packing.num_sequences * blocks, [&](int64_t task) {
    const int64_t first = task % blocks * kConvBlock;
    ConvBlock<Element>(p, first, std::min(kConvBlock, p.num_features - first)).run(task / blocks);
  });
}

inline void causal_conv(const CausalConvParams& p, ParallelFor& parallel) {
  p.element == ElementType::kFloat16 ? causal_conv_of<Half>(p, parallel) : causal_conv_of<float>(p, parallel);
}

// A query or key row [Dk] as float32, of length 1 if asked for.
template <typename Element>
void load_unit_row(const GatedDeltaRuleParams& p, const void* rows, int64_t token, int64_t head,
                   float* target) {
  const int64_t row = (token * p.num_key_heads + head) * p.key_size;
  load_floats(static_cast<const Element*>(rows) + row, p.key_size, target);
  if (!p.l2_norm) return;
  const float factor = 1.0f / std::sqrt(dot(target, target, p.key_size) + kKeyNormEpsilon);
  for (int64_t i = 0; i < p.key_size; ++i) target[i] *= factor;
}

// What a token leaves to be applied to the state.
struct StateUpdate {
  const float* key;     // [Dk]
  const float* update;  // [kStateColumns]
  float factor;         // exp(decay)
};

// What a key and a query find in a slice of the state.
struct SliceReads {
  float key[kStateColumns];
  float query[kStateColumns];
};

// Applies an update to a slice [Dk, kStateColumns], and reads it. Never inlined: there is one way to round.
[[gnu::noinline]] inline void advance(float* slice, int64_t key_size, const StateUpdate& last,
                                      const float* key, const float* query, SliceReads& reads) {
  constexpr int64_t kCount = kStateColumns / kRegisterLanes;
  Register update[kCount], keys[kCount] = {}, queries[kCount] = {};
  for (int64_t v = 0; v < kCount; ++v) update[v] = load_register(last.update + v * kRegisterLanes);
  for (int64_t i = 0; i < key_size; ++i)
    for (int64_t v = 0; v < kCount; ++v) {
      float* const place = slice + i * kStateColumns + v * kRegisterLanes;
      const Register state = load_register(place) * last.factor + last.key[i] * update[v];
      store_register(place, state);
      keys[v] = keys[v] + key[i] * state;
      queries[v] = queries[v] + query[i] * state;
    }
  for (int64_t v = 0; v < kCount; ++v) {
    store_register(reads.key + v * kRegisterLanes, keys[v]);
    store_register(reads.query + v * kRegisterLanes, queries[v]);
  }
}

// A sequence's steps through the state of one value head.
template <typename Element>
class DeltaHead {
 public:
  DeltaHead(const GatedDeltaRuleParams& p, int64_t sequence, int64_t head)
      : p_(p),
        head_(head),
        first_(p.packing.first(sequence)),
        tokens_(p.packing.count(sequence)),
        past_(p.past_len[sequence]),
        row_(p.slots.at(sequence)),
        slices_((p.value_size + kStateColumns - 1) / kStateColumns),
        state_(new float[slices_ * p.key_size * kStateColumns]()),
        updates_(new float[kTokenBlock * slices_ * kStateColumns]()),
        keys_(new float[2 * kTokenBlock * p.key_size]),
        queries_(keys_.get() + kTokenBlock * p.key_size) {}

  void run() {
    const int64_t known = past_ - p_.pending(row_, past_), committed = p_.committed(row_, past_, tokens_);
    if (past_ > 0) load_state();
    apply_kept(known, committed);
    if (committed > known || past_ == 0) store_state();
    apply_kept(committed, past_);
    for (int64_t first = 0; first < tokens_; first += kTokenBlock)
      read_tokens(first, std::min(kTokenBlock, tokens_ - first));
    if (!p_.keeps_updates(tokens_)) store_state();
  }

 private:
  float* slice(int64_t index) { return state_.get() + index * p_.key_size * kStateColumns; }
  float* updates(int64_t index) { return updates_.get() + index * slices_ * kStateColumns; }
  int64_t columns(int64_t index) { return std::min(kStateColumns, p_.value_size - index * kStateColumns); }

  // Calls copy(slice row, stored row, columns) for the rows of all slices.
  template <typename Copy>
  void each_row(Copy copy) {
    float* stored = p_.state + p_.state_row(row_, head_);
    for (int64_t s = 0; s < slices_; ++s)
      for (int64_t i = 0; i < p_.key_size; ++i)
        copy(slice(s) + i * kStateColumns, stored + i * p_.value_size + s * kStateColumns, columns(s));
  }
  void load_state() {
    each_row([](float* row, const float* stored, int64_t count) { std::copy_n(stored, count, row); });
  }
  void store_state() {
    each_row([](const float* row, float* stored, int64_t count) { std::copy_n(row, count, stored); });
  }

  void apply_kept(int64_t first, int64_t end) {
    SliceReads unused;
    for (int64_t position = first; position < end; ++position) {
      const int64_t kept = p_.kept_row(row_, position);
      const float* key = p_.recent_keys + (kept * p_.num_key_heads + p_.key_head(head_)) * p_.key_size;
      const float* update = p_.recent_updates + (kept * p_.num_value_heads + head_) * p_.value_size;
      const float factor = std::exp(p_.recent_decays[kept * p_.num_value_heads + head_]);
      std::copy_n(update, p_.value_size, updates(0));
      for (int64_t s = 0; s < slices_; ++s)
        advance(slice(s), p_.key_size, {key, updates(0) + s * kStateColumns, factor}, key, key, unused);
    }
  }

  // Reads up to kTokenBlock tokens; the state has read them all afterwards, unless their updates are kept.
  void read_tokens(int64_t first, int64_t count) {
    float dots[kTokenBlock], factors[kTokenBlock];
    const int64_t head = p_.key_head(head_);
    for (int64_t t = 0; t < count; ++t) {
      float *key = keys_.get() + t * p_.key_size, *query = queries_ + t * p_.key_size;
      load_unit_row<Element>(p_, p_.key, first_ + first + t, head, key);
      load_unit_row<Element>(p_, p_.query, first_ + first + t, head, query);
      dots[t] = dot(query, key, p_.key_size);
      factors[t] = std::exp(p_.decay[(first_ + first + t) * p_.num_value_heads + head_]);
    }
    for (int64_t s = 0; s < slices_; ++s) read_slice(s, first, count, dots, factors);
    if (p_.keeps_updates(tokens_))
      for (int64_t t = 0; t < count; ++t) keep(first + t, updates(t));
  }

  void read_slice(int64_t s, int64_t first, int64_t count, const float* dots, const float* factors) {
    static constexpr float kNoUpdate[kStateColumns] = {};
    StateUpdate last{keys_.get(), kNoUpdate, 1.0f};
    SliceReads reads;
    float output[kStateColumns];
    for (int64_t t = 0; t < count; ++t) {
      const float *key = keys_.get() + t * p_.key_size, *query = queries_ + t * p_.key_size;
      advance(slice(s), p_.key_size, last, key, query, reads);
      const int64_t row = (first_ + first + t) * p_.num_value_heads + head_;
      const int64_t column = row * p_.value_size + s * kStateColumns;
      float* update = updates(t) + s * kStateColumns;
      load_floats(static_cast<const Element*>(p_.value) + column, columns(s), update);
      for (int64_t j = 0; j < columns(s); ++j) {
        update[j] = p_.beta[row] * (update[j] - factors[t] * reads.key[j]);
        output[j] = p_.scale * (factors[t] * reads.query[j] + dots[t] * update[j]);
      }
      store_row(output, columns(s), static_cast<Element*>(p_.output) + column);
      last = {key, update, factors[t]};
    }
    if (!p_.keeps_updates(tokens_)) advance(slice(s), p_.key_size, last, last.key, last.key, reads);
  }

  void keep(int64_t token, const float* update) {
    const int64_t kept = p_.kept_row(row_, past_ + token) * p_.num_value_heads + head_;
    std::copy_n(update, p_.value_size, p_.recent_updates + kept * p_.value_size);
    p_.recent_decays[kept] = p_.decay[(first_ + token) * p_.num_value_heads + head_];
  }

  const GatedDeltaRuleParams& p_;
  int64_t head_, first_, tokens_, past_, row_, slices_;
  std::unique_ptr<float[]> state_;    // [slices, Dk, kStateColumns]
  std::unique_ptr<float[]> updates_;  // [kTokenBlock, slices * kStateColumns]
  std::unique_ptr<float[]> keys_;     // [2, kTokenBlock, Dk]
  float* queries_;
};

// What all value heads of a sequence read before: the kept keys and the state's length.
template <typename Element>
void finish_sequence(const GatedDeltaRuleParams& p, int64_t sequence) {
  const int64_t tokens = p.packing.count(sequence), past = p.past_len[sequence];
  const int64_t row = p.slots.at(sequence);
  p.state_len[row] =
      static_cast<int32_t>(p.keeps_updates(tokens) ? p.committed(row, past, tokens) : past + tokens);
  for (int64_t t = 0; p.keeps_updates(tokens) && t < tokens; ++t)
    for (int64_t head = 0; head < p.num_key_heads; ++head)
      load_unit_row<Element>(
          p, p.key, p.packing.first(sequence) + t, head,
          p.recent_keys + (p.kept_row(row, past + t) * p.num_key_heads + head) * p.key_size);
}

template <typename Element>
void gated_delta_rule_of(const GatedDeltaRuleParams& p, ParallelFor& parallel) {
  const int64_t heads = p.num_value_heads;
  parallel.each(p.packing.num_sequences * heads, [&](int64_t task) {
    if (p.packing.count(task / heads) > 0) DeltaHead<Element>(p, task / heads, task % heads).run();
  });
  parallel.each(p.packing.num_sequences, [&](int64_t sequence) {
    if (p.packing.count(sequence) > 0) finish_sequence<Element>(p, sequence);
  });
}

inline void gated_delta_rule(const GatedDeltaRuleParams& p, ParallelFor& parallel) {
  p.element == ElementType::kFloat16 ? gated_delta_rule_of<Half>(p, parallel)
                                     : gated_delta_rule_of<float>(p, parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
