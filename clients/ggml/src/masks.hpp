// The additive f16 mask of ggml, as annulus takes it: pairs that are visible, and a bias if other
// numbers than 0 and -infinity are added. Layers that share a mask share it here too.
#pragma once

#include "node.hpp"

#include <vector>

namespace ggml_annulus {

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
