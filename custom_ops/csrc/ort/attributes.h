// Reads and checks a node's attributes when its kernel is made: ONNX Runtime checks none of a custom
// operator's.
#pragma once

#include "context.h"

namespace ortolan {

// Fills in the name and every attribute of the node's schema; throws InvalidArgument where a value is not
// allowed.
void read_attributes(NodeInfo& node, const OrtKernelInfo* info);

}  // namespace ortolan
