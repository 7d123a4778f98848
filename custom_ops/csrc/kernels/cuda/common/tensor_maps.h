// Descriptors of tensors in device memory for the copies that sm_90's tensor unit makes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"

namespace ortolan::cuda {

// Sizes of three axes, the contiguous one first.
struct TensorShape {
  int64_t x;
  int64_t y;
  int64_t z;
};

// A map of a dense tensor of 16-bit elements whose boxes arrive in rows of 128 swizzled bytes; what a box has
// beyond the tensor becomes zeros. `promotes`: what is read comes to L2 in 256 bytes. The driver's encoder is
// looked up at run time: the library does not link the driver.
cudaError_t make_tensor_map(CUtensorMap& map, ElementType element, const void* data, const TensorShape& shape,
                            const TensorShape& box, bool promotes = true);

// A tensor of four axes, the contiguous one first; bytes from an index to the next on the others.
struct StridedShape {
  int64_t sizes[4];
  int64_t strides[3];
  int64_t box[4];
};

// The same of a tensor of any strides, for what is read once: nothing more is brought to L2.
cudaError_t make_tensor_map(CUtensorMap& map, ElementType element, const void* data,
                            const StridedShape& shape);

// The same of a cache, [N * Hkv, P, D], in boxes of `box_rows` slots and 64 columns.
inline cudaError_t make_cache_map(CUtensorMap& map, ElementType element, const void* data,
                                  const CacheLayout& cache, int64_t box_rows, bool promotes = true) {
  const TensorShape slots{cache.head_size, cache.page_slots, cache.num_pages * cache.num_kv_heads};
  return make_tensor_map(map, element, data, slots, {64, box_rows, 1}, promotes);
}

}  // namespace ortolan::cuda
