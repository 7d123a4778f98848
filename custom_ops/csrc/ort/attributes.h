// Reads and checks a node's attributes when its kernel is made: ONNX Runtime checks none of a custom
// operator's.
#pragma once

#include <initializer_list>
#include <limits>
#include <string>

#include "node.h"

namespace ortolan {

// What an attribute may be.
struct AttributeRule {
  const char* name;
  const char* symbol;   // the contract's, or empty
  const char* allowed;  // in words
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool nonzero = false;
};

template <typename Value>
struct Choice {
  const char* text;
  Value value;
};

// Each function returns the node's value or the default, and fails where it is of another type or not
// allowed.
class AttributeReader {
 public:
  AttributeReader(const NodeInfo& node, const OrtKernelInfo* info) : node_(node), info_(info) {}

  int64_t integer(const AttributeRule& rule, int64_t otherwise) const;
  float real(const AttributeRule& rule, float otherwise) const;
  template <typename Value>
  Value choice(const AttributeRule& rule, Value otherwise,
               std::initializer_list<Choice<Value>> choices) const {
    std::string given;
    if (!text(rule, given)) return otherwise;
    for (const Choice<Value>& choice : choices)
      if (given == choice.text) return choice.value;
    refuse(rule, "'" + given + "'");
  }

 private:
  bool text(const AttributeRule& rule, std::string& value) const;
  [[noreturn]] void refuse(const AttributeRule& rule, const std::string& given) const;

  const NodeInfo& node_;
  const OrtKernelInfo* info_;
};

std::string read_node_name(const OrtApi* api, const OrtKernelInfo* info);

// What the attributes of a cache ask of each other; window -1: none.
void check_ring(const NodeInfo& node, int64_t capacity, int64_t sink, int64_t window);

template <typename Attributes>
void check_together(const NodeInfo& node, const Attributes& attributes) {
  if constexpr (requires { attributes.window; })
    check_ring(node, attributes.capacity, attributes.sink, attributes.window);
  else if constexpr (requires { attributes.capacity; })
    check_ring(node, attributes.capacity, attributes.sink, -1);
}

}  // namespace ortolan
