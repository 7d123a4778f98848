// The library's entry points: registers every operator, for every element type, with ONNX Runtime.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "kernels/cpu/isa.h"
#include "operators.h"

#if defined(__GNUC__)
#define ORTOLAN_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define ORTOLAN_EXPORT extern "C"
#endif

namespace ortolan {
namespace {

// One registration: an operator for one provider, one element type, and one of caches.
struct Operator : abi::CustomOp {
  OperatorKernel kernel;
  Provider provider;
  ElementType element;
  ElementType cache_element;
};

struct Kernel {
  NodeInfo node;
  const OperatorKernel* functions;
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
    return abi::CreateStatus::of(api)(abi::kFail, "ortolan: cannot allocate memory for scratch buffers");
  } catch (const std::exception& error) {
    return abi::CreateStatus::of(api)(abi::kFail, error.what());
  }
}

OrtStatus* create_kernel(const abi::CustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                         void** result) {
  return guarded(api, [&] {
    const Operator& self = as_operator(op);
    auto kernel = std::make_unique<Kernel>();
    NodeInfo& node = kernel->node;
    node.api = api;
    node.schema = self.kernel.schema;
    node.provider = self.provider;
    node.element = self.element;
    node.cache_element = self.cache_element;
    node.name = read_node_name(api, info);
    node.attributes = self.kernel.read_attributes(node, info);
    kernel->functions = &self.kernel;
    if (self.kernel.acquire_resources) kernel->resources = self.kernel.acquire_resources();
    *result = kernel.release();
  });
}

OrtStatus* compute_kernel(void* pointer, OrtKernelContext* ort_context) {
  const Kernel& kernel = *static_cast<const Kernel*>(pointer);
  return guarded(kernel.node.api, [&] { kernel.functions->compute(kernel.node, ort_context); });
}

int port_type(const Operator& op, const Port& port) {
  return facts_of(port.element(op.element, op.cache_element)).onnx;
}

void release_map(int* inputs, int* outputs) {
  std::free(inputs);
  std::free(outputs);
}

Operator define(const OperatorKernel& kernel, Provider provider, ElementType element,
                ElementType cache_element) {
  Operator op{};
  op.version = abi::kApiVersion;
  op.kernel = kernel;
  op.provider = provider;
  op.element = element;
  op.cache_element = cache_element;
  op.GetName = [](const abi::CustomOp* self) { return as_operator(self).kernel.schema->name; };
  op.GetExecutionProviderType = [](const abi::CustomOp* self) -> const char* {
    return as_operator(self).provider == Provider::kCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
  op.GetInputTypeCount = [](const abi::CustomOp* self) {
    return as_operator(self).kernel.schema->inputs.size();
  };
  op.GetOutputTypeCount = [](const abi::CustomOp* self) {
    return as_operator(self).kernel.schema->outputs.size();
  };
  op.GetInputType = [](const abi::CustomOp* self, size_t i) {
    return port_type(as_operator(self), as_operator(self).kernel.schema->inputs[i]);
  };
  op.GetOutputType = [](const abi::CustomOp* self, size_t i) {
    return port_type(as_operator(self), as_operator(self).kernel.schema->outputs[i]);
  };
  op.GetInputCharacteristic = [](const abi::CustomOp* self, size_t i) -> int {
    return as_operator(self).kernel.schema->inputs[i].optional ? abi::kOptional : abi::kRequired;
  };
  op.GetOutputCharacteristic = [](const abi::CustomOp* self, size_t i) -> int {
    return as_operator(self).kernel.schema->outputs[i].optional ? abi::kOptional : abi::kRequired;
  };
  op.GetInputMemoryType = [](const abi::CustomOp* self, size_t i) -> int {
    return as_operator(self).kernel.schema->inputs[i].on_host ? abi::kHostInput : abi::kDefaultMemory;
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
  op.GetMayInplace = kernel.reused_ports;
  op.ReleaseMayInplace = release_map;
  op.GetAliasMap = [](int**, int**) -> size_t { return 0; };
  op.ReleaseAliasMap = release_map;
  return op;
}

void define_all(std::vector<Operator>& list, const std::vector<OperatorKernel>& kernels, Provider provider,
                std::initializer_list<ElementType> elements) {
  for (const OperatorKernel& kernel : kernels) {
    const bool has_compute = kernel.schema->has(PortType::kElement);
    const bool has_cache = kernel.schema->has(PortType::kCache);
    for (const ElementType element : elements)
      if (has_compute || has_cache || element == *elements.begin())
        list.push_back(define(kernel, provider, element, element));
    for (const ElementType code : {ElementType::kInt8, ElementType::kFloat8E4M3})
      for (const ElementType element : elements)
        if (has_cache && (has_compute || element == *elements.begin()))
          list.push_back(define(kernel, provider, element, code));
  }
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> list;
    define_all(list, cpu_operators(), Provider::kCpu, {ElementType::kFloat32, ElementType::kFloat16});
#ifdef ORTOLAN_CUDA
    define_all(list, cuda_operators(), Provider::kCuda,
               {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16});
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

// Limits the CPU kernels to an instruction set (0 plain, 1 AVX2, 2 AVX-512, 3 with VNNI), for tests; 0 where
// it is absent.
ORTOLAN_EXPORT int ortolan_limit_cpu_isa(int isa) {
  if (isa < 0 || isa > 3) return 0;
  return ortolan::cpu::limit_isa(static_cast<ortolan::cpu::Isa>(isa));
}
