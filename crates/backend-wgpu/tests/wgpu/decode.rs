//! Few queries and many keys: packed query heads, and ranges of keys that are merged.
//!
//! The KV cache on wgpu: results, and bytes copied to the device by a token.

use std::sync::Arc;

use annulus::{
    Attention, Cache, CacheShape, Dims, Layout, LocalCache, Runtime, SinkShape, Spec,
    comm::threads::{Threads, each_rank, ring},
};
use annulus_conformance::{
    Case, Draw, Masks, Setting,
    suite::{
        self,
        kv_cache::{CACHED, COPIED, Copied, Decoding, Sequence, numbers, worst},
    },
};
use annulus_core::{Alibi, DType, Dropout, OnHost, Result};
use annulus_wgpu::{Gpu, Level, Options, Wgpu};

use crate::{adapter, answer, gpu, gpu_at, open};

/// The last queries of a causal sequence.
fn at_the_end(dims: &Dims) -> Masks {
    let before = (dims.kv_len - dims.q_len) as u64;
    Masks { window: Some([None, Some(before)]), ..Masks::default() }
}

fn case(name: &str, dims: Dims, change: impl FnOnce(&mut Spec, &mut Masks)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    let mut masks = at_the_end(&dims);
    change(&mut spec, &mut masks);
    Case::new(name, spec, masks, &mut Draw::new(dims.q_len as u64))
}

/// Cases whose tiles have several heads, several ranges of at least 256 keys, or both.
pub(super) fn cases() -> Vec<Case> {
    let token = Dims { kv_heads: 1, q_len: 1, kv_len: 1100, ..Dims::new(1, 1, 8, 16) };
    vec![
        case("one token, 8 packed heads", token, |_, _| {}),
        case("no group", Dims { kv_heads: 8, batch: 2, ..token }, |_, _| {}),
        // 10 queries of 3 heads in a tile, of whose rows two are unused; no fours
        case(
            "3 packed heads, bias, soft cap, sinks",
            Dims {
                batch: 2,
                q_len: 13,
                kv_len: 600,
                q_heads: 6,
                kv_heads: 2,
                value_dim: 7,
                ..token
            },
            |spec, _| {
                spec.bias = Some([2, 6, 13, 600]);
                spec.soft_cap = Some(3.0);
                spec.sinks = Some(SinkShape { per_head: true, count: 2 });
            },
        ),
        case(
            "unnormalised",
            Dims { q_len: 2, kv_len: 530, q_heads: 4, kv_heads: 2, ..token },
            |spec, _| spec.normalize = false,
        ),
        case("dropout", Dims { q_len: 3, kv_len: 520, q_heads: 4, ..token }, |spec, _| {
            spec.dropout = Some(Dropout { probability: 0.3, seed: 7 });
        }),
        // queries that attend to keys of some ranges only, and lists of other lengths
        case("a window", Dims { q_len: 40, kv_len: 600, q_heads: 2, ..token }, |_, masks| {
            masks.window = Some([Some(3), Some(500)]);
        }),
    ]
}

#[test]
fn few_queries_and_many_keys_hold() {
    let Some(gpu) = gpu() else { return };
    for (number, case) in cases().iter().enumerate() {
        answer(&gpu, &case.in_dtype(DType::F32), &Setting::ALONE);
        if number == 0 {
            answer(&gpu, &case.in_dtype(DType::F32), &Setting::new(2, Layout::Contiguous));
            answer(&gpu, &case.in_dtype(DType::Bf16), &Setting::ALONE);
        }
    }
}

#[test]
fn ranges_of_several_chunks_and_submissions_hold() {
    // keys are divided into chunks, which are merged into the state one after the other; a
    // submission has some ranges of a chunk
    let options = Options {
        most_binding_bytes: Some(100 << 10),
        most_part_flops: Some(8_000_000),
        ..Options::default()
    };
    let Some(gpu) = open(&options) else { return };
    for case in &cases()[..2] {
        answer(&gpu, &case.in_dtype(DType::F32), &Setting::ALONE);
    }
}

#[test]
fn the_matrix_level_holds_for_few_queries() {
    if !adapter().is_some_and(|adapter| adapter.levels.contains(&Level::Matrix)) {
        return;
    }
    let Some(gpu) = gpu_at(Level::Matrix) else { return };
    // f32 has no matrices, but reductions by shuffles
    for (case, dtype) in [(0, DType::F16), (2, DType::F16), (0, DType::F32)] {
        answer(&gpu, &cases()[case].in_dtype(dtype), &Setting::ALONE);
    }
}

/// Creates the cache of a rank on the device.
fn cache(gpu: &Gpu, attention: &Attention, transport: Threads) -> Result<Cache> {
    let backend = Wgpu::on_host(gpu.clone());
    Cache::with_backend(attention, &Runtime::new(), CACHED.shape(), backend, transport)
}

/// Creates the backend of a rank: all share the device.
fn on(gpu: &Gpu) -> impl Fn(usize) -> Result<OnHost<Wgpu>> + Sync {
    |_| Ok(Wgpu::on_host(gpu.clone()))
}

#[test]
fn the_kv_cache_holds_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::kv_cache(DType::F32, &[1, 2, 4], on(&gpu)).unwrap();
    suite::kv_cache_segments(DType::F32, on(&gpu)).unwrap();
}

#[test]
fn the_kv_cache_of_elements_of_two_bytes_holds_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    let causal = Attention::new().causal(true);
    // rows of 13 elements begin within a word
    let odd = Decoding { ranks: 2, ..CACHED };
    let odd =
        Decoding { dims: annulus::Dims { batch: 1, kv_heads: 1, head_dim: 7, ..odd.dims }, ..odd };
    for dtype in [DType::Bf16, DType::F16] {
        Decoding { ranks: 2, ..CACHED }.check(&causal, dtype, on(&gpu)).unwrap();
        odd.check(&causal, dtype, on(&gpu)).unwrap();
        suite::kv_cache_segments(dtype, on(&gpu)).unwrap();
    }
}

#[test]
fn ranks_on_the_cpu_and_on_wgpu_share_a_kv_cache() {
    let Some(gpu) = gpu() else { return };
    let attention = Attention::new().causal(true);
    let all = Sequence::<f32>::new(CACHED.dims, None);
    let of_ranks = |gpus: bool| {
        let computed = each_rank(ring(3), |rank, transport| {
            let mut cache = if gpus && rank > 0 {
                cache(&gpu, &attention, transport)?
            } else {
                Cache::new(&attention, &Runtime::new(), CACHED.shape(), transport)?
            };
            all.step(&mut cache, 0..50)?;
            Ok(all.step(&mut cache, 50..61)?.out)
        });
        computed.unwrap()
    };
    let (mixed, want) = (of_ranks(true), of_ranks(false));
    assert!(mixed.iter().all(|out| *out == mixed[0]));
    let pairs = mixed[0].iter().zip(&want[0]).map(|(&got, &want)| (got.into(), want.into()));
    assert!(worst(pairs) < 2e-6);
}

#[test]
fn a_token_copies_its_own_rows_to_the_device_whatever_is_cached() {
    for ranks in [1, 2] {
        // a device of its own, on which no other test copies
        let Some(gpu) = open(&Options::default()) else { return };
        let causal = Attention::new().causal(true);
        let make = |_, runtime: &Runtime, endpoint| {
            Cache::with_backend(&causal, runtime, COPIED, Wgpu::on_host(gpu.clone()), endpoint)
        };
        let mut cache = LocalCache::from_caches(&Runtime::new(), ranks, make).unwrap();
        let copied = || {
            let bytes = gpu.transfers();
            let lists = Some(gpu.mask_bytes());
            Copied { to_device: bytes.to_device, lists, to_host: Some(bytes.to_host) }
        };
        suite::kv_cache_copies(&mut cache, 1024, copied).unwrap();
    }
}

#[test]
fn a_token_copies_a_bias_of_a_function_once_for_each_cached_row_and_head() {
    // a device of its own, on which no other test copies
    let Some(gpu) = open(&Options::default()) else { return };
    let attention = Attention::new().causal(true).bias_function(Arc::new(Alibi::published(4)));
    let shape = CacheShape::new(1, 4, 8).kv_heads(2).value_dim(6);
    let make = |_, runtime: &Runtime, endpoint| {
        Cache::with_backend(&attention, runtime, shape, Wgpu::on_host(gpu.clone()), endpoint)
    };
    let mut cache = LocalCache::from_caches(&Runtime::new(), 1, make).unwrap();
    let rows = 1_000;
    let [k, v] = [8, 6].map(|dim| numbers::<f32>(1, [1, rows, 2, dim]));
    cache.append(k.view(), v.view()).unwrap();
    let before = gpu.mask_bytes();
    cache.attend(numbers::<f32>(3, [1, 1, 4, 8]).view(), None).unwrap();
    let copied = gpu.mask_bytes() - before;
    // a value, a word of a tile mask, and a run for each 32 keys; then the starts of lists
    let most = 4 * rows as u64 * 9;
    assert!((4 * 4 * rows as u64..most).contains(&copied), "{copied} bytes, of {most}");
}
