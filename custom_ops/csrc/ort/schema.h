// How an operator's ports and attributes are described to ONNX Runtime.
#pragma once

#include <span>
#include <string_view>

namespace ortolan {

enum class PortType { kElement, kFloat32, kInt32, kInt64 };

struct Port {
  const char* name;
  const char* shape;  // in the operator contract's symbols, for messages
  PortType type;
  bool optional;
  int alias;             // outputs: index of the input whose buffer is continued or else copied, or -1
  bool on_host = false;  // inputs: in host memory on every device
  int spends = -1;  // outputs: index of the input whose buffer it takes if nothing reads that later, or -1
};

struct Schema {
  const char* name;
  std::span<const Port> inputs;
  std::span<const Port> outputs;
  std::span<const std::string_view> attributes;
  bool cuda_only;  // there is no CPU kernel
};

}  // namespace ortolan
