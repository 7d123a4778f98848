// Reads one call's tensors into the parameters of each operator's kernels, checked.
#pragma once

#include "context.h"

namespace ortolan {

RingKvAppendParams read_ring_kv_append(const Context& context);
SwaAttentionParams read_swa_attention(const Context& context);
SnapKvCaptureParams read_snapkv_capture(const Context& context);
SnapKvScoreParams read_snapkv_score(const Context& context);
KvSelectParams read_kv_select(const Context& context);
KvCompactParams read_kv_compact(const Context& context);

}  // namespace ortolan
