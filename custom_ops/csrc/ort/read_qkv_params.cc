// Reads one call's tensors into the parameters of the kernels behind the joint projection, checked.
#include "call.h"
#include "checks.h"
#include "operators.generated.h"
#include "read_attention.h"
#include "read_caches.h"

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Sizes of heads that are normalised and rotated.
constexpr char kHeadSizes[] = "with D a multiple of 8 up to 512";
bool is_head_size(int64_t size) { return size >= 8 && size <= 512 && size % 8 == 0; }

// Hq, from the attribute and the width of the joint projection.
template <typename Op>
int64_t read_num_heads(const Call<Op>& call, const Tensor& qkv, const CacheLayout& cache) {
  const int64_t num_heads = call.attributes().num_heads;
  if (num_heads < 1 || num_heads % cache.num_kv_heads != 0)
    call.node().fail("attribute num_heads Hq = " + number(num_heads) +
                     " must be a positive multiple of Hkv = " + number(cache.num_kv_heads));
  const int64_t kv_heads = (call.attributes().value_is_key != 0 ? 1 : 2) * cache.num_kv_heads;
  const int64_t width = (num_heads + kv_heads) * cache.head_size;
  if (qkv.dim(1) != width)
    call.bad_shape(Op::In::kQkv, qkv,
                   "= " + to_string({qkv.dim(0), width}) + ", with Hq = " + number(num_heads) +
                       ", Hkv = " + number(cache.num_kv_heads) + ", D = " + number(cache.head_size) +
                       (call.attributes().value_is_key != 0 ? " and no value heads" : ""));
  return num_heads;
}

// Sets cosine, sine and R, of heads of D elements; both are given, or neither.
template <typename Op, typename Params>
void read_angles(const Call<Op>& call, int64_t num_tokens, int64_t head_size, Params& params) {
  const Tensor cosine = call.input(Op::In::kCosine, {1, num_tokens, -1});
  const Tensor sine = call.input(Op::In::kSine, {1, num_tokens, cosine.present ? cosine.dim(2) : -1});
  if (cosine.present != sine.present)
    call.node().fail(std::string("inputs 'cosine' and 'sine' must be given together; ") +
                     (cosine.present ? "'sine'" : "'cosine'") + " is missing");
  if (!cosine.present) return;
  if (2 * cosine.dim(2) > head_size)
    call.bad_shape(Op::In::kCosine, cosine, "with 2 * R at most D = " + number(head_size));
  params.rotary_pairs = cosine.dim(2);
  params.cosine = cosine.as<float>();
  params.sine = sine.as<float>();
}

// Sets where queries are captured; the buffer and the lengths are given, or neither.
template <typename Op>
void read_capture(const Call<Op>& call, int64_t head_size, QkvRopeAppendParams& params) {
  const int64_t num_sequences = params.packing.num_sequences;
  const Tensor capture = call.input(Op::In::kCapture, {num_sequences, -1, params.num_heads, head_size});
  const bool has_past_len = call.input(Op::In::kCapturePastLen).present;
  if (capture.present != has_past_len)
    call.node().fail(std::string("inputs 'capture' and 'capture_past_len' must be given together; ") +
                     (capture.present ? "'capture_past_len'" : "'capture'") + " is missing");
  params.capture = call.aliased_output(Op::Out::kCaptureOut, capture).data;
  if (!capture.present) return;
  params.capture_rows = capture.dim(1);
  params.capture_past_len = read_lengths(call, Op::In::kCapturePastLen, num_sequences, 0);
}

// All that an operator does with the joint projection before attention.
template <typename Op>
QkvRopeAppendParams read_joint(const Call<Op>& call) {
  const Tensor qkv = call.input(Op::In::kQkv, {-1, -1});
  const Tensor key_cache = call.input(Op::In::kKeyCache, {-1, -1, -1, -1});
  const Tensor value_cache = value_cache_like(call, key_cache);
  const int64_t num_tokens = qkv.dim(0), head_size = key_cache.dim(3);
  QkvRopeAppendParams params{};
  read_cached_step(call, key_cache, num_tokens, params);
  check_appended_pages(call, params.cache, params.packing, params.past_len, Op::In::kBlockTable);
  if (!is_head_size(head_size)) call.bad_shape(Op::In::kKeyCache, key_cache, kHeadSizes);
  params.num_heads = read_num_heads(call, qkv, params.cache);
  params.epsilon = call.attributes().epsilon;
  params.value_norm = call.attributes().value_norm != 0;
  params.value_is_key = call.attributes().value_is_key != 0;
  params.qkv = qkv.data;
  params.query_norm_weight = call.input(Op::In::kQueryNormWeight, {head_size}).data;
  params.key_norm_weight = call.input(Op::In::kKeyNormWeight, {head_size}).data;
  read_angles(call, num_tokens, head_size, params);
  params.query = call.output(Op::Out::kQuery, {num_tokens, params.num_heads, head_size}).data;
  read_updated_caches(call, key_cache, value_cache, params);
  read_capture(call, head_size, params);
  return params;
}

}  // namespace

QkvRopeAppendParams read_params(const Call<ops::QkvRopeAppend>& call) { return read_joint(call); }

QkvAttentionParams read_params(const Call<ops::QkvAttention>& call) {
  QkvAttentionParams params{};
  params.heads = read_joint(call);
  const QkvRopeAppendParams& heads = params.heads;
  SwaAttentionParams& attention = params.attention;
  check_head_size(call, heads.cache.head_size);
  attention.element = heads.element;
  attention.cache_element = heads.cache_element;
  attention.cache = heads.cache;
  attention.packing = heads.packing;
  attention.past_len = heads.past_len;
  attention.num_heads = heads.num_heads;
  attention.query = heads.query;
  attention.key_cache = heads.key_cache;
  attention.value_cache = heads.value_cache;
  attention.key_scale = heads.key_scale;
  attention.value_scale = heads.value_scale;
  read_attention(call, attention);
  attention.max_kv_len = read_max_kv_len(call, ops::QkvAttention::In::kMaxKvLen, attention);
  return params;
}

NormRopeParams read_params(const Call<ops::NormRope>& call) {
  using Op = ops::NormRope;
  const Tensor heads = call.input(Op::In::kHeads, {-1, -1, -1});
  if (!is_head_size(heads.dim(2))) call.bad_shape(Op::In::kHeads, heads, kHeadSizes);
  NormRopeParams params{};
  params.element = call.node().element;
  params.num_tokens = heads.dim(0);
  params.num_heads = heads.dim(1);
  params.head_size = heads.dim(2);
  params.heads = heads.data;
  params.norm_weight = call.input(Op::In::kNormWeight, {params.head_size}).data;
  read_angles(call, params.num_tokens, params.head_size, params);
  params.epsilon = call.attributes().epsilon;
  params.rotated = call.output(Op::Out::kRotated, {heads.dim(0), heads.dim(1), heads.dim(2)}).data;
  return params;
}

}  // namespace ortolan
