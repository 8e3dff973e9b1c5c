// mpi: a plan and a cache over one endpoint; prints the sum of out.
// mpi documents: packed documents over the ranks of the job, on the balanced layout and on
// contiguous shards, with a strategy that is chosen for them; both passes give what attention over
// every document alone gives.
#ifndef ANNULUS_WITH_MPI
#error "pkg-config annulus-mpi defines ANNULUS_WITH_MPI"
#endif
// without the C++ bindings of MPI 2
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include "annulus.hpp"

#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>

namespace {

constexpr std::int64_t len = 45, q_heads = 4, kv_heads = 2, dim = 8;
// first rows of the documents, of which one is empty, and the end of the last
const std::vector<std::int64_t> starts{0, 20, 21, 21, 33, len};

using rows = std::vector<std::int64_t>;

// out, lse, dq, dk and dv, row by row.
using results = std::array<std::vector<float>, 5>;

std::vector<float> numbers(std::int64_t salt, const rows &of, std::int64_t per_row) {
  std::vector<float> all;
  for (std::int64_t row : of)
    for (std::int64_t c = 0; c < per_row; c++)
      all.push_back(static_cast<float>((row * 31 + c * 7 + salt * 11) % 17 - 8) / 8.0f);
  return all;
}

annulus::options options(std::int64_t length) {
  annulus::options options;
  options.batch = 1;
  options.q_len = options.kv_len = length;
  options.q_heads = q_heads;
  options.kv_heads = kv_heads;
  options.head_dim = options.value_dim = dim;
  options.causal = 1;
  return options;
}

// Runs both passes of a plan whose tensors have these rows.
results run(annulus::plan &plan, const rows &of) {
  using annulus::view;
  const auto count = static_cast<std::int64_t>(of.size());
  const annulus::extents of_q(1, count, q_heads, dim), of_k(1, count, kv_heads, dim);
  // lse with the heads of a row one after another
  const annulus::extents of_lse(1, q_heads, count), lse_strides(0, 1, q_heads, 0);
  const auto q = numbers(1, of, q_heads * dim), k = numbers(2, of, kv_heads * dim);
  const auto v = numbers(3, of, kv_heads * dim), dout = numbers(4, of, q_heads * dim);
  results all{std::vector<float>(q.size()), std::vector<float>(of.size() * q_heads),
              std::vector<float>(q.size()), std::vector<float>(k.size()),
              std::vector<float>(v.size())};
  auto &[out, lse, dq, dk, dv] = all;
  const view<const float> q_view(q.data(), of_q), k_view(k.data(), of_k), v_view(v.data(), of_k);
  const view<float> out_view(out.data(), of_q), lse_view(lse.data(), of_lse, lse_strides);
  plan.forward<float>({q_view, k_view, v_view, out_view, lse_view});
  plan.backward<float>({q_view, k_view, v_view, out_view, lse_view,
                        view<const float>(dout.data(), of_q), view<float>(dq.data(), of_q),
                        view<float>(dk.data(), of_k), view<float>(dv.data(), of_k)});
  return all;
}

// Computes the results of all rows, each document by a plan of one rank for its rows alone.
results attend_to_each() {
  results all;
  for (std::size_t d = 0; d + 1 < starts.size(); d++) {
    rows of(static_cast<std::size_t>(starts[d + 1] - starts[d]));
    std::iota(of.begin(), of.end(), starts[d]);
    const annulus::attention alone(options(static_cast<std::int64_t>(of.size())));
    auto plan = annulus::plan::over_threads(alone, 1);
    const auto part = run(plan, of);
    for (std::size_t i = 0; i < all.size(); i++)
      all[i].insert(all[i].end(), part[i].begin(), part[i].end());
  }
  return all;
}

// Returns true if the ranks have each row once, with the results that are wanted.
bool matches(std::int32_t layout, int rank, int ranks, const results &want) {
  auto packed = options(len);
  packed.layout = layout;
  packed.strategy = ANNULUS_STRATEGY_AUTO;
  annulus::attention attention(packed);
  annulus::batch<> documents;
  documents.cum_seqlens_q = annulus::view<const std::int64_t>(
      starts.data(), {static_cast<std::int64_t>(starts.size())});
  if (layout == ANNULUS_LAYOUT_BALANCED) attention.set_balanced_layout(ranks, documents);
  attention.set_documents(documents);
  const auto early = attention.q_rows(ranks, rank);
  auto plan = annulus::plan::over_mpi(attention, MPI_COMM_WORLD);
  const auto own = plan.q_rows();
  bool holds = own == early && own == plan.kv_rows() && plan.layout() == layout;
  plan.update(documents);
  const auto got = run(plan, own);
  std::vector<int> held(len);
  for (std::size_t row = 0; row < own.size(); row++) {
    held[static_cast<std::size_t>(own[row])]++;
    for (std::size_t i = 0; i < want.size(); i++) {
      const std::size_t per_row = want[i].size() / len;
      for (std::size_t c = 0; c < per_row; c++) {
        const float one = got[i][row * per_row + c];
        const float other = want[i][static_cast<std::size_t>(own[row]) * per_row + c];
        // a NaN is a difference
        holds = holds && std::abs(one - other) < 2e-5f;
      }
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, held.data(), len, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  for (int count : held) holds = holds && count == 1;
  return holds;
}

// Returns the strategy for full attention over documents of which no rank has a part; with
// `is_told`, for these documents. By the mask alone, moving queries is cheaper than moving keys.
std::int32_t chosen(int ranks, bool is_told) {
  auto full = options(12 * ranks);
  full.kv_len = 10 * full.q_len;
  full.causal = 0;
  full.layout = ANNULUS_LAYOUT_CONTIGUOUS;
  full.strategy = ANNULUS_STRATEGY_AUTO;
  annulus::attention attention(full);
  rows of_q, of_k;
  for (std::int64_t i = 0; i <= 2 * ranks; i++) of_q.push_back(6 * i), of_k.push_back(60 * i);
  const auto count = static_cast<std::int64_t>(of_q.size());
  annulus::batch<> documents;
  documents.cum_seqlens_q = annulus::view<const std::int64_t>(of_q.data(), {count});
  documents.cum_seqlens_k = annulus::view<const std::int64_t>(of_k.data(), {count});
  if (is_told) attention.set_documents(documents);
  return annulus::plan::over_mpi(attention, MPI_COMM_WORLD).strategy().first;
}

// A plan and a cache over one endpoint, which they outlive; prints the sum of out.
int over_endpoint() {
  double sum = 0;
  {
    annulus::options options;
    options.batch = 1;
    options.q_len = options.kv_len = 24;
    options.q_heads = options.kv_heads = 2;
    options.head_dim = options.value_dim = 8;
    options.causal = 1;
    const annulus::attention of_plan(options);
    options.q_len = options.kv_len = 0;
    const annulus::attention of_cache(options);
    std::optional<annulus::endpoint> endpoint(annulus::endpoint::over_mpi(of_plan, MPI_COMM_WORLD));
    auto first = annulus::plan::over_endpoint(of_plan, *endpoint);
    auto cache = annulus::cache::over_endpoint(of_cache, *endpoint);
    auto second = annulus::plan::over_endpoint(of_plan, *endpoint);
    endpoint.reset();
    for (annulus::plan *plan : {&first, &second}) {
      const auto rows = plan->q_rows();
      const auto length = static_cast<std::int64_t>(rows.size());
      std::vector<float> x(rows.size() * 16), out(x.size()), lse(rows.size() * 2);
      for (std::size_t i = 0; i < x.size(); i++)
        x[i] = static_cast<float>((rows[i / 16] * 7 + static_cast<std::int64_t>(i % 16)) % 5);
      annulus::view<const float> in(x.data(), {1, length, 2, 8});
      plan->forward<float>({in, in, in, annulus::view<float>(out.data(), {1, length, 2, 8}),
                            annulus::view<float>(lse.data(), {1, 2, length})});
      for (float each : out) sum += each;
    }
    if (cache.ranks() != first.ranks()) return 1;
  }
  double total = 0;
  int rank = 0;
  MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) std::printf("sum %.3f\n", total);
  return 0;
}

// Packed documents, on two layouts.
int over_documents() {
  int rank = 0, ranks = 0, wrong = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const auto want = attend_to_each();
  for (std::int32_t layout : {ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS})
    if (!matches(layout, rank, ranks, want)) {
      std::fprintf(stderr, "rank %d of %d: other results on layout %d\n", rank, ranks, layout);
      wrong = 1;
    }
  if (ranks > 1 && (chosen(ranks, false) != ANNULUS_STRATEGY_GRID ||
                    chosen(ranks, true) != ANNULUS_STRATEGY_RING)) {
    std::fprintf(stderr, "rank %d of %d: the strategy of other documents\n", rank, ranks);
    wrong = 1;
  }
  MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return wrong;
}

}  // namespace

int main(int count, char **arguments) {
  MPI_Init(&count, &arguments);
  const int wrong = count > 1 ? over_documents() : over_endpoint();
  MPI_Finalize();
  return wrong;
}
