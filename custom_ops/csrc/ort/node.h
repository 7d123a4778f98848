// Who a kernel is: its operator, its node and its provider. Errors name the node.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "abi.h"
#include "schema.h"

namespace ortolan {

// Becomes an OrtStatus with the code INVALID_ARGUMENT where the C ABI begins.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Provider { kCpu, kCuda };

struct NodeInfo {
  const OrtApi* api = nullptr;
  const Schema* schema = nullptr;
  Provider provider = Provider::kCpu;
  ElementType element = ElementType::kFloat32;
  ElementType cache_element = ElementType::kFloat32;
  std::string name;
  std::shared_ptr<const void> attributes;  // of the operator's type

  [[noreturn]] void fail(const std::string& problem) const;
};

// Throws what `status` says; takes ownership of it.
void check(const OrtApi* api, OrtStatus* status);

}  // namespace ortolan
