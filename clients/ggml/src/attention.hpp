// FLASH_ATTN_EXT on several threads:
//
//   for each batch row and chunk of queries:
//     read the mask
//     for each task, in parallel:  attend               few queries: all heads, a share of the keys
//     merge tasks of other keys                         many: one KV head, all keys
#pragma once

#include "worker.hpp"

#include <exception>
#include <omp.h>

namespace ggml_annulus {

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
