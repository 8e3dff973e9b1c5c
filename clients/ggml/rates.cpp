// Times FLASH_ATTN_EXT of ggml's CPU backend and of annulus in turns, in one process, with the mask
// of a model: query i of the last queries attends to keys 0 .. keys - queries + i.
//
//   usage: GGML_BACKEND_PATH=libggml-annulus.so rates [PAIRS [THREADS [QUERIES [TYPE [DIM]]]]]
//
// Prints the median milliseconds of CPU time of all threads.
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr int64_t HEADS = 32, KV_HEADS = 8, KEYS = 8192;
int64_t DIM = 128;

double cpu_ms() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

ggml_backend_ptr open(const char *name, int threads) {
  ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
  if (!device) {
    std::fprintf(stderr, "rates: no device %s\n", name);
    std::exit(1);
  }
  ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
  void *set = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                "ggml_backend_set_n_threads");
  reinterpret_cast<ggml_backend_set_n_threads_t>(set)(backend.get(), threads);
  return backend;
}

void fill(ggml_tensor *tensor) {
  static uint32_t state = 1;
  std::vector<float> row(static_cast<size_t>(tensor->ne[0]));
  for (int64_t index = 0; index < ggml_nrows(tensor); index++) {
    for (float &number : row) {
      state = state * 1664525 + 1013904223;
      number = static_cast<float>(state >> 8) / (1 << 23) - 1;
    }
    char *into = static_cast<char *>(tensor->data) + index * static_cast<int64_t>(tensor->nb[1]);
    ggml_quantize_chunk(tensor->type, row.data(), into, 0, 1, tensor->ne[0], nullptr);
  }
}

void run(ggml_backend_t cpu, ggml_backend_t annulus, ggml_type type, int64_t queries, int pairs) {
  ggml_context_ptr context(ggml_init({1 << 20, nullptr, true}));
  ggml_context *in = context.get();
  ggml_tensor *q = ggml_new_tensor_3d(in, GGML_TYPE_F32, DIM, queries, HEADS);
  ggml_tensor *k = ggml_new_tensor_3d(in, type, DIM, KV_HEADS, KEYS);  // as a KV cache has them
  ggml_tensor *v = ggml_new_tensor_3d(in, type, DIM, KV_HEADS, KEYS);
  ggml_tensor *mask = ggml_new_tensor_2d(in, GGML_TYPE_F16, KEYS, queries);
  ggml_tensor *out = ggml_flash_attn_ext(in, q, ggml_permute(in, k, 0, 2, 1, 3),
                                         ggml_permute(in, v, 0, 2, 1, 3), mask, 0.09f, 0, 0);
  ggml_cgraph *graph = ggml_new_graph(in);
  ggml_build_forward_expand(graph, out);
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(
      in, ggml_backend_cpu_buffer_type()));
  for (ggml_tensor *tensor : {q, k, v}) fill(tensor);
  auto *pair = static_cast<ggml_fp16_t *>(mask->data);
  for (int64_t query = 0; query < queries; query++)
    for (int64_t key = 0; key < KEYS; key++)
      *pair++ = ggml_fp32_to_fp16(key <= KEYS - queries + query
                                      ? 0
                                      : -std::numeric_limits<float>::infinity());
  std::vector<double> times[2];
  for (int turn = 0; turn <= pairs; turn++)
    for (int second = 0; second < 2; second++) {
      const int which = (turn + second) % 2;
      const double start = cpu_ms();
      const ggml_status status = ggml_backend_graph_compute(which ? annulus : cpu, graph);
      if (status != GGML_STATUS_SUCCESS) std::exit(1);
      if (turn > 0) times[which].push_back(cpu_ms() - start);  // the first warms up
    }
  double medians[2];
  for (int which = 0; which < 2; which++) {
    std::sort(times[which].begin(), times[which].end());
    medians[which] = times[which][times[which].size() / 2];
  }
  std::printf("%-5s %4d queries, %d keys: CPU %8.2f ms, annulus %8.2f ms, %5.2f times\n",
              ggml_type_name(type), static_cast<int>(queries), static_cast<int>(KEYS), medians[0],
              medians[1], medians[0] / medians[1]);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char **arguments) {
  const int pairs = count > 1 ? std::atoi(arguments[1]) : 3;
  const int threads = count > 2 ? std::atoi(arguments[2]) : 1;
  if (count > 5) DIM = std::atoi(arguments[5]);
  ggml_backend_load_all();
  const ggml_backend_ptr cpu = open("CPU", threads), annulus = open("ANNULUS", threads);
  for (int64_t queries : {1, 8, 512}) {
    if (count > 3 && queries != std::atoi(arguments[3])) continue;
    for (ggml_type type :
         {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0})
      if (count <= 4 || std::string(arguments[4]) == ggml_type_name(type))
        run(cpu.get(), annulus.get(), type, queries, queries < 100 ? 3 * pairs : pairs);
  }
}
