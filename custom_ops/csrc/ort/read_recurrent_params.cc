// Reads one call's tensors into the parameters of the kernels of recurrent layers, checked.
#include <algorithm>
#include <cmath>

#include "call.h"
#include "checks.h"
#include "operators.generated.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Rows of the state buffers, one of its own for each sequence.
StateSlots read_slots(const Context& context, size_t index, size_t state_index, const Tensor& state,
                      int64_t num_sequences) {
  const Tensor tensor = context.input(index, {num_sequences});
  const StateSlots slots{tensor.as<int32_t>(), state.dim(0)};
  if (!tensor.present && slots.num_rows < num_sequences)
    context.bad_shape(state_index, state,
                      "with N >= B = " + number(num_sequences) + " where there is no state_slot");
  if (!tensor.present || !context.values_readable()) return slots;
  for (int64_t b = 0; b < num_sequences; ++b)
    if (slots.at(b) < 0 || slots.at(b) >= slots.num_rows)
      context.node().fail("input 'state_slot' names row " + number(slots.at(b)) + " for sequence " +
                          number(b) + "; a row must be between 0 and N - 1 = " + number(slots.num_rows - 1));
  std::vector<int32_t> sorted(slots.slots, slots.slots + num_sequences);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    context.node().fail("input 'state_slot' gives row " + number(*twice) +
                        " to two sequences; each sequence needs a row of its own");
  return slots;
}

// Lengths are read where they lie in host memory; on CUDA the kernels stay inside the buffers.
void check_lengths(const Context& context, const GatedDeltaRuleParams& p) {
  if (!context.values_readable()) return;
  for (int64_t b = 0; b < p.packing.num_sequences; ++b) {
    const int64_t past = p.past_len[b], known = p.state_len[p.slots.at(b)];
    if (past == 0 || p.packing.count(b) == 0) continue;
    if (known < 0 || known > past)
      context.node().fail("sequence " + number(b) + " has past_len " + number(past) +
                          ", but its state has read " + number(known) +
                          " tokens, and cannot forget; start again from a saved state, or from past_len 0");
    if (past - known > p.recent_tokens)
      context.node().fail("sequence " + number(b) + " has past_len " + number(past) +
                          ", but its state has read " + number(known) +
                          " tokens, and only R = " + number(p.recent_tokens) +
                          " updates are kept; past_len must be at most " + number(known + p.recent_tokens));
  }
}

void check_sizes(const Context& context, const Tensor& key, const Tensor& value, const Tensor& recent_keys) {
  using In = ops::GatedDeltaRule::In;
  if (key.dim(1) < 1 || key.dim(2) < 1 || key.dim(2) > kMaxKeySize)
    context.bad_shape(In::kKey, key, "with Hk >= 1 and Dk between 1 and " + number(kMaxKeySize));
  if (value.dim(1) < 1 || value.dim(1) % key.dim(1) != 0 || value.dim(2) < 1)
    context.bad_shape(In::kValue, value, "with Hv a multiple of Hk = " + number(key.dim(1)) + " and Dv >= 1");
  if (recent_keys.dim(1) < 1 || recent_keys.dim(1) > kMaxRecentTokens)
    context.bad_shape(In::kRecentKeys, recent_keys, "with R between 1 and " + number(kMaxRecentTokens));
}

}  // namespace

CausalConvParams read_params(const Call<ops::CausalConv>& call) {
  using Op = ops::CausalConv;
  const Tensor x = call.input(Op::In::kX, {-1, -1});
  const Tensor weight = call.input(Op::In::kWeight, {x.dim(1), -1});
  const Tensor ring = call.input(Op::In::kConvState, {-1, -1, x.dim(1)});
  if (weight.dim(1) < 2 || weight.dim(1) > kMaxConvTaps)
    call.bad_shape(Op::In::kWeight, weight, "with K between 2 and " + number(kMaxConvTaps));
  if (ring.dim(1) < weight.dim(1) - 1)
    call.bad_shape(Op::In::kConvState, ring, "with Rc >= K - 1 = " + number(weight.dim(1) - 1));
  CausalConvParams params{};
  params.element = call.node().element;
  params.packing = read_packing(call, Op::In::kQueryStart, x.dim(0));
  params.past_len = read_lengths(call, Op::In::kPastLen, params.packing.num_sequences, 0).values;
  params.slots = read_slots(call, Op::In::kStateSlot, Op::In::kConvState, ring, params.packing.num_sequences);
  params.num_features = x.dim(1);
  params.num_taps = weight.dim(1);
  params.ring_rows = ring.dim(1);
  params.activation = call.attributes().activation;
  params.x = x.data;
  params.weight = weight.data;
  params.bias = call.input(Op::In::kBias, {x.dim(1)}).data;
  params.y = call.output(Op::Out::kY, x.shape).data;
  params.conv_state = call.aliased_output(Op::Out::kConvStateOut, ring).data;
  return params;
}

GatedDeltaRuleParams read_params(const Call<ops::GatedDeltaRule>& call) {
  using Op = ops::GatedDeltaRule;
  const Tensor query = call.input(Op::In::kQuery, {-1, -1, -1});
  const Tensor key = call.input(Op::In::kKey, {query.dim(0), query.dim(1), query.dim(2)});
  const Tensor value = call.input(Op::In::kValue, {query.dim(0), -1, -1});
  const int64_t tokens = query.dim(0), key_heads = key.dim(1), value_heads = value.dim(1);
  const Tensor state = call.input(Op::In::kState, {-1, value_heads, key.dim(2), value.dim(2)});
  const int64_t rows = state.dim(0);
  const Tensor keys = call.input(Op::In::kRecentKeys, {rows, -1, key_heads, key.dim(2)});
  check_sizes(call, key, value, keys);
  const Tensor updates = call.input(Op::In::kRecentUpdates, {rows, keys.dim(1), value_heads, value.dim(2)});
  const Tensor decays = call.input(Op::In::kRecentDecays, {rows, keys.dim(1), value_heads});
  const Tensor lengths = call.input(Op::In::kStateLen, {rows});
  GatedDeltaRuleParams params{};
  params.element = call.node().element;
  params.packing = read_packing(call, Op::In::kQueryStart, tokens);
  params.past_len = read_lengths(call, Op::In::kPastLen, params.packing.num_sequences, 0).values;
  params.slots = read_slots(call, Op::In::kStateSlot, Op::In::kState, state, params.packing.num_sequences);
  params.num_key_heads = key_heads;
  params.num_value_heads = value_heads;
  params.key_size = key.dim(2);
  params.value_size = value.dim(2);
  params.recent_tokens = keys.dim(1);
  const float scale = call.attributes().scale;
  params.scale = scale != 0 ? scale : 1.0f / std::sqrt(static_cast<float>(params.key_size));
  params.l2_norm = call.attributes().l2_norm != 0;
  params.query = query.data;
  params.key = key.data;
  params.value = value.data;
  params.decay = call.input(Op::In::kDecay, {tokens, value_heads}).as<float>();
  params.beta = call.input(Op::In::kBeta, {tokens, value_heads}).as<float>();
  params.state_len = lengths.as<int32_t>();
  check_lengths(call, params);
  params.output = call.output(Op::Out::kOutput, value.shape).data;
  params.state = call.aliased_output(Op::Out::kStateOut, state).as<float>();
  params.recent_keys = call.aliased_output(Op::Out::kRecentKeysOut, keys).as<float>();
  params.recent_updates = call.aliased_output(Op::Out::kRecentUpdatesOut, updates).as<float>();
  params.recent_decays = call.aliased_output(Op::Out::kRecentDecaysOut, decays).as<float>();
  params.state_len = call.aliased_output(Op::Out::kStateLenOut, lengths).as<int32_t>();
  return params;
}

}  // namespace ortolan
