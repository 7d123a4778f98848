// Facts about element types: their sizes, and their numbers in the interfaces that tensors pass through.
#pragma once

#include <cstdint>

namespace ortolan {

enum class ElementType { kFloat32, kFloat16, kBFloat16, kInt32, kInt64, kUint8, kInt8, kFloat8E4M3 };

struct ElementFacts {
  int bytes;
  int onnx;        // TensorProto.DataType, which is ONNXTensorElementDataType, too
  int cuda_data;   // cudaDataType, as cuBLAS takes it
  int tensor_map;  // CUtensorMapDataType
};

constexpr ElementFacts facts_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return {.bytes = 4, .onnx = 1, .cuda_data = 0, .tensor_map = 7};
    case ElementType::kFloat16:
      return {.bytes = 2, .onnx = 10, .cuda_data = 2, .tensor_map = 6};
    case ElementType::kBFloat16:
      return {.bytes = 2, .onnx = 16, .cuda_data = 14, .tensor_map = 9};
    case ElementType::kInt32:
      return {.bytes = 4, .onnx = 6, .cuda_data = 10, .tensor_map = 4};
    case ElementType::kInt64:
      return {.bytes = 8, .onnx = 7, .cuda_data = 24, .tensor_map = 5};
    case ElementType::kUint8:
      return {.bytes = 1, .onnx = 2, .cuda_data = 8, .tensor_map = 0};
    case ElementType::kInt8:
      return {.bytes = 1, .onnx = 3, .cuda_data = 3, .tensor_map = 0};
    case ElementType::kFloat8E4M3:
      return {.bytes = 1, .onnx = 17, .cuda_data = 28, .tensor_map = 0};
  }
  return {};
}

// Whether elements are codes, which a scale for each row belongs to.
constexpr bool is_code(ElementType type) {
  return type == ElementType::kInt8 || type == ElementType::kFloat8E4M3;
}

constexpr int64_t element_bytes(ElementType type) { return facts_of(type).bytes; }

}  // namespace ortolan
