// QkvRopeAppend and NormRope on CUDA: head norms, RoPE, the append of keys and values and the capture of
// queries on the way from the joint projection. Caches of codes get those of the rounded keys and values.
//
// Layout: kLanes neighbouring threads own one head of one token. A lane owns two vectors of it (a Pair),
// those which RoPE mixes, so that no element travels between lanes; elements that are not rotated are paired
// with their neighbours. Vectors have 8 elements, or 1 where R is no multiple of 8. Grid: x walks tokens, y
// the heads of a token. All arithmetic is float32 and rounded once; what is neither normalised nor rotated
// keeps its bits. Determinism: the sum of a norm has one fixed order (lanes, then a butterfly); a slot has
// one writer, as in RingKvAppend. Heads have a multiple of 8 elements, up to 512; every buffer is aligned to
// 16 bytes. Overlap: only norm weights are read before the kernel in front has ended.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/packed_rows.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "kernels/cuda/operators.generated.h"
#include "kernels/row_scale.h"

namespace ortolan::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMaxHeadSize = 512;
constexpr int kWarp = 32;

// Blocks of the most threads that a multiprocessor must hold: 4 leave 64 registers a thread, which is enough
// without spills; 5 spill and are slower. Codes take more registers.
template <typename Element, int kWidth, bool kCodes>
constexpr int kMinBlocks = sizeof(Element) == 2 && kWidth == 8 ? (kCodes ? 3 : 4) : 1;

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
  const unsigned first_lane = threadIdx.x % kWarp / kLanes * kLanes;
  return (kLanes == kWarp ? ~0u : (1u << kLanes % kWarp) - 1) << first_lane;
}

// Stores a head as codes and their scale.
template <int kLanes, typename Element, int kWidth, int kPairs>
__device__ __forceinline__ void store_codes(const HeadPart<Element, kWidth, kLanes, kPairs>& part,
                                            const QkvRopeAppendParams& p, int64_t row, bool is_value,
                                            int lane) {
  using Part = HeadPart<Element, kWidth, kLanes, kPairs>;
  float values[kPairs][2][kWidth], largest = 0;
  part.unpack(values, p, lane);
  bool is_nan = false;
#pragma unroll
  for (int i = 0; i < kPairs * 2 * kWidth; ++i) {
    const float magnitude = fabsf(values[i / kWidth / 2][i / kWidth % 2][i % kWidth]);
    is_nan |= magnitude != magnitude;
    largest = fmaxf(largest, magnitude);
  }
  const unsigned lanes = lanes_of_head<kLanes>();
  largest = fold_lanes<kLanes / 2, 1>(largest, Max(), lanes);
  is_nan = (__ballot_sync(lanes, is_nan) & lanes) != 0;
  const RowScale scale = RowScale::of(p.cache_element, largest, is_nan);
  if (lane == 0) (is_value ? p.value_scale : p.key_scale)[row] = scale.value;
  uint8_t* target = static_cast<uint8_t*>(is_value ? p.value_cache : p.key_cache) + row * p.cache.head_size;
  Part::each_vector(p, lane, [&](int i, int side, int offset) {
    Vector<uint8_t, kWidth> codes;
    uint8_t bytes[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) bytes[e] = scale.code(values[i][side][e]);
    __builtin_memcpy(codes.words, bytes, kWidth);
    codes.store(target + offset);
  });
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

// Where a head of a token goes; null where it is dropped.
template <typename Element>
__device__ __forceinline__ Element* destination(const QkvRopeAppendParams& p, int64_t token, int head) {
  if (head < p.num_heads)
    return static_cast<Element*>(p.query) + (token * p.num_heads + head) * p.cache.head_size;
  const int64_t key_head = head - p.num_heads;
  const bool is_key = key_head < p.cache.num_kv_heads;
  const int64_t kv_head = is_key ? key_head : key_head - p.cache.num_kv_heads;
  const int64_t offset = append_offset(p.cache, p.packing, p.past_len, token, kv_head);
  return offset < 0 ? nullptr : static_cast<Element*>(is_key ? p.key_cache : p.value_cache) + offset;
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

// `kCodes`: whether caches hold codes.
template <typename Element, int kWidth, int kLanes, int kPairs, bool kCodes>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<Element, kWidth, kCodes>)
    move_heads(const QkvRopeAppendParams p) {
  launch_dependents();
  using Part = HeadPart<Element, kWidth, kLanes, kPairs>;
  const int lane = threadIdx.x % kLanes;
  const int64_t token = blockIdx.x, num_kv_heads = p.cache.num_kv_heads;
  const int head = blockIdx.y * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  if (head >= p.num_heads + 2 * num_kv_heads) return;
  const bool is_value = head >= p.num_heads + num_kv_heads;
  const void* weight = is_value ? nullptr : head < p.num_heads ? p.query_norm_weight : p.key_norm_weight;
  const bool normed = weight || (is_value && p.value_norm);
  Part part, weight_part;
  if (weight) weight_part.load(static_cast<const Element*>(weight), p, lane);

  wait_for_previous_kernel();
  const int64_t row_heads = p.num_heads + (p.value_is_key ? 1 : 2) * num_kv_heads;
  const int64_t row_head = is_value && p.value_is_key ? head - num_kv_heads : head;
  const int64_t source = (token * row_heads + row_head) * p.cache.head_size;
  part.load(static_cast<const Element*>(p.qkv) + source, p, lane);
  const bool rotated = !is_value && p.rotary_pairs > 0;
  Angles<kWidth, kLanes, kPairs> angles;
  if (rotated) angles.load(p, token, lane);
  const bool is_coded = kCodes && head >= p.num_heads;
  const int64_t kv_head = is_value ? head - p.num_heads - num_kv_heads : head - p.num_heads;
  const int64_t row = is_coded ? append_row(p.cache, p.packing, p.past_len, token, kv_head) : -1;
  Element* target = is_coded ? nullptr : destination<Element>(p, token, head);
  if (normed || rotated) {
    float values[kPairs][2][kWidth];
    part.unpack(values, p, lane);
    if (normed) weight_part.scale(values, inverse_root_mean_square<kLanes>(values, p), weight, p, lane);
    if (rotated) angles.rotate(values, p, lane);
#pragma unroll
    for (int i = 0; i < kPairs * 2; ++i) part.vectors[i / 2][i % 2].pack(values[i / 2][i % 2]);
  }
  if (is_coded && row >= 0) store_codes<kLanes>(part, p, row, is_value, lane);
  const bool captures = p.capture_rows > 0 && head < p.num_heads;
#pragma unroll 1  // two copies of the stores take more registers
  for (bool is_copy = false; target; is_copy = true) {
    part.store(target, p, lane);
    target = captures && !is_copy ? captured<Element>(p, token, head) : nullptr;
  }
}

template <typename Element, int kWidth, int kLanes, int kPairs>
cudaError_t launch_heads(const QkvRopeAppendParams& p, const Launch& launch) {
  const int64_t threads = (p.num_heads + 2 * p.cache.num_kv_heads) * kLanes;
  const int64_t blocks_per_token = divide_up(threads, kMaxThreads);
  const int64_t block = divide_up(divide_up(threads, blocks_per_token), kWarp) * kWarp;
  const dim3 grid(static_cast<unsigned>(p.packing.num_tokens), static_cast<unsigned>(blocks_per_token));
  const auto kernel = is_code(p.cache_element) ? move_heads<Element, kWidth, kLanes, kPairs, true>
                                               : move_heads<Element, kWidth, kLanes, kPairs, false>;
  return launch_overlapped(kernel, grid, dim3(static_cast<unsigned>(block)), 0, launch, p);
}

template <typename Element>
cudaError_t launch_element(const QkvRopeAppendParams& p, const Launch& launch) {
  if (p.rotary_pairs % 8 != 0) return launch_heads<Element, 1, kWarp, kMaxHeadSize / 2 / kWarp>(p, launch);
  if (p.cache.head_size <= 64) return launch_heads<Element, 8, 4, 1>(p, launch);
  if (p.cache.head_size <= 128) return launch_heads<Element, 8, 8, 1>(p, launch);
  if (p.cache.head_size <= 256) return launch_heads<Element, 8, 16, 1>(p, launch);
  return launch_heads<Element, 8, kWarp, 1>(p, launch);
}

bool is_supported(const QkvRopeAppendParams& p) {
  const int64_t head_size = p.cache.head_size;
  const bool angles = p.rotary_pairs == 0 || (p.cosine && p.sine);
  return head_size > 0 && head_size <= kMaxHeadSize && head_size % 8 == 0 && p.rotary_pairs >= 0 &&
         2 * p.rotary_pairs <= head_size && angles;
}

cudaError_t move_all_heads(const QkvRopeAppendParams& p, const Launch& launch) {
  if (!is_supported(p)) return cudaErrorInvalidValue;
  if (p.packing.num_tokens == 0) return cudaSuccess;
  const int bytes = vector_bytes(16, {p.qkv, p.query_norm_weight, p.key_norm_weight, p.cosine, p.sine,
                                      p.query, p.key_cache, p.value_cache, p.capture});
  if (bytes < 16) return cudaErrorMisalignedAddress;
  return with_element(p.element, [&]<typename Element>() { return launch_element<Element>(p, launch); });
}

}  // namespace

cudaError_t qkv_rope_append(const QkvRopeAppendParams& p, const Launch& launch) {
  return p.packing.num_sequences == 0 ? cudaSuccess : move_all_heads(p, launch);
}

cudaError_t norm_rope(const NormRopeParams& p, const Launch& launch) {
  return p.num_heads == 0 ? cudaSuccess : move_all_heads(as_queries(p), launch);
}

}  // namespace ortolan::cuda
