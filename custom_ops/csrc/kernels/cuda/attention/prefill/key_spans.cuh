// How the keys of a short chunk's tile are shared out: in spans, which are summed apart and then merged, some
// at a time, in ascending order. Where one ends follows from key positions alone: spans are of one size, but
// behind the first ones that of each octave of positions doubles, as partial sums take memory for all that
// fit into a cache.
#pragma once

#include "kernels/cache_layout.h"

namespace ortolan::cuda {

// Of tiles of kKeys keys.
template <int kKeys>
struct KeySpans {
  static constexpr int kUnit = 1024 / kKeys;  // tiles of the smallest spans
  static constexpr int kEqual = 16;           // of these come first
  static constexpr int kOfOctave = 8;         // spans of each octave behind them
  static constexpr int kMerged = 16;          // spans that are merged before their sum joins others

  // First tile of a span.
  static ORTOLAN_HOST_DEVICE int first(int span) {
    if (span < kEqual) return span * kUnit;
    const int octave = (span - kEqual) / kOfOctave, place = (span - kEqual) % kOfOctave;
    return kUnit * ((kEqual + 2 * place) << octave);
  }
  // The span that holds a tile.
  static ORTOLAN_HOST_DEVICE int of(int tile) {
    int place = tile / kUnit, before = 0;
    for (; place >= 2 * kEqual; place /= 2) before += kOfOctave;
    return before + (place < kEqual ? place : kEqual + (place - kEqual) / 2);
  }
};

}  // namespace ortolan::cuda
