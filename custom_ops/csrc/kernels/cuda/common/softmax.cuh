// What every attention kernel does between the two products: which keys a query sees, logits, exponentials.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace ortolan::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int32_t kNoWindow = 1 << 30;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Position i sees position j: causal, and inside the window or a sink.
struct Visibility {
  int32_t window;  // kNoWindow: all
  int32_t sink;

  static ORTOLAN_HOST_DEVICE Visibility of(const SwaAttentionParams& params) {
    const bool limited = params.window >= 0 && params.window < kNoWindow;
    return {limited ? static_cast<int32_t>(params.window) : kNoWindow,
            limited ? static_cast<int32_t>(params.cache.sink) : 0};
  }
  __device__ __forceinline__ bool sees(int32_t i, int32_t j) const {
    return bool((j <= i) & ((j > i - window) | (j < sink)));  // no branches
  }
  // Whether some of the queries first .. last (inclusive) does not see some of the keys begin .. end.
  __device__ __forceinline__ bool cuts(int32_t first, int32_t last, int32_t begin, int32_t end) const {
    return end - 1 > first || begin <= last - window;
  }
};

// Logits in units of log2: factor * product, where `mapped` is false; else the softcap comes between.
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
    return softcap > 0 ? cap(z) : z * kLog2E;
  }
  template <int kCount>
  __device__ __forceinline__ void map(float (&products)[kCount]) const {
    if (softcap > 0) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) products[n] = cap(products[n] * scale);
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) products[n] = products[n] * scale * kLog2E;
    }
  }
  // tanh by its exponential: an absolute error near 1e-7, where tanh.approx has 5e-4.
  __device__ __forceinline__ float cap(float z) const {
    return softcap * kLog2E * (1 - __fdividef(2.0f, fast_exp2(z * power) + 1));
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
