#include "cublas.h"

#include <dlfcn.h>

namespace ortolan::cuda {
namespace {

// The part of cuBLAS's C interface that is used here; the values are those of its documentation.
constexpr int kTransposed = 1, kPlain = 0;
constexpr int kComputeFloat32 = 68;
constexpr int kDefaultAlgorithm = -1;
constexpr int kNoReducedPrecisionSums = 16;

struct Functions {
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*set_stream)(void*, cudaStream_t) = nullptr;
  int (*set_workspace)(void*, void*, size_t) = nullptr;
  int (*set_math_mode)(void*, int) = nullptr;
  int (*multiply)(void*, int, int, int64_t, int64_t, int64_t, const void*, const void*, int, int64_t,
                  const void*, int, int64_t, const void*, void*, int, int64_t, int, int) = nullptr;
  bool complete = false;
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// The library stays loaded: handles of other owners may point into it.
Functions load() {
  void* library = nullptr;
  for (const int flags : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY})
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"})
      if (!library) library = dlopen(name, flags);
  Functions functions;
  functions.complete = library && find(library, "cublasCreate_v2", functions.create) &&
                       find(library, "cublasDestroy_v2", functions.destroy) &&
                       find(library, "cublasSetStream_v2", functions.set_stream) &&
                       find(library, "cublasSetWorkspace_v2", functions.set_workspace) &&
                       find(library, "cublasSetMathMode", functions.set_math_mode) &&
                       find(library, "cublasGemmEx_64", functions.multiply);
  return functions;
}

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

}  // namespace

std::unique_ptr<Cublas> Cublas::create() {
  void* handle = nullptr;
  if (!functions().complete || functions().create(&handle) != 0) return nullptr;
  std::unique_ptr<Cublas> cublas(new Cublas(handle));
  if (functions().set_math_mode(handle, kNoReducedPrecisionSums) != 0) return nullptr;
  return cublas;
}

Cublas::~Cublas() { functions().destroy(handle_); }

cudaError_t Cublas::multiply(const CublasProduct& p, cudaStream_t stream, void* workspace) {
  const Functions& f = functions();
  const float one = 1.0f, kept = p.accumulate ? 1.0f : 0.0f;
  // cuBLAS counts columns first: its result [columns, rows] is ours [rows, columns].
  const int type = facts_of(p.element).cuda_data;
  const int output_type = p.output_float32 ? facts_of(ElementType::kFloat32).cuda_data : type;
  int status = f.set_stream(handle_, stream);
  if (status == 0) status = f.set_workspace(handle_, workspace, kWorkspaceBytes);
  if (status == 0)
    status = f.multiply(handle_, kTransposed, kPlain, p.columns, p.rows, p.inner, &one, p.weight, type,
                        p.inner, p.input, type, p.inner, &kept, p.output, output_type, p.columns,
                        kComputeFloat32, kDefaultAlgorithm);
  return status == 0 ? cudaSuccess : cudaErrorUnknown;
}

}  // namespace ortolan::cuda
