// The library's entry points: registers every operator, for every element type, with ONNX Runtime.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "attributes.h"
#include "context.h"
#include "kernels/cpu/kernels.h"
#include "operators.h"
#include "schemas.generated.h"

#if defined(__GNUC__)
#define ORTOLAN_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define ORTOLAN_EXPORT extern "C"
#endif

namespace ortolan {
namespace {

// One registration: an operator for one provider and one element type.
struct Operator : abi::CustomOp {
  const Schema* schema;
  Compute compute;
  Provider provider;
  ElementType element;
};

struct Kernel {
  NodeInfo node;
  Compute compute;
  Resources resources;
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

OrtStatus* create_kernel(const abi::CustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                         void** result) {
  return guarded(api, [&] {
    auto kernel = std::make_unique<Kernel>();
    NodeInfo& node = kernel->node;
    node.api = api;
    node.schema = as_operator(op).schema;
    node.provider = as_operator(op).provider;
    node.element = as_operator(op).element;
    read_attributes(node, info);
    kernel->compute = as_operator(op).compute;
    kernel->resources = acquire_resources(node.provider);
    *result = kernel.release();
  });
}

OrtStatus* compute_kernel(void* pointer, OrtKernelContext* ort_context) {
  const Kernel& kernel = *static_cast<const Kernel*>(pointer);
  return guarded(kernel.node.api, [&] { kernel.compute(Context(kernel.node, ort_context)); });
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
    case PortType::kInt64:
      return abi::kInt64;
  }
  return abi::kFloat;
}

// The input whose buffer an output may take, or -1.
int reused_input(const Port& port) { return port.alias >= 0 ? port.alias : port.spends; }

// Pairs of such ports; ONNX Runtime asks for them without naming the operator, so each schema has a function
// of its own. They are declared as what may happen in place, not as aliases: an alias that is no graph output
// holds even where the old value is a constant, the caller's, or read again.
template <const Schema& kSchema>
size_t reused_ports(int** inputs, int** outputs) {
  size_t count = 0;
  for (const Port& port : kSchema.outputs) count += reused_input(port) >= 0;
  *inputs = *outputs = nullptr;
  if (count == 0) return 0;
  *inputs = static_cast<int*>(std::malloc(count * sizeof(int)));
  *outputs = static_cast<int*>(std::malloc(count * sizeof(int)));
  if (!*inputs || !*outputs) return 0;
  size_t next = 0;
  for (size_t i = 0; i < kSchema.outputs.size(); ++i) {
    if (reused_input(kSchema.outputs[i]) < 0) continue;
    (*inputs)[next] = reused_input(kSchema.outputs[i]);
    (*outputs)[next++] = static_cast<int>(i);
  }
  return count;
}

void release_map(int* inputs, int* outputs) {
  std::free(inputs);
  std::free(outputs);
}

template <const Schema& kSchema>
Operator define(Compute compute, Provider provider, ElementType element) {
  Operator op{};
  op.version = abi::kApiVersion;
  op.schema = &kSchema;
  op.compute = compute;
  op.provider = provider;
  op.element = element;
  op.GetName = [](const abi::CustomOp* self) { return as_operator(self).schema->name; };
  op.GetExecutionProviderType = [](const abi::CustomOp* self) -> const char* {
    return as_operator(self).provider == Provider::kCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
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
  op.GetInputMemoryType = [](const abi::CustomOp* self, size_t i) -> int {
    return as_operator(self).schema->inputs[i].on_host ? abi::kHostInput : abi::kDefaultMemory;
  };
  op.GetVariadicInputMinArity = [](const abi::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const abi::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const abi::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const abi::CustomOp*) { return 1; };
  op.CreateKernelV2 = create_kernel;
  op.KernelComputeV2 = compute_kernel;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetStartVersion = [](const abi::CustomOp*) { return 1; };
  op.GetEndVersion = [](const abi::CustomOp*) { return 1; };
  op.GetMayInplace = reused_ports<kSchema>;
  op.ReleaseMayInplace = release_map;
  op.GetAliasMap = [](int**, int**) -> size_t { return 0; };
  op.ReleaseAliasMap = release_map;
  return op;
}

void define_all(std::vector<Operator>& list, const Computes& computes, Provider provider,
                ElementType element) {
  list.push_back(define<kRingKvAppendSchema>(computes.ring_kv_append, provider, element));
  list.push_back(define<kSwaAttentionSchema>(computes.swa_attention, provider, element));
  list.push_back(define<kSnapKvCaptureSchema>(computes.snapkv_capture, provider, element));
  list.push_back(define<kSnapKvScoreSchema>(computes.snapkv_score, provider, element));
  list.push_back(define<kKvCompactSchema>(computes.kv_compact, provider, element));
  if (element == ElementType::kFloat32)  // without a port of that type an operator is registered once
    list.push_back(define<kKvSelectSchema>(computes.kv_select, provider, element));
  if (provider == Provider::kCpu) return;  // the schemas below are CUDA-only
  list.push_back(define<kFusedLinearSchema>(computes.fused_linear, provider, element));
  list.push_back(define<kQkvRopeAppendSchema>(computes.qkv_rope_append, provider, element));
  if (element == ElementType::kFloat32)
    list.push_back(define<kRopeAnglesSchema>(computes.rope_angles, provider, element));
  list.push_back(define<kLastRowsSchema>(computes.last_rows, provider, element));
  list.push_back(define<kRmsNormAddSchema>(computes.rms_norm_add, provider, element));
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> list;
    for (ElementType element : {ElementType::kFloat32, ElementType::kFloat16})
      define_all(list, cpu_computes(), Provider::kCpu, element);
#ifdef ORTOLAN_CUDA
    for (ElementType element : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16})
      define_all(list, cuda_computes(), Provider::kCuda, element);
#endif
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

// ONNX Runtime refuses a domain that it is given twice, and an entry of the options outlives their copying.
void register_once(const OrtApi* api, OrtSessionOptions* options) {
  constexpr const char* kRegistered = "ortolan.operators_registered";
  int registered = 0;
  check(api, abi::HasSessionConfigEntry::of(api)(options, kRegistered, &registered));
  if (registered) return;
  check(api, abi::AddCustomOpDomain::of(api)(options, operator_domain(api)));
  check(api, abi::AddSessionConfigEntry::of(api)(options, kRegistered, "1"));
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

// Registers the operators with session options; does nothing where they already are.
ORTOLAN_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const ortolan::abi::ApiBase* base) {
  using namespace ortolan;
  const OrtApi* api = base->GetApi(abi::kApiVersion);
  if (!api) return refuse_old_runtime(base);
  return guarded(api, [&] { register_once(api, options); });
}

// What the library was built with: "version;providers".
#ifdef ORTOLAN_CUDA
ORTOLAN_EXPORT const char* ortolan_library_info() { return ORTOLAN_VERSION ";cpu;cuda"; }
#else
ORTOLAN_EXPORT const char* ortolan_library_info() { return ORTOLAN_VERSION ";cpu"; }
#endif

// Limits the CPU kernels to an instruction set (0 plain, 1 AVX2, 2 AVX-512), for tests; 0 where it is absent.
ORTOLAN_EXPORT int ortolan_limit_cpu_isa(int isa) {
  if (isa < 0 || isa > 2) return 0;
  return ortolan::cpu::limit_isa(static_cast<ortolan::cpu::Isa>(isa));
}
