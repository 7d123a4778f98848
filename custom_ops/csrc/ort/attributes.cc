#include "attributes.h"

#include <cmath>
#include <optional>

namespace ortolan {
namespace {

// Positions are int32, so nothing larger can be meant, and sums of two attributes cannot overflow.
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

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

// What the node says of one attribute, in whichever type it has.
struct Given {
  std::optional<int64_t> integer;
  std::optional<float> real;
  std::optional<std::string> text;

  static Given of(const NodeInfo& node, const OrtKernelInfo* info, const char* name) {
    return {find_number<abi::KernelInfoGetAttribute_int64, int64_t>(node.api, info, name),
            find_number<abi::KernelInfoGetAttribute_float, float>(node.api, info, name),
            find_text(node.api, info, name)};
  }
  // ONNX Runtime reports an absent attribute and one of another type alike; only an absent one has its
  // default.
  void refuse_other_type(const NodeInfo& node, const char* name, const char* expected) const {
    if (integer || real || text)
      node.fail(std::string("attribute ") + name + " has the wrong type; it must be " + expected);
  }
};

bool is_allowed(const AttributeRule& rule, double value) {
  return std::isfinite(value) && value >= rule.least && value <= rule.most && !(rule.nonzero && value == 0);
}

std::string title(const AttributeRule& rule) {
  return std::string("attribute ") + rule.name + (*rule.symbol ? " " : "") + rule.symbol;
}

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

int64_t AttributeReader::integer(const AttributeRule& rule, int64_t otherwise) const {
  const Given given = Given::of(node_, info_, rule.name);
  if (!given.integer) given.refuse_other_type(node_, rule.name, "an integer (INT)");
  const int64_t value = given.integer.value_or(otherwise);
  if (value > kLargest)
    node_.fail(title(rule) + " = " + number(value) + " must be at most " + number(kLargest));
  if (!is_allowed(rule, static_cast<double>(value))) refuse(rule, number(value));
  return value;
}

float AttributeReader::real(const AttributeRule& rule, float otherwise) const {
  const Given given = Given::of(node_, info_, rule.name);
  if (!given.real) given.refuse_other_type(node_, rule.name, "a number (FLOAT)");
  const float value = given.real.value_or(otherwise);
  if (!is_allowed(rule, value)) refuse(rule, std::to_string(value));
  return value;
}

bool AttributeReader::text(const AttributeRule& rule, std::string& value) const {
  const Given given = Given::of(node_, info_, rule.name);
  if (!given.text) given.refuse_other_type(node_, rule.name, "a text (STRING)");
  value = given.text.value_or("");
  return given.text.has_value();
}

void AttributeReader::refuse(const AttributeRule& rule, const std::string& given) const {
  node_.fail(title(rule) + " = " + given + " is not allowed; allowed: " + rule.allowed);
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

void check_ring(const NodeInfo& node, int64_t capacity, int64_t sink, int64_t window) {
  if (capacity == 0) return;
  if (capacity <= sink)
    node.fail("attribute capacity C = " + number(capacity) + " must be more than sink S = " + number(sink));
  if (window > 0 && capacity < sink + window)
    node.fail("attribute capacity C = " + number(capacity) +
              " must be at least sink S + window W = " + number(sink) + " + " + number(window));
}

}  // namespace ortolan
