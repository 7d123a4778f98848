// clang-format off
// What the library knows of each operator; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`.
#pragma once

#include "kernels/expert_params.h"
#include "kernels/fused_params.h"
#include "kernels/gate_params.h"
#include "kernels/low_bit_expert_params.h"
#include "kernels/low_bit_params.h"
#include "kernels/params.h"
#include "kernels/qkv_params.h"
#include "kernels/recurrent_params.h"
#include "attributes.h"
#include "schema.h"

namespace ortolan {

template <typename Op>
class Call;

inline constexpr Port kRingKvAppendInputs[] = {
    {.name = "key", .shape = "[T, Hkv, D]", .type = PortType::kElement},
    {.name = "value", .shape = "[T, Hkv, D]", .type = PortType::kElement},
    {.name = "key_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "value_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "block_table", .shape = "[B, M]", .type = PortType::kInt32, .optional = true},
    {.name = "key_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "value_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
};
inline constexpr Port kRingKvAppendOutputs[] = {
    {.name = "key_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 2},
    {.name = "value_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 3},
    {.name = "key_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 7},
    {.name = "value_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 8},
};
namespace ops {
struct RingKvAppend {
  using Params = RingKvAppendParams;
  struct In { enum : size_t { kKey, kValue, kKeyCache, kValueCache, kQueryStart, kPastLen, kBlockTable, kKeyScale, kValueScale }; };
  struct Out { enum : size_t { kKeyCacheOut, kValueCacheOut, kKeyScaleOut, kValueScaleOut }; };
  struct Attributes {
    int64_t sink = 0;
    int64_t capacity = 0;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.sink = reader.integer({.name = "sink", .symbol = "S", .allowed = "0 or more", .least = 0}, 0);
      attributes.capacity = reader.integer({.name = "capacity", .symbol = "C", .allowed = "0, or at least S + W (at least S + 1 without a window)", .least = 0}, 0);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"RingKvAppend", kRingKvAppendInputs, kRingKvAppendOutputs};
};
}  // namespace ops
RingKvAppendParams read_params(const Call<ops::RingKvAppend>& call);

inline constexpr Port kSwaAttentionInputs[] = {
    {.name = "query", .shape = "[T, Hq, D]", .type = PortType::kElement},
    {.name = "key_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "value_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "block_table", .shape = "[B, M]", .type = PortType::kInt32, .optional = true},
    {.name = "sink_logits", .shape = "[Hq]", .type = PortType::kFloat32, .optional = true},
    {.name = "prefix_end", .shape = "[B]", .type = PortType::kInt32, .optional = true},
    {.name = "key_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "value_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "max_query_len", .shape = "[1]", .type = PortType::kInt32, .optional = true, .on_host = true},
};
inline constexpr Port kSwaAttentionOutputs[] = {
    {.name = "output", .shape = "[T, Hq, D]", .type = PortType::kElement},
    {.name = "lse", .shape = "[Hq, T]", .type = PortType::kFloat32, .optional = true},
};
namespace ops {
struct SwaAttention {
  using Params = SwaAttentionParams;
  struct In { enum : size_t { kQuery, kKeyCache, kValueCache, kQueryStart, kPastLen, kBlockTable, kSinkLogits, kPrefixEnd, kKeyScale, kValueScale, kMaxQueryLen }; };
  struct Out { enum : size_t { kOutput, kLse }; };
  struct Attributes {
    int64_t window = -1;
    int64_t sink = 0;
    int64_t capacity = 0;
    float scale = 0.0f;
    float softcap = 0.0f;
    int64_t causal = 1;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.window = reader.integer({.name = "window", .symbol = "W", .allowed = "-1, or 1 or more", .least = -1, .nonzero = true}, -1);
      attributes.sink = reader.integer({.name = "sink", .symbol = "S", .allowed = "0 or more", .least = 0}, 0);
      attributes.capacity = reader.integer({.name = "capacity", .symbol = "C", .allowed = "0, or at least S + W (at least S + 1 without a window)", .least = 0}, 0);
      attributes.scale = reader.real({.name = "scale", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.softcap = reader.real({.name = "softcap", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.causal = reader.integer({.name = "causal", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 1);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"SwaAttention", kSwaAttentionInputs, kSwaAttentionOutputs};
};
}  // namespace ops
SwaAttentionParams read_params(const Call<ops::SwaAttention>& call);

inline constexpr Port kSnapKvCaptureInputs[] = {
    {.name = "query", .shape = "[T, Hq, D]", .type = PortType::kElement},
    {.name = "capture", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B]", .type = PortType::kInt32},
};
inline constexpr Port kSnapKvCaptureOutputs[] = {
    {.name = "capture_out", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement, .alias = 1},
};
namespace ops {
struct SnapKvCapture {
  using Params = SnapKvCaptureParams;
  struct In { enum : size_t { kQuery, kCapture, kQueryStart, kPastLen }; };
  struct Out { enum : size_t { kCaptureOut }; };
  struct Attributes {
    static Attributes read(const AttributeReader&) { return {}; }
  };
  static constexpr Schema kSchema{"SnapKvCapture", kSnapKvCaptureInputs, kSnapKvCaptureOutputs};
};
}  // namespace ops
SnapKvCaptureParams read_params(const Call<ops::SnapKvCapture>& call);

inline constexpr Port kSnapKvScoreInputs[] = {
    {.name = "capture", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement},
    {.name = "key_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "kv_len", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "block_table", .shape = "[B, M]", .type = PortType::kInt32, .optional = true},
    {.name = "key_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
};
inline constexpr Port kSnapKvScoreOutputs[] = {
    {.name = "score", .shape = "[B, Hkv, K]", .type = PortType::kFloat32},
};
namespace ops {
struct SnapKvScore {
  using Params = SnapKvScoreParams;
  struct In { enum : size_t { kCapture, kKeyCache, kKvLen, kBlockTable, kKeyScale }; };
  struct Out { enum : size_t { kScore }; };
  struct Attributes {
    float scale = 0.0f;
    float softcap = 0.0f;
    GroupReduce group_reduce = GroupReduce::kMean;
    QueryReduce query_reduce = QueryReduce::kMean;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.scale = reader.real({.name = "scale", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.softcap = reader.real({.name = "softcap", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.group_reduce = reader.choice<GroupReduce>({"group_reduce", "", "'mean', 'max' or 'sum'"}, GroupReduce::kMean, {{"mean", GroupReduce::kMean}, {"max", GroupReduce::kMax}, {"sum", GroupReduce::kSum}});
      attributes.query_reduce = reader.choice<QueryReduce>({"query_reduce", "", "'mean' or 'max'"}, QueryReduce::kMean, {{"mean", QueryReduce::kMean}, {"max", QueryReduce::kMax}});
      return attributes;
    }
  };
  static constexpr Schema kSchema{"SnapKvScore", kSnapKvScoreInputs, kSnapKvScoreOutputs};
};
}  // namespace ops
SnapKvScoreParams read_params(const Call<ops::SnapKvScore>& call);

inline constexpr Port kKvSelectInputs[] = {
    {.name = "score", .shape = "[B, Hkv or 1, C]", .type = PortType::kFloat32},
    {.name = "kv_len", .shape = "[B, Hkv]", .type = PortType::kInt32},
    {.name = "budget", .shape = "[1]", .type = PortType::kInt64, .on_host = true},
    {.name = "window", .shape = "[1]", .type = PortType::kInt64, .on_host = true},
    {.name = "sink", .shape = "[1]", .type = PortType::kInt64, .on_host = true},
};
inline constexpr Port kKvSelectOutputs[] = {
    {.name = "keep", .shape = "[B, Hkv or 1, K]", .type = PortType::kInt32},
    {.name = "kept_len", .shape = "[B, Hkv]", .type = PortType::kInt32},
};
namespace ops {
struct KvSelect {
  using Params = KvSelectParams;
  struct In { enum : size_t { kScore, kKvLen, kBudget, kWindow, kSink }; };
  struct Out { enum : size_t { kKeep, kKeptLen }; };
  struct Attributes {
    static Attributes read(const AttributeReader&) { return {}; }
  };
  static constexpr Schema kSchema{"KvSelect", kKvSelectInputs, kKvSelectOutputs};
};
}  // namespace ops
KvSelectParams read_params(const Call<ops::KvSelect>& call);

inline constexpr Port kKvCompactInputs[] = {
    {.name = "key_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "value_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "keep", .shape = "[B, Hkv or 1, K]", .type = PortType::kInt32},
    {.name = "block_table", .shape = "[B, M]", .type = PortType::kInt32, .optional = true},
    {.name = "key_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "value_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
};
inline constexpr Port kKvCompactOutputs[] = {
    {.name = "key_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 0},
    {.name = "value_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 1},
    {.name = "key_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 4},
    {.name = "value_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 5},
};
namespace ops {
struct KvCompact {
  using Params = KvCompactParams;
  struct In { enum : size_t { kKeyCache, kValueCache, kKeep, kBlockTable, kKeyScale, kValueScale }; };
  struct Out { enum : size_t { kKeyCacheOut, kValueCacheOut, kKeyScaleOut, kValueScaleOut }; };
  struct Attributes {
    static Attributes read(const AttributeReader&) { return {}; }
  };
  static constexpr Schema kSchema{"KvCompact", kKvCompactInputs, kKvCompactOutputs};
};
}  // namespace ops
KvCompactParams read_params(const Call<ops::KvCompact>& call);

inline constexpr Port kMoeGateInputs[] = {
    {.name = "router_logits", .shape = "[T, E]", .type = PortType::kElement},
    {.name = "selection_bias", .shape = "[E]", .type = PortType::kFloat32, .optional = true},
    {.name = "expert_scale", .shape = "[E]", .type = PortType::kFloat32, .optional = true},
};
inline constexpr Port kMoeGateOutputs[] = {
    {.name = "experts", .shape = "[T, K]", .type = PortType::kInt32},
    {.name = "weights", .shape = "[T, K]", .type = PortType::kFloat32},
};
namespace ops {
struct MoeGate {
  using Params = MoeGateParams;
  struct In { enum : size_t { kRouterLogits, kSelectionBias, kExpertScale }; };
  struct Out { enum : size_t { kExperts, kWeights }; };
  struct Attributes {
    int64_t top_k = 1;
    GateScoring scoring = GateScoring::kSoftmax;
    int64_t normalise = 0;
    float scale = 1.0f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.top_k = reader.integer({.name = "top_k", .symbol = "K", .allowed = "1 to E", .least = 1}, 1);
      attributes.scoring = reader.choice<GateScoring>({"scoring", "", "'softmax' or 'sigmoid'"}, GateScoring::kSoftmax, {{"softmax", GateScoring::kSoftmax}, {"sigmoid", GateScoring::kSigmoid}});
      attributes.normalise = reader.integer({.name = "normalise", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 0);
      attributes.scale = reader.real({.name = "scale", .symbol = "", .allowed = "any finite number"}, 1.0f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"MoeGate", kMoeGateInputs, kMoeGateOutputs};
};
}  // namespace ops
MoeGateParams read_params(const Call<ops::MoeGate>& call);

inline constexpr Port kMoeExpertsInputs[] = {
    {.name = "x", .shape = "[T, H]", .type = PortType::kElement},
    {.name = "experts", .shape = "[T, K]", .type = PortType::kInt32},
    {.name = "weights", .shape = "[T, K]", .type = PortType::kFloat32},
    {.name = "gate_up", .shape = "[E, 2 * I, H]", .type = PortType::kElement},
    {.name = "down", .shape = "[E, H, I]", .type = PortType::kElement},
    {.name = "gate_up_bias", .shape = "[E, 2 * I]", .type = PortType::kElement, .optional = true},
    {.name = "down_bias", .shape = "[E, H]", .type = PortType::kElement, .optional = true},
    {.name = "residual", .shape = "[T, H]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kMoeExpertsOutputs[] = {
    {.name = "y", .shape = "[T, H]", .type = PortType::kElement, .spends = 7},
};
namespace ops {
struct MoeExperts {
  using Params = MoeExpertsParams;
  struct In { enum : size_t { kX, kExperts, kWeights, kGateUp, kDown, kGateUpBias, kDownBias, kResidual }; };
  struct Out { enum : size_t { kY }; };
  struct Attributes {
    GatedActivation activation = GatedActivation::kSiluMul;
    float limit = 7.0f;
    float alpha = 1.702f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.activation = reader.choice<GatedActivation>({"activation", "", "'silu_mul', 'gelu_mul' (erf), 'gelu_tanh_mul' or 'clamped_silu_mul'"}, GatedActivation::kSiluMul, {{"silu_mul", GatedActivation::kSiluMul}, {"gelu_mul", GatedActivation::kGeluMul}, {"gelu_tanh_mul", GatedActivation::kGeluTanhMul}, {"clamped_silu_mul", GatedActivation::kClampedSiluMul}});
      attributes.limit = reader.real({.name = "limit", .symbol = "", .allowed = "0 or more", .least = 0}, 7.0f);
      attributes.alpha = reader.real({.name = "alpha", .symbol = "", .allowed = "any finite number"}, 1.702f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"MoeExperts", kMoeExpertsInputs, kMoeExpertsOutputs};
};
}  // namespace ops
MoeExpertsParams read_params(const Call<ops::MoeExperts>& call);

inline constexpr Port kCausalConvInputs[] = {
    {.name = "x", .shape = "[T, F]", .type = PortType::kElement},
    {.name = "weight", .shape = "[F, K]", .type = PortType::kElement},
    {.name = "conv_state", .shape = "[N, Rc, F]", .type = PortType::kElement},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B]", .type = PortType::kInt32},
    {.name = "bias", .shape = "[F]", .type = PortType::kElement, .optional = true},
    {.name = "state_slot", .shape = "[B]", .type = PortType::kInt32, .optional = true},
};
inline constexpr Port kCausalConvOutputs[] = {
    {.name = "y", .shape = "[T, F]", .type = PortType::kElement},
    {.name = "conv_state_out", .shape = "[N, Rc, F]", .type = PortType::kElement, .alias = 2},
};
namespace ops {
struct CausalConv {
  using Params = CausalConvParams;
  struct In { enum : size_t { kX, kWeight, kConvState, kQueryStart, kPastLen, kBias, kStateSlot }; };
  struct Out { enum : size_t { kY, kConvStateOut }; };
  struct Attributes {
    ConvActivation activation = ConvActivation::kSilu;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.activation = reader.choice<ConvActivation>({"activation", "", "'silu' or 'none'"}, ConvActivation::kSilu, {{"silu", ConvActivation::kSilu}, {"none", ConvActivation::kNone}});
      return attributes;
    }
  };
  static constexpr Schema kSchema{"CausalConv", kCausalConvInputs, kCausalConvOutputs};
};
}  // namespace ops
CausalConvParams read_params(const Call<ops::CausalConv>& call);

inline constexpr Port kGatedDeltaRuleInputs[] = {
    {.name = "query", .shape = "[T, Hk, Dk]", .type = PortType::kElement},
    {.name = "key", .shape = "[T, Hk, Dk]", .type = PortType::kElement},
    {.name = "value", .shape = "[T, Hv, Dv]", .type = PortType::kElement},
    {.name = "decay", .shape = "[T, Hv]", .type = PortType::kFloat32},
    {.name = "beta", .shape = "[T, Hv]", .type = PortType::kFloat32},
    {.name = "state", .shape = "[N, Hv, Dk, Dv]", .type = PortType::kFloat32},
    {.name = "recent_keys", .shape = "[N, R, Hk, Dk]", .type = PortType::kFloat32},
    {.name = "recent_updates", .shape = "[N, R, Hv, Dv]", .type = PortType::kFloat32},
    {.name = "recent_decays", .shape = "[N, R, Hv]", .type = PortType::kFloat32},
    {.name = "state_len", .shape = "[N]", .type = PortType::kInt32},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B]", .type = PortType::kInt32},
    {.name = "state_slot", .shape = "[B]", .type = PortType::kInt32, .optional = true},
};
inline constexpr Port kGatedDeltaRuleOutputs[] = {
    {.name = "output", .shape = "[T, Hv, Dv]", .type = PortType::kElement},
    {.name = "state_out", .shape = "[N, Hv, Dk, Dv]", .type = PortType::kFloat32, .alias = 5},
    {.name = "recent_keys_out", .shape = "[N, R, Hk, Dk]", .type = PortType::kFloat32, .alias = 6},
    {.name = "recent_updates_out", .shape = "[N, R, Hv, Dv]", .type = PortType::kFloat32, .alias = 7},
    {.name = "recent_decays_out", .shape = "[N, R, Hv]", .type = PortType::kFloat32, .alias = 8},
    {.name = "state_len_out", .shape = "[N]", .type = PortType::kInt32, .alias = 9},
};
namespace ops {
struct GatedDeltaRule {
  using Params = GatedDeltaRuleParams;
  struct In { enum : size_t { kQuery, kKey, kValue, kDecay, kBeta, kState, kRecentKeys, kRecentUpdates, kRecentDecays, kStateLen, kQueryStart, kPastLen, kStateSlot }; };
  struct Out { enum : size_t { kOutput, kStateOut, kRecentKeysOut, kRecentUpdatesOut, kRecentDecaysOut, kStateLenOut }; };
  struct Attributes {
    float scale = 0.0f;
    int64_t l2_norm = 1;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.scale = reader.real({.name = "scale", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.l2_norm = reader.integer({.name = "l2_norm", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 1);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"GatedDeltaRule", kGatedDeltaRuleInputs, kGatedDeltaRuleOutputs};
};
}  // namespace ops
GatedDeltaRuleParams read_params(const Call<ops::GatedDeltaRule>& call);

inline constexpr Port kLowBitExpertsInputs[] = {
    {.name = "x", .shape = "[T, H]", .type = PortType::kElement},
    {.name = "experts", .shape = "[T, K]", .type = PortType::kInt32},
    {.name = "weights", .shape = "[T, K]", .type = PortType::kFloat32},
    {.name = "gate_up_codes", .shape = "[E, 2 * I, H / 2] or [E, 2 * I, H]", .type = PortType::kUint8},
    {.name = "down_codes", .shape = "[E, H, I / 2] or [E, H, I]", .type = PortType::kUint8},
    {.name = "gate_up_scales", .shape = "[E, 2 * I, Gh]", .type = PortType::kElement, .optional = true},
    {.name = "gate_up_zero_points", .shape = "[E, 2 * I, ceil(Gh / 2)] or [E, 2 * I, Gh]", .type = PortType::kUint8, .optional = true},
    {.name = "gate_up_scale_codes", .shape = "[E, 2 * I, Gh]", .type = PortType::kUint8, .optional = true},
    {.name = "gate_up_float_scales", .shape = "[E, ceil(2 * I / scale_rows), Gh] or [E, 2 * I, 1]", .type = PortType::kFloat32, .optional = true},
    {.name = "down_scales", .shape = "[E, H, Gi]", .type = PortType::kElement, .optional = true},
    {.name = "down_zero_points", .shape = "[E, H, ceil(Gi / 2)] or [E, H, Gi]", .type = PortType::kUint8, .optional = true},
    {.name = "down_scale_codes", .shape = "[E, H, Gi]", .type = PortType::kUint8, .optional = true},
    {.name = "down_float_scales", .shape = "[E, ceil(H / scale_rows), Gi] or [E, H, 1]", .type = PortType::kFloat32, .optional = true},
    {.name = "gate_up_bias", .shape = "[E, 2 * I]", .type = PortType::kElement, .optional = true},
    {.name = "down_bias", .shape = "[E, H]", .type = PortType::kElement, .optional = true},
    {.name = "residual", .shape = "[T, H]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kLowBitExpertsOutputs[] = {
    {.name = "y", .shape = "[T, H]", .type = PortType::kElement, .spends = 15},
};
namespace ops {
struct LowBitExperts {
  using Params = LowBitExpertsParams;
  struct In { enum : size_t { kX, kExperts, kWeights, kGateUpCodes, kDownCodes, kGateUpScales, kGateUpZeroPoints, kGateUpScaleCodes, kGateUpFloatScales, kDownScales, kDownZeroPoints, kDownScaleCodes, kDownFloatScales, kGateUpBias, kDownBias, kResidual }; };
  struct Out { enum : size_t { kY }; };
  struct Attributes {
    LowBitFormat format = LowBitFormat::kInt4;
    int64_t group_size = 0;
    int64_t scale_rows = 1;
    GatedActivation activation = GatedActivation::kSiluMul;
    float limit = 7.0f;
    float alpha = 1.702f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.format = reader.choice<LowBitFormat>({"format", "", "'int4', 'int8', 'fp8', 'mxfp4' or 'nvfp4'"}, LowBitFormat::kInt4, {{"int4", LowBitFormat::kInt4}, {"int8", LowBitFormat::kInt8}, {"fp8", LowBitFormat::kFp8}, {"mxfp4", LowBitFormat::kMxfp4}, {"nvfp4", LowBitFormat::kNvfp4}});
      attributes.group_size = reader.integer({.name = "group_size", .symbol = "", .allowed = "0 (a whole row), or an even divisor of H and of I", .least = 0}, 0);
      attributes.scale_rows = reader.integer({.name = "scale_rows", .symbol = "", .allowed = "1 or more", .least = 1}, 1);
      attributes.activation = reader.choice<GatedActivation>({"activation", "", "'silu_mul', 'gelu_mul' (erf), 'gelu_tanh_mul' or 'clamped_silu_mul'"}, GatedActivation::kSiluMul, {{"silu_mul", GatedActivation::kSiluMul}, {"gelu_mul", GatedActivation::kGeluMul}, {"gelu_tanh_mul", GatedActivation::kGeluTanhMul}, {"clamped_silu_mul", GatedActivation::kClampedSiluMul}});
      attributes.limit = reader.real({.name = "limit", .symbol = "", .allowed = "0 or more", .least = 0}, 7.0f);
      attributes.alpha = reader.real({.name = "alpha", .symbol = "", .allowed = "any finite number"}, 1.702f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"LowBitExperts", kLowBitExpertsInputs, kLowBitExpertsOutputs};
};
}  // namespace ops
LowBitExpertsParams read_params(const Call<ops::LowBitExperts>& call);

inline constexpr Port kLowBitLinearInputs[] = {
    {.name = "x", .shape = "[T, I]", .type = PortType::kElement},
    {.name = "codes", .shape = "[N, I / 2] or [N, I]", .type = PortType::kUint8},
    {.name = "scales", .shape = "[N, G]", .type = PortType::kElement, .optional = true},
    {.name = "zero_points", .shape = "[N, ceil(G / 2)] or [N, G]", .type = PortType::kUint8, .optional = true},
    {.name = "scale_codes", .shape = "[N, G]", .type = PortType::kUint8, .optional = true},
    {.name = "float_scales", .shape = "[ceil(N / scale_rows), G] or [N, 1]", .type = PortType::kFloat32, .optional = true},
    {.name = "norm_weight", .shape = "[I]", .type = PortType::kElement, .optional = true},
    {.name = "bias", .shape = "[N]", .type = PortType::kElement, .optional = true},
    {.name = "residual", .shape = "[T, O]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kLowBitLinearOutputs[] = {
    {.name = "y", .shape = "[T, O]", .type = PortType::kElement, .optional = true, .spends = 8},
    {.name = "y_float32", .shape = "[T, O]", .type = PortType::kFloat32, .optional = true},
};
namespace ops {
struct LowBitLinear {
  using Params = LowBitLinearParams;
  struct In { enum : size_t { kX, kCodes, kScales, kZeroPoints, kScaleCodes, kFloatScales, kNormWeight, kBias, kResidual }; };
  struct Out { enum : size_t { kY, kYFloat32 }; };
  struct Attributes {
    LowBitFormat format = LowBitFormat::kInt4;
    int64_t group_size = 0;
    int64_t scale_rows = 1;
    InputFormat input_format = InputFormat::kNone;
    float input_scale = 0.0f;
    float epsilon = 1e-06f;
    GatedActivation activation = GatedActivation::kNone;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.format = reader.choice<LowBitFormat>({"format", "", "'int4', 'int8', 'fp8', 'mxfp4' or 'nvfp4'"}, LowBitFormat::kInt4, {{"int4", LowBitFormat::kInt4}, {"int8", LowBitFormat::kInt8}, {"fp8", LowBitFormat::kFp8}, {"mxfp4", LowBitFormat::kMxfp4}, {"nvfp4", LowBitFormat::kNvfp4}});
      attributes.group_size = reader.integer({.name = "group_size", .symbol = "", .allowed = "0 (a whole row), or an even divisor of I", .least = 0}, 0);
      attributes.scale_rows = reader.integer({.name = "scale_rows", .symbol = "", .allowed = "1 or more", .least = 1}, 1);
      attributes.input_format = reader.choice<InputFormat>({"input_format", "", "'none', or 'fp8' where format is 'fp8'"}, InputFormat::kNone, {{"none", InputFormat::kNone}, {"fp8", InputFormat::kFp8}});
      attributes.input_scale = reader.real({.name = "input_scale", .symbol = "", .allowed = "0 (a scale for each token and group), or more with input_format fp8", .least = 0}, 0.0f);
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      attributes.activation = reader.choice<GatedActivation>({"activation", "", "'none', 'silu_mul', 'gelu_mul' (erf) or 'gelu_tanh_mul'"}, GatedActivation::kNone, {{"none", GatedActivation::kNone}, {"silu_mul", GatedActivation::kSiluMul}, {"gelu_mul", GatedActivation::kGeluMul}, {"gelu_tanh_mul", GatedActivation::kGeluTanhMul}});
      return attributes;
    }
  };
  static constexpr Schema kSchema{"LowBitLinear", kLowBitLinearInputs, kLowBitLinearOutputs};
};
}  // namespace ops
LowBitLinearParams read_params(const Call<ops::LowBitLinear>& call);

inline constexpr Port kFusedLinearInputs[] = {
    {.name = "x", .shape = "[T, I]", .type = PortType::kElement},
    {.name = "weight", .shape = "[O, I] or [2 * O, I]", .type = PortType::kElement},
    {.name = "norm_weight", .shape = "[I]", .type = PortType::kElement, .optional = true},
    {.name = "bias", .shape = "[O] or [2 * O]", .type = PortType::kElement, .optional = true},
    {.name = "residual", .shape = "[T, O]", .type = PortType::kElement, .optional = true},
    {.name = "factor", .shape = "[T, X]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kFusedLinearOutputs[] = {
    {.name = "y", .shape = "[T, O]", .type = PortType::kElement, .optional = true, .spends = 4},
    {.name = "y_float32", .shape = "[T, O]", .type = PortType::kFloat32, .optional = true},
};
namespace ops {
struct FusedLinear {
  using Params = FusedLinearParams;
  struct In { enum : size_t { kX, kWeight, kNormWeight, kBias, kResidual, kFactor }; };
  struct Out { enum : size_t { kY, kYFloat32 }; };
  struct Attributes {
    float epsilon = 1e-06f;
    GatedActivation activation = GatedActivation::kNone;
    int64_t factor_offset = 0;
    int64_t batch_invariant = 0;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      attributes.activation = reader.choice<GatedActivation>({"activation", "", "'none', 'silu_mul', 'gelu_mul' (erf) or 'gelu_tanh_mul'"}, GatedActivation::kNone, {{"none", GatedActivation::kNone}, {"silu_mul", GatedActivation::kSiluMul}, {"gelu_mul", GatedActivation::kGeluMul}, {"gelu_tanh_mul", GatedActivation::kGeluTanhMul}});
      attributes.factor_offset = reader.integer({.name = "factor_offset", .symbol = "", .allowed = "0 or more", .least = 0}, 0);
      attributes.batch_invariant = reader.integer({.name = "batch_invariant", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 0);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"FusedLinear", kFusedLinearInputs, kFusedLinearOutputs};
};
}  // namespace ops
FusedLinearParams read_params(const Call<ops::FusedLinear>& call);

inline constexpr Port kQkvRopeAppendInputs[] = {
    {.name = "qkv", .shape = "[T, (Hq + 2 * Hkv) * D]", .type = PortType::kElement},
    {.name = "key_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "value_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "block_table", .shape = "[B, M]", .type = PortType::kInt32, .optional = true},
    {.name = "query_norm_weight", .shape = "[D]", .type = PortType::kElement, .optional = true},
    {.name = "key_norm_weight", .shape = "[D]", .type = PortType::kElement, .optional = true},
    {.name = "cosine", .shape = "[1, T, R]", .type = PortType::kFloat32, .optional = true},
    {.name = "sine", .shape = "[1, T, R]", .type = PortType::kFloat32, .optional = true},
    {.name = "capture", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement, .optional = true},
    {.name = "capture_past_len", .shape = "[B]", .type = PortType::kInt32, .optional = true},
    {.name = "key_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "value_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
};
inline constexpr Port kQkvRopeAppendOutputs[] = {
    {.name = "query", .shape = "[T, Hq, D]", .type = PortType::kElement},
    {.name = "key_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 1},
    {.name = "value_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 2},
    {.name = "capture_out", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement, .optional = true, .alias = 10},
    {.name = "key_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 12},
    {.name = "value_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 13},
};
namespace ops {
struct QkvRopeAppend {
  using Params = QkvRopeAppendParams;
  struct In { enum : size_t { kQkv, kKeyCache, kValueCache, kQueryStart, kPastLen, kBlockTable, kQueryNormWeight, kKeyNormWeight, kCosine, kSine, kCapture, kCapturePastLen, kKeyScale, kValueScale }; };
  struct Out { enum : size_t { kQuery, kKeyCacheOut, kValueCacheOut, kCaptureOut, kKeyScaleOut, kValueScaleOut }; };
  struct Attributes {
    int64_t num_heads = 0;
    float epsilon = 1e-06f;
    int64_t value_norm = 0;
    int64_t value_is_key = 0;
    int64_t sink = 0;
    int64_t capacity = 0;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.num_heads = reader.integer({.name = "num_heads", .symbol = "Hq", .allowed = "a positive multiple of Hkv", .least = 0}, 0);
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      attributes.value_norm = reader.integer({.name = "value_norm", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 0);
      attributes.value_is_key = reader.integer({.name = "value_is_key", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 0);
      attributes.sink = reader.integer({.name = "sink", .symbol = "S", .allowed = "0 or more", .least = 0}, 0);
      attributes.capacity = reader.integer({.name = "capacity", .symbol = "C", .allowed = "0, or at least S + W (at least S + 1 without a window)", .least = 0}, 0);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"QkvRopeAppend", kQkvRopeAppendInputs, kQkvRopeAppendOutputs};
};
}  // namespace ops
QkvRopeAppendParams read_params(const Call<ops::QkvRopeAppend>& call);

inline constexpr Port kQkvAttentionInputs[] = {
    {.name = "qkv", .shape = "[T, (Hq + 2 * Hkv) * D]", .type = PortType::kElement},
    {.name = "key_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "value_cache", .shape = "[N, Hkv, P, D]", .type = PortType::kCache},
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "block_table", .shape = "[B, M]", .type = PortType::kInt32, .optional = true},
    {.name = "query_norm_weight", .shape = "[D]", .type = PortType::kElement, .optional = true},
    {.name = "key_norm_weight", .shape = "[D]", .type = PortType::kElement, .optional = true},
    {.name = "cosine", .shape = "[1, T, R]", .type = PortType::kFloat32, .optional = true},
    {.name = "sine", .shape = "[1, T, R]", .type = PortType::kFloat32, .optional = true},
    {.name = "capture", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement, .optional = true},
    {.name = "capture_past_len", .shape = "[B]", .type = PortType::kInt32, .optional = true},
    {.name = "key_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "value_scale", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true},
    {.name = "sink_logits", .shape = "[Hq]", .type = PortType::kFloat32, .optional = true},
    {.name = "prefix_end", .shape = "[B]", .type = PortType::kInt32, .optional = true},
    {.name = "max_kv_len", .shape = "[1]", .type = PortType::kInt32, .optional = true, .on_host = true},
    {.name = "max_query_len", .shape = "[1]", .type = PortType::kInt32, .optional = true, .on_host = true},
};
inline constexpr Port kQkvAttentionOutputs[] = {
    {.name = "output", .shape = "[T, Hq, D]", .type = PortType::kElement},
    {.name = "key_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 1},
    {.name = "value_cache_out", .shape = "[N, Hkv, P, D]", .type = PortType::kCache, .alias = 2},
    {.name = "query", .shape = "[T, Hq, D]", .type = PortType::kElement},
    {.name = "capture_out", .shape = "[B, Wq, Hq, D]", .type = PortType::kElement, .optional = true, .alias = 10},
    {.name = "key_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 12},
    {.name = "value_scale_out", .shape = "[N, Hkv, P]", .type = PortType::kFloat32, .optional = true, .alias = 13},
};
namespace ops {
struct QkvAttention {
  using Params = QkvAttentionParams;
  struct In { enum : size_t { kQkv, kKeyCache, kValueCache, kQueryStart, kPastLen, kBlockTable, kQueryNormWeight, kKeyNormWeight, kCosine, kSine, kCapture, kCapturePastLen, kKeyScale, kValueScale, kSinkLogits, kPrefixEnd, kMaxKvLen, kMaxQueryLen }; };
  struct Out { enum : size_t { kOutput, kKeyCacheOut, kValueCacheOut, kQuery, kCaptureOut, kKeyScaleOut, kValueScaleOut }; };
  struct Attributes {
    int64_t num_heads = 0;
    float epsilon = 1e-06f;
    int64_t value_norm = 0;
    int64_t value_is_key = 0;
    int64_t sink = 0;
    int64_t capacity = 0;
    int64_t window = -1;
    float scale = 0.0f;
    float softcap = 0.0f;
    int64_t causal = 1;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.num_heads = reader.integer({.name = "num_heads", .symbol = "Hq", .allowed = "a positive multiple of Hkv", .least = 0}, 0);
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      attributes.value_norm = reader.integer({.name = "value_norm", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 0);
      attributes.value_is_key = reader.integer({.name = "value_is_key", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 0);
      attributes.sink = reader.integer({.name = "sink", .symbol = "S", .allowed = "0 or more", .least = 0}, 0);
      attributes.capacity = reader.integer({.name = "capacity", .symbol = "C", .allowed = "0, or at least S + W (at least S + 1 without a window)", .least = 0}, 0);
      attributes.window = reader.integer({.name = "window", .symbol = "W", .allowed = "-1, or 1 or more", .least = -1, .nonzero = true}, -1);
      attributes.scale = reader.real({.name = "scale", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.softcap = reader.real({.name = "softcap", .symbol = "", .allowed = "0 or more", .least = 0}, 0.0f);
      attributes.causal = reader.integer({.name = "causal", .symbol = "", .allowed = "0 or 1", .least = 0, .most = 1}, 1);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"QkvAttention", kQkvAttentionInputs, kQkvAttentionOutputs};
};
}  // namespace ops
QkvAttentionParams read_params(const Call<ops::QkvAttention>& call);

inline constexpr Port kNormRopeInputs[] = {
    {.name = "heads", .shape = "[T, H, D]", .type = PortType::kElement},
    {.name = "cosine", .shape = "[1, T, R]", .type = PortType::kFloat32},
    {.name = "sine", .shape = "[1, T, R]", .type = PortType::kFloat32},
    {.name = "norm_weight", .shape = "[D]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kNormRopeOutputs[] = {
    {.name = "rotated", .shape = "[T, H, D]", .type = PortType::kElement},
};
namespace ops {
struct NormRope {
  using Params = NormRopeParams;
  struct In { enum : size_t { kHeads, kCosine, kSine, kNormWeight }; };
  struct Out { enum : size_t { kRotated }; };
  struct Attributes {
    float epsilon = 1e-06f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"NormRope", kNormRopeInputs, kNormRopeOutputs};
};
}  // namespace ops
NormRopeParams read_params(const Call<ops::NormRope>& call);

inline constexpr Port kRopeAnglesInputs[] = {
    {.name = "positions", .shape = "[T]", .type = PortType::kInt64},
    {.name = "inv_freq", .shape = "[1, R]", .type = PortType::kFloat32},
};
inline constexpr Port kRopeAnglesOutputs[] = {
    {.name = "cosine", .shape = "[1, T, R]", .type = PortType::kFloat32},
    {.name = "sine", .shape = "[1, T, R]", .type = PortType::kFloat32},
};
namespace ops {
struct RopeAngles {
  using Params = RopeAnglesParams;
  struct In { enum : size_t { kPositions, kInvFreq }; };
  struct Out { enum : size_t { kCosine, kSine }; };
  struct Attributes {
    float factor = 1.0f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.factor = reader.real({.name = "factor", .symbol = "", .allowed = "any finite number"}, 1.0f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"RopeAngles", kRopeAnglesInputs, kRopeAnglesOutputs};
};
}  // namespace ops
RopeAnglesParams read_params(const Call<ops::RopeAngles>& call);

inline constexpr Port kGatherRowsInputs[] = {
    {.name = "rows", .shape = "[T, H]", .type = PortType::kElement},
    {.name = "row_indices", .shape = "[R]", .type = PortType::kInt64},
};
inline constexpr Port kGatherRowsOutputs[] = {
    {.name = "output", .shape = "[R, H]", .type = PortType::kElement},
};
namespace ops {
struct GatherRows {
  using Params = GatherRowsParams;
  struct In { enum : size_t { kRows, kRowIndices }; };
  struct Out { enum : size_t { kOutput }; };
  struct Attributes {
    static Attributes read(const AttributeReader&) { return {}; }
  };
  static constexpr Schema kSchema{"GatherRows", kGatherRowsInputs, kGatherRowsOutputs};
};
}  // namespace ops
GatherRowsParams read_params(const Call<ops::GatherRows>& call);

inline constexpr Port kNarrowStepInputs[] = {
    {.name = "query_start", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "row_indices", .shape = "[R]", .type = PortType::kInt64},
    {.name = "positions", .shape = "[T]", .type = PortType::kInt64, .optional = true},
};
inline constexpr Port kNarrowStepOutputs[] = {
    {.name = "query_start_out", .shape = "[B+1]", .type = PortType::kInt32},
    {.name = "past_len_out", .shape = "[B] or [B, Hkv]", .type = PortType::kInt32},
    {.name = "positions_out", .shape = "[R]", .type = PortType::kInt64, .optional = true},
};
namespace ops {
struct NarrowStep {
  using Params = NarrowStepParams;
  struct In { enum : size_t { kQueryStart, kPastLen, kRowIndices, kPositions }; };
  struct Out { enum : size_t { kQueryStartOut, kPastLenOut, kPositionsOut }; };
  struct Attributes {
    static Attributes read(const AttributeReader&) { return {}; }
  };
  static constexpr Schema kSchema{"NarrowStep", kNarrowStepInputs, kNarrowStepOutputs};
};
}  // namespace ops
NarrowStepParams read_params(const Call<ops::NarrowStep>& call);

inline constexpr Port kRmsNormAddInputs[] = {
    {.name = "x", .shape = "[T, I]", .type = PortType::kElement},
    {.name = "norm_weight", .shape = "[I]", .type = PortType::kElement},
    {.name = "residual", .shape = "[T, I]", .type = PortType::kElement, .optional = true},
    {.name = "scale", .shape = "[1]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kRmsNormAddOutputs[] = {
    {.name = "y", .shape = "[T, I]", .type = PortType::kElement},
};
namespace ops {
struct RmsNormAdd {
  using Params = RmsNormAddParams;
  struct In { enum : size_t { kX, kNormWeight, kResidual, kScale }; };
  struct Out { enum : size_t { kY }; };
  struct Attributes {
    float epsilon = 1e-06f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"RmsNormAdd", kRmsNormAddInputs, kRmsNormAddOutputs};
};
}  // namespace ops
RmsNormAddParams read_params(const Call<ops::RmsNormAdd>& call);

inline constexpr Port kGateMulInputs[] = {
    {.name = "x", .shape = "[T, X]", .type = PortType::kElement},
    {.name = "gate", .shape = "[T, G]", .type = PortType::kElement},
    {.name = "norm_weight", .shape = "[N]", .type = PortType::kElement, .optional = true},
    {.name = "residual", .shape = "[T, O]", .type = PortType::kElement, .optional = true},
};
inline constexpr Port kGateMulOutputs[] = {
    {.name = "y", .shape = "[T, O]", .type = PortType::kElement},
};
namespace ops {
struct GateMul {
  using Params = GateMulParams;
  struct In { enum : size_t { kX, kGate, kNormWeight, kResidual }; };
  struct Out { enum : size_t { kY }; };
  struct Attributes {
    GateActivation activation = GateActivation::kSilu;
    int64_t size = 0;
    int64_t x_offset = 0;
    int64_t gate_offset = 0;
    int64_t gate_size = 0;
    float epsilon = 1e-06f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.activation = reader.choice<GateActivation>({"activation", "", "'silu', 'sigmoid', 'softplus', 'gelu' or 'gelu_tanh'"}, GateActivation::kSilu, {{"silu", GateActivation::kSilu}, {"sigmoid", GateActivation::kSigmoid}, {"softplus", GateActivation::kSoftplus}, {"gelu", GateActivation::kGelu}, {"gelu_tanh", GateActivation::kGeluTanh}});
      attributes.size = reader.integer({.name = "size", .symbol = "O", .allowed = "1 or more", .least = 0}, 0);
      attributes.x_offset = reader.integer({.name = "x_offset", .symbol = "", .allowed = "0 or more", .least = 0}, 0);
      attributes.gate_offset = reader.integer({.name = "gate_offset", .symbol = "", .allowed = "0 or more", .least = 0}, 0);
      attributes.gate_size = reader.integer({.name = "gate_size", .symbol = "", .allowed = "0, or a divisor of O", .least = 0}, 0);
      attributes.epsilon = reader.real({.name = "epsilon", .symbol = "", .allowed = "0 or more", .least = 0}, 1e-06f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"GateMul", kGateMulInputs, kGateMulOutputs};
};
}  // namespace ops
GateMulParams read_params(const Call<ops::GateMul>& call);

inline constexpr Port kDeltaGatesInputs[] = {
    {.name = "decay_rows", .shape = "[T, X]", .type = PortType::kElement},
    {.name = "beta_rows", .shape = "[T, Y]", .type = PortType::kElement},
    {.name = "a_log", .shape = "[Hv]", .type = PortType::kElement},
    {.name = "dt_bias", .shape = "[Hv]", .type = PortType::kElement},
};
inline constexpr Port kDeltaGatesOutputs[] = {
    {.name = "decay", .shape = "[T, Hv]", .type = PortType::kFloat32},
    {.name = "beta", .shape = "[T, Hv]", .type = PortType::kFloat32},
};
namespace ops {
struct DeltaGates {
  using Params = DeltaGatesParams;
  struct In { enum : size_t { kDecayRows, kBetaRows, kALog, kDtBias }; };
  struct Out { enum : size_t { kDecay, kBeta }; };
  struct Attributes {
    int64_t decay_offset = 0;
    int64_t beta_offset = 0;
    float beta_scale = 1.0f;

    static Attributes read(const AttributeReader& reader) {
      Attributes attributes;
      attributes.decay_offset = reader.integer({.name = "decay_offset", .symbol = "", .allowed = "0 or more", .least = 0}, 0);
      attributes.beta_offset = reader.integer({.name = "beta_offset", .symbol = "", .allowed = "0 or more", .least = 0}, 0);
      attributes.beta_scale = reader.real({.name = "beta_scale", .symbol = "", .allowed = "any finite number"}, 1.0f);
      return attributes;
    }
  };
  static constexpr Schema kSchema{"DeltaGates", kDeltaGatesInputs, kDeltaGatesOutputs};
};
}  // namespace ops
DeltaGatesParams read_params(const Call<ops::DeltaGates>& call);

}  // namespace ortolan
