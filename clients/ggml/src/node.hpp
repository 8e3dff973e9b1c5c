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

}  // namespace ggml_annulus
