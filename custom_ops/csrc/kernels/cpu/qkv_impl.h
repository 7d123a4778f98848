// QkvRopeAppend and NormRope on the CPU: a task is a token. A head is normalised and rotated in float32,
// rounded once, and put where it belongs; what is neither normalised nor rotated keeps its bits.
#pragma once

#include "kernels/cpu/operators.generated.h"
#include "lanes.h"
#include "low_bit_append.h"
#include "rows_impl.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kMostHeadSize = 512;

template <typename Element>
class TokenHeads {
 public:
  TokenHeads(const QkvRopeAppendParams& p, int64_t token)
      : p_(p), token_(token), size_(p.cache.head_size), sequence_(sequence_of(p.packing, token)) {}

  void move() {
    const int64_t kv_heads = p_.cache.num_kv_heads,
                  row_heads = p_.num_heads + (p_.value_is_key ? 1 : 2) * kv_heads;
    const auto* row = static_cast<const Element*>(p_.qkv) + token_ * row_heads * size_;
    for (int64_t h = 0; h < p_.num_heads; ++h) {
      prepare(row + h * size_, p_.query_norm_weight, true);
      put(p_.query, token_ * p_.num_heads + h);
      if (p_.capture_rows > 0) capture(h);
    }
    const auto* keys = row + p_.num_heads * size_;
    const auto* values = p_.value_is_key ? keys : keys + kv_heads * size_;
    for (int64_t h = 0; h < kv_heads; ++h) append(keys + h * size_, values + h * size_, h);
  }

 private:
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

  void append(const Element* key, const Element* value, int64_t head) {
    const int64_t row = cache_row(head);
    if (row < 0) return;
    prepare(key, p_.key_norm_weight, true);
    store_row(p_.key_cache, p_.key_scale, row);
    prepare_value(value);
    store_row(p_.value_cache, p_.value_scale, row);
  }

  // Of two tokens of a chunk that share a slot only the later is written; -1 for the other.
  int64_t cache_row(int64_t head) const {
    if (sequence_ < 0) return -1;
    const int64_t t = token_ - p_.packing.first(sequence_), position = p_.past_len.at(sequence_, head) + t;
    if (position >= p_.cache.sink && t + p_.cache.capacity - p_.cache.sink < p_.packing.count(sequence_))
      return -1;
    return p_.cache.row_index(sequence_, head, p_.cache.slot(position));
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

inline void qkv_rope_append(const QkvRopeAppendParams& p, ParallelFor& parallel) {
  const bool is_half = p.element == ElementType::kFloat16;
  parallel.each(p.packing.num_tokens, [&](int64_t token) {
    is_half ? TokenHeads<Half>(p, token).move() : TokenHeads<float>(p, token).move();
  });
}

inline void norm_rope(const NormRopeParams& p, ParallelFor& parallel) {
  ORTOLAN_ISA::qkv_rope_append(as_queries(p), parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
