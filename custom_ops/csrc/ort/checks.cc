#include "checks.h"

#include <algorithm>

namespace ortolan {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// What a promise bounds, and what it must be at least, in words.
struct PromiseWords {
  const char* of;
  const char* least;
};

// Reads what the caller promises that tokens(b) does not pass; 0: nothing.
template <typename Tokens>
int64_t read_promise(const Context& context, size_t index, const Packing& packing, const Tokens& tokens,
                     const PromiseWords& words) {
  const int64_t most = read_number<int32_t>(context, index);
  for (int64_t b = 0; most > 0 && context.values_readable() && b < packing.num_sequences; ++b)
    if (tokens(b) > most)
      context.node().fail("sequence " + number(b) + " has " + number(tokens(b)) + " " + words.of +
                          ", more than input '" + context.node().schema->inputs[index].name +
                          "' = " + number(most) + "; it must be at least " + words.least + ", or 0");
  return most;
}

}  // namespace

Packing read_packing(const Context& context, size_t index, int64_t num_tokens) {
  const Tensor tensor = context.input(index, {-1});
  if (tensor.dim(0) < 1) context.bad_shape(index, tensor, "with B >= 0");
  const Packing packing{tensor.as<int32_t>(), tensor.dim(0) - 1, num_tokens};
  if (packing.num_sequences == 0 && num_tokens > 0)
    context.node().fail("input 'query_start' must rise from 0 to T = " + number(num_tokens) +
                        "; it has 1 element, which means 0 sequences");
  if (!context.values_readable()) return packing;
  bool rising = packing.query_start[0] == 0 && packing.query_start[packing.num_sequences] == num_tokens;
  for (int64_t b = 0; b < packing.num_sequences; ++b) rising = rising && packing.count(b) >= 0;
  if (!rising)
    context.node().fail("input 'query_start' must rise from 0 to T = " + number(num_tokens) + "; it holds " +
                        to_string({packing.query_start, packing.query_start + tensor.dim(0)}));
  return packing;
}

Lengths read_lengths(const Context& context, size_t index, int64_t num_sequences, int64_t heads) {
  const Tensor tensor = context.input(index);
  const bool per_head = heads > 0 && tensor.shape.size() == 2 && tensor.dim(1) == heads;
  const bool shared = tensor.shape.size() == 1;
  if (!(per_head || shared) || tensor.dim(0) != num_sequences)
    context.bad_shape(index, tensor,
                      "with B = " + number(num_sequences) + (heads > 0 ? ", Hkv = " + number(heads) : ""));
  const int32_t* values = tensor.as<int32_t>();
  for (int64_t i = 0; context.values_readable() && i < tensor.size(); ++i)
    if (values[i] < 0)
      context.node().fail(std::string("input '") + context.node().schema->inputs[index].name + "' holds " +
                          number(values[i]) + "; a length must be at least 0");
  return per_head ? Lengths{values, heads, 1} : Lengths{values, 1, 0};
}

void check_not_negative(const Context& context, size_t index, int64_t value) {
  if (value < 0)
    context.node().fail(std::string("input '") + context.node().schema->inputs[index].name + "' is " +
                        number(value) + "; it must be at least 0");
}

CacheLayout read_cache(const Context& context, const Tensor& pool, const CachePorts& ports,
                       int64_t num_sequences) {
  const NodeInfo& node = context.node();
  CacheLayout cache;
  cache.num_pages = pool.dim(0);
  cache.num_kv_heads = pool.dim(1);
  cache.page_slots = pool.dim(2);
  cache.head_size = pool.dim(3);
  const Tensor table = context.input(ports.block_table, {num_sequences, -1});
  if (table.present) {
    cache.block_table = table.as<int32_t>();
    cache.pages_per_sequence = table.dim(1);
  } else if (cache.num_pages < num_sequences) {
    context.bad_shape(ports.pool, pool,
                      "with N >= B = " + number(num_sequences) + " where there is no block_table");
  }
  const int64_t slots = cache.pages_per_sequence * cache.page_slots;
  cache.capacity = ports.capacity ? ports.capacity : slots;
  cache.sink = ports.sink;
  if (cache.capacity < 1 || cache.capacity > slots)
    node.fail("capacity C = " + number(cache.capacity) + " must be between 1 and M * P = " + number(slots));
  if (cache.sink >= cache.capacity)
    node.fail("capacity C = " + number(cache.capacity) + " must be more than sink S = " + number(cache.sink));
  if (cache.num_kv_heads < 1) context.bad_shape(ports.pool, pool, "with Hkv >= 1");
  return cache;
}

Tensor read_scale(const Context& context, size_t index, const Tensor& pool) {
  const Tensor scale = context.input(index, {pool.dim(0), pool.dim(1), pool.dim(2)});
  const std::string name = std::string("input '") + context.node().schema->inputs[index].name + "' ";
  const bool holds_codes = is_code(context.node().cache_element);
  if (holds_codes && !scale.present)
    context.node().fail(name + "is missing; a cache of int8 or float8e4m3fn needs the scales of its rows, " +
                        "[N, Hkv, P] float32");
  if (!holds_codes && scale.present)
    context.node().fail(name + "is given, but the cache does not hold codes; leave it out");
  return scale;
}

CacheOutputs read_cache_outputs(const Context& context, size_t index, const Tensor& key_cache,
                                const Tensor& value_cache) {
  return {context.aliased_output(index, key_cache).data, context.aliased_output(index + 1, value_cache).data};
}

void check_pages(const Context& context, const CacheLayout& cache, size_t block_table, int64_t sequence,
                 int64_t first, int64_t end) {
  if (!cache.block_table || !context.values_readable() || first >= end) return;
  // Once a ring has wrapped, its slots hold other positions than their own.
  const int64_t begin = end > cache.capacity ? 0 : first;
  const int64_t slots = std::min(end, cache.capacity);
  for (int64_t i = begin / cache.page_slots; i * cache.page_slots < slots; ++i) {
    const int64_t page = cache.block_table[sequence * cache.pages_per_sequence + i];
    if (page < 0 || page >= cache.num_pages)
      context.node().fail(std::string("input '") + context.node().schema->inputs[block_table].name +
                          "' names page " + number(page) + " for sequence " + number(sequence) +
                          "; a page must be between 0 and N - 1 = " + number(cache.num_pages - 1));
  }
}

void check_appended_pages(const Context& context, const CacheLayout& cache, const Packing& packing,
                          const Lengths& past_len, size_t block_table) {
  if (!cache.block_table || !context.values_readable()) return;
  for (int64_t b = 0; b < packing.num_sequences; ++b)
    for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
      const int64_t past = past_len.at(b, h);
      check_pages(context, cache, block_table, b, past, past + packing.count(b));
    }
}

void check_attended_pages(const Context& context, const SwaAttentionParams& p, size_t block_table) {
  if (!p.cache.block_table || !context.values_readable()) return;
  for (int64_t b = 0; b < p.packing.num_sequences; ++b)
    for (int64_t h = 0; h < p.cache.num_kv_heads && p.packing.count(b) > 0; ++h) {
      const int64_t past = p.past_len.at(b, h), length = past + p.packing.count(b);
      const bool sees_all = p.window < 0 || (p.prefix_end && past < p.prefix_end[b]);
      const int64_t oldest = sees_all ? 0 : std::max<int64_t>(0, past - p.window + 1);
      check_pages(context, p.cache, block_table, b, 0, std::min(p.cache.sink, oldest));
      check_pages(context, p.cache, block_table, b, oldest, length);
    }
}

void check_head_size(const Context& context, int64_t head_size) {
  const bool fits = head_size % 8 == 0 && head_size > 0 && (head_size <= 256 || head_size == 512);
  if (!fits)
    context.node().fail("head size D = " + number(head_size) + " must be a multiple of 8 up to 256, or 512");
}

void check_heads(const Context& context, size_t query_index, const Tensor& query, int64_t num_heads,
                 const CacheLayout& cache, int64_t head_size) {
  if (head_size != cache.head_size)
    context.bad_shape(query_index, query, "with D = " + number(cache.head_size) + " as in the cache");
  check_head_size(context, head_size);
  if (num_heads < 1 || num_heads % cache.num_kv_heads != 0)
    context.bad_shape(query_index, query, "with Hq a multiple of Hkv = " + number(cache.num_kv_heads));
}

const int32_t* read_prefixes(const Context& context, size_t index, const SwaAttentionParams& p) {
  const Tensor tensor = context.input(index, {p.packing.num_sequences});
  if (!tensor.present) return nullptr;
  if (!p.causal)
    context.node().fail(
        "input 'prefix_end' needs causal = 1; with causal = 0 every query sees later keys already, so leave "
        "it out");
  const int32_t* values = tensor.as<int32_t>();
  for (int64_t b = 0; context.values_readable() && b < tensor.size(); ++b)
    if (values[b] < 0)
      context.node().fail("input 'prefix_end' holds " + number(values[b]) +
                          "; a position must be at least 0");
  return values;
}

void check_window(const Context& context, const SwaAttentionParams& p) {
  const CacheLayout& cache = p.cache;
  const NodeInfo& node = context.node();
  if (p.window > 0 && cache.capacity < cache.sink + p.window)
    node.fail("capacity C = " + number(cache.capacity) +
              " must be at least sink S + window W = " + number(cache.sink) + " + " + number(p.window));
  if (!context.values_readable()) return;
  for (int64_t b = 0; b < p.packing.num_sequences; ++b)
    for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
      const int64_t tokens = p.packing.count(b), length = p.past_len.at(b, h) + tokens;
      if (tokens == 0 || length <= cache.capacity) continue;
      if (p.window < 0)
        node.fail("sequence " + number(b) + " has " + number(length) + " tokens, more than capacity C = " +
                  number(cache.capacity) + "; attention without a window needs all of them");
      const int64_t prefix = p.prefix_end ? p.prefix_end[b] : 0;
      if (p.past_len.at(b, h) < prefix && prefix > cache.sink)
        node.fail("sequence " + number(b) + " has " + number(length) +
                  " tokens, more than capacity C = " + number(cache.capacity) +
                  "; its queries before 'prefix_end' = " + number(prefix) + " need the prefix's first ones");
      if (cache.capacity < cache.sink + p.window - 1 + tokens)
        node.fail("sequence " + number(b) + " appended T_b = " + number(tokens) +
                  " tokens to a ring of C = " + number(cache.capacity) +
                  "; C must be at least S + W - 1 + T_b = " + number(cache.sink + p.window - 1 + tokens) +
                  "; use smaller chunks");
    }
}

int64_t read_max_kv_len(const Context& context, size_t index, const SwaAttentionParams& p) {
  const auto length = [&](int64_t b) {
    int64_t longest = 0;
    for (int64_t h = 0; h < p.cache.num_kv_heads && p.packing.count(b) > 0; ++h)
      longest = std::max(longest, p.past_len.at(b, h) + p.packing.count(b));
    return longest;
  };
  return read_promise(context, index, p.packing, length,
                      {.of = "tokens", .least = "the longest length after the step"});
}

int64_t read_max_query_len(const Context& context, size_t index, const Packing& packing) {
  return read_promise(context, index, packing, [&](int64_t b) { return packing.count(b); },
                      {.of = "tokens in the step", .least = "the most tokens of a sequence"});
}

void check_scored_lengths(const Context& context, const SnapKvScoreParams& p, size_t block_table) {
  if (!context.values_readable()) return;
  for (int64_t b = 0; b < p.num_sequences; ++b)
    for (int64_t h = 0; h < p.cache.num_kv_heads; ++h) {
      if (p.kv_len.at(b, h) > p.cache.capacity)
        context.node().fail("input 'kv_len' holds " + number(p.kv_len.at(b, h)) +
                            ", more than the cache's capacity C = " + number(p.cache.capacity));
      check_pages(context, p.cache, block_table, b, 0, p.kv_len.at(b, h));
    }
}

void check_selected_lengths(const Context& context, const KvSelectParams& p) {
  if (p.num_kv_heads < 1)
    context.node().fail("input 'kv_len' has 0 kv heads; its shape is [B, Hkv], and Hkv must be at least 1");
  if (!context.values_readable()) return;
  for (int64_t i = 0; i < p.num_sequences * p.num_kv_heads; ++i)
    if (p.kv_len[i] > p.capacity)
      context.node().fail("input 'kv_len' holds " + number(p.kv_len[i]) +
                          ", more than the C = " + number(p.capacity) + " positions that 'score' has");
}

void check_keep(const Context& context, const KvCompactParams& p, size_t block_table) {
  if (!context.values_readable()) return;
  for (int64_t list = 0; list < p.num_sequences * p.keep_heads; ++list) {
    const int32_t* keep = p.keep + list * p.keep_count;
    const int64_t sequence = list / p.keep_heads;
    int64_t previous = -1, kept = 0;
    bool ended = false;
    for (int64_t k = 0; k < p.keep_count; ++k) {
      const bool pad = keep[k] == -1;
      if (!pad && (ended || keep[k] <= previous || keep[k] >= p.cache.capacity))
        context.node().fail("input 'keep' list " + number(list) + " holds " + number(keep[k]) + " at index " +
                            number(k) + " after " + number(previous) +
                            "; positions must be strictly ascending and less than C = " +
                            number(p.cache.capacity) + ", and -1 is allowed only at the end");
      ended = ended || pad;
      if (pad) continue;
      previous = keep[k];
      ++kept;
      check_pages(context, p.cache, block_table, sequence, previous, previous + 1);
    }
    check_pages(context, p.cache, block_table, sequence, 0, kept);
  }
}

}  // namespace ortolan
