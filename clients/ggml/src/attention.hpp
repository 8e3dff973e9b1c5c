// FLASH_ATTN_EXT on several threads.
#pragma once

#include "node.hpp"

#include <exception>
#include <limits>
#include <map>
#include <omp.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace ggml_annulus {

// A result: queries are `row` elements of out apart, heads `queries` elements of lse.
struct Partial {
  float *out;
  int64_t row;
  float *lse;
  int64_t queries;

  // Merges a result of other keys: out = sum of e^(lse_i - lse) out_i.
  void merge(const Partial &other, int64_t rows, int64_t heads, int64_t dim) const {
    for (int64_t head = 0; head < heads; head++)
      for (int64_t query = 0; query < rows; query++) {
        float &old = lse[head * queries + query];
        const float added = other.lse[head * other.queries + query];
        if (added == -std::numeric_limits<float>::infinity()) continue;  // nothing is visible
        const float max = std::max(old, added);
        const float both = max + std::log(std::exp(old - max) + std::exp(added - max));
        const float keep = std::exp(old - both), add = std::exp(added - both);
        old = both;
        float *into = out + query * row + head * dim;
        const float *from = other.out + query * other.row + head * dim;
        for (int64_t c = 0; c < dim; c++) into[c] = into[c] * keep + from[c] * add;
      }
  }
};

// Converts f16 to f32; ggml has vector instructions for that in its CPU backend only.
inline void f16_to_f32(const void *from, float *into, int64_t count) {
  const auto *halves = static_cast<const ggml_fp16_t *>(from);
#ifdef __F16C__
  for (; count >= 8; count -= 8, halves += 8, into += 8)
    _mm256_storeu_ps(into, _mm256_cvtph_ps(_mm_loadu_si128(
                               reinterpret_cast<const __m128i *>(halves))));
#endif
  ggml_fp16_to_fp32_row(halves, into, count);
}

struct Task {
  int64_t batch, chunk;            // chunk: its first query
  Range kv_heads, queries, keys;   // queries count from the first of the chunk
  Partial result;                  // of the first query and head
};

// One thread: its plans, its memory, and a task.
//
//   K and V of one type of annulus:  read in place; q is rounded to it, out has the residual
//   other types:                     for each block of keys: K, V -> f32, pass, merge by lse
class Worker {
 public:
  void attend(const Node &node, const Masks &masks, const Task &task) {
    if (!node.widens)
      return pass(node, masks, task, view(node.k, task.batch, task.keys, task.kv_heads),
                  view(node.v, task.batch, task.keys, task.kv_heads));
    const int64_t dims = task.kv_heads.size() * (node.head_dim + node.value_dim);
    const int64_t all = task.queries.size() < FEW_QUERIES ? SHORT_BLOCK : LONG_BLOCK;
    const int64_t step = std::max<int64_t>(64, all / dims / 64 * 64);
    const int64_t heads = task.kv_heads.size() * node.group();
    Task block = task;
    for (int64_t first = task.keys.first; first < task.keys.end; first += step) {
      const bool is_first = first == task.keys.first;
      block.keys = {first, std::min(first + step, task.keys.end)};
      if (!is_first) {
        out_.resize(task.queries.size() * task.result.row);
        lse_.resize(heads * task.result.queries);
        block.result = {out_.data(), task.result.row, lse_.data(), task.result.queries};
      }
      const annulus_tensor k = widened(k_, node.k, block), v = widened(v_, node.v, block);
      pass(node, masks, block, k, v);
      if (!is_first) task.result.merge(block.result, task.queries.size(), heads, node.value_dim);
    }
  }

 private:
  // Elements of K and V of a block that is widened. A key that few queries read once stays in the
  // second-level cache; with many queries a long block makes merging cheap.
  static constexpr int64_t SHORT_BLOCK = 1 << 18, LONG_BLOCK = 1 << 21;
  static constexpr size_t MAX_PLANS = 48;

  using Key = std::array<int64_t, 9>;  // shape and parameters of a plan
  struct Entry {
    annulus::plan plan;
    std::array<int64_t, 4> mask;  // version and first head, query and key; zeros: all is visible
    int64_t used;
  };

  // Copies K or V of a task to f32, [heads, rows, dim].
  static annulus_tensor widened(std::vector<float> &into, const ggml_tensor *of, const Task &task) {
    const int64_t dim = of->ne[0], rows = task.keys.size(), heads = task.kv_heads.size();
    const auto to_float = of->type == GGML_TYPE_F16 ? f16_to_f32
                                                    : ggml_get_type_traits(of->type)->to_float;
    into.resize(heads * rows * dim);
    float *to = into.data();
    for (int64_t head = task.kv_heads.first; head < task.kv_heads.end; head++)
      for (int64_t key = task.keys.first; key < task.keys.end; key++, to += dim) {
        const char *from = row(of, key, head, task.batch);
        to_float ? to_float(from, to, dim) : (void)std::memcpy(to, from, dim * sizeof *to);
      }
    return tensor(into.data(), ANNULUS_F32, {1, rows, heads, dim}, {0, dim, rows * dim, 1});
  }

  // Returns the plan for the shape of a task; the least recently used of too many is dropped.
  Entry &entry(const Node &node, const Task &task, bool sinks, int64_t bias_heads) {
    annulus::options options;
    options.batch = options.has_softmax_scale = options.forward_only = 1;
    options.q_len = task.queries.size(), options.kv_len = task.keys.size();
    options.kv_heads = task.kv_heads.size(), options.q_heads = options.kv_heads * node.group();
    options.head_dim = node.head_dim, options.value_dim = node.value_dim;
    options.dtype = node.dtype;
    options.softmax_scale = node.scale, options.logits_soft_cap = node.cap;
    options.sinks = options.sinks_per_head = sinks;
    const float floats[] = {node.scale, node.cap};
    int32_t parameters[2];
    std::memcpy(parameters, floats, sizeof parameters);
    const Key key{options.q_len, options.kv_len, options.kv_heads, options.q_heads,
                  (options.head_dim << 32) + options.value_dim, options.dtype * 2 + sinks,
                  bias_heads, parameters[0], parameters[1]};
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      const auto older = [](auto &a, auto &b) { return a.second.used < b.second.used; };
      if (plans_.size() >= MAX_PLANS)
        plans_.erase(std::min_element(plans_.begin(), plans_.end(), older));
      const int64_t bias[] = {1, bias_heads, options.q_len, options.kv_len};
      if (bias_heads > 0) std::copy_n(bias, 4, options.bias_dims);
      auto plan = annulus::plan::over_threads(annulus::attention(options), 1);
      found = plans_.emplace(key, Entry{std::move(plan), {}, 0}).first;
    }
    found->second.used = ++clock_;
    return found->second;
  }

  // Gives a plan the visible pairs of a task, unless it has them.
  static void update(const Node &node, const Masks &masks, const Task &task, Entry &entry) {
    const bool per_head = node.visible_heads() > 1;
    const int64_t head = per_head ? task.kv_heads.first * node.group() : 0;
    std::array<int64_t, 4> mask{};
    if (masks.hides) mask = {masks.version, head, task.queries.first, task.keys.first};
    if (mask == entry.mask) return;
    annulus::batch<uint8_t> batch;
    const int64_t plane = masks.queries * masks.keys;
    if (masks.hides)
      batch.attention_mask = annulus::view<const uint8_t>(
          &masks.visible[head * plane + task.queries.first * masks.keys + task.keys.first],
          {1, per_head ? task.kv_heads.size() * node.group() : 1, task.queries.size(),
           task.keys.size()},
          {0, plane, masks.keys, 1});
    entry.mask = {-1, 0, 0, 0};  // unknown if the update fails
    entry.plan.update(batch);
    entry.mask = mask;
  }

  void pass(const Node &node, const Masks &masks, const Task &task, const annulus_tensor &k,
            const annulus_tensor &v) {
    const bool has_sinks = node.sinks && task.keys.first == 0;  // in one of the partial results
    const int64_t queries = task.queries.size(), dim = node.value_dim;
    const int64_t plane = masks.queries * masks.keys;
    const Range heads{task.kv_heads.first * node.group(), task.kv_heads.end * node.group()};
    const Range rows{task.chunk + task.queries.first, task.chunk + task.queries.end};
    const bool per_head = node.bias_heads() > 1, narrow = node.dtype != ANNULUS_F32;
    const int64_t bias_heads = !masks.adds ? 0 : per_head ? heads.size() : 1;
    Entry &entry = this->entry(node, task, has_sinks, bias_heads);
    update(node, masks, task, entry);

    const Partial &result = task.result;
    annulus_tensor bias{}, sinks{}, residual{}, q = view(node.q, task.batch, rows, heads);
    annulus_tensor out = tensor(result.out, ANNULUS_F32, {1, queries, heads.size(), dim},
                                {0, result.row, dim, 1});
    const annulus_tensor lse = tensor(result.lse, ANNULUS_F32, {1, heads.size(), queries, 1},
                                      {0, result.queries, 1, 0});
    if (masks.adds)
      bias = tensor(&masks.bias[(per_head ? heads.first * plane : 0) +
                                task.queries.first * masks.keys + task.keys.first],
                    ANNULUS_F32, {1, bias_heads, queries, task.keys.size()},
                    {0, plane, masks.keys, 1});
    if (has_sinks)
      sinks = tensor(static_cast<const float *>(node.sinks->data) + heads.first, ANNULUS_F32,
                     {heads.size(), 1, 1, 1}, {1, 0, 0, 0});
    if (narrow) {
      const int64_t count = queries * heads.size(), q_dim = node.head_dim;
      const auto from_float = ggml_get_type_traits(node.k->type)->from_float_ref;
      q16_.resize(count * q_dim), out16_.resize(count * dim), residual16_.resize(count * dim);
      uint16_t *into = q16_.data();
      for (int64_t query = rows.first; query < rows.end; query++)
        for (int64_t head = heads.first; head < heads.end; head++, into += q_dim)
          from_float(reinterpret_cast<const float *>(row(node.q, query, head, task.batch)), into,
                     q_dim);
      const auto packed = [&](std::vector<uint16_t> &all, int64_t dims) {
        return tensor(all.data(), node.dtype, {1, queries, heads.size(), dims},
                      {0, heads.size() * dims, dims, 1});
      };
      q = packed(q16_, q_dim), out = packed(out16_, dim), residual = packed(residual16_, dim);
    }
    annulus_forward_args args{};
    args.struct_size = sizeof args;
    args.q = &q, args.k = &k, args.v = &v, args.out = &out, args.lse = &lse;
    args.bias = masks.adds ? &bias : nullptr;
    args.softmax_aux = has_sinks ? &sinks : nullptr;
    args.out_residual = narrow ? &residual : nullptr;
    annulus::detail::check(annulus_forward(entry.plan.get(), &args));

    // out and its rounding residual add up to nearly f32
    const auto to_float = ggml_get_type_traits(node.k->type)->to_float;
    line_.resize(dim);
    for (int64_t query = 0; narrow && query < queries; query++)
      for (int64_t head = 0; head < heads.size(); head++) {
        const int64_t from = (query * heads.size() + head) * dim;
        float *into = result.out + query * result.row + head * dim;
        to_float(&out16_[from], into, dim);
        to_float(&residual16_[from], line_.data(), dim);
        for (int64_t c = 0; c < dim; c++) into[c] += line_[c];
      }
  }

  std::map<Key, Entry> plans_;
  int64_t clock_ = 0;
  std::vector<float> k_, v_, out_, lse_, line_;
  std::vector<uint16_t> q16_, out16_, residual16_;
};

// All threads:
//
//   for each batch row and chunk of queries:
//     read the mask
//     for each task, in parallel:  attend               few queries: all heads, a share of the keys
//     merge tasks of other keys                         many: one KV head, all keys
class Attention {
 public:
  void set_threads(int threads) { threads_ = std::max(1, threads); }

  // Computes a node that is not refused. Throws annulus::error and std::bad_alloc.
  void compute(const ggml_tensor *tensor) {
    const Node node(tensor);
    workers_.resize(std::max<size_t>(workers_.size(), threads_));
    const int64_t step = std::max<int64_t>(1, CHUNK_PAIRS / (node.bias_heads() * node.keys));
    for (int64_t batch = 0; batch < node.batch; batch++)
      for (int64_t first = 0; first < node.queries; first += step) {
        const Range chunk{first, std::min(first + step, node.queries)};
        masks_.read(node, batch, chunk, threads_);
        attend(node, batch, chunk);
      }
  }

 private:
  static constexpr int64_t CHUNK_PAIRS = 1 << 25;  // of a mask: 128 MiB of bias
  static constexpr int64_t MIN_KEYS = 256;         // of a task that does not have all
  static constexpr int64_t MIN_QUERIES = 64;       // likewise

  void attend(const Node &node, int64_t batch, Range chunk) {
    const int64_t queries = chunk.size(), row = node.heads * node.value_dim;
    const bool few = queries < FEW_QUERIES;
    const int64_t heads = few ? node.kv_heads : 1;
    int64_t rows = queries;
    // three tasks a thread, if there is not the same number of heads for each
    if (!few && node.kv_heads % threads_ != 0)
      rows = std::min(rows, std::max(MIN_QUERIES, rows * node.kv_heads / (3 * threads_)));
    const int64_t tasks = node.kv_heads / heads * ((queries + rows - 1) / rows);
    const int64_t wanted = std::max<int64_t>(1, std::min((threads_ + tasks - 1) / tasks,
                                                         node.keys / MIN_KEYS));
    const int64_t keys = (node.keys + wanted - 1) / wanted;
    const int64_t parts = (node.keys + keys - 1) / keys;

    float *out = node.out + (batch * node.queries + chunk.first) * row;
    lse_.resize(parts * node.heads * queries);
    parts_.resize((parts - 1) * queries * row);
    const auto result = [&](int64_t part) {
      float *data = part == 0 ? out : parts_.data() + (part - 1) * queries * row;
      return Partial{data, row, lse_.data() + part * node.heads * queries, queries};
    };
    std::vector<Task> all;
    for (int64_t part = 0; part < parts; part++)
      for (int64_t query = 0; query < queries; query += rows)
        for (int64_t head = 0; head < node.kv_heads; head += heads) {
          Partial of_task = result(part);
          of_task.out += query * row + head * node.group() * node.value_dim;
          of_task.lse += head * node.group() * queries + query;
          all.push_back({batch, chunk.first, {head, head + heads},
                         {query, std::min(query + rows, queries)},
                         {part * keys, std::min((part + 1) * keys, node.keys)}, of_task});
        }
    std::exception_ptr failure;
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
    for (size_t index = 0; index < all.size(); index++) try {
        workers_[omp_get_thread_num()].attend(node, masks_, all[index]);
      } catch (...) {
#pragma omp critical
        failure = std::current_exception();
      }
    if (failure) std::rethrow_exception(failure);
    for (int64_t part = 1; part < parts; part++)
      result(0).merge(result(part), queries, node.heads, node.value_dim);
  }

  int threads_ = GGML_DEFAULT_N_THREADS;
  Masks masks_{};
  std::vector<Worker> workers_;
  std::vector<float> lse_, parts_;
};

}  // namespace ggml_annulus
