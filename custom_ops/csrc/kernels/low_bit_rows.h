// How a row of a cache becomes codes with one scale, and back (OPS contract, "Low-bit caches").
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cache_layout.h"
#include "element_types.h"

namespace ortolan {

// The largest magnitude that a code stands for.
ORTOLAN_HOST_DEVICE float largest_code(ElementType code) {
  return code == ElementType::kInt8 ? 127.0f : 448.0f;
}

// x, in units of a row's scale, as a code: to nearest even, saturating. NaN becomes 0; the scale shows it.
ORTOLAN_HOST_DEVICE uint8_t int8_code(float x) {
  if (!(x == x)) return 0;
  const float rounded = rintf(x);
  return static_cast<uint8_t>(static_cast<int8_t>(fminf(fmaxf(rounded, -127.0f), 127.0f)));
}

ORTOLAN_HOST_DEVICE uint8_t float8_code(float x) {
  constexpr float kLeastNormal = 0.015625f;  // 2^-6
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80u;
  if (!(x == x)) return static_cast<uint8_t>(sign);
  const float magnitude = fminf(fabsf(x), 448.0f);
  // Below 2^-6 codes are 2^-9 apart; eight of them reach the first normal one, whose code is 8.
  if (magnitude < kLeastNormal)
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(magnitude * 512.0f)));
  memcpy(&bits, &magnitude, sizeof bits);
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return static_cast<uint8_t>(sign | ((bits >> 20) - (120u << 3)));
}

ORTOLAN_HOST_DEVICE float float8_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  uint32_t bits =
      magnitude << 20;  // exponents are rebiased by a multiplication, which makes subnormals right
  float value;
  memcpy(&value, &bits, sizeof value);
  value *= 1.329227995784916e36f;  // 2^120
  return code & 0x80u ? -value : value;
}

ORTOLAN_HOST_DEVICE float code_value(ElementType type, uint8_t code) {
  return type == ElementType::kInt8 ? static_cast<float>(static_cast<int8_t>(code)) : float8_value(code);
}

ORTOLAN_HOST_DEVICE uint8_t code_of(ElementType type, float x) {
  return type == ElementType::kInt8 ? int8_code(x) : float8_code(x);
}

}  // namespace ortolan
