//! The KV cache on emulated devices: results, and bytes copied to the device by a token.

use std::sync::Arc;

use annulus::{
    Attention, Cache, CacheShape, Error, LocalCache, Runtime,
    comm::threads::{each_rank, ring},
};
use annulus_conformance::suite::{
    self,
    kv_cache::{CACHED, COPIED, Copied, Decoding, Sequence, numbers},
};
use annulus_core::{Alibi, DType, OnHost, Result};
use annulus_cuda::Cuda;
use annulus_cuda_emulator as emulator;
use ndarray::s;

use crate::support::{emulated, emulated_on, next_device};

/// Creates the backend of a rank, on a device of its own.
fn cuda(_: usize) -> Result<OnHost<Cuda>> {
    Ok(emulated()?.on_host())
}

#[test]
fn the_kv_cache_holds_on_cuda() {
    suite::kv_cache(DType::F32, &[1, 2, 4], cuda).unwrap();
}

#[test]
fn the_kv_cache_of_other_types_holds_on_cuda() {
    let causal = Attention::new().causal(true);
    for dtype in [DType::F64, DType::Bf16, DType::F16] {
        for ranks in [1, 3] {
            Decoding { ranks, ..CACHED }.check(&causal, dtype, cuda).unwrap();
        }
    }
}

#[test]
fn segments_hold_on_cuda() {
    for dtype in [DType::F32, DType::Bf16] {
        suite::kv_cache_segments(dtype, cuda).unwrap();
    }
}

#[test]
fn refused_tokens_are_overwritten_on_cuda() {
    let attention = Attention::new().causal(true);
    let all = Sequence::<f32>::new(CACHED.dims, None);
    let other = numbers::<f32>(9, [2, 7, 2, 8]);
    let decode = |speculates: bool| {
        let outs = each_rank(ring(2), |rank, transport| {
            let mut cache = Cache::with_backend(
                &attention,
                &Runtime::new(),
                CACHED.shape(),
                cuda(rank)?,
                transport,
            )?;
            all.step(&mut cache, 0..53)?;
            if speculates {
                // it has been computed when it is refused
                cache.append(other.view(), other.slice(s![.., .., .., ..6]))?;
                cache.attend(all.q.slice(s![.., ..7, .., ..]), None)?;
                cache.truncate(53)?;
            }
            Ok(all.step(&mut cache, 53..61)?.out)
        });
        outs.unwrap()
    };
    assert_eq!(decode(true), decode(false));
}

#[test]
fn a_token_copies_its_own_rows_to_the_device_whatever_is_cached() {
    let causal = Attention::new().causal(true);
    copies_of_a_token(&causal, &[1, 2]);
    // row numbers and positions of keys
    let alibi = Arc::new(Alibi::published(4));
    copies_of_a_token(&causal.dropout(0.3, 5).bias_function(alibi), &[1]);
}

fn copies_of_a_token(attention: &Attention, ranks: &[usize]) {
    let ordinals = [next_device(), next_device()];
    for &ranks in ranks {
        let cache = LocalCache::from_caches(&Runtime::new(), ranks, |rank, runtime, endpoint| {
            let backend = emulated_on(ordinals[rank])?.on_host();
            Cache::with_backend(attention, runtime, COPIED, backend, endpoint)
        });
        let copied = || {
            let to_device = ordinals.map(emulator::bytes_to_device).iter().sum();
            Copied { to_device, lists: None, to_host: None }
        };
        let verdict = cache
            .map_err(|error| error.to_string())
            .and_then(|mut cache| suite::kv_cache_copies(&mut cache, 2048, copied));
        assert_eq!(verdict, Ok(()), "{ranks} ranks");
    }
}

#[test]
fn a_device_that_fails_ends_the_kv_cache_on_all_ranks() {
    let attention = Attention::new().causal(true);
    let all = Sequence::<f32>::new(CACHED.dims, None);
    let errors = each_rank(ring(2), |rank, transport| {
        let made = emulated()?;
        let stream = made.stream().clone();
        let mut cache = Cache::with_backend(
            &attention,
            &Runtime::new(),
            CACHED.shape(),
            made.on_host(),
            transport,
        )?;
        // the abort may arrive before rank 0 has closed its first call
        let failed = all.step(&mut cache, 0..53).and_then(|_| {
            if rank == 1 {
                // a copy to memory that the device does not have
                // SAFETY: the emulated device refuses the address.
                let refused = unsafe { stream.copy_to_device(8, &[0]) };
                assert!(refused.is_err());
            }
            all.step(&mut cache, 53..61)
        });
        let failed = failed.map(drop).unwrap_err();
        let next = all.step(&mut cache, 53..54).map(drop).unwrap_err();
        Ok((failed, next))
    });
    let errors = errors.unwrap();
    assert!(matches!(errors[1].0, Error::Device { .. }), "{errors:?}");
    assert!(matches!(errors[0].0, Error::Aborted { .. }), "{errors:?}");
    assert!(errors.iter().all(|(_, next)| matches!(next, Error::Poisoned { .. })), "{errors:?}");
}

#[test]
fn what_a_kv_cache_on_cuda_does_not_have_is_refused() {
    let attention = Attention::new().reproducible(true);
    let error = LocalCache::from_caches(&Runtime::new(), 1, |rank, runtime, to| {
        Cache::with_backend(&attention, runtime, CacheShape::new(1, 2, 8), cuda(rank)?, to)
    });
    let error = error.map(drop).unwrap_err();
    let named = matches!(&error, Error::Unsupported { .. });
    assert!(named && error.to_string().contains("reproducible"), "{error}");
}
