// cache RANKS FILE MACHINE: decoding as tests/c/cache.c does it, by annulus.hpp; the results go to
// FILE. A plan takes the strategy of the least time on MACHINE.
#include <annulus.hpp>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <utility>

namespace {

constexpr std::int64_t batch = 2, len = 37, q_heads = 4, kv_heads = 2, head_dim = 8, value_dim = 6;

void check(bool holds, const char *what) {
  if (!holds) {
    std::cerr << what << " does not hold; last error: " << annulus_last_error() << "\n";
    std::exit(1);
  }
}

float value(std::int64_t salt, std::int64_t b, std::int64_t row, std::int64_t head,
            std::int64_t c) {
  return static_cast<float>((row * 31 + head * 7 + c * 3 + b * 5 + salt * 11) % 17 - 8) / 8.0f;
}

// A tensor of all rows, [batch, len, heads, dim].
template <class T>
std::vector<T> numbers(std::int64_t salt, std::int64_t heads, std::int64_t dim) {
  std::vector<T> all;
  for (std::int64_t b = 0; b < batch; b++)
    for (std::int64_t row = 0; row < len; row++)
      for (std::int64_t head = 0; head < heads; head++)
        for (std::int64_t c = 0; c < dim; c++)
          all.push_back(static_cast<T>(value(salt, b, row, head, c)));
  return all;
}

annulus::options options() {
  annulus::options options;
  options.batch = batch;
  options.q_heads = q_heads;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  options.value_dim = value_dim;
  options.causal = 1;
  options.page_rows = 4;
  return options;
}

// Results of all rows, in the order of `decoded` in tests/c/decode.h.
template <class T>
struct decoded {
  std::vector<T> out = std::vector<T>(batch * len * q_heads * value_dim);
  std::vector<T> lse = std::vector<T>(batch * q_heads * len);
  bool operator==(const decoded &other) const { return out == other.out && lse == other.lse; }
};

// Some rows of a tensor of all rows, where they are.
template <class T>
annulus::view<T> rows(T *all, std::int64_t first, std::int64_t count, std::int64_t heads,
                      std::int64_t dim) {
  annulus::extents strides{len * heads * dim, heads * dim, dim, 1};
  return {all + first * heads * dim, {batch, count, heads, dim}, strides};
}

template <class T>
decoded<T> decode(annulus::cache &cache) {
  auto q = numbers<T>(1, q_heads, head_dim), k = numbers<T>(2, kv_heads, head_dim);
  auto v = numbers<T>(3, kv_heads, value_dim);
  decoded<T> all;
  for (std::int64_t first = 0, n = 20; first < len; first += n, n = first < 24 ? 4 : 1) {
    check(cache.len() == first, "the number of cached rows");
    auto keys = rows(k.data(), first, n, kv_heads, head_dim);
    auto values = rows(v.data(), first, n, kv_heads, value_dim);
    if (first == 20) {
      check(cache.own_rows(n) == std::vector<std::int64_t>{0, 1, 2, 3}, "own rows");
      cache.append_own(n, keys, values);
    } else {
      cache.append(keys, values);
    }
    cache.attend<T>({rows(q.data(), first, n, q_heads, head_dim),
                     rows(all.out.data(), first, n, q_heads, value_dim),
                     {all.lse.data() + first, {batch, q_heads, n}, {q_heads * len, len, 1}}});
  }
  return all;
}

// Two nodes of two ranks with a slow network: the ranks of a node divide the keys.
void plan_by_machine(const char *machine) {
  auto all = options();
  all.page_rows = 0;
  all.batch = 1;
  all.q_len = all.kv_len = 64;
  all.kv_heads = 1;
  all.value_dim = head_dim;
  all.causal = 0;
  all.strategy = ANNULUS_STRATEGY_AUTO;
  annulus::attention attention(all);
  try {
    attention.set_machine("none.json");
    check(false, "a machine without a file");
  } catch (const annulus::error &error) {
    check(error.status() == ANNULUS_IO, "the status of a missing file");
    check(std::string(error.what()).rfind("none.json: ", 0) == 0, "the name of a missing file");
  }
  attention.set_machine(machine);
  auto plan = annulus::plan::over_threads(attention, 4);
  check(plan.strategy() == std::pair<std::int32_t, std::int32_t>(ANNULUS_STRATEGY_GRID, 1), "grid");
  check(plan.grid() == std::pair<std::int32_t, std::int32_t>(2, 2), "the parts of the grid");
}

}  // namespace

int main(int count, char **arguments) {
  check(count == 4, "three arguments");
  const std::int64_t ranks = std::atoi(arguments[1]);
  auto cache = annulus::cache::over_threads(annulus::attention(options()), ranks);
  check(cache.rank() == 0 && cache.ranks() == ranks && cache.page_rows() == 4, "the ring");
  const auto first = decode<float>(cache);
  check(cache.local_len() == len && cache.buffer_bytes() > 0, "lengths");
  check(cache.predicted_bytes(1) ==
            static_cast<std::uint64_t>(ranks * (ranks - 1) * batch * q_heads * (value_dim + 2) * 4),
        "predicted bytes");
  try {
    cache.truncate(len + 1);
    check(false, "a cache truncated beyond its length");
  } catch (const annulus::error &error) {
    check(error.status() == ANNULUS_INVALID_ARGUMENT && !error.is_fatal(), "the status");
    check(std::string(error.what()) == "len: got 38, want at most the 37 cached rows", "the text");
  }
  // a moved cache is the same
  auto moved = std::move(cache);
  moved.truncate(0);
  check(decode<float>(moved) == first, "the same bits again");

  auto f64 = options();
  f64.dtype = ANNULUS_F64;
  auto wide = annulus::cache::over_threads(annulus::attention(f64), ranks);
  const auto second = decode<double>(wide);
  for (std::size_t i = 0; i < first.out.size(); i++)
    check(std::abs(second.out[i] - static_cast<double>(first.out[i])) < 1e-5, "double precision");

  plan_by_machine(arguments[3]);
  std::ofstream file(arguments[2], std::ios::binary);
  file.write(reinterpret_cast<const char *>(first.out.data()),
             static_cast<std::streamsize>(first.out.size() * sizeof(float)));
  file.write(reinterpret_cast<const char *>(first.lse.data()),
             static_cast<std::streamsize>(first.lse.size() * sizeof(float)));
  check(file.flush().good(), "a written file");
  return 0;
}
