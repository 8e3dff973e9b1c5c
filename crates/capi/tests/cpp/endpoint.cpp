/* endpoint: a plan and a cache over one endpoint, which they outlive; prints the sum of out. */
#ifndef ANNULUS_WITH_MPI
#error "pkg-config annulus-mpi defines ANNULUS_WITH_MPI"
#endif
/* without the C++ bindings of MPI 2 */
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include "annulus.hpp"

#include <cstdio>
#include <optional>

int main(int count, char **arguments) {
  MPI_Init(&count, &arguments);
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
  MPI_Finalize();
  return 0;
}
