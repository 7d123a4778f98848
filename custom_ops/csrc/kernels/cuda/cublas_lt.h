// Products of few rows whose sum with another array is written elsewhere, which cuBLAS's plain interface
// cannot do without a copy. cuBLASLt is found at run time, as cuBLAS is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cublas.h"

namespace ortolan::cuda {

// Steps of more rows change their sizes too often to plan for each.
constexpr int64_t kMostPlannedRows = 128;

// cuBLAS's number of an element type.
constexpr int cublas_type(ElementType element) {
  return element == ElementType::kFloat32 ? 0 : element == ElementType::kFloat16 ? 2 : 14;
}

// How one size of sum is computed: descriptions of its matrices, and the algorithm that cuBLASLt prefers.
class SumPlan {
 public:
  // Plans are made for arrays of this alignment.
  static bool is_aligned(const CublasProduct& product);

  SumPlan(void* handle, const CublasProduct& product, size_t workspace_bytes);
  ~SumPlan();
  SumPlan(const SumPlan&) = delete;
  SumPlan& operator=(const SumPlan&) = delete;

  // Whether cuBLASLt is there and has an algorithm.
  bool is_usable() const { return is_usable_; }
  // For usable plans; false where cuBLASLt fails.
  bool run(void* handle, const CublasProduct& product, cudaStream_t stream, void* workspace,
           size_t workspace_bytes) const;

 private:
  bool describe(const CublasProduct& product);
  bool choose(void* handle, size_t workspace_bytes);

  void* operation_ = nullptr;
  void* weight_ = nullptr;  // layouts
  void* input_ = nullptr;
  void* output_ = nullptr;
  uint64_t algorithm_[8] = {};
  bool is_usable_ = false;
};

}  // namespace ortolan::cuda
