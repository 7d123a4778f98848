// A head on its way from the joint projection to attention: how lanes hold it, its norm and its rotation.
//
// A lane owns two vectors of a head (a Pair), those which RoPE mixes, so that no element travels between
// lanes; elements that are not rotated are paired with their neighbours. All arithmetic is float32 and
// rounded once; the sum of a norm has one fixed order (lanes, then a butterfly).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/cuda/common/packed_rows.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/qkv_params.h"

namespace ortolan::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float& target, float x) { target = x; }
__device__ __forceinline__ void round_to(__half& target, float x) { target = __float2half_rn(x); }
__device__ __forceinline__ void round_to(__nv_bfloat16& target, float x) { target = __float2bfloat16_rn(x); }

// kWidth neighbouring elements, moved in accesses of 16 bytes where they fill one.
template <typename Element, int kWidth>
struct Vector {
  static constexpr int kBytes = sizeof(Element) * kWidth;
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, Element>>;
  static constexpr int kWords = kBytes / sizeof(Word);
  Word words[kWords];

  __device__ __forceinline__ void load(const Element* source) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(source)[i];
  }
  __device__ __forceinline__ void store(Element* target) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(target)[i] = words[i];
  }
  __device__ __forceinline__ void unpack(float (&values)[kWidth]) const {
    Element elements[kWidth];
    __builtin_memcpy(elements, words, kBytes);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = to_float(elements[i]);
  }
  __device__ __forceinline__ void pack(const float (&values)[kWidth]) {
    Element elements[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) round_to(elements[i], values[i]);
    __builtin_memcpy(words, elements, kBytes);
  }
};

// The two vectors of a head that belong together: element i and i + R where RoPE mixes them, else neighbours.
struct Pair {
  int first;
  int second;

  __device__ __forceinline__ Pair(int index, int width, int rotary_pairs) {
    const bool rotated = index * width < rotary_pairs;
    first = (rotated ? index : 2 * index) * width;
    second = first + (rotated ? rotary_pairs : width);
  }
};

// What one lane holds of a head, or of a head's norm weight.
template <typename Element, int kWidth, int kLanes, int kPairs>
struct HeadPart {
  Vector<Element, kWidth> vectors[kPairs][2];

  // Calls visit(pair, side, offset) for each vector of the lane; those past the head's end are left out.
  template <typename Visit>
  static __device__ __forceinline__ void each_vector(const QkvRopeAppendParams& p, int lane, Visit visit) {
    const int head_size = static_cast<int>(p.cache.head_size);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Pair pair(lane + i * kLanes, kWidth, static_cast<int>(p.rotary_pairs));
      if (pair.first < head_size) visit(i, 0, pair.first);
      if (pair.second < head_size) visit(i, 1, pair.second);
    }
  }
  __device__ __forceinline__ void load(const Element* head, const QkvRopeAppendParams& p, int lane) {
    each_vector(p, lane, [&](int i, int side, int offset) { vectors[i][side].load(head + offset); });
  }
  __device__ __forceinline__ void store(Element* head, const QkvRopeAppendParams& p, int lane) const {
    each_vector(p, lane, [&](int i, int side, int offset) { vectors[i][side].store(head + offset); });
  }
  // Vectors past the head's end become zeros.
  __device__ __forceinline__ void unpack(float (&values)[kPairs][2][kWidth], const QkvRopeAppendParams& p,
                                         int lane) const {
#pragma unroll
    for (int i = 0; i < kPairs * 2 * kWidth; ++i) values[i / kWidth / 2][i / kWidth % 2][i % kWidth] = 0.0f;
    each_vector(p, lane, [&](int i, int side, int) { vectors[i][side].unpack(values[i][side]); });
  }
  // values *= factor * this weight, or factor alone.
  __device__ __forceinline__ void scale(float (&values)[kPairs][2][kWidth], float factor, bool is_weighted,
                                        const QkvRopeAppendParams& p, int lane) const {
    each_vector(p, lane, [&](int i, int side, int) {
      float weights[kWidth];
      vectors[i][side].unpack(weights);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[i][side][e] *= is_weighted ? factor * weights[e] : factor;
    });
  }
};

// Angles of one lane's rotated pairs.
template <int kWidth, int kLanes, int kPairs>
struct Angles {
  float cosine[kPairs][kWidth];
  float sine[kPairs][kWidth];

  __device__ __forceinline__ void load(const QkvRopeAppendParams& p, int64_t token, int lane) {
    Vector<float, kWidth> vector;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int offset = (lane + i * kLanes) * kWidth;
      if (offset >= p.rotary_pairs) continue;
      vector.load(p.cosine + token * p.rotary_pairs + offset);
      vector.unpack(cosine[i]);
      vector.load(p.sine + token * p.rotary_pairs + offset);
      vector.unpack(sine[i]);
    }
  }
  __device__ __forceinline__ void rotate(float (&values)[kPairs][2][kWidth], const QkvRopeAppendParams& p,
                                         int lane) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if ((lane + i * kLanes) * kWidth >= p.rotary_pairs) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float x = values[i][0][e], y = values[i][1][e];
        values[i][0][e] = x * cosine[i][e] - y * sine[i][e];
        values[i][1][e] = y * cosine[i][e] + x * sine[i][e];
      }
    }
  }
};

// The lanes of a warp that hold one head together.
template <int kLanes>
__device__ __forceinline__ unsigned lanes_of_head() {
  const unsigned first_lane = threadIdx.x % 32 / kLanes * kLanes;
  return (kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1) << first_lane;
}

// 1 / root of the mean square over a head, which kLanes neighbouring lanes hold.
template <int kLanes, int kPairs, int kWidth>
__device__ __forceinline__ float inverse_root_mean_square(const float (&values)[kPairs][2][kWidth],
                                                          const QkvRopeAppendParams& p) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs * 2 * kWidth; ++i) {
    const float x = values[i / kWidth / 2][i / kWidth % 2][i % kWidth];
    sum += x * x;
  }
  sum = fold_lanes<kLanes / 2, 1>(sum, Add(), lanes_of_head<kLanes>());
  return rsqrtf(sum / static_cast<float>(p.cache.head_size) + p.epsilon);
}

// Normalises and rotates what lanes hold of a head. `weight_part`: of its norm's weight, where it has one.
template <int kLanes, typename Element, int kWidth, int kPairs>
__device__ __forceinline__ void prepare_head(HeadPart<Element, kWidth, kLanes, kPairs>& part,
                                             const HeadPart<Element, kWidth, kLanes, kPairs>& weight_part,
                                             const Angles<kWidth, kLanes, kPairs>& angles, bool is_normed,
                                             bool is_weighted, bool is_rotated, const QkvRopeAppendParams& p,
                                             int lane) {
  if (!is_normed && !is_rotated) return;  // keeps its bits
  float values[kPairs][2][kWidth];
  part.unpack(values, p, lane);
  if (is_normed) weight_part.scale(values, inverse_root_mean_square<kLanes>(values, p), is_weighted, p, lane);
  if (is_rotated) angles.rotate(values, p, lane);
#pragma unroll
  for (int i = 0; i < kPairs * 2; ++i) part.vectors[i / 2][i % 2].pack(values[i / 2][i % 2]);
}

// Where a query head is captured; null where it is not. Of the queries of a chunk that share a row only the
// last is captured, so no two writers meet.
template <typename Element>
__device__ __forceinline__ Element* captured(const QkvRopeAppendParams& p, int64_t token, int head) {
  const int64_t sequence = sequence_of(p.packing, token);
  if (sequence < 0) return nullptr;
  const int row = static_cast<int>(token - p.packing.first(sequence));
  const int position = p.capture_past_len.at(sequence, 0) + row;
  if (position < 0 || row + p.capture_rows < p.packing.count(sequence)) return nullptr;
  const int64_t place = static_cast<unsigned>(position) % static_cast<unsigned>(p.capture_rows);
  const int64_t rows = (sequence * p.capture_rows + place) * p.num_heads + head;
  return static_cast<Element*>(p.capture) + rows * p.cache.head_size;
}

}  // namespace ortolan::cuda
