// A FLASH_ATTN_EXT node of ggml: its tensors [dim, rows, heads, batch] and parameters, what is
// refused, and views of its tensors for annulus. Heads are query heads unless called KV heads.
#pragma once

#include <annulus.hpp>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace ggml_annulus {

// Indices from first to end, which is not included.
struct Range {
  int64_t first, end;
  int64_t size() const { return end - first; }
};

inline int32_t annulus_dtype(ggml_type type) {
  return type == GGML_TYPE_F32    ? ANNULUS_F32
         : type == GGML_TYPE_F16  ? ANNULUS_F16
         : type == GGML_TYPE_BF16 ? ANNULUS_BF16
                                  : 0;
}

inline const char *row(const ggml_tensor *of, int64_t i1, int64_t i2, int64_t i3) {
  return static_cast<const char *>(of->data) + i1 * of->nb[1] + i2 * of->nb[2] + i3 * of->nb[3];
}

inline annulus_tensor tensor(const void *data, int32_t dtype, std::array<int64_t, 4> dims,
                             std::array<int64_t, 4> strides) {
  annulus_tensor all{const_cast<void *>(data), dtype, {}, {}};
  std::copy(dims.begin(), dims.end(), all.dims);
  std::copy(strides.begin(), strides.end(), all.strides);
  return all;
}

// Views rows and heads of q, k or v in place.
inline annulus_tensor view(const ggml_tensor *of, int64_t batch, Range rows, Range heads) {
  const auto size = static_cast<int64_t>(ggml_type_size(of->type));
  return tensor(row(of, rows.first, heads.first, batch), annulus_dtype(of->type),
                {1, rows.size(), heads.size(), of->ne[0]},
                {0, static_cast<int64_t>(of->nb[1]) / size,
                 static_cast<int64_t>(of->nb[2]) / size, 1});
}

constexpr int64_t MAX_DIM = 1024;  // of head_dim and value_dim in annulus.h

// Below it annulus has kernels that read each key once, for all heads.
constexpr int64_t FEW_QUERIES = 16;

struct Node {
  explicit Node(const ggml_tensor *node)
      : q(node->src[0]), k(node->src[1]), v(node->src[2]), mask(node->src[3]), sinks(node->src[4]),
        out(static_cast<float *>(node->data)),
        batch(q->ne[3]), queries(q->ne[1]), keys(k->ne[1]), heads(q->ne[2]), kv_heads(k->ne[2]),
        head_dim(k->ne[0]), value_dim(v->ne[0]) {
    float parameters[3];
    std::memcpy(parameters, node->op_params, sizeof parameters);
    scale = parameters[0], max_bias = parameters[1], cap = parameters[2];
    dtype = k->type == v->type ? annulus_dtype(k->type) : 0;
    // with many queries, tiles of f32 in place are faster than tiles that are packed
    widens = dtype == 0 || (dtype != ANNULUS_F32 && queries >= FEW_QUERIES);
    if (widens) dtype = ANNULUS_F32;
  }

  const ggml_tensor *q, *k, *v, *mask, *sinks;
  float *out;  // [batch, queries, heads, value_dim]
  int64_t batch, queries, keys, heads, kv_heads, head_dim, value_dim;
  float scale, max_bias, cap;
  int32_t dtype;  // of a pass, ANNULUS_*
  bool widens;    // K and V are copied to f32, block by block

  int64_t group() const { return heads / kv_heads; }
  // Heads that differ in visible pairs and in the bias: all, or 1.
  int64_t visible_heads() const { return mask && mask->ne[2] > 1 ? heads : 1; }
  int64_t bias_heads() const { return max_bias > 0 ? heads : visible_heads(); }

  // Returns the factor of the mask for a head (Press et al. 2022): a geometric sequence for a power
  // of two, then every second number of the sequence for the next power.
  float slope(int64_t head) const {
    if (max_bias == 0) return 1;
    const auto base = std::exp2(std::floor(std::log2(static_cast<float>(heads))));
    const auto h = static_cast<float>(head);
    return h < base ? std::exp2(-max_bias / base * (h + 1))
                    : std::exp2(-max_bias / 2 / base * (2 * (h - base) + 1));
  }

  // Returns nullptr if annulus serves the node, else the reason.
  const char *refusal(const ggml_tensor *node) const {
    if (q->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32) return "q and out are f32";
    for (const ggml_tensor *kv : {k, v})
      if (kv->type != GGML_TYPE_F32 && !ggml_get_type_traits(kv->type)->to_float)
        return "no conversion of K or V to f32";
    for (const ggml_tensor *rows : {q, k, v})
      if (rows->nb[0] != ggml_type_size(rows->type)) return "rows are contiguous";
    if (!ggml_is_contiguous(node)) return "out is contiguous";
    if (head_dim > MAX_DIM || value_dim > MAX_DIM) return "more dims than annulus has";
    if (keys < 1 || v->ne[1] != keys || v->ne[2] != kv_heads || heads % kv_heads != 0 ||
        k->ne[3] != batch || v->ne[3] != batch)
      return "shapes of K and V";
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != sizeof(ggml_fp16_t) ||
                 mask->ne[0] < keys || mask->ne[1] < queries))
      return "an f16 mask of all queries and keys";
    if (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks))) return "f32 sinks";
    if (!std::isfinite(scale) || !std::isfinite(cap) || cap < 0 || max_bias < 0)
      return "scale, max_bias and soft cap are finite, the last two not negative";
    return nullptr;
  }
};

// The additive f16 mask of ggml, as annulus takes it: pairs that are visible, and a bias if other
// numbers than 0 and -infinity are added. Layers that share a mask share it here too.
class Masks {
 public:
  int64_t queries, keys;         // of the chunk
  bool hides, adds;              // a pair; a number
  std::vector<uint8_t> visible;  // [visible_heads, queries, keys] of the node, if it hides
  std::vector<float> bias;       // [bias_heads, queries, keys], times the slope, if it adds
  int64_t version = 0;           // of visible: its bytes change with it only

  // Reads the mask of some queries of a batch row.
  void read(const Node &node, int64_t batch, Range chunk, int all_threads) {
    queries = chunk.size(), keys = node.keys, hides = adds = false;
    if (!node.mask) return;
    const auto line = [&](int64_t index) {  // of [heads, queries]
      const ggml_tensor *mask = node.mask;
      return reinterpret_cast<const ggml_fp16_t *>(
          row(mask, chunk.first + index % queries, index / queries % mask->ne[2],
              batch % mask->ne[3]));
    };
    const int64_t lines = node.visible_heads() * queries;
    const int threads = lines * keys < 1 << 18 ? 1 : all_threads;
    int hidden = 0, numbers = 0;
    next_.resize(lines * keys);
#pragma omp parallel for num_threads(threads) reduction(| : hidden, numbers)
    for (int64_t index = 0; index < lines; index++) {
      const ggml_fp16_t *from = line(index);
      uint8_t *into = next_.data() + index * keys;
      uint16_t any_hidden = 0, any_number = 0;
      for (int64_t key = 0; key < keys; key++) {
        const bool is_visible = from[key] != MINUS_INFINITY;
        into[key] = is_visible;
        any_hidden |= !is_visible;
        any_number |= is_visible ? from[key] & 0x7fff : 0;
      }
      hidden |= any_hidden;
      numbers |= any_number;
    }
    hides = hidden != 0, adds = numbers != 0;
    const std::array<int64_t, 3> shape{node.visible_heads(), queries, keys};
    if (hides && (shape != shape_ || next_ != visible)) {
      std::swap(next_, visible);
      shape_ = shape;
      version++;
    }
    if (!adds) return;
    bias.resize(node.bias_heads() * queries * keys);
#pragma omp parallel for num_threads(threads)
    for (int64_t index = 0; index < node.bias_heads() * queries; index++) {
      float *into = bias.data() + index * keys;
      const float slope = node.slope(index / queries);
      ggml_fp16_to_fp32_row(line(index), into, keys);
      if (slope != 1)
        for (int64_t key = 0; key < keys; key++) into[key] *= slope;
    }
  }

 private:
  static constexpr ggml_fp16_t MINUS_INFINITY = 0xfc00;
  std::vector<uint8_t> next_;
  std::array<int64_t, 3> shape_{};
};

}  // namespace ggml_annulus
