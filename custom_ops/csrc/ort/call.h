// One call of an operator whose attributes are known.
#pragma once

#include "context.h"

namespace ortolan {

template <typename Op>
class Call : public Context {
 public:
  using Context::Context;

  const typename Op::Attributes& attributes() const {
    return *static_cast<const typename Op::Attributes*>(node().attributes.get());
  }
};

}  // namespace ortolan
