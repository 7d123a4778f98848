// clang-format off
// The operators' ports and attributes; generated from custom_ops/schema.py by `python -m ortolan.custom_ops.codegen`.
#pragma once

#include <array>

#include "schema.h"

namespace ortolan {

inline constexpr Port kRingKvAppendInputs[] = {
    {"key", "[T, Hkv, D]", PortType::kElement, false, -1},
    {"value", "[T, Hkv, D]", PortType::kElement, false, -1},
    {"key_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"value_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"query_start", "[B+1]", PortType::kInt32, false, -1},
    {"past_len", "[B] or [B, Hkv]", PortType::kInt32, false, -1},
    {"block_table", "[B, M]", PortType::kInt32, true, -1},
};
inline constexpr Port kRingKvAppendOutputs[] = {
    {"key_cache_out", "[N, Hkv, P, D]", PortType::kElement, false, 2},
    {"value_cache_out", "[N, Hkv, P, D]", PortType::kElement, false, 3},
};
inline constexpr std::array<std::string_view, 2> kRingKvAppendAttributes = {"sink", "capacity"};
inline constexpr Schema kRingKvAppendSchema = {"RingKvAppend", kRingKvAppendInputs,
                                  kRingKvAppendOutputs, kRingKvAppendAttributes, false};

inline constexpr Port kSwaAttentionInputs[] = {
    {"query", "[T, Hq, D]", PortType::kElement, false, -1},
    {"key_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"value_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"query_start", "[B+1]", PortType::kInt32, false, -1},
    {"past_len", "[B] or [B, Hkv]", PortType::kInt32, false, -1},
    {"block_table", "[B, M]", PortType::kInt32, true, -1},
    {"sink_logits", "[Hq]", PortType::kFloat32, true, -1},
};
inline constexpr Port kSwaAttentionOutputs[] = {
    {"output", "[T, Hq, D]", PortType::kElement, false, -1},
    {"lse", "[Hq, T]", PortType::kFloat32, true, -1},
};
inline constexpr std::array<std::string_view, 5> kSwaAttentionAttributes = {"window", "sink", "capacity", "scale", "softcap"};
inline constexpr Schema kSwaAttentionSchema = {"SwaAttention", kSwaAttentionInputs,
                                  kSwaAttentionOutputs, kSwaAttentionAttributes, false};

inline constexpr Port kSnapKvCaptureInputs[] = {
    {"query", "[T, Hq, D]", PortType::kElement, false, -1},
    {"capture", "[B, Wq, Hq, D]", PortType::kElement, false, -1},
    {"query_start", "[B+1]", PortType::kInt32, false, -1},
    {"past_len", "[B]", PortType::kInt32, false, -1},
};
inline constexpr Port kSnapKvCaptureOutputs[] = {
    {"capture_out", "[B, Wq, Hq, D]", PortType::kElement, false, 1},
};
inline constexpr std::array<std::string_view, 0> kSnapKvCaptureAttributes = {};
inline constexpr Schema kSnapKvCaptureSchema = {"SnapKvCapture", kSnapKvCaptureInputs,
                                  kSnapKvCaptureOutputs, kSnapKvCaptureAttributes, false};

inline constexpr Port kSnapKvScoreInputs[] = {
    {"capture", "[B, Wq, Hq, D]", PortType::kElement, false, -1},
    {"key_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"kv_len", "[B] or [B, Hkv]", PortType::kInt32, false, -1},
    {"block_table", "[B, M]", PortType::kInt32, true, -1},
};
inline constexpr Port kSnapKvScoreOutputs[] = {
    {"score", "[B, Hkv, K]", PortType::kFloat32, false, -1},
};
inline constexpr std::array<std::string_view, 3> kSnapKvScoreAttributes = {"scale", "softcap", "group_reduce"};
inline constexpr Schema kSnapKvScoreSchema = {"SnapKvScore", kSnapKvScoreInputs,
                                  kSnapKvScoreOutputs, kSnapKvScoreAttributes, false};

inline constexpr Port kKvSelectInputs[] = {
    {"score", "[B, Hkv or 1, C]", PortType::kFloat32, false, -1},
    {"kv_len", "[B, Hkv]", PortType::kInt32, false, -1},
    {"budget", "[1]", PortType::kInt64, false, -1, true},
    {"window", "[1]", PortType::kInt64, false, -1, true},
    {"sink", "[1]", PortType::kInt64, false, -1, true},
};
inline constexpr Port kKvSelectOutputs[] = {
    {"keep", "[B, Hkv or 1, K]", PortType::kInt32, false, -1},
    {"kept_len", "[B, Hkv]", PortType::kInt32, false, -1},
};
inline constexpr std::array<std::string_view, 0> kKvSelectAttributes = {};
inline constexpr Schema kKvSelectSchema = {"KvSelect", kKvSelectInputs,
                                  kKvSelectOutputs, kKvSelectAttributes, false};

inline constexpr Port kKvCompactInputs[] = {
    {"key_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"value_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"keep", "[B, Hkv or 1, K]", PortType::kInt32, false, -1},
    {"block_table", "[B, M]", PortType::kInt32, true, -1},
};
inline constexpr Port kKvCompactOutputs[] = {
    {"key_cache_out", "[N, Hkv, P, D]", PortType::kElement, false, 0},
    {"value_cache_out", "[N, Hkv, P, D]", PortType::kElement, false, 1},
};
inline constexpr std::array<std::string_view, 0> kKvCompactAttributes = {};
inline constexpr Schema kKvCompactSchema = {"KvCompact", kKvCompactInputs,
                                  kKvCompactOutputs, kKvCompactAttributes, false};

inline constexpr Port kFusedLinearInputs[] = {
    {"x", "[T, I]", PortType::kElement, false, -1},
    {"weight", "[O, I] or [2 * O, I]", PortType::kElement, false, -1},
    {"norm_weight", "[I]", PortType::kElement, true, -1},
    {"bias", "[O] or [2 * O]", PortType::kElement, true, -1},
    {"residual", "[T, O]", PortType::kElement, true, -1},
};
inline constexpr Port kFusedLinearOutputs[] = {
    {"y", "[T, O]", PortType::kElement, true, -1, false, 4},
    {"y_float32", "[T, O]", PortType::kFloat32, true, -1},
};
inline constexpr std::array<std::string_view, 2> kFusedLinearAttributes = {"epsilon", "activation"};
inline constexpr Schema kFusedLinearSchema = {"FusedLinear", kFusedLinearInputs,
                                  kFusedLinearOutputs, kFusedLinearAttributes, true};

inline constexpr Port kQkvRopeAppendInputs[] = {
    {"qkv", "[T, (Hq + 2 * Hkv) * D]", PortType::kElement, false, -1},
    {"key_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"value_cache", "[N, Hkv, P, D]", PortType::kElement, false, -1},
    {"query_start", "[B+1]", PortType::kInt32, false, -1},
    {"past_len", "[B] or [B, Hkv]", PortType::kInt32, false, -1},
    {"block_table", "[B, M]", PortType::kInt32, true, -1},
    {"query_norm_weight", "[D]", PortType::kElement, true, -1},
    {"key_norm_weight", "[D]", PortType::kElement, true, -1},
    {"cosine", "[1, T, R]", PortType::kFloat32, true, -1},
    {"sine", "[1, T, R]", PortType::kFloat32, true, -1},
    {"capture", "[B, Wq, Hq, D]", PortType::kElement, true, -1},
    {"capture_past_len", "[B]", PortType::kInt32, true, -1},
};
inline constexpr Port kQkvRopeAppendOutputs[] = {
    {"query", "[T, Hq, D]", PortType::kElement, false, -1},
    {"key_cache_out", "[N, Hkv, P, D]", PortType::kElement, false, 1},
    {"value_cache_out", "[N, Hkv, P, D]", PortType::kElement, false, 2},
    {"capture_out", "[B, Wq, Hq, D]", PortType::kElement, true, 10},
};
inline constexpr std::array<std::string_view, 4> kQkvRopeAppendAttributes = {"num_heads", "epsilon", "sink", "capacity"};
inline constexpr Schema kQkvRopeAppendSchema = {"QkvRopeAppend", kQkvRopeAppendInputs,
                                  kQkvRopeAppendOutputs, kQkvRopeAppendAttributes, true};

inline constexpr Port kRopeAnglesInputs[] = {
    {"positions", "[T]", PortType::kInt64, false, -1},
    {"inv_freq", "[1, R]", PortType::kFloat32, false, -1},
};
inline constexpr Port kRopeAnglesOutputs[] = {
    {"cosine", "[1, T, R]", PortType::kFloat32, false, -1},
    {"sine", "[1, T, R]", PortType::kFloat32, false, -1},
};
inline constexpr std::array<std::string_view, 1> kRopeAnglesAttributes = {"factor"};
inline constexpr Schema kRopeAnglesSchema = {"RopeAngles", kRopeAnglesInputs,
                                  kRopeAnglesOutputs, kRopeAnglesAttributes, true};

inline constexpr Port kLastRowsInputs[] = {
    {"x", "[T, I]", PortType::kElement, false, -1},
    {"query_start", "[B+1]", PortType::kInt32, false, -1},
};
inline constexpr Port kLastRowsOutputs[] = {
    {"y", "[B, I]", PortType::kElement, false, -1},
};
inline constexpr std::array<std::string_view, 0> kLastRowsAttributes = {};
inline constexpr Schema kLastRowsSchema = {"LastRows", kLastRowsInputs,
                                  kLastRowsOutputs, kLastRowsAttributes, true};

inline constexpr Port kRmsNormAddInputs[] = {
    {"x", "[T, I]", PortType::kElement, false, -1},
    {"norm_weight", "[I]", PortType::kElement, false, -1},
    {"residual", "[T, I]", PortType::kElement, false, -1},
};
inline constexpr Port kRmsNormAddOutputs[] = {
    {"y", "[T, I]", PortType::kElement, false, -1},
};
inline constexpr std::array<std::string_view, 1> kRmsNormAddAttributes = {"epsilon"};
inline constexpr Schema kRmsNormAddSchema = {"RmsNormAdd", kRmsNormAddInputs,
                                  kRmsNormAddOutputs, kRmsNormAddAttributes, true};

}  // namespace ortolan
