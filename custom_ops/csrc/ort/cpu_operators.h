// How a CPU kernel becomes an operator's.
#pragma once

#include "operators.generated.h"
#include "operators.h"

namespace ortolan {

template <typename Op, auto kKernel>
OperatorKernel cpu_operator() {
  return {.schema = &Op::kSchema,
          .read_attributes = read_attributes<Op>,
          .compute =
              [](const NodeInfo& node, OrtKernelContext* context) {
                const Call<Op> call(node, context);
                OrtParallelFor parallel(call);
                kKernel(read_params(call), parallel);
              },
          .reused_ports = reused_ports<Op>};
}

}  // namespace ortolan
