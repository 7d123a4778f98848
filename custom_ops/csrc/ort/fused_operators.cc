#include "fused_operators.h"

#include "checks.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// The one output that the node asks for: y in the element type, or y_float32.
void read_linear_output(const Context& context, FusedLinearParams& params) {
  const std::vector<int64_t> shape{params.num_tokens, params.num_outputs};
  const Tensor rounded = context.output(0, shape), exact = context.output(1, shape);
  if (rounded.present == exact.present)
    context.node().fail(std::string("exactly one of the outputs 'y' and 'y_float32' must be asked for; ") +
                        (rounded.present ? "both are" : "none is"));
  params.output_float32 = exact.present;
  params.output = exact.present ? exact.data : rounded.data;
}

// Hq, from the attribute and the width of the joint projection.
int64_t read_num_heads(const Context& context, const Tensor& qkv, const CacheLayout& cache) {
  const int64_t num_heads = context.node().num_heads;
  if (num_heads < 1 || num_heads % cache.num_kv_heads != 0)
    context.node().fail("attribute num_heads Hq = " + number(num_heads) +
                        " must be a positive multiple of Hkv = " + number(cache.num_kv_heads));
  const int64_t width = (num_heads + 2 * cache.num_kv_heads) * cache.head_size;
  if (qkv.dim(1) != width)
    context.bad_shape(0, qkv,
                      "= " + to_string({qkv.dim(0), width}) + ", with Hq = " + number(num_heads) +
                          ", Hkv = " + number(cache.num_kv_heads) + ", D = " + number(cache.head_size));
  return num_heads;
}

// Sets cosine, sine and R; both are given, or neither.
void read_angles(const Context& context, int64_t num_tokens, QkvRopeAppendParams& params) {
  const Tensor cosine = context.input(8, {1, num_tokens, -1});
  const Tensor sine = context.input(9, {1, num_tokens, cosine.present ? cosine.dim(2) : -1});
  if (cosine.present != sine.present)
    context.node().fail(std::string("inputs 'cosine' and 'sine' belong together; ") +
                        (cosine.present ? "'sine'" : "'cosine'") + " is missing");
  if (!cosine.present) return;
  if (2 * cosine.dim(2) > params.cache.head_size)
    context.bad_shape(8, cosine, "with 2 * R at most D = " + number(params.cache.head_size));
  params.rotary_pairs = cosine.dim(2);
  params.cosine = cosine.as<float>();
  params.sine = sine.as<float>();
}

// Sets where queries are captured; the buffer and the lengths are given, or neither.
void read_capture(const Context& context, int64_t head_size, QkvRopeAppendParams& params) {
  const int64_t num_sequences = params.packing.num_sequences;
  const Tensor capture = context.input(10, {num_sequences, -1, params.num_heads, head_size});
  const Tensor past_len = context.input(11, {num_sequences});
  if (capture.present != past_len.present)
    context.node().fail(std::string("inputs 'capture' and 'capture_past_len' belong together; ") +
                        (capture.present ? "'capture_past_len'" : "'capture'") + " is missing");
  if (!capture.present) return;
  params.capture_rows = capture.dim(1);
  params.capture_past_len.values = past_len.as<int32_t>();
  params.capture = context.aliased_output(3, capture).data;
}

}  // namespace

FusedLinearParams read_fused_linear(const Context& context) {
  const NodeInfo& node = context.node();
  const bool gated = node.activation != GatedActivation::kNone;
  const Tensor input = context.input(0, {-1, -1});
  const Tensor weight = context.input(1, {-1, input.dim(1)});
  if (input.dim(1) == 0) context.bad_shape(0, input, "with at least one feature");
  if (gated && weight.dim(0) % 2 != 0)
    context.bad_shape(1, weight, "with an even number of rows: the gate's, then the factor's");
  FusedLinearParams params{};
  params.element = node.element;
  params.num_tokens = input.dim(0);
  params.num_inputs = input.dim(1);
  params.num_outputs = gated ? weight.dim(0) / 2 : weight.dim(0);
  params.input = input.data;
  params.weight = weight.data;
  params.norm_weight = context.input(2, {params.num_inputs}).data;
  params.epsilon = node.epsilon;
  params.bias = context.input(3, {weight.dim(0)}).data;
  params.residual = context.input(4, {params.num_tokens, params.num_outputs}).data;
  params.activation = node.activation;
  read_linear_output(context, params);
  return params;
}

RopeAnglesParams read_rope_angles(const Context& context) {
  const Tensor positions = context.input(0, {-1});
  const Tensor inv_freq = context.input(1, {1, -1});
  RopeAnglesParams params;
  params.num_tokens = positions.dim(0);
  params.rotary_pairs = inv_freq.dim(1);
  params.positions = positions.as<int64_t>();
  params.inv_freq = inv_freq.as<float>();
  params.factor = context.node().factor;
  const std::vector<int64_t> shape{1, params.num_tokens, params.rotary_pairs};
  params.cosine = context.output(0, shape).as<float>();
  params.sine = context.output(1, shape).as<float>();
  return params;
}

LastRowsParams read_last_rows(const Context& context) {
  const Tensor input = context.input(0, {-1, -1});
  const Packing packing = read_packing(context, 1, input.dim(0));
  LastRowsParams params;
  params.row_bytes = input.dim(1) * element_bytes(context.node().element);
  params.num_tokens = input.dim(0);
  params.num_sequences = packing.num_sequences;
  params.input = input.data;
  params.query_start = packing.query_start;
  params.output = context.output(0, {params.num_sequences, input.dim(1)}).data;
  return params;
}

RmsNormAddParams read_rms_norm_add(const Context& context) {
  const Tensor input = context.input(0, {-1, -1});
  RmsNormAddParams params{};
  params.element = context.node().element;
  params.num_tokens = input.dim(0);
  params.row_size = input.dim(1);
  params.input = input.data;
  params.weight = context.input(1, {input.dim(1)}).data;
  params.residual = context.input(2, {input.dim(0), input.dim(1)}).data;
  params.epsilon = context.node().epsilon;
  params.output = context.output(0, input.shape).data;
  return params;
}

QkvRopeAppendParams read_qkv_rope_append(const Context& context) {
  const Tensor qkv = context.input(0, {-1, -1});
  const Tensor key_cache = context.input(1, {-1, -1, -1, -1});
  const Tensor value_cache =
      context.input(2, {key_cache.dim(0), key_cache.dim(1), key_cache.dim(2), key_cache.dim(3)});
  const int64_t num_tokens = qkv.dim(0), head_size = key_cache.dim(3);
  QkvRopeAppendParams params{};
  params.element = context.node().element;
  params.packing = read_packing(context, 3, num_tokens);
  params.past_len = read_lengths(context, 4, params.packing.num_sequences, key_cache.dim(1));
  params.cache = read_cache(context, key_cache, 1, 5, params.packing.num_sequences);
  if (head_size < 8 || head_size > 512 || head_size % 8 != 0)
    context.bad_shape(1, key_cache, "with D a multiple of 8 up to 512");
  params.num_heads = read_num_heads(context, qkv, params.cache);
  params.epsilon = context.node().epsilon;
  params.qkv = qkv.data;
  params.query_norm_weight = context.input(6, {head_size}).data;
  params.key_norm_weight = context.input(7, {head_size}).data;
  read_angles(context, num_tokens, params);
  params.query = context.output(0, {num_tokens, params.num_heads, head_size}).data;
  const CacheOutputs caches = read_cache_outputs(context, 1, key_cache, value_cache);
  params.key_cache = caches.key;
  params.value_cache = caches.value;
  read_capture(context, head_size, params);
  return params;
}

}  // namespace ortolan
