// How an operator's ports are described to ONNX Runtime.
#pragma once

#include <span>

#include "kernels/element_types.h"

namespace ortolan {

enum class PortType { kElement, kCache, kFloat32, kInt32, kInt64, kUint8 };

struct Port {
  const char* name;
  const char* shape;  // in the operator contract's symbols, for messages
  PortType type;
  bool optional = false;
  int alias = -1;        // outputs: index of the input whose buffer is continued or else copied
  bool on_host = false;  // inputs: in host memory on every device
  int spends = -1;       // outputs: index of the input whose buffer it takes if nothing reads that later

  // The type of its elements in a kernel for `node` elements and caches of `cache` elements.
  constexpr ElementType element(ElementType node, ElementType cache) const {
    switch (type) {
      case PortType::kElement:
        return node;
      case PortType::kCache:
        return cache;
      case PortType::kFloat32:
        return ElementType::kFloat32;
      case PortType::kInt32:
        return ElementType::kInt32;
      case PortType::kInt64:
        return ElementType::kInt64;
      case PortType::kUint8:
        return ElementType::kUint8;
    }
    return node;
  }
  // The input whose buffer an output may take, or -1.
  constexpr int reused_input() const { return alias >= 0 ? alias : spends; }
};

struct Schema {
  const char* name;
  std::span<const Port> inputs;
  std::span<const Port> outputs;

  // Without a port of the node's element type an operator is registered once, and without a port of the
  // cache's once for each element type.
  constexpr bool has(PortType type) const {
    for (const std::span<const Port> ports : {inputs, outputs})
      for (const Port& port : ports)
        if (port.type == type) return true;
    return false;
  }
};

}  // namespace ortolan
