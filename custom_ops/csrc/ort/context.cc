#include "context.h"

#include <cstring>
#include <exception>
#include <mutex>

#ifdef ORTOLAN_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ortolan {

std::string to_string(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

int64_t Tensor::size() const {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return count;
}

void NodeInfo::fail(const std::string& problem) const {
  throw InvalidArgument("ortolan." + std::string(schema->name) + " node '" + name + "': " + problem);
}

void check(const OrtApi* api, OrtStatus* status) {
  if (!status) return;
  const std::string message = abi::GetErrorMessage::of(api)(status);
  abi::ReleaseStatus::of(api)(status);
  throw std::runtime_error("ONNX Runtime rejected a call of the operator library: " + message);
}

Context::Context(const NodeInfo& node, OrtKernelContext* context)
    : node_(node), context_(context), inputs_(node.schema->inputs.size()) {
  check(node.api, abi::KernelContext_GetInputCount::of(node.api)(context, &num_inputs_));
}

void* Context::gpu_stream() const {
  void* stream = nullptr;
  check(node_.api, abi::KernelContext_GetGPUComputeStream::of(node_.api)(context_, &stream));
  return stream;
}

const Tensor& Context::input(size_t index) const {
  std::optional<Tensor>& known = inputs_[index];
  if (!known) known = read_input(index);
  return *known;
}

Tensor Context::read_input(size_t index) const {
  const Port& port = node_.schema->inputs[index];
  const OrtValue* value = nullptr;
  if (index < num_inputs_)
    check(node_.api, abi::KernelContext_GetInput::of(node_.api)(context_, index, &value));
  if (!value) {
    if (!port.optional) node_.fail(std::string("input '") + port.name + "' is missing");
    return {};
  }
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(node_.api, abi::GetTensorTypeAndShape::of(node_.api)(value, &info));
  size_t rank = 0;
  OrtStatus* status = abi::GetDimensionsCount::of(node_.api)(info, &rank);
  Tensor tensor;
  tensor.present = true;
  tensor.shape.resize(rank);
  if (!status) status = abi::GetDimensions::of(node_.api)(info, tensor.shape.data(), rank);
  abi::ReleaseTensorTypeAndShapeInfo::of(node_.api)(info);
  check(node_.api, status);
  check(node_.api, abi::GetTensorMutableData::of(node_.api)(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

const Tensor& Context::input(size_t index, std::span<const int64_t> dims) const {
  const Tensor& tensor = input(index);
  if (!tensor.present) return tensor;
  bool fits = tensor.shape.size() == dims.size();
  size_t axis = 0;
  for (int64_t dim : dims) {
    if (!fits) break;
    fits = dim < 0 || tensor.shape[axis] == dim;
    ++axis;
  }
  if (!fits)
    bad_shape(index, tensor, "with " + to_string({dims.begin(), dims.end()}) + ", where -1 means any size");
  return tensor;
}

Tensor Context::output(size_t index, const std::vector<int64_t>& shape) const {
  Tensor tensor;
  tensor.shape = shape;
  size_t num_outputs = 0;
  check(node_.api, abi::KernelContext_GetOutputCount::of(node_.api)(context_, &num_outputs));
  if (index >= num_outputs) return tensor;
  OrtValue* value = nullptr;
  check(node_.api,
        abi::KernelContext_GetOutput::of(node_.api)(context_, index, shape.data(), shape.size(), &value));
  if (!value) return tensor;
  tensor.present = true;
  check(node_.api, abi::GetTensorMutableData::of(node_.api)(value, &tensor.data));
  const Span span = span_of(node_.schema->outputs[index], tensor);
  check_apart(index, span);
  outputs_.emplace_back(index, span);
  return tensor;
}

Tensor Context::aliased_output(size_t index, const Tensor& source) const {
  const Port& port = node_.schema->outputs[index];
  Tensor tensor = output(index, source.shape);
  if (!source.present && tensor.present)
    node_.fail(std::string("output '") + port.name + "' continues input '" +
               node_.schema->inputs[port.alias].name + "', which is not given; leave out the output, too");
  if (!source.present) return tensor;
  if (!tensor.present) node_.fail(std::string("output '") + port.name + "' is missing");
  const int64_t bytes = span_of(port, tensor).bytes;
  if (tensor.data != source.data && bytes > 0) copy(tensor.data, source.data, bytes);
  return tensor;
}

Context::Span Context::span_of(const Port& port, const Tensor& tensor) const {
  return {
      tensor.as<const char>(),
      tensor.present ? tensor.size() * element_bytes(port.element(node_.element, node_.cache_element)) : 0};
}

void Context::check_apart(size_t index, const Span& output) const {
  const Schema& schema = *node_.schema;
  const Port& port = schema.outputs[index];
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Span other = span_of(schema.inputs[i], input(i));
    const bool reused = static_cast<int>(i) == port.reused_input();
    if (!output.overlaps(other)) continue;
    if (reused && output.begin == other.begin && output.bytes == other.bytes) continue;
    const std::string own =
        port.alias < 0 ? "" : std::string("the buffer of '") + schema.inputs[port.alias].name + "', or to ";
    node_.fail(std::string("output '") + port.name + "' shares the buffer of input '" +
               schema.inputs[i].name + "'; bind it to " + own + "memory that no input uses");
  }
  for (const auto& [other, span] : outputs_)
    if (output.overlaps(span))
      node_.fail(std::string("outputs '") + schema.outputs[other].name + "' and '" + port.name +
                 "' share a buffer; bind each to a buffer of its own");
}

void Context::copy(void* target, const void* source, size_t bytes) const {
#ifdef ORTOLAN_CUDA
  if (node_.provider == Provider::kCuda) {
    const cudaError_t error = cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice,
                                              static_cast<cudaStream_t>(gpu_stream()));
    if (error == cudaSuccess) return;
    cudaGetLastError();  // the thread forgets what is reported
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
#endif
  std::memcpy(target, source, bytes);
}

void Context::bad_shape(size_t index, const Tensor& tensor, const std::string& rule) const {
  const Port& port = node_.schema->inputs[index];
  node_.fail(std::string("input '") + port.name + "' has shape " + to_string(tensor.shape) + "; expected " +
             port.shape + " " + rule);
}

void OrtParallelFor::run(int64_t count, Task task, void* context) {
  if (count == 1) return task(context, 0);
  if (count < 1) return;
  struct Call {
    Task task;
    void* context;
    std::mutex mutex;
    std::exception_ptr error;
  } call{task, context, {}, nullptr};
  // Exceptions must not cross the runtime's threads: the first one is kept and thrown again here.
  auto body = [](void* data, size_t index) {
    Call& shared = *static_cast<Call*>(data);
    try {
      shared.task(shared.context, static_cast<int64_t>(index));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(shared.mutex);
      if (!shared.error) shared.error = std::current_exception();
    }
  };
  // A batch count of 0 leaves the partition to the runtime.
  check(api_, abi::KernelContext_ParallelFor::of(api_)(context_, body, static_cast<size_t>(count), 0, &call));
  if (call.error) std::rethrow_exception(call.error);
}

}  // namespace ortolan
