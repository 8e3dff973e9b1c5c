//! The KV cache on wgpu: results, and bytes copied to the device by a token.

use std::sync::Arc;

use annulus::{
    AnyBackend, Attention, BackendName, Cache, CacheShape, Error, LocalCache, Runtime,
    comm::threads::{each_rank, ring},
};
use annulus_conformance::suite::{
    self,
    kv_cache::{CACHED, COPIED, Copied, Decoding, Sequence, numbers, worst},
};
use annulus_core::{Alibi, DType, OnHost, Result};
use annulus_wgpu::{Gpu, Options, Wgpu};
use ndarray::{Array4, s};

use super::{gpu, open};

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
fn refused_tokens_are_overwritten_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    let attention = Attention::new().causal(true);
    let all = Sequence::<f32>::new(CACHED.dims, None);
    let other = numbers::<f32>(9, [2, 7, 2, 8]);
    let outs = each_rank(ring(2), |_, transport| {
        let mut cache = Cache::with_backend(
            &attention,
            &Runtime::new(),
            CACHED.shape(),
            on(&gpu)(0)?,
            transport,
        )?;
        all.step(&mut cache, 0..53)?;
        // a speculation, which has been computed when it is refused
        cache.append(other.view(), other.slice(s![.., .., .., ..6]))?;
        let refused = cache.attend(all.q.slice(s![.., ..7, .., ..]), None)?;
        cache.truncate(53)?;
        Ok([refused.out, all.step(&mut cache, 53..61)?.out])
    });
    let want = each_rank(ring(2), |_, transport| {
        let mut cache = Cache::with_backend(
            &attention,
            &Runtime::new(),
            CACHED.shape(),
            on(&gpu)(0)?,
            transport,
        )?;
        all.step(&mut cache, 0..53)?;
        Ok(all.step(&mut cache, 53..61)?.out)
    });
    for [_, out] in outs.unwrap() {
        assert_eq!(out, want.as_ref().unwrap()[0]);
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
                Cache::with_backend(
                    &attention,
                    &Runtime::new(),
                    CACHED.shape(),
                    on(&gpu)(rank)?,
                    transport,
                )?
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

#[test]
fn what_a_kv_cache_on_wgpu_does_not_have_is_refused() {
    let Some(gpu) = gpu() else { return };
    let refused = |attention: Attention, shape: CacheShape, words: &str| {
        let errors = each_rank(ring(2), |rank, transport| {
            Ok(Cache::with_backend(&attention, &Runtime::new(), shape, on(&gpu)(rank)?, transport)
                .map(drop)
                .unwrap_err())
        });
        for error in errors.unwrap() {
            let named = matches!(error, Error::Unsupported { .. } | Error::Refused { .. });
            assert!(named && error.to_string().contains(words), "{error}");
        }
    };
    let shape = CacheShape::new(1, 2, 8);
    refused(Attention::new().reproducible(true), shape, "reproducible");
    refused(Attention::new().dtype(DType::F64), shape, "f64");
    refused(Attention::new(), CacheShape::new(1, 2, 257), "257");
}

#[test]
fn a_kv_cache_is_made_on_a_backend_that_is_named() {
    if gpu().is_none() {
        return;
    }
    let x = numbers::<f32>(1, [1, 9, 2, 8]);
    let attend = |name| -> Array4<f32> {
        let runtime = Runtime::new().backend(AnyBackend::open(name, None, 0).unwrap());
        let attention = Attention::new().causal(true);
        let shape = CacheShape::new(1, 2, 8);
        let mut cache = LocalCache::new(&attention, &runtime, shape, 2).unwrap();
        cache.append(x.view(), x.view()).unwrap();
        cache.attend(x.view(), None).unwrap().out
    };
    let (got, want) = (attend(BackendName::Wgpu), attend(BackendName::Cpu));
    assert!(worst(got.iter().zip(&want).map(|(&got, &want)| (got.into(), want.into()))) < 2e-6);
}
