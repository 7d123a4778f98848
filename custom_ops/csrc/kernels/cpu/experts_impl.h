// MoeExperts on the CPU, in two passes: gate_up and the activation, then down and the sum over a token's
// experts.
//
// Pairs of token and choice are grouped by expert. A task of the first pass is (chosen expert, block of
// rows of its gate_up); one of the second is a block of the rows of down, of all chosen experts. So each
// weight of a chosen expert is read from memory once, and no two tasks add to one value. A dot product has
// one order of sums, whatever the other tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "aligned_floats.h"
#include "expert_lists.h"
#include "kernels/cpu/operators.generated.h"
#include "lanes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kTaskWeightRows = 32;
constexpr int64_t kTileInputs = 32;
// Rows of weights, and tokens, whose products are summed together, as registers allow.
#if defined(__AVX512F__)
constexpr int64_t kDotRows = 4, kDotTokens = 4;
#else
constexpr int64_t kDotRows = 4, kDotTokens = 1;
#endif

inline const float* unpacked_rows(const float* rows, int64_t, float*) { return rows; }
inline const float* unpacked_rows(const Half* rows, int64_t count, float* buffer) {
  load_floats(rows, count, buffer);
  return buffer;
}

// products[token][row] of kRows rows, one behind the other, and kTokens inputs.
template <int64_t kRows, int64_t kTokens, typename Element>
void dot_block(const Element* rows, int64_t size, const float* const* inputs, float (&products)[4][4]) {
  Register sums[kTokens][kRows][kVecRegisters] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int64_t v = 0; v < kVecRegisters; ++v) {
      const int64_t at = i + v * kRegisterLanes;
      Register weights[kRows];
      for (int64_t r = 0; r < kRows; ++r) weights[r] = load_few_lanes(rows + r * size + at);
      for (int64_t t = 0; t < kTokens; ++t) {
        const Register x = load_register(inputs[t] + at);
        for (int64_t r = 0; r < kRows; ++r) sums[t][r][v] = sums[t][r][v] + weights[r] * x;
      }
    }
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t r = 0; r < kRows; ++r) {
      float sum = horizontal_sum(as_vec(sums[t][r]));
      for (int64_t j = i; j < size; ++j) sum = std::fma(to_float(rows[r * size + j]), inputs[t][j], sum);
      products[t][r] = sum;
    }
}

// Rows that are multiplied by the same weights.
struct InputRows {
  const float* const* rows;
  int64_t count;
};

// Gives store(input, row, product) the products of `count` rows of weights with all inputs: those of some
// inputs at a time, which stay in the cache while all the rows pass.
template <typename Element, typename Store>
void multiply_rows(const Element* weights, int64_t count, int64_t size, const InputRows& inputs,
                   float* buffer, Store store) {
  float products[4][4];
  const auto at_rows = [&]<int64_t kRows>(int64_t first, int64_t token, int64_t end) {
    const Element* stored = weights + first * size;
    if (inputs.count == 1) {  // each weight is used once
      dot_block<kRows, 1>(stored, size, &inputs.rows[0], products);
      for (int64_t r = 0; r < kRows; ++r) store(0, first + r, products[0][r]);
      return;
    }
    const float* rows = unpacked_rows(stored, kRows * size, buffer);
    const auto at_tokens = [&]<int64_t kTokens>() {
      dot_block<kRows, kTokens>(rows, size, &inputs.rows[token], products);
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t r = 0; r < kRows; ++r) store(token + t, first + r, products[t][r]);
      token += kTokens;
    };
    while (token + kDotTokens <= end) at_tokens.template operator()<kDotTokens>();
    while (token < end) at_tokens.template operator()<1>();
  };
  for (int64_t token = 0; token < inputs.count; token += kTileInputs) {
    const int64_t end = std::min(token + kTileInputs, inputs.count);
    int64_t row = 0;
    for (; row + kDotRows <= count; row += kDotRows) at_rows.template operator()<kDotRows>(row, token, end);
    for (; row < count; ++row) at_rows.template operator()<1>(row, token, end);
  }
}

inline float plain_gate(GatedActivation activation, float gate, float factor) {
  switch (activation) {
    case GatedActivation::kGeluMul:
      return 0.5f * gate * (1.0f + std::erf(gate * 0.70710678118654752f)) * factor;
    case GatedActivation::kGeluTanhMul: {
      const float inner = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
      return 0.5f * gate * (1.0f + std::tanh(inner)) * factor;
    }
    default:
      return gate / (1.0f + std::exp(-gate)) * factor;
  }
}

inline float gated(const ExpertStep& p, float gate, float factor) {
  if (p.activation != GatedActivation::kClampedSiluMul) return plain_gate(p.activation, gate, factor);
  gate = clamp_above(gate, p.limit);
  return gate / (1.0f + std::exp(-p.alpha * gate)) * (clamp_both(factor, p.limit) + 1.0f);
}

// A weight [rows, columns] of each expert, in elements.
template <typename Element>
struct DenseStack {
  const Element* weights;
  int64_t rows;
  int64_t columns;

  // What a row of inputs takes; where the value of a column lies, and a row of them put there; and what is
  // done once all values of a row lie there.
  int64_t row_floats() const { return columns; }
  int64_t place(int64_t column) const { return column; }
  void place(const float* source, int64_t count, float* target) const {
    std::memcpy(target, source, count * sizeof(float));
  }
  bool finishes() const { return false; }
  void finish(float*) const {}

  // Gives store(input, row, product) the products of rows first .. of an expert's weight with all inputs.
  template <typename Store>
  void multiply(int64_t expert, int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    std::unique_ptr<float[]> buffer(std::is_same_v<Element, float> ? nullptr : new float[kDotRows * columns]);
    multiply_rows(weights + (expert * rows + first) * columns, count, columns, inputs, buffer.get(), store);
  }
};

template <typename Element, typename Stack>
class ExpertLayer {
 public:
  ExpertLayer(const ExpertStep& p, const Stack& gate_up, const Stack& down)
      : p_(p),
        gate_up_(gate_up),
        down_(down),
        lists_(ExpertLists::of(p)),
        x_floats_(gate_up.row_floats()),
        inner_floats_(down.row_floats()),
        inner_(aligned_floats(p.num_tokens * p.top_k * inner_floats_)) {
    if constexpr (!std::is_same_v<Stack, DenseStack<float>>)
      placed_ = aligned_floats(p.num_tokens * x_floats_);
    x_ = placed_.get();
    const Element* x = static_cast<const Element*>(p.x);
    if constexpr (std::is_same_v<Stack, DenseStack<float>>) x_ = x;
    if (!placed_) return;
    std::unique_ptr<float[]> row(new float[p.hidden_size]);
    for (int64_t t = 0; t < p.num_tokens; ++t) {
      for (int64_t i = 0; i < p.hidden_size; ++i) row[i] = to_float(x[t * p.hidden_size + i]);
      gate_up.place(row.get(), p.hidden_size, placed_.get() + t * x_floats_);
    }
  }

  void run(ParallelFor& parallel) {
    const int64_t blocks = divide(p_.inner_size);
    parallel.each(blocks * lists_.num_chosen(),
                  [&](int64_t task) { activate(task / blocks, task % blocks * kTaskWeightRows); });
    if (down_.finishes())
      parallel.each(p_.num_tokens * p_.top_k, [&](int64_t pair) { down_.finish(inner_row(pair)); });
    parallel.each(divide(p_.hidden_size), [&](int64_t block) { combine(block * kTaskWeightRows); });
  }

 private:
  static int64_t divide(int64_t rows) { return (rows + kTaskWeightRows - 1) / kTaskWeightRows; }
  static float element_at(const void* values, int64_t index) {
    return values ? to_float(static_cast<const Element*>(values)[index]) : 0.0f;
  }

  // Rows first .. of the inner features of all pairs of one expert.
  void activate(int64_t place, int64_t first) {
    const int64_t count = std::min(kTaskWeightRows, p_.inner_size - first);
    const int64_t begin = lists_.begin[place], pairs = lists_.begin[place + 1] - begin;
    std::vector<const float*> rows(pairs);
    for (int64_t i = 0; i < pairs; ++i) rows[i] = x_ + lists_.pairs[begin + i] / p_.top_k * x_floats_;
    const InputRows inputs{rows.data(), pairs};
    const int64_t expert = lists_.experts[place], factor = p_.inner_size + first;
    const int64_t biases = expert * 2 * p_.inner_size;
    gate_up_.multiply(expert, first, count, inputs, [&](int64_t i, int64_t row, float sum) {
      inner_row(begin + i)[down_.place(first + row)] =
          sum + element_at(p_.gate_up_bias, biases + first + row);
    });
    gate_up_.multiply(expert, factor, count, inputs, [&](int64_t i, int64_t row, float sum) {
      float& place = inner_row(begin + i)[down_.place(first + row)];
      Element rounded;
      from_float(gated(p_, place, sum + element_at(p_.gate_up_bias, biases + factor + row)), rounded);
      place = to_float(rounded);
    });
  }

  // Columns first .. of y, for all tokens.
  void combine(int64_t first) {
    const int64_t count = std::min(kTaskWeightRows, p_.hidden_size - first);
    std::unique_ptr<float[]> parts(new float[lists_.pairs.size() * count]);
    for (int64_t place = 0; place < lists_.num_chosen(); ++place) {
      const int64_t begin = lists_.begin[place], expert = lists_.experts[place];
      std::vector<const float*> rows(lists_.begin[place + 1] - begin);
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = inner_row(begin + i);
      const InputRows inputs{rows.data(), static_cast<int64_t>(rows.size())};
      down_.multiply(expert, first, count, inputs, [&](int64_t i, int64_t row, float sum) {
        parts[lists_.pairs[begin + i] * count + row] =
            sum + element_at(p_.down_bias, expert * p_.hidden_size + first + row);
      });
    }
    for (int64_t t = 0; t < p_.num_tokens; ++t)
      for (int64_t row = 0; row < count; ++row) {
        float sum = 0;
        for (int64_t k = t * p_.top_k; k < (t + 1) * p_.top_k; ++k)
          sum += p_.weights[k] * parts[k * count + row];
        const int64_t place = t * p_.hidden_size + first + row;
        from_float(element_at(p_.residual, place) + sum, static_cast<Element*>(p_.y)[place]);
      }
  }

  float* inner_row(int64_t place) const { return inner_.get() + place * inner_floats_; }

  const ExpertStep& p_;
  const Stack gate_up_, down_;
  const ExpertLists lists_;
  // Rows of inputs as the weights take them.
  const int64_t x_floats_, inner_floats_;
  const AlignedFloats inner_;  // of pairs grouped by expert, rounded to Element before
  AlignedFloats placed_;       // of tokens; null where x is read as it is
  const float* x_;
};

template <typename Element>
void run_experts(const MoeExpertsParams& p, ParallelFor& parallel) {
  using Stack = DenseStack<Element>;
  const Stack gate_up{static_cast<const Element*>(p.gate_up), 2 * p.inner_size, p.hidden_size};
  const Stack down{static_cast<const Element*>(p.down), p.hidden_size, p.inner_size};
  ExpertLayer<Element, Stack>(p, gate_up, down).run(parallel);
}

inline void moe_experts(const MoeExpertsParams& p, ParallelFor& parallel) {
  if (p.element == ElementType::kFloat32) return run_experts<float>(p, parallel);
  run_experts<Half>(p, parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
