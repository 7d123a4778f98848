// The kinds of rows that decode attention by mma.sync reads: 16-bit elements, or codes with a scale each.
#pragma once

#include <cstdint>

namespace ortolan::cuda {

// Stands for whichever 16-bit type a launch's queries and output have.
struct AnyHalf {};

// Codes of caches, as template arguments.
struct Int8Code {};
struct Float8Code {};

template <typename Element_, int kHeadSize_>
struct DenseRows {
  using Element = Element_;  // of queries and the output
  using Stored = Element_;   // of caches
  static constexpr int kHeadSize = kHeadSize_;
  // Keys of a tile, per warp: the smaller the head, the more of a warp's work is the same for any number of
  // keys.
  static constexpr int kWarpKeys = kHeadSize <= 64 ? 32 : 16;
  static constexpr int kLoadParts = 1;  // of a tile's keys, and of its values: each is loaded by a warp
  static constexpr bool kHasScales = false;
};

// One kernel serves both element types: products are those of float16, in which every code is exact.
template <typename Code_, int kHeadSize_>
struct CodeRows {
  using Element = AnyHalf;
  using Stored = uint8_t;
  using Code = Code_;
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kWarpKeys = 32;
  static constexpr int kLoadParts = 2;
  static constexpr bool kHasScales = true;
};

}  // namespace ortolan::cuda
