// A forward and a backward pass over two ranks in this process, with a sliding window.
#include <annulus.hpp>

#include <iostream>

int main() try {
  const std::int64_t batch = 1, len = 256, q_heads = 4, kv_heads = 2, dim = 16;
  annulus::options options;
  options.batch = batch;
  options.q_len = options.kv_len = len;
  options.q_heads = q_heads;
  options.kv_heads = kv_heads;
  options.head_dim = options.value_dim = dim;
  options.causal = 1;
  options.window_left = 63;
  auto plan = annulus::plan::over_threads(annulus::attention(options), 2);

  std::vector<float> q(batch * len * q_heads * dim, 0.5f), out(q.size()), dq(q.size());
  std::vector<float> k(batch * len * kv_heads * dim, 0.25f), dk(k.size()), dv(k.size());
  std::vector<float> lse(batch * q_heads * len), maxima(lse.size()), sums(lse.size());
  std::vector<float> dout(q.size(), 1.0f);
  const annulus::extents queries(batch, len, q_heads, dim), keys(batch, len, kv_heads, dim);
  const annulus::view<float> q_view(q.data(), queries), k_view(k.data(), keys);
  const annulus::view<float> out_view(out.data(), queries), dout_view(dout.data(), queries);
  const annulus::extents statistics(batch, q_heads, len);
  const annulus::view<float> lse_view(lse.data(), statistics);
  const annulus::view<float> dq_view(dq.data(), queries), dk_view(dk.data(), keys);
  const annulus::view<float> dv_view(dv.data(), keys);

  // the backward pass computes probabilities from the maximum and the sum of each row
  annulus::forward_tensors<float> forward{q_view, k_view, k_view, out_view, lse_view};
  forward.max = annulus::view<float>(maxima.data(), statistics);
  forward.sum = annulus::view<float>(sums.data(), statistics);
  plan.forward(forward);
  annulus::backward_tensors<float> backward{q_view,    k_view,  k_view,  out_view, lse_view,
                                            dout_view, dq_view, dk_view, dv_view};
  backward.max = annulus::view<const float>(maxima.data(), statistics);
  backward.sum = annulus::view<const float>(sums.data(), statistics);
  plan.backward(backward);
  std::cout << "out " << out[0] << ", lse " << lse.back() << ", dv " << dv[0] << "\n";
} catch (const annulus::error &error) {
  std::cerr << error.what() << "\n";
  return 1;
}
