#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>

#include <omp.h>

namespace ggml_annulus {
namespace {

constexpr int64_t MAX_DIM = 512;          // options.head_dim and value_dim of annulus
constexpr int64_t FEW_QUERIES = 16;       // below it annulus has kernels that read K and V once
constexpr int64_t MIN_KEYS = 256;         // of a task that shares its queries with other tasks
constexpr int64_t CHUNK_PAIRS = 1 << 26;  // of a mask: 64 MiB of visible, 256 MiB of bias
constexpr int64_t ALIBI_PAIRS = 1 << 22;  // of the bias of a task: 16 MiB
constexpr size_t MAX_PLANS = 48;          // of a thread
// K and V of a block that is copied: near the second-level cache for few queries, which read each
// key once; for many, so long that merging its results costs little.
constexpr int64_t SHORT_BLOCK_BYTES = 1 << 20, LONG_BLOCK_BYTES = 8 << 20;

constexpr uint16_t F16_MINUS_INFINITY = 0xfc00;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

int32_t annulus_dtype(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32: return ANNULUS_F32;
    case GGML_TYPE_F16: return ANNULUS_F16;
    case GGML_TYPE_BF16: return ANNULUS_BF16;
    default: return 0;
  }
}

float parameter(const ggml_tensor *node, int index) {
  float value;
  std::memcpy(&value, reinterpret_cast<const char *>(node->op_params) + 4 * index, sizeof value);
  return value;
}

const char *at(const ggml_tensor *tensor, int64_t i1, int64_t i2, int64_t i3) {
  return static_cast<const char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
         i3 * tensor->nb[3];
}

annulus_tensor tensor(const void *data, int32_t dtype, std::array<int64_t, 4> dims,
                      std::array<int64_t, 4> strides) {
  annulus_tensor all{const_cast<void *>(data), dtype, {}, {}};
  std::copy(dims.begin(), dims.end(), all.dims);
  std::copy(strides.begin(), strides.end(), all.strides);
  return all;
}

// A view of rows and heads of q, k or v of ggml, [dim, rows, heads, batch].
annulus_tensor view(const ggml_tensor *of, int64_t batch, Range rows, Range heads) {
  const auto size = static_cast<int64_t>(ggml_type_size(of->type));
  const auto stride = [&](int axis) { return static_cast<int64_t>(of->nb[axis]) / size; };
  return tensor(at(of, rows.first, heads.first, batch), annulus_dtype(of->type),
                {1, rows.size(), heads.size(), of->ne[0]}, {0, stride(1), stride(2), 1});
}

// Copies rows and heads of k or v to f32, [heads, rows, dim].
annulus_tensor widened(std::vector<float> &into, const ggml_tensor *of, int64_t batch, Range rows,
                       Range heads) {
  const int64_t dim = of->ne[0];
  into.resize(heads.size() * rows.size() * dim);
  const auto to_float = ggml_get_type_traits(of->type)->to_float;
  float *row = into.data();
  for (int64_t head = heads.first; head < heads.end; head++)
    for (int64_t i = rows.first; i < rows.end; i++, row += dim) {
      const char *from = at(of, i, head, batch);
      if (of->type == GGML_TYPE_F32)
        std::memcpy(row, from, dim * sizeof(float));
      else
        to_float(from, row, dim);
    }
  return tensor(into.data(), ANNULUS_F32, {1, rows.size(), heads.size(), dim},
                {0, dim, rows.size() * dim, 1});
}

// A result of some heads and queries: rows of out are `row` apart, heads of lse `queries`.
struct Partial {
  float *out;
  int64_t row;
  float *lse;
  int64_t queries;
};

// Merges `from`, of other keys, into `into`: out = sum of e^(lse_i - lse) out_i.
void merge(const Partial &into, const Partial &from, int64_t queries, int64_t heads, int64_t dim) {
  for (int64_t head = 0; head < heads; head++)
    for (int64_t query = 0; query < queries; query++) {
      float &old = into.lse[head * into.queries + query];
      const float other = from.lse[head * from.queries + query];
      if (other == MINUS_INFINITY) continue;  // nothing is visible
      const float max = std::max(old, other);
      const float old_weight = std::exp(old - max), weight = std::exp(other - max);
      const float sum = old_weight + weight;
      old = max + std::log(sum);
      float *out = into.out + query * into.row + head * dim;
      const float *add = from.out + query * from.row + head * dim;
      for (int64_t c = 0; c < dim; c++)
        out[c] = out[c] * (old_weight / sum) + add[c] * (weight / sum);
    }
}

}  // namespace

const char *refusal(const ggml_tensor *node) {
  const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
  const ggml_tensor *mask = node->src[3], *sinks = node->src[4];
  if (q->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32) return "q and out are f32";
  for (const ggml_tensor *kv : {k, v})
    if (kv->type != GGML_TYPE_F32 && !ggml_get_type_traits(kv->type)->to_float)
      return "type of K or V";
  for (const ggml_tensor *rows : {q, k, v})
    if (rows->nb[0] != ggml_type_size(rows->type)) return "rows are contiguous";
  if (!ggml_is_contiguous(node)) return "out is contiguous";
  if (k->ne[0] > MAX_DIM || v->ne[0] > MAX_DIM) return "dims of a head are at most 512";
  if (k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] != 0)
    return "K and V have the same keys and heads, a divisor of the query heads";
  if (k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) return "batch rows";
  if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] < k->ne[1] ||
               mask->ne[1] < q->ne[1]))
    return "an f16 mask of all queries and keys";
  if (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks))) return "f32 sinks";
  const float scale = parameter(node, 0), max_bias = parameter(node, 1), cap = parameter(node, 2);
  if (!std::isfinite(scale) || !std::isfinite(cap) || cap < 0 || max_bias < 0)
    return "finite scale and soft cap";
  return nullptr;
}

Node::Node(ggml_tensor *node)
    : q(node->src[0]),
      k(node->src[1]),
      v(node->src[2]),
      mask(node->src[3]),
      sinks(node->src[4]),
      out(static_cast<float *>(node->data)),
      batch(q->ne[3]),
      queries(q->ne[1]),
      keys(k->ne[1]),
      heads(q->ne[2]),
      kv_heads(k->ne[2]),
      group(heads / kv_heads),
      head_dim(k->ne[0]),
      value_dim(v->ne[0]),
      scale(parameter(node, 0)),
      max_bias(parameter(node, 1)),
      cap(parameter(node, 2)),
      dtype(annulus_dtype(k->type)),
      widens(k->type != v->type || dtype == 0) {
  if (widens) dtype = ANNULUS_F32;
}

float Node::slope(int64_t head) const {
  if (max_bias == 0) return 1;
  // Press et al. 2022: a geometric sequence for a power of two, then every second of the next
  const auto base = std::exp2(std::floor(std::log2(static_cast<float>(heads))));
  const auto h = static_cast<float>(head);
  return head < base ? std::exp2(-max_bias / base * (h + 1))
                     : std::exp2(-max_bias / 2 / base * (2 * (h - base) + 1));
}

Worker::Entry &Worker::entry(const Node &node, const Task &task, bool sinks, int64_t bias_heads) {
  const auto bits = [](float number) {
    int32_t all;
    std::memcpy(&all, &number, sizeof all);
    return int64_t{all};
  };
  const Key key{task.queries.size(), task.keys.size(), task.kv_heads.size(), node.group,
                node.head_dim, node.value_dim, node.dtype, sinks, bias_heads, bits(node.scale),
                bits(node.cap)};
  if (const auto found = plans_.find(key); found != plans_.end()) {
    found->second.used = ++clock_;
    return found->second;
  }
  if (plans_.size() >= MAX_PLANS)
    plans_.erase(std::min_element(plans_.begin(), plans_.end(), [](const auto &a, const auto &b) {
      return a.second.used < b.second.used;
    }));
  annulus::options options;
  options.batch = 1;
  options.q_len = task.queries.size();
  options.kv_len = task.keys.size();
  options.q_heads = task.kv_heads.size() * node.group;
  options.kv_heads = task.kv_heads.size();
  options.head_dim = node.head_dim;
  options.value_dim = node.value_dim;
  options.dtype = node.dtype;
  options.has_softmax_scale = 1;
  options.softmax_scale = node.scale;
  options.logits_soft_cap = node.cap;
  options.sinks = options.sinks_per_head = sinks;
  options.forward_only = 1;
  if (bias_heads > 0) {
    const int64_t dims[] = {1, bias_heads, options.q_len, options.kv_len};
    std::copy_n(dims, 4, options.bias_dims);
  }
  return plans_
      .emplace(key, Entry{annulus::plan::over_threads(annulus::attention(options), 1), {}, ++clock_})
      .first->second;
}

void Worker::update(const Node &node, const Masks &masks, const Task &task, Entry &entry) {
  const bool per_head = masks.heads > 1;
  const int64_t first = per_head ? task.kv_heads.first * node.group : 0;
  const MaskPart part = masks.hides ? MaskPart{static_cast<int64_t>(masks.version), first,
                                               task.queries.first, task.keys.first}
                                    : MaskPart{};
  if (part == entry.mask) return;
  annulus::batch<uint8_t> batch;
  if (masks.hides) {
    const int64_t heads = per_head ? task.kv_heads.size() * node.group : 1;
    const int64_t plane = masks.queries * masks.keys;
    const uint8_t *data = masks.visible.data() + first * plane +
                          task.queries.first * masks.keys + task.keys.first;
    batch.attention_mask = annulus::view<const uint8_t>(
        data, {1, heads, task.queries.size(), task.keys.size()}, {0, plane, masks.keys, 1});
  }
  entry.mask = {-1, -1, -1, -1};  // unknown if the update fails
  entry.plan.update(batch);
  entry.mask = part;
}

void Worker::pass(const Node &node, const Masks &masks, const Task &task, const annulus_tensor &k,
                  const annulus_tensor &v, bool sinks) {
  const Range heads{task.kv_heads.first * node.group, task.kv_heads.end * node.group};
  const int64_t queries = task.queries.size(), dim = node.value_dim;
  const int64_t bias_heads =
      !masks.adds ? 0 : masks.heads == 1 && node.max_bias == 0 ? 1 : heads.size();
  Entry &entry = this->entry(node, task, sinks, bias_heads);
  update(node, masks, task, entry);

  annulus_tensor bias{};
  if (masks.adds) {
    const int64_t plane = masks.queries * masks.keys;
    const float *data = masks.bias.data() + task.queries.first * masks.keys + task.keys.first;
    if (masks.heads > 1) data += heads.first * plane;
    bias = tensor(data, ANNULUS_F32, {1, bias_heads, queries, task.keys.size()},
                  {0, plane, masks.keys, 1});
    if (node.max_bias > 0) {
      bias_.resize(bias_heads * queries * task.keys.size());
      float *into = bias_.data();
      for (int64_t head = 0; head < heads.size(); head++) {
        const float slope = node.slope(heads.first + head);
        for (int64_t query = 0; query < queries; query++, into += task.keys.size()) {
          const float *from = data + (masks.heads > 1 ? head * plane : 0) + query * masks.keys;
          for (int64_t key = 0; key < task.keys.size(); key++) into[key] = slope * from[key];
        }
      }
      bias = tensor(bias_.data(), ANNULUS_F32, {1, bias_heads, queries, task.keys.size()},
                    {0, queries * task.keys.size(), task.keys.size(), 1});
    }
  }

  const Range rows{task.chunk + task.queries.first, task.chunk + task.queries.end};
  annulus_tensor q = view(node.q, task.batch, rows, heads);
  annulus_tensor out = tensor(task.out, ANNULUS_F32, {1, queries, heads.size(), dim},
                              {0, node.heads * dim, dim, 1});
  annulus_tensor residual = out;
  const annulus_tensor lse = tensor(task.lse, ANNULUS_F32, {1, heads.size(), queries, 1},
                                    {0, masks.queries, 1, 0});
  const bool narrow = node.dtype != ANNULUS_F32;
  const auto *traits = ggml_get_type_traits(node.k->type);
  if (narrow) {
    // q rounded to the type of K; out and its rounding residual, whose sum is nearly f32
    q16_.resize(queries * heads.size() * node.head_dim);
    out16_.resize(queries * heads.size() * dim);
    residual16_.resize(out16_.size());
    uint16_t *into = q16_.data();
    for (int64_t query = rows.first; query < rows.end; query++)
      for (int64_t head = heads.first; head < heads.end; head++, into += node.head_dim)
        traits->from_float_ref(
            reinterpret_cast<const float *>(at(node.q, query, head, task.batch)), into,
            node.head_dim);
    q = tensor(q16_.data(), node.dtype, {1, queries, heads.size(), node.head_dim},
               {0, heads.size() * node.head_dim, node.head_dim, 1});
    const std::array<int64_t, 4> dims{1, queries, heads.size(), dim};
    out = tensor(out16_.data(), node.dtype, dims, {0, heads.size() * dim, dim, 1});
    residual = tensor(residual16_.data(), node.dtype, dims, {0, heads.size() * dim, dim, 1});
  }
  annulus_tensor aux{};
  if (sinks)
    aux = tensor(static_cast<const float *>(node.sinks->data) + heads.first, ANNULUS_F32,
                 {heads.size(), 1, 1, 1}, {1, 1, 0, 0});
  annulus_forward_args args{};
  args.struct_size = sizeof args;
  args.q = &q;
  args.k = &k;
  args.v = &v;
  args.bias = masks.adds ? &bias : nullptr;
  args.softmax_aux = sinks ? &aux : nullptr;
  args.out = &out;
  args.lse = &lse;
  args.out_residual = narrow ? &residual : nullptr;
  annulus::detail::check(annulus_forward(entry.plan.get(), &args));
  if (!narrow) return;
  row_.resize(dim);
  for (int64_t query = 0; query < queries; query++)
    for (int64_t head = 0; head < heads.size(); head++) {
      const int64_t from = (query * heads.size() + head) * dim;
      float *into = task.out + (query * node.heads + head) * dim;
      traits->to_float(&out16_[from], into, dim);
      traits->to_float(&residual16_[from], row_.data(), dim);
      for (int64_t c = 0; c < dim; c++) into[c] += row_[c];
    }
}

void Worker::attend(const Node &node, const Masks &masks, const Task &task) {
  const bool sinks = node.sinks && task.keys.first == 0;
  const Range kv = task.kv_heads;
  if (!node.widens) {
    pass(node, masks, task, view(node.k, task.batch, task.keys, kv),
         view(node.v, task.batch, task.keys, kv), sinks);
    return;
  }
  const int64_t row_bytes = kv.size() * (node.head_dim + node.value_dim) * sizeof(float);
  const bool few = task.queries.size() < FEW_QUERIES;
  const int64_t step =
      round_up(std::max<int64_t>(1, (few ? SHORT_BLOCK_BYTES : LONG_BLOCK_BYTES) / row_bytes), 64);
  const int64_t heads = kv.size() * node.group, row = node.heads * node.value_dim;
  for (int64_t first = task.keys.first; first < task.keys.end; first += step) {
    Task block = task;
    block.keys = {first, std::min(first + step, task.keys.end)};
    const bool is_first = first == task.keys.first;
    if (!is_first) {
      out_.resize(task.queries.size() * row);
      lse_.resize(heads * masks.queries);
      block.out = out_.data();
      block.lse = lse_.data();
    }
    const annulus_tensor k = widened(k_, node.k, task.batch, block.keys, kv);
    const annulus_tensor v = widened(v_, node.v, task.batch, block.keys, kv);
    pass(node, masks, block, k, v, sinks && is_first);
    if (!is_first)
      merge({task.out, row, task.lse, masks.queries}, {block.out, row, block.lse, masks.queries},
            task.queries.size(), heads, node.value_dim);
  }
}

// Splits the f16 mask into visible pairs and, if it adds other numbers than 0, a bias.
void Attention::prepare(const Node &node, int64_t batch, Range chunk) {
  const ggml_tensor *mask = node.mask;
  masks_.heads = mask && mask->ne[2] > 1 ? node.heads : 1;
  masks_.queries = chunk.size();
  masks_.keys = node.keys;
  masks_.hides = masks_.adds = false;
  if (!mask) return;
  const int64_t rows = masks_.heads * chunk.size(), keys = node.keys;
  const auto line = [&](int64_t row) {
    return reinterpret_cast<const ggml_fp16_t *>(at(mask, chunk.first + row % chunk.size(),
                                                    row / chunk.size() % mask->ne[2],
                                                    batch % mask->ne[3]));
  };
  const int threads = rows * keys < 1 << 18 ? 1 : threads_;
  next_visible_.resize(rows * keys);
  int hides = 0, adds = 0;
#pragma omp parallel for num_threads(threads) reduction(| : hides, adds)
  for (int64_t row = 0; row < rows; row++) {
    const ggml_fp16_t *from = line(row);
    uint8_t *into = next_visible_.data() + row * keys;
    uint16_t hidden = 0, numbers = 0;
    for (int64_t key = 0; key < keys; key++) {
      const bool visible = from[key] != F16_MINUS_INFINITY;
      into[key] = visible;
      hidden |= !visible;
      numbers |= visible ? from[key] & 0x7fff : 0;
    }
    hides |= hidden;
    adds |= numbers;
  }
  masks_.hides = hides != 0;
  masks_.adds = adds != 0;
  const std::array<int64_t, 3> shape{masks_.heads, masks_.queries, masks_.keys};
  if (masks_.hides && (shape != visible_shape_ || next_visible_ != masks_.visible)) {
    std::swap(next_visible_, masks_.visible);
    visible_shape_ = shape;
    masks_.version++;
  }
  if (!masks_.adds) return;
  masks_.bias.resize(rows * keys);
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; row++)
    ggml_fp16_to_fp32_row(line(row), masks_.bias.data() + row * keys, keys);
}

// Attends to all keys with the queries of a chunk.
void Attention::attend(const Node &node, int64_t batch, Range chunk) {
  const int64_t threads = threads_, queries = chunk.size(), dim = node.value_dim;
  const bool few = queries < FEW_QUERIES;
  const int64_t task_heads = few ? node.kv_heads : 1;
  int64_t task_queries = queries;
  if (!few && node.kv_heads % threads != 0)
    task_queries = std::max<int64_t>(64, round_up(queries * node.kv_heads / (3 * threads), 16));
  if (!few && masks_.adds && node.max_bias > 0)
    task_queries = std::clamp<int64_t>(ALIBI_PAIRS / (node.group * node.keys), 16, task_queries);
  task_queries = std::min(task_queries, queries);
  const int64_t tasks =
      node.kv_heads / task_heads * ((queries + task_queries - 1) / task_queries);
  const int64_t parts = std::clamp<int64_t>((threads + tasks - 1) / tasks, 1,
                                            std::max<int64_t>(1, node.keys / MIN_KEYS));
  const int64_t task_keys = round_up((node.keys + parts - 1) / parts, 64);

  lse_.resize(node.heads * queries);
  const int64_t out_len = queries * node.heads * dim, lse_len = node.heads * queries;
  partial_out_.resize((parts - 1) * out_len);
  partial_lse_.resize((parts - 1) * lse_len);
  float *out = node.out + (batch * node.queries + chunk.first) * node.heads * dim;
  std::vector<Task> all;
  int64_t part = 0;
  for (int64_t key = 0; key < node.keys; key += task_keys, part++)
    for (int64_t query = 0; query < queries; query += task_queries)
      for (int64_t head = 0; head < node.kv_heads; head += task_heads) {
        float *part_out = part == 0 ? out : partial_out_.data() + (part - 1) * out_len;
        float *part_lse = part == 0 ? lse_.data() : partial_lse_.data() + (part - 1) * lse_len;
        all.push_back({batch, chunk.first, {head, head + task_heads},
                       {query, std::min(query + task_queries, queries)},
                       {key, std::min(key + task_keys, node.keys)},
                       part_out + (query * node.heads + head * node.group) * dim,
                       part_lse + head * node.group * queries + query});
      }
  std::exception_ptr failure;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (size_t index = 0; index < all.size(); index++) {
    try {
      workers_[omp_get_thread_num()].attend(node, masks_, all[index]);
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  const int64_t row = node.heads * dim;
  for (int64_t other = 0; other + 1 < part; other++)
    merge({out, row, lse_.data(), queries},
          {partial_out_.data() + other * out_len, row, partial_lse_.data() + other * lse_len,
           queries},
          queries, node.heads, dim);
}

void Attention::compute(ggml_tensor *tensor) {
  const Node node(tensor);
  workers_.resize(std::max<size_t>(workers_.size(), threads_));
  const int64_t mask_heads = node.mask && node.mask->ne[2] > 1 ? node.heads : 1;
  const int64_t step = std::max<int64_t>(1, CHUNK_PAIRS / (mask_heads * std::max<int64_t>(1, node.keys)));
  for (int64_t batch = 0; batch < node.batch; batch++)
    for (int64_t first = 0; first < node.queries; first += step) {
      const Range chunk{first, std::min(first + step, node.queries)};
      prepare(node, batch, chunk);
      attend(node, batch, chunk);
    }
}

}  // namespace ggml_annulus
