// cuBLAS, found at run time: the library that ONNX Runtime's CUDA provider has loaded, else the installed
// one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/params.h"

namespace ortolan::cuda {

// output[rows, columns] = input[rows, inner] * weight[columns, inner]^T + accumulate * output, float32 sums.
struct CublasProduct {
  ElementType element;
  bool output_float32;
  int64_t rows;
  int64_t columns;
  int64_t inner;
  const void* input;
  const void* weight;
  void* output;
  bool accumulate;
};

// One handle, for the device that was current when it was made. Not for two threads at once.
class Cublas {
 public:
  // Scratch memory that each product may use, so that nothing is allocated while a graph is captured.
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

  // Null where no cuBLAS is to be found.
  static std::unique_ptr<Cublas> create();
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  cudaError_t multiply(const CublasProduct& product, cudaStream_t stream, void* workspace);

 private:
  explicit Cublas(void* handle) : handle_(handle) {}
  void* handle_;
};

}  // namespace ortolan::cuda
