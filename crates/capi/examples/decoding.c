/* Decoding with a KV cache of two ranks: a prefill of 64 rows, then tokens one by one. */
#include <annulus.h> /* cc decoding.c $(pkg-config --cflags --libs annulus) */
#include <stdio.h>
#include <stdlib.h>

static void check(int status) {
  if (status == ANNULUS_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", annulus_error_string(status), annulus_last_error());
  exit(1);
}

int main(void) {
  annulus_options options;
  annulus_attention *attention;
  annulus_cache *cache;
  check(annulus_options_init(&options, sizeof options));
  options.batch = 1, options.causal = 1; /* q_len and kv_len stay 0 */
  options.q_heads = options.kv_heads = 4, options.head_dim = options.value_dim = 16;
  check(annulus_attention_create(&options, &attention));
  check(annulus_cache_create_threads(attention, 2, &cache));
  static float x[64 * 64], out[64 * 64], lse[4 * 64];
  for (int64_t len = 0; len < 67;) {
    int64_t n = len == 0 ? 64 : 1; /* projections of the next n tokens, here made up */
    for (int64_t i = 0; i < n * 64; i++) x[i] = (float)((len + i / 64) % 7);
    annulus_tensor rows = {x, ANNULUS_F32, {1, n, 4, 16}, {n * 64, 64, 16, 1}}, o = rows;
    annulus_tensor l = {lse, ANNULUS_F32, {1, 4, n, 1}, {4 * n, n, 1, 1}};
    o.data = out;
    check(annulus_cache_append(cache, &rows, &rows));
    annulus_attend_args args = {sizeof args, &rows, NULL, &o, &l};
    check(annulus_cache_attend(cache, &args));
    check(annulus_cache_len(cache, &len));
    printf("%d rows: out %g, lse %g\n", (int)len, out[(n - 1) * 64], lse[n - 1]);
  }
  check(annulus_cache_destroy(cache));
  check(annulus_attention_destroy(attention));
  return 0;
}
