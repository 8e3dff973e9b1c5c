//! Caches of one rank.

use annulus::{CacheShape, LocalCache, Runtime};

use super::*;

/// Makes the cache of one rank.
fn cache(endpoint: Threads, q_len: i64) -> (i32, *mut annulus_cache) {
    // SAFETY: numbers may be 0
    let mut options: annulus_options = unsafe { std::mem::zeroed() };
    let (mut attention, mut cache) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: all pointers are to locals
    unsafe {
        ok(annulus_options_init(&raw mut options, size_of::<annulus_options>() as u64));
        (options.batch, options.q_len, options.q_heads, options.kv_heads) = (1, q_len, 2, 1);
        (options.head_dim, options.value_dim, options.page_rows) = (4, 4, 3);
        (options.causal, options.deadline_seconds) = (1, 60.0);
        ok(annulus_attention_create(&raw const options, &raw mut attention));
        let status = cache_over(attention, endpoint, &mut cache);
        ok(annulus_attention_destroy(attention));
        (status, cache)
    }
}

/// Appends rows and attends with their queries. `drop_q` passes NULL as q.
fn decode(cache: *mut annulus_cache, rows: &[i64], drop_q: bool) -> (i32, Array4<f32>) {
    let (q, k, v) = (input(1, rows, 2), input(2, rows, 1), input(3, rows, 1));
    let out = Array4::<f32>::zeros(q.raw_dim());
    let lse = Array3::<f32>::zeros((1, 2, rows.len()));
    let [q, k, v, out_tensor] = [&q, &k, &v, &out].map(tensor);
    let lse_tensor = tensor(&lse);
    let args = annulus_attend_args {
        struct_size: size_of::<annulus_attend_args>() as u64,
        q: if drop_q { ptr::null() } else { &raw const q },
        softmax_aux: ptr::null(),
        out: &raw const out_tensor,
        lse: &raw const lse_tensor,
    };
    // SAFETY: the arrays outlive the calls, and nobody touches them meanwhile
    let status = unsafe {
        ok(annulus_cache_append(cache, &raw const k, &raw const v));
        annulus_cache_attend(cache, &raw const args)
    };
    (status, out)
}

#[test]
fn caches_of_single_ranks_give_the_bits_of_a_cache_of_threads() {
    let chunks: [Vec<i64>; 3] = [(0..20).collect(), vec![20], vec![21]];
    for ranks in [1, 2, 3] {
        let shape = CacheShape::new(1, 2, 4).kv_heads(1).page_rows(3);
        let attention = Attention::new().causal(true);
        let runtime = Runtime::new().threads(1);
        let mut threads = LocalCache::new(&attention, &runtime, shape, ranks).unwrap();
        let mut by_threads = |rows: &Vec<i64>| {
            threads.append(input(2, rows, 1).view(), input(3, rows, 1).view()).unwrap();
            threads.attend(input(1, rows, 2).view(), None).unwrap().out
        };
        let want: Vec<Array4<f32>> = chunks.iter().map(&mut by_threads).collect();
        let run = |endpoint: Threads| {
            let rank = endpoint.rank();
            let (status, cache) = cache(endpoint, 0);
            ok(status);
            let refused = decode(cache, &[0], rank == 0).0;
            let of_rank = if rank == 0 { ANNULUS_INVALID_ARGUMENT } else { ANNULUS_REFUSED };
            assert_eq!(refused, of_rank, "{}", message());
            ok(annulus_cache_truncate(cache, 0));
            for (rows, want) in chunks.iter().zip(&want) {
                let (status, out) = decode(cache, rows, false);
                ok(status);
                assert!(out == want, "rank {} of {ranks}", rank);
            }
            ok(annulus_cache_destroy(cache));
        };
        on_all(ranks, run);
    }
}

#[test]
fn ranks_do_not_wait_for_one_whose_options_have_no_cache() {
    let run = |endpoint: Threads| {
        let rank = endpoint.rank() as i64;
        let (status, none) = cache(endpoint, rank);
        assert!(none.is_null());
        (status, message())
    };
    let statuses = on_all(2, run);
    assert_eq!(statuses[1].0, ANNULUS_INVALID_ARGUMENT);
    assert!(statuses[1].1.starts_with("q_len: got 1"), "{statuses:?}");
    assert_eq!(statuses[0].0, ANNULUS_PEER_LOST, "{statuses:?}");
}
