// The library's entry points: registers every operator, for every element type, with ONNX Runtime.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "../kernels/cpu/kernels.h"
#include "abi.h"
#include "context.h"
#include "operators.h"
#include "schemas.generated.h"

#if defined(__GNUC__)
#define ORTOLAN_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define ORTOLAN_EXPORT extern "C"
#endif

namespace ortolan {
namespace {

using Compute = void (*)(const Context&, cpu::ParallelFor&);

// One registration: an operator for one element type.
struct Operator : abi::CustomOp {
  const Schema* schema;
  Compute compute;
  ElementType element;
};

struct Kernel {
  NodeInfo node;
  Compute compute;
};

const Operator& as_operator(const abi::CustomOp* op) { return *static_cast<const Operator*>(op); }

// Runs `body` and turns what it throws into a status; nothing may unwind through the C ABI.
template <typename Body>
OrtStatus* guarded(const OrtApi* api, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const InvalidArgument& error) {
    return abi::CreateStatus::of(api)(abi::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return abi::CreateStatus::of(api)(abi::kFail, "ortolan: out of memory for scratch buffers");
  } catch (const std::exception& error) {
    return abi::CreateStatus::of(api)(abi::kFail, error.what());
  }
}

using Integer = abi::KernelInfoGetAttribute_int64;
using Real = abi::KernelInfoGetAttribute_float;

// The value of an attribute, if the node has it and its type is Value.
template <typename Reader, typename Value>
std::optional<Value> find_number(const OrtApi* api, const OrtKernelInfo* info, const char* name) {
  Value value{};
  OrtStatus* status = Reader::of(api)(info, name, &value);
  if (!status) return value;
  abi::ReleaseStatus::of(api)(status);
  return std::nullopt;
}

std::optional<std::string> find_text(const OrtApi* api, const OrtKernelInfo* info, const char* name) {
  size_t size = 0;
  OrtStatus* status = abi::KernelInfoGetAttribute_string::of(api)(info, name, nullptr, &size);
  if (status) {
    abi::ReleaseStatus::of(api)(status);
    return std::nullopt;
  }
  std::string text(size, '\0');
  check(api, abi::KernelInfoGetAttribute_string::of(api)(info, name, text.data(), &size));
  return text.c_str();
}

// ONNX Runtime reports an absent attribute and one of another type alike; only an absent one has its default.
template <typename Value>
void read_attribute(const NodeInfo& node, const OrtKernelInfo* info, const char* name, Value& value) {
  const std::optional<int64_t> integer = find_number<Integer, int64_t>(node.api, info, name);
  const std::optional<float> real = find_number<Real, float>(node.api, info, name);
  const std::optional<std::string> text = find_text(node.api, info, name);
  const auto take = [&](const auto& given, const char* expected) {
    if (given)
      value = *given;
    else if (integer || real || text)
      node.fail(std::string("attribute ") + name + " has another type; expected " + expected);
  };
  if constexpr (std::is_same_v<Value, int64_t>)
    take(integer, "an integer (INT)");
  else if constexpr (std::is_same_v<Value, float>)
    take(real, "a number (FLOAT)");
  else
    take(text, "a text (STRING)");
}

std::string read_node_name(const OrtApi* api, const OrtKernelInfo* info) {
  size_t size = 0;
  OrtStatus* status = abi::KernelInfo_GetNodeName::of(api)(info, nullptr, &size);
  if (status) abi::ReleaseStatus::of(api)(status);
  if (size == 0) return {};
  std::string text(size, '\0');
  check(api, abi::KernelInfo_GetNodeName::of(api)(info, text.data(), &size));
  return text.c_str();
}

GroupReduce parse_group_reduce(const NodeInfo& node, const std::string& text) {
  if (text == "mean") return GroupReduce::kMean;
  if (text == "max") return GroupReduce::kMax;
  if (text == "sum") return GroupReduce::kSum;
  node.fail("attribute group_reduce is '" + text + "'; allowed: mean, max, sum");
}

// Reads one attribute that the operator table lists; a name without a reader here is a build that drifted.
void read_schema_attribute(NodeInfo& node, const OrtKernelInfo* info, std::string_view name) {
  if (name == "window") return read_attribute(node, info, "window", node.window);
  if (name == "sink") return read_attribute(node, info, "sink", node.sink);
  if (name == "capacity") return read_attribute(node, info, "capacity", node.capacity);
  if (name == "scale") return read_attribute(node, info, "scale", node.scale);
  if (name == "softcap") return read_attribute(node, info, "softcap", node.softcap);
  if (name != "group_reduce") node.fail("attribute " + std::string(name) + " has no reader in the library");
  std::string reduce = "mean";
  read_attribute(node, info, "group_reduce", reduce);
  node.group_reduce = parse_group_reduce(node, reduce);
}

// Positions are int32, so nothing larger can be meant, and sums of two attributes cannot overflow.
void check_largest(const NodeInfo& node, const char* attribute, int64_t value) {
  constexpr int64_t largest = std::numeric_limits<int32_t>::max();
  if (value > largest)
    node.fail(std::string("attribute ") + attribute + " = " + std::to_string(value) + " must be at most " +
              std::to_string(largest));
}

void check_attributes(const NodeInfo& node) {
  check_largest(node, "window W", node.window);
  check_largest(node, "sink S", node.sink);
  check_largest(node, "capacity C", node.capacity);
  if (node.window == 0 || node.window < -1)
    node.fail("attribute window W = " + std::to_string(node.window) + "; allowed: -1 (none) or at least 1");
  if (node.sink < 0) node.fail("attribute sink S = " + std::to_string(node.sink) + " must be at least 0");
  if (node.capacity < 0)
    node.fail("attribute capacity C = " + std::to_string(node.capacity) +
              " must be at least 1, or 0 for M * P");
  if (node.capacity > 0 && node.capacity < node.sink + std::max<int64_t>(node.window, 1))
    node.fail("attribute capacity C = " + std::to_string(node.capacity) +
              " must be at least sink S + window W = " + std::to_string(node.sink) + " + " +
              std::to_string(std::max<int64_t>(node.window, 1)));
  if (!std::isfinite(node.scale) || node.scale < 0)
    node.fail("attribute scale is " + std::to_string(node.scale) +
              "; allowed: 0 (for 1/sqrt(D)) or a positive number");
  if (!std::isfinite(node.softcap) || node.softcap < 0)
    node.fail("attribute softcap is " + std::to_string(node.softcap) +
              "; allowed: 0 (none) or a positive number");
}

OrtStatus* create_kernel(const abi::CustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                         void** result) {
  return guarded(api, [&] {
    auto kernel = std::make_unique<Kernel>();
    NodeInfo& node = kernel->node;
    node.api = api;
    node.schema = as_operator(op).schema;
    node.element = as_operator(op).element;
    node.name = read_node_name(api, info);
    for (std::string_view name : node.schema->attributes) read_schema_attribute(node, info, name);
    check_attributes(node);
    kernel->compute = as_operator(op).compute;
    *result = kernel.release();
  });
}

OrtStatus* compute_kernel(void* pointer, OrtKernelContext* ort_context) {
  const Kernel& kernel = *static_cast<const Kernel*>(pointer);
  return guarded(kernel.node.api, [&] {
    OrtParallelFor parallel(kernel.node.api, ort_context);
    kernel.compute(Context(kernel.node, ort_context), parallel);
  });
}

int element_data_type(ElementType element) {
  return element == ElementType::kFloat32   ? abi::kFloat
         : element == ElementType::kFloat16 ? abi::kFloat16
                                            : abi::kBFloat16;
}

int port_type(const Operator& op, const Port& port) {
  switch (port.type) {
    case PortType::kElement:
      return element_data_type(op.element);
    case PortType::kFloat32:
      return abi::kFloat;
    case PortType::kInt32:
      return abi::kInt32;
  }
  return abi::kFloat;
}

// ONNX Runtime asks for aliases without naming the operator, so each schema has functions of its own.
template <const Schema& kSchema>
size_t alias_map(int** inputs, int** outputs) {
  size_t count = 0;
  for (const Port& port : kSchema.outputs) count += port.alias >= 0;
  *inputs = *outputs = nullptr;
  if (count == 0) return 0;
  *inputs = static_cast<int*>(std::malloc(count * sizeof(int)));
  *outputs = static_cast<int*>(std::malloc(count * sizeof(int)));
  if (!*inputs || !*outputs) return 0;
  size_t next = 0;
  for (size_t i = 0; i < kSchema.outputs.size(); ++i) {
    if (kSchema.outputs[i].alias < 0) continue;
    (*inputs)[next] = kSchema.outputs[i].alias;
    (*outputs)[next++] = static_cast<int>(i);
  }
  return count;
}

void release_map(int* inputs, int* outputs) {
  std::free(inputs);
  std::free(outputs);
}

size_t no_inplace(int** inputs, int** outputs) {
  *inputs = *outputs = nullptr;
  return 0;
}

template <const Schema& kSchema>
Operator define(Compute compute, ElementType element) {
  Operator op{};
  op.version = abi::kApiVersion;
  op.schema = &kSchema;
  op.compute = compute;
  op.element = element;
  op.GetName = [](const abi::CustomOp* self) { return as_operator(self).schema->name; };
  op.GetExecutionProviderType = [](const abi::CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](const abi::CustomOp* self) { return as_operator(self).schema->inputs.size(); };
  op.GetOutputTypeCount = [](const abi::CustomOp* self) { return as_operator(self).schema->outputs.size(); };
  op.GetInputType = [](const abi::CustomOp* self, size_t i) {
    return port_type(as_operator(self), as_operator(self).schema->inputs[i]);
  };
  op.GetOutputType = [](const abi::CustomOp* self, size_t i) {
    return port_type(as_operator(self), as_operator(self).schema->outputs[i]);
  };
  op.GetInputCharacteristic = [](const abi::CustomOp* self, size_t i) -> int {
    return as_operator(self).schema->inputs[i].optional ? abi::kOptional : abi::kRequired;
  };
  op.GetOutputCharacteristic = [](const abi::CustomOp* self, size_t i) -> int {
    return as_operator(self).schema->outputs[i].optional ? abi::kOptional : abi::kRequired;
  };
  op.GetInputMemoryType = [](const abi::CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const abi::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const abi::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const abi::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const abi::CustomOp*) { return 1; };
  op.CreateKernelV2 = create_kernel;
  op.KernelComputeV2 = compute_kernel;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetStartVersion = [](const abi::CustomOp*) { return 1; };
  op.GetEndVersion = [](const abi::CustomOp*) { return 1; };
  op.GetMayInplace = no_inplace;
  op.ReleaseMayInplace = release_map;
  op.GetAliasMap = alias_map<kSchema>;
  op.ReleaseAliasMap = release_map;
  return op;
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> list;
    for (ElementType element : {ElementType::kFloat32, ElementType::kFloat16}) {
      list.push_back(define<kRingKvAppendSchema>(compute_ring_kv_append, element));
      list.push_back(define<kSwaAttentionSchema>(compute_swa_attention, element));
      list.push_back(define<kSnapKvCaptureSchema>(compute_snapkv_capture, element));
      list.push_back(define<kSnapKvScoreSchema>(compute_snapkv_score, element));
      list.push_back(define<kKvCompactSchema>(compute_kv_compact, element));
    }
    return list;
  }();
  return all;
}

// The domain lives as long as the process: sessions keep pointers into it.
OrtCustomOpDomain* operator_domain(const OrtApi* api) {
  static OrtCustomOpDomain* const domain = [api] {
    OrtCustomOpDomain* created = nullptr;
    check(api, abi::CreateCustomOpDomain::of(api)("ortolan", &created));
    for (const Operator& op : operators()) check(api, abi::CustomOpDomain_Add::of(api)(created, &op));
    return created;
  }();
  return domain;
}

OrtStatus* refuse_old_runtime(const abi::ApiBase* base) {
  const OrtApi* first = base->GetApi(1);
  if (!first) return nullptr;  // without any API there is no way to say it
  const std::string message = std::string("ortolan: this is ONNX Runtime ") + base->GetVersionString() +
                              "; the operators need 1.20 or newer, run `pip install -U onnxruntime`";
  return abi::CreateStatus::of(first)(abi::kFail, message.c_str());
}

}  // namespace
}  // namespace ortolan

ORTOLAN_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const ortolan::abi::ApiBase* base) {
  using namespace ortolan;
  const OrtApi* api = base->GetApi(abi::kApiVersion);
  if (!api) return refuse_old_runtime(base);
  return guarded(api, [&] { check(api, abi::AddCustomOpDomain::of(api)(options, operator_domain(api))); });
}

// What the library was built with: "version;providers".
ORTOLAN_EXPORT const char* ortolan_library_info() { return ORTOLAN_VERSION ";cpu"; }

// Limits the CPU kernels to an instruction set (0 plain, 1 AVX2, 2 AVX-512), for tests; 0 where it is absent.
ORTOLAN_EXPORT int ortolan_limit_cpu_isa(int isa) {
  if (isa < 0 || isa > 2) return 0;
  return ortolan::cpu::limit_isa(static_cast<ortolan::cpu::Isa>(isa));
}
