#include "attributes.h"

#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

namespace ortolan {
namespace {

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

GatedActivation parse_activation(const NodeInfo& node, const std::string& text) {
  if (text == "none") return GatedActivation::kNone;
  if (text == "silu_mul") return GatedActivation::kSilu;
  if (text == "gelu_mul") return GatedActivation::kGelu;
  if (text == "gelu_tanh_mul") return GatedActivation::kGeluTanh;
  node.fail("attribute activation is '" + text + "'; allowed: none, silu_mul, gelu_mul, gelu_tanh_mul");
}

// Reads one attribute that the operator table lists; a name without a reader here is a build that drifted.
void read_schema_attribute(NodeInfo& node, const OrtKernelInfo* info, std::string_view name) {
  if (name == "window") return read_attribute(node, info, "window", node.window);
  if (name == "sink") return read_attribute(node, info, "sink", node.sink);
  if (name == "capacity") return read_attribute(node, info, "capacity", node.capacity);
  if (name == "scale") return read_attribute(node, info, "scale", node.scale);
  if (name == "softcap") return read_attribute(node, info, "softcap", node.softcap);
  if (name == "epsilon") return read_attribute(node, info, "epsilon", node.epsilon);
  if (name == "factor") return read_attribute(node, info, "factor", node.factor);
  if (name == "num_heads") return read_attribute(node, info, "num_heads", node.num_heads);
  std::string text = name == "activation" ? "none" : "mean";
  if (name == "activation") {
    read_attribute(node, info, "activation", text);
    node.activation = parse_activation(node, text);
  } else if (name == "group_reduce") {
    read_attribute(node, info, "group_reduce", text);
    node.group_reduce = parse_group_reduce(node, text);
  } else {
    node.fail("attribute " + std::string(name) + " has no reader in the library");
  }
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
  check_largest(node, "num_heads Hq", node.num_heads);
  if (node.window == 0 || node.window < -1)
    node.fail("attribute window W = " + std::to_string(node.window) + "; allowed: -1 (none) or at least 1");
  if (node.sink < 0) node.fail("attribute sink S = " + std::to_string(node.sink) + " must be at least 0");
  if (node.capacity < 0)
    node.fail("attribute capacity C = " + std::to_string(node.capacity) +
              " must be at least 1, or 0 for M * P");
  if (node.capacity > 0 && node.capacity <= node.sink)
    node.fail("attribute capacity C = " + std::to_string(node.capacity) +
              " must be more than sink S = " + std::to_string(node.sink));
  if (node.capacity > 0 && node.capacity < node.sink + node.window)
    node.fail("attribute capacity C = " + std::to_string(node.capacity) +
              " must be at least sink S + window W = " + std::to_string(node.sink) + " + " +
              std::to_string(node.window));
  if (!std::isfinite(node.scale) || node.scale < 0)
    node.fail("attribute scale is " + std::to_string(node.scale) +
              "; allowed: 0 (for 1/sqrt(D)) or a positive number");
  if (!std::isfinite(node.epsilon) || node.epsilon < 0)
    node.fail("attribute epsilon is " + std::to_string(node.epsilon) + "; allowed: 0 or a positive number");
  if (!std::isfinite(node.softcap) || node.softcap < 0)
    node.fail("attribute softcap is " + std::to_string(node.softcap) +
              "; allowed: 0 (none) or a positive number");
}

}  // namespace

void read_attributes(NodeInfo& node, const OrtKernelInfo* info) {
  node.name = read_node_name(node.api, info);
  for (std::string_view name : node.schema->attributes) read_schema_attribute(node, info, name);
  check_attributes(node);
}

}  // namespace ortolan
