// threads RANKS FILE: the case of tests/c/case.h by annulus.hpp; and its exceptions and functions.
// threads RANKS FILE MACHINE: decoding; a plan takes the strategy of the least time on MACHINE. The
// results go to FILE.
#include <annulus.hpp>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
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

float value(std::int64_t salt, std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t c) {
  return static_cast<float>((row * 31 + head * 7 + c * 3 + b * 5 + salt * 11) % 17 - 8) / 8.0f;
}

// A tensor of all rows, [batch, len, heads, dim].
template <class T = float>
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
  options.q_len = options.kv_len = len;
  options.q_heads = q_heads;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  options.value_dim = value_dim;
  options.causal = 1;
  return options;
}

// out of 700 queries in the reproducible order, on a ring of `ranks` ranks.
std::vector<float> reproducible(std::int64_t ranks) {
  constexpr std::int64_t rows = 700;
  auto all = options();
  all.batch = 1;
  all.q_len = all.kv_len = rows;
  all.kv_heads = q_heads;
  all.value_dim = head_dim;
  all.reproducible = 1;
  auto plan = annulus::plan::over_threads(annulus::attention(all), ranks);
  std::vector<float> x, out(rows * q_heads * head_dim), lse(rows * q_heads);
  for (std::size_t i = 0; i < out.size(); i++)
    x.push_back(value(1, 0, static_cast<std::int64_t>(i), 0, 0));
  const annulus::extents of_x(1, rows, q_heads, head_dim), of_lse(1, q_heads, rows);
  const annulus::view<const float> tensor(x.data(), of_x);
  plan.forward<float>({tensor, tensor, tensor, annulus::view<float>(out.data(), of_x),
                       annulus::view<float>(lse.data(), of_lse)});
  return out;
}

template <class Call>
void refused(Call call, const char *name) {
  try {
    call();
  } catch (const annulus::error &error) {
    check(error.status() == ANNULUS_INVALID_ARGUMENT && !error.is_fatal(), name);
    check(std::strncmp(error.what(), name, std::strlen(name)) == 0, name);
    return;
  }
  check(false, name);
}

annulus::options cache_options() {
  auto all = options();
  all.q_len = all.kv_len = 0;
  all.page_rows = 4;
  return all;
}

// Results of all rows, in the order of `decoded` in tests/c/case.h.
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

// Decoding as tests/c/threads.c does it.
void decode_and_compare(std::int64_t ranks, const char *path) {
  auto cache = annulus::cache::over_threads(annulus::attention(cache_options()), ranks);
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

  auto f64 = cache_options();
  f64.dtype = ANNULUS_F64;
  auto wide = annulus::cache::over_threads(annulus::attention(f64), ranks);
  const auto second = decode<double>(wide);
  for (std::size_t i = 0; i < first.out.size(); i++)
    check(std::abs(second.out[i] - static_cast<double>(first.out[i])) < 1e-5, "double precision");

  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char *>(first.out.data()),
             static_cast<std::streamsize>(first.out.size() * sizeof(float)));
  file.write(reinterpret_cast<const char *>(first.lse.data()),
             static_cast<std::streamsize>(first.lse.size() * sizeof(float)));
  check(file.flush().good(), "a written file");
}

}  // namespace

int main(int count, char **arguments) {
  check(count == 3 || count == 4, "threads RANKS FILE [MACHINE]");
  if (count == 4) {
    plan_by_machine(arguments[3]);
    decode_and_compare(std::atoi(arguments[1]), arguments[2]);
    return 0;
  }
  const annulus::attention attention(options());
  auto made = annulus::plan::over_threads(attention, std::atoi(arguments[1]));
  annulus::plan plan = std::move(made);
  check(plan.q_rows().size() == len && plan.kv_rows()[1] == 1 && plan.rank() == 0, "rows");
  check(plan.workspace_bytes() > 0, "bytes");
  check(plan.numerics().rfind("cpu ", 0) == 0, "numerics");

  auto q = numbers(1, q_heads, head_dim), k = numbers(2, kv_heads, head_dim);
  auto v = numbers(3, kv_heads, value_dim), dout = numbers(4, q_heads, value_dim);
  std::vector<float> dlse;
  for (std::int64_t b = 0; b < batch; b++)
    for (std::int64_t head = 0; head < q_heads; head++)
      for (std::int64_t row = 0; row < len; row++) dlse.push_back(value(5, b, row, head, 0));
  std::vector<float> out(dout.size()), lse(dlse.size()), dq(q.size()), dk(k.size()), dv(v.size());
  std::vector<float> maxima(dlse.size()), sums(dlse.size());
  using annulus::view;
  const annulus::extents of_q(batch, len, q_heads, head_dim), of_k(batch, len, kv_heads, head_dim);
  const annulus::extents of_v(batch, len, kv_heads, value_dim);
  const annulus::extents of_out(batch, len, q_heads, value_dim), of_lse(batch, q_heads, len);
  const view<const float> q_view(q.data(), of_q), k_view(k.data(), of_k), v_view(v.data(), of_v);
  const view<float> out_view(out.data(), of_out), lse_view(lse.data(), of_lse);
  annulus::forward_tensors<float> outputs{q_view, k_view, v_view, out_view, lse_view};
  outputs.max = view<float>(maxima.data(), of_lse);
  outputs.sum = view<float>(sums.data(), of_lse);
  plan.forward(outputs);
  annulus::backward_tensors<float> tensors{
      q_view, k_view, v_view, out_view, lse_view, view<const float>(dout.data(), of_out),
      view<float>(dq.data(), of_q), view<float>(dk.data(), of_k), view<float>(dv.data(), of_v)};
  tensors.dlse = view<const float>(dlse.data(), of_lse);
  tensors.max = view<const float>(maxima.data(), of_lse);
  tensors.sum = view<const float>(sums.data(), of_lse);
  plan.backward(tensors);
  const auto first = dq;
  plan.forward_start<float>({q_view, k_view, v_view, out_view, lse_view});
  while (!plan.test()) continue;
  plan.backward_start(tensors);
  plan.wait();
  check(first == dq, "passes on threads of their own");

  std::ofstream file(arguments[2], std::ios::binary);
  for (const auto *all : {&out, &lse, &dq, &dk, &dv})
    file.write(reinterpret_cast<const char *>(all->data()),
               static_cast<std::streamsize>(all->size() * sizeof(float)));
  file.close();
  check(file.good(), "written");

  // lists of the own key alone: out is v, whatever is added to its score
  std::vector<std::int64_t> offsets(len + 1), own(len);
  for (std::int64_t row = 0; row <= len; row++) offsets[row] = row;
  for (std::int64_t row = 0; row < len; row++) own[row] = row;
  std::vector<double> added(len, 0.5);
  annulus::batch<> listed;
  const annulus::extents of_offsets(1, 1, len + 1);
  listed.key_list_offsets = view<const std::int64_t>(offsets.data(), of_offsets);
  listed.key_list_indices = view<const std::int64_t>(own.data(), annulus::extents(len));
  listed.key_list_bias = view<const double>(added.data(), annulus::extents(len));
  plan.update(listed);
  plan.forward(outputs);
  for (std::int64_t i = 0; i < value_dim; i++)
    check(out[static_cast<std::size_t>(i)] == v[static_cast<std::size_t>(i)], "its own value");
  plan.backward(tensors);
  const auto dadded = plan.list_bias_gradient();
  // one key has the probability 1: the gradient is that of lse alone
  double dlse_of_row = 0;
  for (std::int64_t of_head = 0; of_head < batch * q_heads; of_head++)
    dlse_of_row += dlse[static_cast<std::size_t>(of_head * len)];
  check(dadded.size() == len && std::abs(dadded[0] - dlse_of_row) < 1e-4, "list bias gradient");
  own[2] = len;
  refused([&] { plan.update(listed); }, "key_lists: got row 2, entry 0: key");
  plan.update(annulus::batch<>());

  // errors
  refused([&] { plan.forward<float>({q_view, k_view, k_view, out_view, lse_view}); }, "v: got");
  std::vector<double> doubles(q.size());
  refused([&] {
    view<double> d(doubles.data(), of_q);
    view<double> statistics(doubles.data(), of_lse);
    plan.forward<double>({d, d, d, d, statistics});
  }, "out: got memory");
  refused([] {
    auto wrong = options();
    wrong.dtype = 0;
    annulus::attention none(wrong);
  }, "dtype");
  refused([&] { annulus::plan::over_threads(attention, 0); }, "ranks");
  refused([&] { plan.wait(); }, "plan: got one without a pass");

  // a mask, a layout and a bias of the host's; the plan outlives the attention that has them
  std::atomic<std::uint64_t> sent{0};
  auto masked = [&] {
    auto all = options();
    all.causal = 0;
    all.layout = ANNULUS_LAYOUT_CUSTOM;
    annulus::attention description(all);
    std::int64_t window = 3;
    description.add_mask("window of 3", 0, [window](const annulus_pair &pair) {
      return pair.kv_position <= pair.q_position && pair.q_position - pair.kv_position <= window;
    });
    description.set_bias_function("none", [](const annulus_pair &) { return 0.0; });
    std::vector<std::vector<std::int64_t>> rows(2);
    for (std::int64_t row = 0; row < len; row++) rows[row % 2].push_back(row);
    description.set_custom_layout(rows, rows);
    description.on_step([&sent](const annulus_step_event &event) { sent += event.bytes; });
    return annulus::plan::over_threads(description, 2);
  }();
  check(masked.layout() == ANNULUS_LAYOUT_CUSTOM && masked.ranks() == 2, "layout");
  std::vector<float> by_mask(out.size()), by_window(out.size());
  masked.forward<float>({q_view, k_view, v_view, view<float>(by_mask.data(), of_out), lse_view});
  check(sent > 0 && sent == masked.predicted_bytes(ANNULUS_PASS_FORWARD), "bytes of events");
  refused([&] { masked.predicted_bytes(2); }, "pass: got 2");
  // the same as a window on a grid of one axis, in boxes
  auto all = options();
  all.layout = ANNULUS_LAYOUT_CUSTOM;
  annulus::attention on_grid(all);
  on_grid.add_neighborhood(std::to_string(len) + ":3+0:edge=clip");
  on_grid.set_boxes_layout(2, {len});
  auto windowed = annulus::plan::over_threads(on_grid, 2);
  windowed.forward<float>({q_view, k_view, v_view, view<float>(by_window.data(), of_out), lse_view});
  double furthest = 0;
  for (std::size_t i = 0; i < by_mask.size(); i++)
    furthest = std::max(furthest, std::abs(double(by_mask[i]) - double(by_window[i])));
  check(furthest < 1e-5 && by_mask != out, "a mask of the host's is a window");

  // the rows of a rank before there is a plan, for documents of 20 and 17 rows
  auto packed = options();
  packed.layout = ANNULUS_LAYOUT_BALANCED;
  annulus::attention balanced(packed);
  const std::vector<std::int64_t> starts{0, 20, len};
  annulus::batch<> documents;
  documents.cum_seqlens_q = view<const std::int64_t>(starts.data(), {3});
  balanced.set_balanced_layout(2, documents);
  const auto rows_0 = balanced.q_rows(2, 0), rows_1 = balanced.kv_rows(2, 1);
  check(rows_0.size() + rows_1.size() == len && rows_0 != rows_1, "rows of ranks");
  auto over_documents = annulus::plan::over_threads(balanced, 2);
  over_documents.update(documents);
  over_documents.forward<float>({q_view, k_view, v_view, out_view, lse_view});
  check(over_documents.layout() == ANNULUS_LAYOUT_BALANCED, "balanced");
  // the first row of a document attends to itself alone
  check(out[20 * q_heads * value_dim] == v[20 * kv_heads * value_dim], "documents");

  check(reproducible(1) == reproducible(3), "bits that do not depend on the ranks");

  // all-to-all over heads: other sums, the same result
  auto by_heads = options();
  by_heads.strategy = ANNULUS_STRATEGY_HEADS_RING;
  by_heads.strategy_heads = 2;
  auto two = annulus::plan::over_threads(annulus::attention(by_heads), 2);
  check(two.strategy() == std::make_pair(ANNULUS_STRATEGY_HEADS_RING, 2) && two.ranks() == 2,
        "strategy");
  const auto by_ring = [&] {
    plan.forward<float>({q_view, k_view, v_view, out_view, lse_view});
    return out;
  }();
  two.forward<float>({q_view, k_view, v_view, out_view, lse_view});
  for (std::size_t i = 0; i < out.size(); i++)
    check(std::abs(out[i] - by_ring[i]) < 1e-5f, "all-to-all over heads");

  // a batch: every row is a sequence of its own, so out is v
  std::vector<std::int32_t> ids(batch * len);
  for (std::size_t i = 0; i < ids.size(); i++) ids[i] = static_cast<std::int32_t>(i % len);
  annulus::batch<> alone;
  alone.q_segment_ids = view<const std::int32_t>(ids.data(), {batch, len});
  plan.update(alone);
  plan.forward<float>({q_view, k_view, v_view, out_view, lse_view});
  check(out[value_dim * 3 + 1] == v[value_dim + 1], "a row that attends to itself");
  return 0;
}
