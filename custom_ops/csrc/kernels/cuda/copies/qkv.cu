// QkvRopeAppend and NormRope on CUDA: head norms, RoPE, the append of keys and values and the capture of
// queries on the way from the joint projection. Caches of codes get those of the rounded keys and values.
//
// Layout: kLanes neighbouring threads own one head of one token, as heads.cuh says. Vectors have 8 elements,
// or 1 where R is no multiple of 8. Grid: x walks tokens, y the heads of a token. What is neither normalised
// nor rotated keeps its bits. Determinism: a slot has one writer, as in RingKvAppend. Heads have a multiple
// of 8 elements, up to 512; every buffer is aligned to 16 bytes. Overlap: only norm weights are read before
// the kernel in front has ended.
#include "heads.cuh"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"
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
  prepare_head<kLanes>(part, weight_part, angles, normed, weight, rotated, p, lane);
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
