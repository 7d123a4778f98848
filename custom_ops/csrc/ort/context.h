// A kernel's view of one call: typed tensors, named errors, the runtime's threads or stream.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi.h"
#include "kernels/cpu/parallel.h"
#include "kernels/fused_params.h"
#include "kernels/params.h"
#include "schema.h"

namespace ortolan {

// Becomes an OrtStatus with the code INVALID_ARGUMENT where the C ABI begins.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Provider { kCpu, kCuda };

// What the constructor of a kernel learned: who it is and what its attributes say.
struct NodeInfo {
  const OrtApi* api = nullptr;
  const Schema* schema = nullptr;
  Provider provider = Provider::kCpu;
  ElementType element = ElementType::kFloat32;
  std::string name;
  int64_t window = -1;
  int64_t sink = 0;
  int64_t capacity = 0;
  float scale = 0;
  float softcap = 0;
  GroupReduce group_reduce = GroupReduce::kMean;
  float epsilon = 1e-6f;
  float factor = 1.0f;
  int64_t num_heads = 0;
  GatedActivation activation = GatedActivation::kNone;

  [[noreturn]] void fail(const std::string& problem) const;
};

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape;
  bool present = false;

  int64_t dim(size_t axis) const { return shape[axis]; }
  int64_t size() const;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

std::string to_string(const std::vector<int64_t>& shape);

// Throws what `status` says; takes ownership of it.
void check(const OrtApi* api, OrtStatus* status);

class Context {
 public:
  Context(const NodeInfo& node, OrtKernelContext* context);

  const NodeInfo& node() const { return node_; }
  OrtKernelContext* raw() const { return context_; }

  // Whether tensor values lie in host memory, so that they can be checked before the kernel runs.
  bool values_readable() const { return node_.provider == Provider::kCpu; }
  // The cudaStream_t of this call.
  void* gpu_stream() const;

  // Input `index`, of the schema's rank; an absent optional input has `present` false.
  Tensor input(size_t index) const;
  // Input `index`, with these dimensions; -1 allows any.
  Tensor input(size_t index, std::initializer_list<int64_t> dims) const;
  // Output `index`; data is null where the caller did not ask for it.
  Tensor output(size_t index, const std::vector<int64_t>& shape) const;
  // The output that continues input `source`: the same buffer, or a copy of it.
  Tensor aliased_output(size_t index, const Tensor& source) const;

  // Fails with "input 'name' has shape ...; expected ...".
  [[noreturn]] void bad_shape(size_t index, const Tensor& tensor, const std::string& rule) const;

 private:
  void copy(void* target, const void* source, size_t bytes) const;
  // An output that is about to be copied to must leave every input as it is.
  void check_apart(size_t output_index, const char* target, int64_t bytes) const;
  int64_t port_bytes(const Port& port) const;  // of one element

  const NodeInfo& node_;
  OrtKernelContext* context_;
  size_t num_inputs_ = 0;
};

// Runs tasks on ONNX Runtime's intra-op threads.
class OrtParallelFor : public cpu::ParallelFor {
 public:
  explicit OrtParallelFor(const Context& context) : api_(context.node().api), context_(context.raw()) {}
  void run(int64_t count, Task task, void* context) override;

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
};

}  // namespace ortolan
