/*
 * annulus for C++17: handles that destroy themselves, views of tensors, exceptions.
 *
 * A header without a library of its own: everything calls annulus.h, whose documentation holds.
 * Calls that fail throw annulus::error. Objects are moved, not copied.
 */
#ifndef ANNULUS_HPP
#define ANNULUS_HPP

#include "annulus.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace annulus {

/* A call that failed: its status, and annulus_last_error as what(). */
class error : public std::runtime_error {
 public:
  error(int status, const std::string &message) : std::runtime_error(message), status_(status) {}
  /* ANNULUS_INVALID_ARGUMENT and so on. */
  int status() const noexcept { return status_; }
  /* True if the plan that returned this cannot be used any more. */
  bool is_fatal() const noexcept { return status_ >= ANNULUS_DEVICE; }

 private:
  int status_;
};

namespace detail {
inline void check(int status) {
  if (status != ANNULUS_SUCCESS) throw error(status, annulus_last_error());
}
}  // namespace detail

/* 16-bit elements by their bits. */
struct f16 {
  std::uint16_t bits;
};
struct bf16 {
  std::uint16_t bits;
};

/* Element type and accumulator of a type of C++. Specialise it for 16-bit types of your own. */
template <class T>
struct element;
template <>
struct element<float> {
  static constexpr std::int32_t dtype = ANNULUS_F32;
  using accumulator = float;
};
template <>
struct element<double> {
  static constexpr std::int32_t dtype = ANNULUS_F64;
  using accumulator = double;
};
template <>
struct element<f16> {
  static constexpr std::int32_t dtype = ANNULUS_F16;
  using accumulator = float;
};
template <>
struct element<bf16> {
  static constexpr std::int32_t dtype = ANNULUS_BF16;
  using accumulator = float;
};
template <>
struct element<std::int8_t> {
  static constexpr std::int32_t dtype = ANNULUS_I8;
};
template <>
struct element<std::int16_t> {
  static constexpr std::int32_t dtype = ANNULUS_I16;
};
template <>
struct element<std::int32_t> {
  static constexpr std::int32_t dtype = ANNULUS_I32;
};
template <>
struct element<std::int64_t> {
  static constexpr std::int32_t dtype = ANNULUS_I64;
};
template <>
struct element<std::uint8_t> {
  static constexpr std::int32_t dtype = ANNULUS_U8;
};
template <>
struct element<bool> {
  static constexpr std::int32_t dtype = ANNULUS_BOOL;
};

/* Lengths or strides, in elements. Lengths that are not given are 1. */
class extents {
 public:
  extents(std::int64_t a, std::int64_t b = 1, std::int64_t c = 1, std::int64_t d = 1)
      : all_{a, b, c, d} {}
  std::int64_t operator[](std::size_t axis) const { return all_[axis]; }

 private:
  std::array<std::int64_t, 4> all_;
};

/* A view of a tensor of the caller's: neither owns nor copies it. T is const for inputs. */
template <class T>
class view {
 public:
  /* Elements one after another, the last axis fastest. */
  view(T *data, extents dims) : view(data, dims, packed(dims)) {}
  view(T *data, extents dims, extents strides) : tensor_{} {
    tensor_.data = const_cast<void *>(static_cast<const void *>(data));
    tensor_.dtype = element<std::remove_const_t<T>>::dtype;
    for (std::size_t axis = 0; axis < 4; axis++) {
      tensor_.dims[axis] = dims[axis];
      tensor_.strides[axis] = strides[axis];
    }
  }
  /* A view for writing serves for reading. */
  template <class U, class = std::enable_if_t<std::is_same_v<const U, T>>>
  view(const view<U> &other) : tensor_(*other.get()) {}
  const annulus_tensor *get() const noexcept { return &tensor_; }

 private:
  static extents packed(extents dims) {
    return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
  }
  annulus_tensor tensor_;
};

namespace detail {
template <class T>
const annulus_tensor *get(const std::optional<view<T>> &tensor) noexcept {
  return tensor ? tensor->get() : nullptr;
}
}  // namespace detail

/* The options of annulus.h, with their defaults. */
struct options : annulus_options {
  options() { detail::check(annulus_options_init(this, sizeof(annulus_options))); }
};

/* Segment ids, positions, packed lengths, a dense mask and key lists; M is the type of the mask's
   elements. */
template <class M = bool>
struct batch {
  std::optional<view<const std::int32_t>> q_segment_ids, kv_segment_ids;
  std::optional<view<const std::int64_t>> q_positions, kv_positions;
  std::optional<view<const M>> attention_mask;
  std::optional<view<const std::int64_t>> cum_seqlens_q, cum_seqlens_k;
  std::optional<view<const std::int64_t>> key_list_offsets, key_list_indices, key_list_ends;
  std::optional<view<const double>> key_list_bias;
};

namespace detail {
/* The views of a batch, which it outlives. */
template <class M>
annulus_batch get(const batch<M> &of) noexcept {
  annulus_batch all{};
  all.struct_size = sizeof all;
  all.q_segment_ids = get(of.q_segment_ids);
  all.kv_segment_ids = get(of.kv_segment_ids);
  all.q_positions = get(of.q_positions);
  all.kv_positions = get(of.kv_positions);
  all.attention_mask = get(of.attention_mask);
  all.cum_seqlens_q = get(of.cum_seqlens_q);
  all.cum_seqlens_k = get(of.cum_seqlens_k);
  all.key_list_offsets = get(of.key_list_offsets);
  all.key_list_indices = get(of.key_list_indices);
  all.key_list_ends = get(of.key_list_ends);
  all.key_list_bias = get(of.key_list_bias);
  return all;
}
/* The number that read(handle, value) writes. */
template <class N, class Handle, class Read>
N number(Handle *handle, Read read) {
  N value{};
  check(read(handle, &value));
  return value;
}
/* The row numbers that read(rows, capacity, count) writes. */
template <class Read>
std::vector<std::int64_t> rows(Read read) {
  std::int64_t count = 0;
  check(read(nullptr, 0, &count));
  std::vector<std::int64_t> all(static_cast<std::size_t>(count));
  if (count > 0) check(read(all.data(), count, &count));
  return all;
}
}  // namespace detail

/* The tensors of a forward pass: {q, k, v, out, lse}, then those that the options ask for. */
template <class T>
struct forward_tensors {
  using A = typename element<T>::accumulator;
  view<const T> q, k, v;
  view<T> out;
  view<A> lse;
  std::optional<view<const A>> bias = {}, softmax_aux = {};
  std::optional<view<A>> max = {}, sum = {}, ties = {};
  std::optional<view<T>> out_residual = {};
  std::optional<view<A>> statistics = {}, head_statistics = {};
};

/* The tensors of a backward pass: {q, k, v, out, lse, dout, dq, dk, dv}, then the optional ones. */
template <class T>
struct backward_tensors {
  using A = typename element<T>::accumulator;
  view<const T> q, k, v, out;
  view<const A> lse;
  view<const T> dout;
  view<T> dq, dk, dv;
  std::optional<view<const A>> bias = {}, softmax_aux = {}, dlse = {}, max = {}, ties = {};
  std::optional<view<A>> dbias = {}, dsoftmax_aux = {};
  std::optional<view<const A>> sum = {};
  std::optional<view<const T>> out_residual = {};
};

/* The tensors of a call of a KV cache: {q, out, lse}, then the sinks if the options have them. */
template <class T>
struct attend_tensors {
  using A = typename element<T>::accumulator;
  view<const T> q;
  view<T> out;
  view<A> lse;
  std::optional<view<const A>> softmax_aux = {};
};

/* A mask and a bias of the host's. They must not throw: a program in which one does is terminated. */
using mask_function = std::function<bool(const annulus_pair &)>;
using bias_function = std::function<double(const annulus_pair &)>;
/* Called with every activity of a pass, by several threads at once. It must not throw either. */
using step_function = std::function<void(const annulus_step_event &)>;

/* The description of an attention. */
class attention {
 public:
  explicit attention(const options &options) {
    annulus_attention *made = nullptr;
    detail::check(annulus_attention_create(&options, &made));
    handle_.reset(made);
  }
  /* Adds a mask, as one more condition. Ranks compare the name. */
  void add_mask(const std::string &name, std::uint32_t flags, mask_function visible) {
    auto kept = std::make_shared<mask_function>(std::move(visible));
    detail::check(annulus_attention_add_mask(get(), name.c_str(), flags, call_mask, kept.get()));
    functions_.push_back(std::move(kept));
  }
  /* Adds a window on a grid, as "64x128:7x5", as one more condition. */
  void add_neighborhood(const std::string &text) {
    detail::check(annulus_attention_add_neighborhood(get(), text.c_str()));
  }
  /* Sets a bias that is computed from each pair. */
  void set_bias_function(const std::string &name, bias_function bias) {
    auto kept = std::make_shared<bias_function>(std::move(bias));
    detail::check(annulus_attention_set_bias_function(get(), name.c_str(), call_bias, kept.get()));
    functions_.push_back(std::move(kept));
  }
  /* Sets the function that is called with every activity of a pass. */
  void on_step(step_function step) {
    auto kept = std::make_shared<step_function>(std::move(step));
    detail::check(annulus_attention_on_step(get(), call_step, kept.get()));
    functions_.push_back(std::move(kept));
  }
  void set_alibi(const std::vector<double> &slopes) {
    auto count = static_cast<std::int64_t>(slopes.size());
    detail::check(annulus_attention_set_alibi(get(), slopes.data(), count));
  }
  /* Makes the bias a table by relative positions, such as "t5:32,128". */
  void set_bias_table(const std::string &kind) {
    detail::check(annulus_attention_set_bias_table(get(), kind.c_str()));
  }
  /* Sets the machine of a machine file, for ANNULUS_STRATEGY_AUTO. */
  void set_machine(const std::string &path) {
    detail::check(annulus_attention_set_machine(get(), path.c_str()));
  }
  /* Lets plans compute in a CUstream of a CUcontext, on tensors in device memory: views are made of
     device pointers. */
  void set_cuda_stream(void *context, void *stream) {
    detail::check(annulus_attention_set_cuda_stream(get(), context, stream));
  }
  /* Lets blocks travel over an ncclComm_t, after set_cuda_stream. */
  void set_nccl_communicator(void *communicator) {
    detail::check(annulus_attention_set_nccl_communicator(get(), communicator));
  }
  /* Sets the rows of every rank, for ANNULUS_LAYOUT_CUSTOM. */
  void set_custom_layout(const std::vector<std::vector<std::int64_t>> &q,
                         const std::vector<std::vector<std::int64_t>> &kv) {
    if (q.size() != kv.size())
      throw error(ANNULUS_INVALID_ARGUMENT, "layout: got q and kv of unequal numbers of ranks");
    auto [q_counts, q_rows] = flat(q);
    auto [kv_counts, kv_rows] = flat(kv);
    detail::check(annulus_attention_set_custom_layout(get(), static_cast<std::int64_t>(q.size()),
                                                      q_counts.data(), q_rows.data(),
                                                      kv_counts.data(), kv_rows.data()));
  }
  /* Sets boxes of a grid with the least surface, for ANNULUS_LAYOUT_CUSTOM. */
  void set_boxes_layout(std::int64_t ranks, const std::vector<std::int64_t> &shape) {
    detail::check(annulus_attention_set_boxes_layout(
        get(), ranks, static_cast<std::int64_t>(shape.size()), shape.data()));
  }
  /* Sets rows of equal numbers and work for the documents of a batch of all rows, for
   * ANNULUS_LAYOUT_BALANCED. */
  template <class M>
  void set_balanced_layout(std::int64_t ranks, const batch<M> &documents) {
    const annulus_batch all = detail::get(documents);
    detail::check(annulus_attention_set_balanced_layout(get(), ranks, &all));
  }
  /* Sets the documents of a batch of all rows, for which ANNULUS_STRATEGY_AUTO chooses. */
  template <class M>
  void set_documents(const batch<M> &documents) {
    const annulus_batch all = detail::get(documents);
    detail::check(annulus_attention_set_documents(get(), &all));
  }
  /* Global rows of one rank of a ring, in the order of its tensors, before there is a plan. */
  std::vector<std::int64_t> q_rows(std::int64_t ranks, std::int64_t rank) const {
    return detail::rows([&](std::int64_t *rows, std::int64_t capacity, std::int64_t *count) {
      return annulus_attention_q_rows(get(), ranks, rank, rows, capacity, count);
    });
  }
  std::vector<std::int64_t> kv_rows(std::int64_t ranks, std::int64_t rank) const {
    return detail::rows([&](std::int64_t *rows, std::int64_t capacity, std::int64_t *count) {
      return annulus_attention_kv_rows(get(), ranks, rank, rows, capacity, count);
    });
  }
  annulus_attention *get() const noexcept { return handle_.get(); }

 private:
  friend class plan;
  friend class cache;
  using list = std::vector<std::int64_t>;
  static std::pair<list, list> flat(const std::vector<list> &ranks) {
    std::pair<list, list> all;
    for (const list &rows : ranks) {
      all.first.push_back(static_cast<std::int64_t>(rows.size()));
      all.second.insert(all.second.end(), rows.begin(), rows.end());
    }
    return all;
  }
  static std::int32_t call_mask(void *context, const annulus_pair *pair) noexcept {
    return (*static_cast<mask_function *>(context))(*pair) ? 1 : 0;
  }
  static double call_bias(void *context, const annulus_pair *pair) noexcept {
    return (*static_cast<bias_function *>(context))(*pair);
  }
  static void call_step(void *context, const annulus_step_event *event) noexcept {
    (*static_cast<step_function *>(context))(*event);
  }
  struct destroy {
    void operator()(annulus_attention *handle) const noexcept {
      annulus_attention_destroy(handle);
    }
  };
  std::unique_ptr<annulus_attention, destroy> handle_;
  /* Plans share them, because they call them as long as they live. */
  std::vector<std::shared_ptr<void>> functions_;
};

/* A duplicate of a communicator, which several plans and caches share. They may outlive it. */
class endpoint {
 public:
#ifdef ANNULUS_WITH_MPI
  /* Of the attention, only what concerns the communicator is used. Collective. */
  static endpoint over_mpi(const attention &of, MPI_Comm communicator) {
    annulus_endpoint *handle = nullptr;
    detail::check(annulus_endpoint_create_mpi(of.get(), communicator, &handle));
    return endpoint(handle);
  }
#endif
  annulus_endpoint *get() const noexcept { return handle_.get(); }

 private:
  explicit endpoint(annulus_endpoint *handle) : handle_(handle) {}
  struct destroy {
    void operator()(annulus_endpoint *handle) const noexcept { annulus_endpoint_destroy(handle); }
  };
  std::unique_ptr<annulus_endpoint, destroy> handle_;
};

/* A plan, made once and used for many passes. */
class plan {
 public:
  /* A ring of threads in this process, over whole tensors. */
  static plan over_threads(const attention &of, std::int64_t ranks) {
    return made(of, [&](auto out) { return annulus_plan_create_threads(of.get(), ranks, out); });
  }
#ifdef ANNULUS_WITH_MPI
  /* This rank of a ring over a communicator. Collective. */
  static plan over_mpi(const attention &of, MPI_Comm communicator) {
    return made(of, [&](auto out) { return annulus_plan_create_mpi(of.get(), communicator, out); });
  }
#endif
  /* This rank of a ring over an endpoint. Collective, in the same order on all ranks. */
  static plan over_endpoint(const attention &of, const endpoint &shared) {
    return made(
        of, [&](auto out) { return annulus_plan_create_endpoint(of.get(), shared.get(), out); });
  }

  std::int64_t rank() const { return number<std::int64_t>(annulus_plan_rank); }
  std::int64_t ranks() const { return number<std::int64_t>(annulus_plan_ranks); }
  std::int32_t layout() const { return number<std::int32_t>(annulus_plan_layout); }
  std::int32_t route() const { return number<std::int32_t>(annulus_plan_route); }
  /* The strategy in force: ANNULUS_STRATEGY_*, and the ranks of a group. */
  std::pair<std::int32_t, std::int32_t> strategy() const {
    std::pair<std::int32_t, std::int32_t> in_force;
    detail::check(annulus_plan_strategy(get(), &in_force.first, &in_force.second));
    return in_force;
  }
  /* Parts into which it divides queries and keys. */
  std::pair<std::int32_t, std::int32_t> grid() const {
    std::pair<std::int32_t, std::int32_t> parts;
    detail::check(annulus_plan_grid(get(), &parts.first, &parts.second));
    return parts;
  }
  /* Fingerprint of the arithmetic: equal bits of reproducible plans need equal ones. */
  std::string numerics() const {
    std::int64_t length = 0;
    detail::check(annulus_plan_numerics(get(), nullptr, 0, &length));
    std::string text(static_cast<std::size_t>(length) + 1, '\0');
    detail::check(annulus_plan_numerics(get(), &text[0], length + 1, &length));
    text.pop_back();
    return text;
  }
  std::uint64_t workspace_bytes() const {
    return number<std::uint64_t>(annulus_plan_workspace_bytes);
  }
  /* Bytes of the messages of a pass: ANNULUS_PASS_FORWARD or ANNULUS_PASS_BACKWARD. */
  std::uint64_t predicted_bytes(std::int32_t pass) const {
    return number<std::uint64_t>([pass](const annulus_plan *plan, std::uint64_t *bytes) {
      return annulus_plan_predicted_bytes(plan, pass, bytes);
    });
  }
  /* Global rows of this rank, in the order of its tensors. */
  std::vector<std::int64_t> q_rows() const { return rows(annulus_plan_q_rows); }
  std::vector<std::int64_t> kv_rows() const { return rows(annulus_plan_kv_rows); }

  /* The gradient of key_list_bias that the last backward pass has computed. */
  std::vector<double> list_bias_gradient() const {
    std::int64_t count = 0;
    detail::check(annulus_plan_list_bias_gradient(get(), nullptr, 0, &count));
    std::vector<double> all(static_cast<std::size_t>(count));
    if (count > 0)
      detail::check(annulus_plan_list_bias_gradient(get(), all.data(), count, &count));
    return all;
  }

  /* Adapts the plan to a batch. Collective. */
  template <class M>
  void update(const batch<M> &to) {
    const annulus_batch all = detail::get(to);
    detail::check(annulus_plan_update(get(), &all));
  }
  /* Computes out and lse. Collective. */
  template <class T>
  void forward(const forward_tensors<T> &of) {
    const annulus_forward_args all = arguments(of);
    detail::check(annulus_forward(get(), &all));
  }
  /* Computes the gradients. Collective. */
  template <class T>
  void backward(const backward_tensors<T> &of) {
    const annulus_backward_args all = arguments(of);
    detail::check(annulus_backward(get(), &all));
  }
  /* Starts a pass on a thread of its own. The elements stay as they are until it has ended. */
  template <class T>
  void forward_start(const forward_tensors<T> &of) {
    const annulus_forward_args all = arguments(of);
    detail::check(annulus_forward_start(get(), &all));
  }
  template <class T>
  void backward_start(const backward_tensors<T> &of) {
    const annulus_backward_args all = arguments(of);
    detail::check(annulus_backward_start(get(), &all));
  }
  /* True if the pass that was started has ended; throws what it failed with. */
  bool test() { return number<std::int32_t>(annulus_plan_test) != 0; }
  /* Waits for the pass that was started; throws what it failed with. */
  void wait() { detail::check(annulus_plan_wait(get())); }
  annulus_plan *get() const noexcept { return handle_.get(); }

 private:
  plan() = default;
  template <class Make>
  static plan made(const attention &of, Make make) {
    plan made;
    annulus_plan *handle = nullptr;
    detail::check(make(&handle));
    made.handle_.reset(handle);
    made.functions_ = of.functions_;
    return made;
  }
  /* The tensors of both passes. */
  template <class Args, class Tensors>
  static Args common(const Tensors &of) {
    Args all{};
    all.struct_size = sizeof all;
    all.q = of.q.get();
    all.k = of.k.get();
    all.v = of.v.get();
    all.bias = detail::get(of.bias);
    all.softmax_aux = detail::get(of.softmax_aux);
    all.out = of.out.get();
    all.lse = of.lse.get();
    all.max = detail::get(of.max);
    all.sum = detail::get(of.sum);
    all.out_residual = detail::get(of.out_residual);
    all.ties = detail::get(of.ties);
    return all;
  }
  template <class T>
  static annulus_forward_args arguments(const forward_tensors<T> &of) {
    auto all = common<annulus_forward_args>(of);
    all.statistics = detail::get(of.statistics);
    all.head_statistics = detail::get(of.head_statistics);
    return all;
  }
  template <class T>
  static annulus_backward_args arguments(const backward_tensors<T> &of) {
    auto all = common<annulus_backward_args>(of);
    all.dout = of.dout.get();
    all.dlse = detail::get(of.dlse);
    all.dq = of.dq.get();
    all.dk = of.dk.get();
    all.dv = of.dv.get();
    all.dbias = detail::get(of.dbias);
    all.dsoftmax_aux = detail::get(of.dsoftmax_aux);
    return all;
  }
  template <class N, class Read>
  N number(Read read) const {
    return detail::number<N>(get(), read);
  }
  template <class Read>
  std::vector<std::int64_t> rows(Read read) const {
    return detail::rows([&](std::int64_t *rows, std::int64_t capacity, std::int64_t *count) {
      return read(get(), rows, capacity, count);
    });
  }
  struct destroy {
    void operator()(annulus_plan *handle) const noexcept { annulus_plan_destroy(handle); }
  };
  /* Destroyed after the handle, which calls them. */
  std::vector<std::shared_ptr<void>> functions_;
  std::unique_ptr<annulus_plan, destroy> handle_;
};

/* A KV cache for decoding and chunked prefill, whose rows are sharded over ranks. */
class cache {
 public:
  /* All ranks, as threads of this process. */
  static cache over_threads(const attention &of, std::int64_t ranks) {
    return made(of, [&](auto out) { return annulus_cache_create_threads(of.get(), ranks, out); });
  }
#ifdef ANNULUS_WITH_MPI
  /* This rank of a cache over a communicator. Collective. */
  static cache over_mpi(const attention &of, MPI_Comm communicator) {
    return made(of,
                [&](auto out) { return annulus_cache_create_mpi(of.get(), communicator, out); });
  }
#endif
  /* This rank of a cache over an endpoint. Collective, in the same order on all ranks. */
  static cache over_endpoint(const attention &of, const endpoint &shared) {
    return made(
        of, [&](auto out) { return annulus_cache_create_endpoint(of.get(), shared.get(), out); });
  }

  /* Appends rows that every rank passes: [batch, rows, kv_heads, head_dim or value_dim]. Local. */
  template <class T>
  void append(const view<const T> &k, const view<const T> &v) {
    detail::check(annulus_cache_append(get(), k.get(), v.get()));
  }
  template <class T>
  void append(const view<T> &k, const view<T> &v) {
    append(view<const T>(k), view<const T>(v));
  }
  /* Appends `count` rows, of which this rank passes those of own_rows(count) only. Local. */
  template <class T>
  void append_own(std::int64_t count, const view<const T> &k, const view<const T> &v) {
    detail::check(annulus_cache_append_own(get(), count, k.get(), v.get()));
  }
  template <class T>
  void append_own(std::int64_t count, const view<T> &k, const view<T> &v) {
    append_own(count, view<const T>(k), view<const T>(v));
  }
  /* Rows of this rank among the next `count` rows, which count from 0. */
  std::vector<std::int64_t> own_rows(std::int64_t count) const {
    return detail::rows([&](std::int64_t *rows, std::int64_t capacity, std::int64_t *found) {
      return annulus_cache_own_rows(get(), count, rows, capacity, found);
    });
  }
  /* Removes the rows from `len` on. Local. */
  void truncate(std::int64_t len) { detail::check(annulus_cache_truncate(get(), len)); }
  /* Computes out and lse of the queries of the last rows. Collective. */
  template <class T>
  void attend(const attend_tensors<T> &of) {
    annulus_attend_args all{};
    all.struct_size = sizeof all;
    all.q = of.q.get();
    all.softmax_aux = detail::get(of.softmax_aux);
    all.out = of.out.get();
    all.lse = of.lse.get();
    detail::check(annulus_cache_attend(get(), &all));
  }

  /* Cached rows of all ranks, and of this one. */
  std::int64_t len() const { return number<std::int64_t>(annulus_cache_len); }
  std::int64_t local_len() const { return number<std::int64_t>(annulus_cache_local_len); }
  std::int64_t page_rows() const { return number<std::int64_t>(annulus_cache_page_rows); }
  std::int64_t rank() const { return number<std::int64_t>(annulus_cache_rank); }
  std::int64_t ranks() const { return number<std::int64_t>(annulus_cache_ranks); }
  /* Bytes of the messages of a call with so many queries. */
  std::uint64_t predicted_bytes(std::int64_t queries) const {
    return number<std::uint64_t>([queries](const annulus_cache *cache, std::uint64_t *bytes) {
      return annulus_cache_predicted_bytes(cache, queries, bytes);
    });
  }
  std::uint64_t buffer_bytes() const { return number<std::uint64_t>(annulus_cache_buffer_bytes); }
  annulus_cache *get() const noexcept { return handle_.get(); }

 private:
  cache() = default;
  template <class Make>
  static cache made(const attention &of, Make make) {
    cache made;
    annulus_cache *handle = nullptr;
    detail::check(make(&handle));
    made.handle_.reset(handle);
    made.functions_ = of.functions_;
    return made;
  }
  template <class N, class Read>
  N number(Read read) const {
    return detail::number<N>(get(), read);
  }
  struct destroy {
    void operator()(annulus_cache *handle) const noexcept { annulus_cache_destroy(handle); }
  };
  /* Destroyed after the handle, which calls them. */
  std::vector<std::shared_ptr<void>> functions_;
  std::unique_ptr<annulus_cache, destroy> handle_;
};

}  // namespace annulus

#endif
