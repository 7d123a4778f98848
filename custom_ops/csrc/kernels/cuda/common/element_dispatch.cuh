// From an element type to the C++ type that kernels are compiled for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "kernels/element_types.h"

namespace ortolan::cuda {

// Calls f.operator()<Element>() for one of the 16-bit types.
template <typename Function>
auto with_half_element(ElementType element, Function&& f) {
  return element == ElementType::kFloat16 ? f.template operator()<__half>()
                                          : f.template operator()<__nv_bfloat16>();
}

// The same for one of all types that kernels compute in.
template <typename Function>
auto with_element(ElementType element, Function&& f) {
  return element == ElementType::kFloat32 ? f.template operator()<float>()
                                          : with_half_element(element, std::forward<Function>(f));
}

}  // namespace ortolan::cuda
