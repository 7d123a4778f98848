// What every attention kernel does between the two products: which keys a query sees, logits, exponentials.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace ortolan::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int32_t kNoWindow = 1 << 30;
constexpr int32_t kCausal = -1;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Positions that some queries see: oldest .. newest, inclusive, and those before `sink_end`.
struct SeenPositions {
  int32_t oldest;  // may be negative
  int32_t newest;
  int32_t sink_end;

  __device__ __forceinline__ bool holds(int32_t position) const {
    return bool(((position >= oldest) & (position <= newest)) | (position < sink_end));  // no branches
  }
  __device__ __forceinline__ bool hold_any(int32_t begin, int32_t end) const {
    return (begin <= newest && end > oldest) || begin < sink_end;
  }
  __device__ __forceinline__ bool hold_all(int32_t begin, int32_t end) const {
    return (end - 1 <= newest && begin >= oldest) || end <= sink_end;
  }
};

// Which positions of one sequence see which. Queries of a prefix come before all others and see the same, so
// the first and the last of some queries in a row bound what they see.
struct Visibility {
  int32_t window;  // kNoWindow: all
  int32_t sink;
  int32_t ahead;   // later positions that a query sees; kCausal: none, and no later sinks
  int32_t last;    // of the sequence
  int32_t prefix;  // positions before it see each other

  // `last`: of the sequence's positions.
  static __device__ __forceinline__ Visibility of(const SwaAttentionParams& params, int sequence,
                                                  int32_t last) {
    const bool limited = params.window >= 0 && params.window < kNoWindow;
    const int32_t window = limited ? static_cast<int32_t>(params.window) : kNoWindow;
    const int32_t prefix = params.prefix_end ? min(params.prefix_end[sequence], last + 1) : 0;
    return {window, limited ? static_cast<int32_t>(params.cache.sink) : 0,
            params.causal ? kCausal
            : limited     ? window - 1
                          : kNoWindow,
            last, prefix};
  }
  // What the query at position i sees.
  __device__ __forceinline__ SeenPositions of_query(int32_t i) const {
    const bool in_prefix = i < prefix;
    return {in_prefix ? 0 : i - window + 1, in_prefix ? prefix - 1 : min(i + max(ahead, 0), last),
            min(sink, (ahead == kCausal ? i : last) + 1)};
  }
  // What some of the queries first .. last (inclusive) see.
  __device__ __forceinline__ SeenPositions of_queries(int32_t first, int32_t last) const {
    const SeenPositions a = of_query(first), b = of_query(last);
    return {a.oldest, max(a.newest, b.newest), b.sink_end};
  }
  // What all of them see, sinks apart.
  __device__ __forceinline__ SeenPositions of_each(int32_t first, int32_t last) const {
    return {of_query(last).oldest, of_query(first).newest, 0};
  }
};

// Logits in units of log2: factor * product, where `mapped` is false; else the softcap comes between. Mapped
// ones are rounded before anything else is made of them, so that they have the same bits in every kernel.
struct Logits {
  float factor;
  float scale;
  float softcap;  // 0: none
  float power;    // exponent of tanh's exponential per unit of a logit
  bool mapped;  // also where the scale is not positive: a row's largest product is then not its largest logit

  static ORTOLAN_HOST_DEVICE Logits of(float scale, float softcap) {
    const bool mapped = softcap > 0 || !(scale > 0);
    return {mapped ? 1.0f : scale * kLog2E, scale, softcap, softcap > 0 ? 2 * kLog2E / softcap : 0, mapped};
  }
  __device__ __forceinline__ float map(float product) const {
    const float z = product * scale;
    return softcap > 0 ? cap(z) : __fmul_rn(z, kLog2E);
  }
  template <int kCount>
  __device__ __forceinline__ void map(float (&products)[kCount]) const {
    if (softcap > 0) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) products[n] = cap(products[n] * scale);
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) products[n] = __fmul_rn(products[n] * scale, kLog2E);
    }
  }
  // Products become logits in units of log2.
  template <int kCount>
  __device__ __forceinline__ void finish(float (&products)[kCount]) const {
    if (mapped) return map(products);
#pragma unroll
    for (int n = 0; n < kCount; ++n) products[n] = __fmul_rn(products[n], factor);
  }
  // tanh by its exponential: an absolute error near 1e-7, where tanh.approx has 5e-4.
  __device__ __forceinline__ float cap(float z) const {
    return __fmul_rn(softcap * kLog2E, 1 - __fdividef(2.0f, fast_exp2(z * power) + 1));
  }
};

// A maximum that may be that of no keys, made fit to be subtracted.
__device__ __forceinline__ float finite_max(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// The softmax of a row over some of its keys: the maximum, in units of log2, and the denominator.
struct SoftmaxState {
  float maximum;
  float total;
};

constexpr SoftmaxState kNoKeys{-INFINITY, 0.0f};

// Factors that bring two partial sums to their common maximum. The same function everywhere: it fixes the
// bits.
struct Merge {
  float kept;
  float added;
  SoftmaxState state;

  static __device__ __forceinline__ Merge of(SoftmaxState a, SoftmaxState b) {
    Merge merge;
    const float maximum = fmaxf(a.maximum, b.maximum);
    const float base = finite_max(maximum);
    merge.kept = fast_exp2(a.maximum - base);
    merge.added = fast_exp2(b.maximum - base);
    merge.state = {maximum, fmaf(a.total, merge.kept, b.total * merge.added)};
    return merge;
  }
  __device__ __forceinline__ float apply(float a, float b) const { return fmaf(a, kept, b * added); }
};

// What a row's sums are multiplied by in the end, and its LSE. `total` counts exp2(z - base), base in units
// of log2; the learned sink joins once, and may be larger than all logits.
struct Denominator {
  float inverse;
  float lse;

  static __device__ __forceinline__ Denominator of(float total, float maximum, const float* sink_logits,
                                                   int64_t head) {
    float base = finite_max(maximum), rescale = 1.0f;
    if (sink_logits) {
      const float sink = sink_logits[head] * kLog2E;
      const float largest = fmaxf(maximum, sink);
      rescale = fast_exp2(maximum - finite_max(largest));
      base = finite_max(largest);
      total = fmaf(total, rescale, fast_exp2(sink - base));
    }
    if (!(total > 0)) return {0.0f, -INFINITY};
    return {rescale / total, base * kLn2 + logf(total)};
  }
};

}  // namespace ortolan::cuda
