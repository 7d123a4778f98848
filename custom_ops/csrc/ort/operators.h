// What the library needs of an operator on one provider: its description, and functions of its kernel.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "attributes.h"
#include "call.h"

namespace ortolan {

// What a provider's kernels share; it is freed when the last kernel that holds it is gone.
using Resources = std::shared_ptr<void>;

struct OperatorKernel {
  const Schema* schema;
  std::shared_ptr<const void> (*read_attributes)(const NodeInfo&, const OrtKernelInfo*);
  void (*compute)(const NodeInfo&, OrtKernelContext*);  // tensors in, parameters checked, kernel run
  // Pairs of inputs and outputs that may share a buffer. ONNX Runtime asks for them without naming the
  // operator.
  size_t (*reused_ports)(int** inputs, int** outputs);
  Resources (*acquire_resources)() = nullptr;
};

template <typename Op>
std::shared_ptr<const void> read_attributes(const NodeInfo& node, const OrtKernelInfo* info) {
  const auto attributes = Op::Attributes::read(AttributeReader(node, info));
  check_together(node, attributes);
  return std::make_shared<const typename Op::Attributes>(attributes);
}

// Such ports are declared as what may happen in place, not as aliases: an alias that is not an output of the
// graph holds even where the old value is a constant, the caller's, or read again.
template <typename Op>
size_t reused_ports(int** inputs, int** outputs) {
  size_t count = 0;
  for (const Port& port : Op::kSchema.outputs) count += port.reused_input() >= 0;
  *inputs = *outputs = nullptr;
  if (count == 0) return 0;
  *inputs = static_cast<int*>(std::malloc(count * sizeof(int)));
  *outputs = static_cast<int*>(std::malloc(count * sizeof(int)));
  if (!*inputs || !*outputs) return 0;
  size_t next = 0;
  for (size_t i = 0; i < Op::kSchema.outputs.size(); ++i) {
    const int input = Op::kSchema.outputs[i].reused_input();
    if (input < 0) continue;
    (*inputs)[next] = input;
    (*outputs)[next++] = static_cast<int>(i);
  }
  return count;
}

// Generated lists.
std::vector<OperatorKernel> cpu_operators();
std::vector<OperatorKernel> cuda_operators();

}  // namespace ortolan
