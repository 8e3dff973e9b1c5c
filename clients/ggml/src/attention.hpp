// FLASH_ATTN_EXT of ggml, computed by annulus on the CPU.
//
// For each batch row and chunk of queries:
//   masks:  the additive f16 mask -> visible (u8) and, if it adds anything, bias (f32)
//   tasks:  (KV heads, queries, keys), in parallel, each on one thread with plans of its own
//   merge:  partial results of tasks over different keys, by their lse
// A task of few queries has all heads and a share of the keys; otherwise one KV head and all keys.
#pragma once

#include <annulus.hpp>
#include <ggml.h>

#include <array>
#include <cstdint>
#include <map>
#include <vector>

namespace ggml_annulus {

// Returns nullptr if the node is served, else why it is refused.
const char *refusal(const ggml_tensor *node);

// Indices from first to end, which is not included.
struct Range {
  int64_t first, end;
  int64_t size() const { return end - first; }
};

// Tensors and parameters of a node. A head is a query head unless it is called a KV head.
struct Node {
  explicit Node(ggml_tensor *node);
  // Factor of the mask for a head (ALiBi).
  float slope(int64_t head) const;

  const ggml_tensor *q, *k, *v, *mask, *sinks;
  float *out;  // [batch, queries, heads, value_dim]
  int64_t batch, queries, keys, heads, kv_heads, group, head_dim, value_dim;
  float scale, max_bias, cap;
  int32_t dtype;  // of a pass, an ANNULUS_ constant
  bool widens;    // K and V are copied to f32, block by block
};

// The mask of a batch row and a chunk of queries, as annulus takes it.
struct Masks {
  int64_t heads = 0, queries = 0, keys = 0;
  bool hides = false, adds = false;
  std::vector<uint8_t> visible;  // [heads, queries, keys], if it hides a pair
  std::vector<float> bias;       // likewise, if a visible pair has a number other than 0
  uint64_t version = 0;          // of visible: as long as it is the same, so are the bytes
};

// What one call of annulus computes, and where. Queries count from the first of the chunk.
struct Task {
  int64_t batch;
  int64_t chunk;      // first query of the chunk
  Range kv_heads, queries, keys;
  float *out;         // of the first query and head; rows are heads * value_dim apart
  float *lse;         // likewise, [heads, queries of the chunk]
};

// Plans and memory of one thread.
class Worker {
 public:
  void attend(const Node &node, const Masks &masks, const Task &task);

 private:
  // Shape and parameters of a plan.
  using Key = std::array<int64_t, 11>;
  // A part of the mask of some version; all zeros: everything is visible.
  using MaskPart = std::array<int64_t, 4>;
  struct Entry {
    annulus::plan plan;
    MaskPart mask;
    uint64_t used;
  };
  Entry &entry(const Node &node, const Task &task, bool sinks, int64_t bias_heads);
  void pass(const Node &node, const Masks &masks, const Task &task, const annulus_tensor &k,
            const annulus_tensor &v, bool sinks);
  void update(const Node &node, const Masks &masks, const Task &task, Entry &entry);

  std::map<Key, Entry> plans_;
  uint64_t clock_ = 0;
  std::vector<float> k_, v_, bias_, out_, lse_, row_;
  std::vector<uint16_t> q16_, out16_, residual16_;
};

class Attention {
 public:
  void set_threads(int threads) { threads_ = threads < 1 ? 1 : threads; }
  // Computes a node that is served. Throws annulus::error and std::bad_alloc.
  void compute(ggml_tensor *node);

 private:
  void prepare(const Node &node, int64_t batch, Range chunk);
  void attend(const Node &node, int64_t batch, Range chunk);

  int threads_ = GGML_DEFAULT_N_THREADS;
  Masks masks_;
  std::vector<uint8_t> next_visible_;
  std::array<int64_t, 3> visible_shape_{};
  std::vector<Worker> workers_;
  std::vector<float> lse_, partial_out_, partial_lse_;
};

}  // namespace ggml_annulus
