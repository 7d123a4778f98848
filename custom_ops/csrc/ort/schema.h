// How an operator's ports are described to ONNX Runtime.
#pragma once

#include <span>

namespace ortolan {

enum class PortType { kElement, kFloat32, kInt32 };

struct Port {
  const char* name;
  const char* shape;  // in the operator contract's symbols, for messages
  PortType type;
  bool optional;
  int alias;  // outputs: index of the input whose buffer is continued, or -1
};

struct Schema {
  const char* name;
  std::span<const Port> inputs;
  std::span<const Port> outputs;
};

}  // namespace ortolan
