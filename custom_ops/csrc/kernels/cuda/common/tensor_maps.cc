#include "tensor_maps.h"

#include <library_types.h>

namespace ortolan::cuda {
namespace {

static_assert(facts_of(ElementType::kFloat16).tensor_map == CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
static_assert(facts_of(ElementType::kBFloat16).tensor_map == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
static_assert(facts_of(ElementType::kFloat32).cuda_data == CUDA_R_32F);
static_assert(facts_of(ElementType::kFloat16).cuda_data == CUDA_R_16F);
static_assert(facts_of(ElementType::kBFloat16).cuda_data == CUDA_R_16BF);

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function)
                                                                      : nullptr;
}

Encode encoder() {
  static const Encode found = find_encoder();
  return found;
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap& map, ElementType element, const void* data, const TensorShape& shape,
                            const TensorShape& box, bool promotes) {
  const Encode encode = encoder();
  if (!encode) return cudaErrorNotSupported;
  const int64_t bytes = element_bytes(element);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(shape.x), static_cast<cuuint64_t>(shape.y),
                              static_cast<cuuint64_t>(shape.z)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(shape.x * bytes),
                                static_cast<cuuint64_t>(shape.x * shape.y * bytes)};
  const cuuint32_t box_sizes[] = {static_cast<cuuint32_t>(box.x), static_cast<cuuint32_t>(box.y),
                                  static_cast<cuuint32_t>(box.z)};
  const cuuint32_t steps[] = {1, 1, 1};
  const auto type = static_cast<CUtensorMapDataType>(facts_of(element).tensor_map);
  const CUresult result =
      encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box_sizes, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             promotes ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t make_tensor_map(CUtensorMap& map, ElementType element, const void* data,
                            const StridedShape& shape) {
  const Encode encode = encoder();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4];
  for (int i = 0; i < 4; ++i) {
    sizes[i] = static_cast<cuuint64_t>(shape.sizes[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    steps[i] = 1;
    if (i < 3) strides[i] = static_cast<cuuint64_t>(shape.strides[i]);
  }
  const auto type = static_cast<CUtensorMapDataType>(facts_of(element).tensor_map);
  const CUresult result = encode(&map, type, 4, const_cast<void*>(data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace ortolan::cuda
