// What the kernels of recurrent layers take: raw pointers, sizes and attributes. No tensor type, no runtime.
#pragma once

#include <cstdint>

#include "params.h"

namespace ortolan {

enum class ConvActivation { kSilu, kNone };

constexpr int64_t kMaxConvTaps = 8;
constexpr int64_t kMaxRecentTokens = 16;
constexpr int64_t kMaxKeySize = 256;
constexpr float kKeyNormEpsilon = 1e-6f;

// Which row of the state buffers a sequence owns.
struct StateSlots {
  const int32_t* slots = nullptr;  // [B] or null: row b
  int64_t num_rows = 0;            // N

  ORTOLAN_HOST_DEVICE int64_t at(int64_t sequence) const { return slots ? slots[sequence] : sequence; }
};

struct CausalConvParams {
  ElementType element = ElementType::kFloat32;
  Packing packing;
  const int32_t* past_len = nullptr;  // [B]
  StateSlots slots;
  int64_t num_features = 0;  // F
  int64_t num_taps = 0;      // K
  int64_t ring_rows = 0;     // Rc
  ConvActivation activation = ConvActivation::kSilu;
  const void* x = nullptr;       // [T, F]
  const void* weight = nullptr;  // [F, K]
  const void* bias = nullptr;    // [F] or null
  void* conv_state = nullptr;    // [N, Rc, F]
  void* y = nullptr;             // [T, F]
};

struct GatedDeltaRuleParams {
  ElementType element = ElementType::kFloat32;
  Packing packing;
  const int32_t* past_len = nullptr;  // [B]
  StateSlots slots;
  int64_t num_key_heads = 0;    // Hk
  int64_t num_value_heads = 0;  // Hv
  int64_t key_size = 0;         // Dk
  int64_t value_size = 0;       // Dv
  int64_t recent_tokens = 0;    // R
  float scale = 1.0f;           // resolved, never 0
  bool l2_norm = true;
  const void* query = nullptr;      // [T, Hk, Dk]
  const void* key = nullptr;        // [T, Hk, Dk]
  const void* value = nullptr;      // [T, Hv, Dv]
  const float* decay = nullptr;     // [T, Hv]
  const float* beta = nullptr;      // [T, Hv]
  float* state = nullptr;           // [N, Hv, Dk, Dv]
  float* recent_keys = nullptr;     // [N, R, Hk, Dk]
  float* recent_updates = nullptr;  // [N, R, Hv, Dv]
  float* recent_decays = nullptr;   // [N, R, Hv]
  int32_t* state_len = nullptr;     // [N]
  void* output = nullptr;           // [T, Hv, Dv]

  ORTOLAN_HOST_DEVICE int64_t key_head(int64_t value_head) const {
    const auto group = static_cast<uint32_t>(num_value_heads) / static_cast<uint32_t>(num_key_heads);
    return static_cast<uint32_t>(value_head) / group;
  }
  // Whether a sequence's updates are kept, so that they can be taken back.
  ORTOLAN_HOST_DEVICE bool keeps_updates(int64_t tokens) const { return tokens <= recent_tokens; }
  // Kept updates that the state of a row has not read yet; lengths that nothing allows give none or all.
  ORTOLAN_HOST_DEVICE int64_t pending(int64_t row, int64_t past) const {
    const int64_t missing = past == 0 ? 0 : past - state_len[row];
    return missing < 0 ? 0 : missing > recent_tokens ? recent_tokens : missing;
  }
  // Tokens that the state of a row has read once kept updates have made room for a step's: at most `past`.
  ORTOLAN_HOST_DEVICE int64_t committed(int64_t row, int64_t past, int64_t tokens) const {
    const int64_t known = past - pending(row, past), least = past + tokens - recent_tokens;
    if (past == 0) return 0;
    return !keeps_updates(tokens) ? past : known < least ? least : known;
  }
  ORTOLAN_HOST_DEVICE int64_t state_row(int64_t row, int64_t value_head) const {
    return (row * num_value_heads + value_head) * key_size * value_size;
  }
  ORTOLAN_HOST_DEVICE int64_t kept_row(int64_t row, int64_t position) const {
    return row * recent_tokens + static_cast<uint32_t>(position) % static_cast<uint32_t>(recent_tokens);
  }
};

}  // namespace ortolan
