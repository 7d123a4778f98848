// A kernel's view of one call: typed tensors, named errors, the runtime's threads or stream.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "node.h"

namespace ortolan {

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
  const Tensor& input(size_t index) const;
  // Input `index`, with these dimensions; -1 allows any.
  const Tensor& input(size_t index, std::initializer_list<int64_t> dims) const {
    return input(index, std::span(dims.begin(), dims.size()));
  }
  const Tensor& input(size_t index, std::span<const int64_t> dims) const;
  // Output `index`; data is null where the caller did not ask for it. It shares no memory with an input or
  // with another output, but for all of the one input that its port may continue: kernels read while they
  // write.
  Tensor output(size_t index, const std::vector<int64_t>& shape) const;
  // The output that continues input `source`: the same buffer, or a copy of it; absent where that is.
  Tensor aliased_output(size_t index, const Tensor& source) const;

  // Fails with "input 'name' has shape ...; expected ...".
  [[noreturn]] void bad_shape(size_t index, const Tensor& tensor, const std::string& rule) const;

 private:
  // Where a tensor lies.
  struct Span {
    const char* begin;
    int64_t bytes;

    bool overlaps(const Span& other) const {
      return bytes > 0 && other.bytes > 0 && begin < other.begin + other.bytes && other.begin < begin + bytes;
    }
  };

  Tensor read_input(size_t index) const;
  void copy(void* target, const void* source, size_t bytes) const;
  Span span_of(const Port& port, const Tensor& tensor) const;
  void check_apart(size_t index, const Span& output) const;

  const NodeInfo& node_;
  OrtKernelContext* context_;
  size_t num_inputs_ = 0;
  mutable std::vector<std::optional<Tensor>> inputs_;     // that were read, each once
  mutable std::vector<std::pair<size_t, Span>> outputs_;  // that were taken
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
