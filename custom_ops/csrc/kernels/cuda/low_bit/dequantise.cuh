// Codes of low-bit weights as elements in memory.
#pragma once

#include "codes.cuh"

namespace ortolan::cuda {

// Whether eight columns at a time share a group and begin where a word does.
inline bool dequantises_eights(const LowBitWeight& w) {
  return w.columns % 8 == 0 && w.group_size % 8 == 0 && reinterpret_cast<uint64_t>(w.codes) % 8 == 0;
}

// Eight columns of a row, from the `first` code on, whose groups begin and end at multiples of eight columns.
template <typename Element>
__device__ __forceinline__ void dequantise_eight(const LowBitWeight& w, int64_t first,
                                                 const GroupValues& group, Element* dense) {
  const int bits = static_cast<int>(code_bits(w.format));
  const uint64_t codes = bits == 8 ? *reinterpret_cast<const uint64_t*>(w.codes + first)
                                   : *reinterpret_cast<const uint32_t*>(w.codes + first / 2);
  Element values[8];
#pragma unroll
  for (int n = 0; n < 8; ++n)
    values[n] = Element(group(static_cast<uint32_t>(codes >> n * bits) & ((1u << bits) - 1)));
#pragma unroll
  for (int n = 0; n < static_cast<int>(sizeof(values)) / 16; ++n) {
    uint4 piece;
    __builtin_memcpy(&piece, reinterpret_cast<const char*>(values) + n * 16, 16);
    reinterpret_cast<uint4*>(dense + first)[n] = piece;
  }
}

}  // namespace ortolan::cuda
