#include "cublas_lt.h"

#include <dlfcn.h>

namespace ortolan::cuda {
namespace {

// The part of cuBLASLt's C interface that is used here; the values are those of its documentation.
constexpr int kTransposed = 1;
constexpr int kComputeFloat32 = 68;
constexpr int kTransposesFirst = 3;                           // of a product's description
constexpr int kMaxWorkspaceBytes = 1, kReductionSchemes = 3;  // of a preference
constexpr int kFirstAlignment = 5, kLastAlignment = 8;        // of a preference, one for each matrix
constexpr uint32_t kSumsOfComputeType = 2;                    // partial sums are float32
constexpr uint32_t kAlignment = 16;

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

struct Functions {
  int (*create_operation)(void**, int, int) = nullptr;
  int (*destroy_operation)(void*) = nullptr;
  int (*set_operation)(void*, int, const void*, size_t) = nullptr;
  int (*create_layout)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*destroy_layout)(void*) = nullptr;
  int (*create_preference)(void**) = nullptr;
  int (*destroy_preference)(void*) = nullptr;
  int (*set_preference)(void*, int, const void*, size_t) = nullptr;
  int (*find_algorithms)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*) = nullptr;
  int (*multiply)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
                  void*, void*, void*, const void*, void*, size_t, cudaStream_t) = nullptr;
  bool complete = false;
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// cuBLAS has loaded it: plans are made for its handles.
Functions load() {
  void* library = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
    if (!library) library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  Functions f;
  f.complete = library && find(library, "cublasLtMatmulDescCreate", f.create_operation) &&
               find(library, "cublasLtMatmulDescDestroy", f.destroy_operation) &&
               find(library, "cublasLtMatmulDescSetAttribute", f.set_operation) &&
               find(library, "cublasLtMatrixLayoutCreate", f.create_layout) &&
               find(library, "cublasLtMatrixLayoutDestroy", f.destroy_layout) &&
               find(library, "cublasLtMatmulPreferenceCreate", f.create_preference) &&
               find(library, "cublasLtMatmulPreferenceDestroy", f.destroy_preference) &&
               find(library, "cublasLtMatmulPreferenceSetAttribute", f.set_preference) &&
               find(library, "cublasLtMatmulAlgoGetHeuristic", f.find_algorithms) &&
               find(library, "cublasLtMatmul", f.multiply);
  return f;
}

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

}  // namespace

bool SumPlan::is_aligned(const CublasProduct& p) {
  const int64_t bytes = element_bytes(p.element);
  uint64_t bits = static_cast<uint64_t>(p.inner * bytes) | static_cast<uint64_t>(p.columns * bytes);
  for (const void* data : {p.weight, p.input, p.addend, static_cast<const void*>(p.output)})
    bits |= reinterpret_cast<uint64_t>(data);
  return bits % kAlignment == 0;
}

SumPlan::SumPlan(void* handle, const CublasProduct& product, size_t workspace_bytes) {
  is_usable_ = functions().complete && describe(product) && choose(handle, workspace_bytes);
}

SumPlan::~SumPlan() {
  for (void* layout : {weight_, input_, output_})
    if (layout) functions().destroy_layout(layout);
  if (operation_) functions().destroy_operation(operation_);
}

// cuBLASLt counts columns first: its result [columns, rows] is ours [rows, columns].
bool SumPlan::describe(const CublasProduct& p) {
  const Functions& f = functions();
  const int element = cublas_type(p.element), scale = cublas_type(ElementType::kFloat32);
  const int result = p.output_float32 ? scale : element;
  return f.create_operation(&operation_, kComputeFloat32, scale) == 0 &&
         f.set_operation(operation_, kTransposesFirst, &kTransposed, sizeof kTransposed) == 0 &&
         f.create_layout(&weight_, element, p.inner, p.columns, p.inner) == 0 &&
         f.create_layout(&input_, element, p.inner, p.rows, p.inner) == 0 &&
         f.create_layout(&output_, result, p.columns, p.rows, p.columns) == 0;
}

bool SumPlan::choose(void* handle, size_t workspace_bytes) {
  const Functions& f = functions();
  void* preference = nullptr;
  if (f.create_preference(&preference) != 0) return false;
  const uint64_t bytes = workspace_bytes;
  int status = f.set_preference(preference, kMaxWorkspaceBytes, &bytes, sizeof bytes);
  if (status == 0)
    status = f.set_preference(preference, kReductionSchemes, &kSumsOfComputeType, sizeof kSumsOfComputeType);
  for (int matrix = kFirstAlignment; matrix <= kLastAlignment && status == 0; ++matrix)
    status = f.set_preference(preference, matrix, &kAlignment, sizeof kAlignment);
  Heuristic best{};
  int count = 0;
  if (status == 0)
    status = f.find_algorithms(handle, operation_, weight_, input_, output_, output_, preference, 1, &best,
                               &count);
  f.destroy_preference(preference);
  if (status != 0 || count == 0 || best.status != 0) return false;
  for (int i = 0; i < 8; ++i) algorithm_[i] = best.algorithm[i];
  return true;
}

bool SumPlan::run(void* handle, const CublasProduct& p, cudaStream_t stream, void* workspace,
                  size_t workspace_bytes) const {
  const float one = 1.0f;
  return functions().multiply(handle, operation_, &one, p.weight, weight_, p.input, input_, &one, p.addend,
                              output_, p.output, output_, algorithm_, workspace, workspace_bytes,
                              stream) == 0;
}

}  // namespace ortolan::cuda
