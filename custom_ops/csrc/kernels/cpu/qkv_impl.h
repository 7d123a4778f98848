// QkvRopeAppend and NormRope on the CPU: a task is a head of a token. It is normalised and rotated in
// float32, rounded once, and put where it belongs; what is neither normalised nor rotated keeps its bits.
#pragma once

#include "kernels/cpu/operators.generated.h"
#include "lanes.h"
#include "low_bit_append.h"
#include "rows_impl.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kMostHeadSize = 512;

template <typename Element>
class TokenHead {
 public:
  TokenHead(const QkvRopeAppendParams& p, int64_t token)
      : p_(p), token_(token), size_(p.cache.head_size), sequence_(sequence_of(p.packing, token)) {}

  void move_query(int64_t head) {
    prepare(head_of(head), p_.query_norm_weight, true);
    put(p_.query, token_ * p_.num_heads + head);
    if (p_.capture_rows > 0) capture(head);
  }

  void append(int64_t head) {
    const int64_t row = cache_row(head);
    if (row < 0) return;
    const Element* key = head_of(p_.num_heads + head);
    prefetch_row(p_.key_cache, row);
    prefetch_row(p_.value_cache, row);
    prepare(key, p_.key_norm_weight, true);
    store_row(p_.key_cache, p_.key_scale, row);
    prepare_value(p_.value_is_key ? key : key + p_.cache.num_kv_heads * size_);
    store_row(p_.value_cache, p_.value_scale, row);
  }

 private:
  const Element* head_of(int64_t place) const {
    const int64_t heads = p_.num_heads + (p_.value_is_key ? 1 : 2) * p_.cache.num_kv_heads;
    return static_cast<const Element*>(p_.qkv) + (token_ * heads + place) * size_;
  }

  // The sequence that owns a row; -1 where none does.
  static int64_t sequence_of(const Packing& packing, int64_t row) {
    if (packing.num_sequences == 0) return -1;
    const int32_t* end = packing.query_start + packing.num_sequences + 1;
    const int32_t* next = std::upper_bound(packing.query_start, end, row);
    return next == end ? -1 : next - packing.query_start - 1;
  }

  // Makes rounded_ the head as it is to be stored.
  void prepare(const Element* head, const void* weight, bool rotates) {
    const bool rotated = rotates && p_.rotary_pairs > 0;
    if (!weight && !rotated) {
      std::memcpy(rounded_, head, size_ * sizeof(Element));
      return;
    }
    load_floats(head, size_, values_);
    if (weight)
      scale_row(values_, size_, inverse_root_mean_square(values_, size_, p_.epsilon),
                static_cast<const Element*>(weight));
    if (rotated) rotate();
    for (int64_t i = 0; i < size_; i += kLanes)
      store_part(load_part(values_ + i, size_ - i), size_ - i, rounded_ + i);
  }

  void prepare_value(const Element* head) {
    if (!p_.value_norm) return prepare(head, nullptr, false);
    load_floats(head, size_, values_);
    const float factor = inverse_root_mean_square(values_, size_, p_.epsilon);
    for (int64_t i = 0; i < size_; i += kLanes)
      store_part(load_part(values_ + i, size_ - i) * factor, size_ - i, rounded_ + i);
  }

  void rotate() {
    const int64_t pairs = p_.rotary_pairs;
    const float *cosine = p_.cosine + token_ * pairs, *sine = p_.sine + token_ * pairs;
    for (int64_t i = 0; i < pairs; i += kLanes) {
      const int64_t count = pairs - i;
      const Vec x = load_part(values_ + i, count), y = load_part(values_ + pairs + i, count);
      const Vec c = load_part(cosine + i, count), s = load_part(sine + i, count);
      store_part(x * c - y * s, count, values_ + i);
      store_part(y * c + x * s, count, values_ + pairs + i);
    }
  }

  void put(void* heads, int64_t head) const {
    std::memcpy(static_cast<Element*>(heads) + head * size_, rounded_, size_ * sizeof(Element));
  }

  // Of the queries of a chunk that share a row of the capture only the last is captured.
  void capture(int64_t head) const {
    if (sequence_ < 0) return;
    const int64_t t = token_ - p_.packing.first(sequence_);
    if (t + p_.capture_rows < p_.packing.count(sequence_)) return;
    const int64_t place = (p_.capture_past_len.at(sequence_, 0) + t) % p_.capture_rows;
    put(p_.capture, (sequence_ * p_.capture_rows + place) * p_.num_heads + head);
  }

  // Of two tokens of a chunk that share a slot only the later is written; -1 for the other.
  int64_t cache_row(int64_t head) const {
    if (sequence_ < 0) return -1;
    const int64_t t = token_ - p_.packing.first(sequence_), position = p_.past_len.at(sequence_, head) + t;
    if (position >= p_.cache.sink && t + p_.cache.capacity - p_.cache.sink < p_.packing.count(sequence_))
      return -1;
    return p_.cache.row_index(sequence_, head, p_.cache.slot(position));
  }

  // Asks for a row that is to be written, which no cache of the processor holds.
  void prefetch_row(const void* cache, int64_t row) const {
    const int64_t bytes = size_ * element_bytes(p_.cache_element);
    for (int64_t i = 0; i < bytes; i += 64)
      __builtin_prefetch(static_cast<const char*>(cache) + row * bytes + i, 1);
  }

  void store_row(void* cache, float* scales, int64_t row) const {
    if (!is_code(p_.cache_element)) return put(cache, row);
    append_codes(rounded_, size_, p_.cache_element, static_cast<uint8_t*>(cache) + row * size_, scales + row);
  }

  const QkvRopeAppendParams& p_;
  const int64_t token_, size_, sequence_;
  alignas(64) float values_[kMostHeadSize];
  alignas(64) Element rounded_[kMostHeadSize];
};

// Each kv head follows the queries of its group, so that any share of the tasks has its share of both.
template <typename Element>
void move_heads(const QkvRopeAppendParams& p, ParallelFor& parallel) {
  const int64_t kv_heads = p.cache.num_kv_heads, group = p.num_heads / std::max<int64_t>(1, kv_heads),
                heads = p.num_heads + kv_heads;
  parallel.each(p.packing.num_tokens * heads, [&](int64_t task) {
    TokenHead<Element> token(p, task / heads);
    const int64_t kv_head = task % heads / (group + 1), place = task % heads % (group + 1);
    place < group ? token.move_query(kv_head * group + place) : token.append(kv_head);
  });
}

inline void qkv_rope_append(const QkvRopeAppendParams& p, ParallelFor& parallel) {
  p.element == ElementType::kFloat16 ? move_heads<Half>(p, parallel) : move_heads<float>(p, parallel);
}

inline void norm_rope(const NormRopeParams& p, ParallelFor& parallel) {
  ORTOLAN_ISA::qkv_rope_append(as_queries(p), parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
