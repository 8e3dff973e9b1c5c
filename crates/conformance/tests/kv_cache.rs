//! The sharded KV cache: prefill and appended tokens against the oracle, bytes of a token, balance,
//! arguments, missing ranks.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, BackwardMode, Cache, CacheShape, DType, Dims, Error, LocalRing, Result, Runtime,
    backend::Cpu,
    comm::{
        Trace,
        threads::{Threads, each_rank, ring},
        trace::{Event, EventKind},
    },
};
use annulus_conformance::{
    device::{Device, Fault, Injection, MockBackend},
    suite::{
        self,
        kv_cache::{CACHED, Decoding, Sequence, numbers, worst},
    },
};
use annulus_core::OnHost;
use ndarray::{Array2, Array4, s};
use proptest::prelude::*;

const SHAPE: CacheShape = CACHED.shape();
const DIMS: Dims = CACHED.dims;

fn cpu(_: usize) -> Result<Cpu> {
    Cpu::new(1)
}

#[test]
fn prefill_and_tokens_are_one_attention() {
    suite::kv_cache(DType::F64, &[1, 2, 3, 4, 8], cpu).unwrap();
}

#[test]
fn segments_are_one_attention() {
    for dtype in [DType::F64, DType::Bf16] {
        suite::kv_cache_segments(dtype, cpu).unwrap();
    }
}

/// The mock device for host tensors: memory that the host cannot access, asynchronous work.
fn mock(_: usize) -> Result<OnHost<MockBackend>> {
    let device = Device::new();
    Ok(OnHost::new(MockBackend::new(device.clone()), device))
}

#[test]
fn blocks_in_device_memory_are_one_attention() {
    suite::kv_cache(DType::F64, &[1, 2, 4], mock).unwrap();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        CACHED.check(&Attention::new().causal(true), dtype, mock).unwrap();
        suite::kv_cache_segments(dtype, mock).unwrap();
    }
}

#[test]
fn results_do_not_depend_on_the_steps_but_for_rounding() {
    let attention = Attention::new().causal(true);
    let tokens: Vec<usize> = (1..=61).collect();
    for ranks in [1, 3, 8] {
        for ends in [&tokens[..], &[61]] {
            Decoding { ranks, ends, ..CACHED }.check(&attention, DType::F64, cpu).unwrap();
        }
        // without a mask, the room for rows of the future would be visible
        Decoding { ranks, ends: &[61], ..CACHED }
            .check(&Attention::new(), DType::F64, cpu)
            .unwrap();
    }
}

#[test]
fn bytes_of_a_token_are_the_same_after_a_thousand_and_a_million_rows() {
    const RANKS: usize = 8;
    let attention = Attention::new().causal(true);
    let shape = CacheShape::new(1, 2, 1).kv_heads(1);
    let row = Array4::<f32>::ones((1, 1, 2, 1));
    let chunk = numbers::<f32>(1, [1, 1000, 1, 1]);
    let of_ranks = each_rank(ring(RANKS), |_, transport| {
        let transport = Trace::new(transport, Instant::now());
        let log = transport.log();
        let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
        let mut bytes = Vec::new();
        for rows in [1_000, 30_000, 1_000_000] {
            while cache.len() < rows {
                cache.append(chunk.view(), chunk.view())?;
            }
            log.clear();
            let forward = cache.attend(row.view(), None)?;
            // the values are below 1, and so is their mean
            assert!(forward.out.iter().all(|out| out.abs() < 1.0));
            assert!((forward.lse[[0, 0, 0]] - (rows as f32).ln()).abs() < 1.0);
            let received = |event: &Event| {
                matches!(event.kind, EventKind::Receive { .. }).then_some(event.bytes)
            };
            let received: Vec<u64> = log.events().iter().filter_map(received).collect();
            bytes.push((forward.reports[0].bytes_sent, received));
        }
        let most = cache.len() / RANKS as u64 + cache.page_rows();
        assert!((most - 2 * cache.page_rows()..=most).contains(&cache.local_len()));
        Ok(bytes)
    })
    .unwrap();
    // out, maximum and sum of 2 heads to each of 7 ranks
    let token = 7 * 2 * (4 + 4 + 4);
    for (sent, received) in of_ranks.concat() {
        assert_eq!((sent, received), (token, vec![token / 7; 7]));
    }
}

#[test]
fn long_prefills_are_computed_in_rounds() {
    // 44 bytes of a query and head: a message of 1 MiB has 744 queries of 32 heads
    let attention = Attention::new().causal(true).sliding_window(3, 0);
    let shape = CacheShape::new(1, 32, 1).kv_heads(1).value_dim(9);
    let dims = Dims::new(1, 2000, 32, 1).kv_heads(1).value_dim(9);
    let all = Sequence::<f32>::new(dims, None);
    let of_ranks = each_rank(ring(2), |_, transport| {
        let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
        all.step(&mut cache, 0..2000)
    })
    .unwrap();
    let mut whole = LocalRing::new(&attention, dims, 1).unwrap();
    let tensors = annulus::Tensors::new(all.q.view(), all.k.view(), all.v.view());
    let whole = whole.forward(&tensors).unwrap();
    for forward in of_ranks {
        let pairs = forward.out.iter().map(|&x| x.into()).zip(whole.out.iter().map(|&x| x.into()));
        assert!(worst(pairs) < 2e-6);
        assert_eq!(forward.reports[0].bytes_sent, 2000 * 32 * 44);
        assert_eq!(forward.reports[0].bytes_sent, forward.reports[0].bytes_predicted);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn ranks_differ_by_a_page_after_any_appends(
        ranks in 1usize..6,
        page_rows in 1u64..40,
        appends in proptest::collection::vec((0usize..90, any::<bool>()), 1..8),
    ) {
        let x = numbers::<f32>(1, [1, 90, 1, 2]);
        let shape = CacheShape::new(1, 1, 2).page_rows(page_rows);
        let of_ranks = each_rank(ring(ranks), |_, transport| {
            let attention = Attention::new().causal(true);
            let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
            let mut local = Vec::new();
            for &(count, sharded) in &appends {
                let rows = if sharded {
                    cache.own_rows(count)?.iter().map(|row| row as usize).collect()
                } else {
                    Vec::from_iter(0..count)
                };
                let rows = x.select(ndarray::Axis(1), &rows);
                if sharded {
                    cache.append_own(count, rows.view(), rows.view())?;
                } else {
                    cache.append(rows.view(), rows.view())?;
                }
                local.push(cache.local_len());
            }
            Ok(local)
        }).unwrap();
        let mut len = 0;
        for (step, (count, _)) in appends.iter().enumerate() {
            len += *count as u64;
            let local: Vec<u64> = of_ranks.iter().map(|local| local[step]).collect();
            prop_assert_eq!(local.iter().sum::<u64>(), len);
            prop_assert!(local.iter().max().unwrap() - local.iter().min().unwrap() <= page_rows);
        }
    }
}

fn on_two_ranks<T: Send>(
    attention: &Attention,
    shape: CacheShape,
    work: impl Fn(usize, Result<Cache>) -> T + Sync,
) -> Vec<T> {
    let attention =
        |rank| if rank == 0 { Attention::new().causal(true) } else { attention.clone() };
    each_rank(ring(2), |rank, transport: Threads| {
        let own = if rank == 0 { SHAPE } else { shape };
        Ok(work(rank, Cache::new(&attention(rank), &Runtime::new(), own, transport)))
    })
    .unwrap()
}

#[test]
fn what_a_cache_does_not_have_is_refused_when_it_is_made() {
    let new = || Attention::new().causal(true);
    let unsupported = [
        ("bias", new().bias([1, 1, 1, 1])),
        ("unnormalized", new().unnormalized(true)),
        ("local_gradients", new().local_gradients(true)),
        ("second_derivatives", new().second_derivatives(true)),
        ("backward_mode", new().backward_mode(BackwardMode::TwoPass)),
    ];
    for (what, attention) in unsupported {
        let errors = on_two_ranks(&attention, SHAPE, |_, cache| cache.map(drop).unwrap_err());
        assert_eq!(errors[1], Error::unsupported(what, "the KV cache"));
        assert!(matches!(errors[0], Error::Refused { rank: 1, .. }), "{what}: {:?}", errors[0]);
    }
    let invalid = [
        ("page_rows", new(), SHAPE.page_rows(0)),
        ("page_rows", new(), SHAPE.page_rows(u64::MAX)),
        ("kv_heads", new(), CacheShape::new(1, 4, 8).kv_heads(0)),
        ("q_heads", new(), CacheShape::new(1, 4, 8).kv_heads(3)),
        ("value_dim", new(), SHAPE.value_dim(Dims::MAX_DIM + 1)),
        ("softmax_scale", new().softmax_scale(f64::NAN), SHAPE),
    ];
    for (name, attention, shape) in invalid {
        let errors = on_two_ranks(&attention, shape, |_, cache| cache.map(drop).unwrap_err());
        let named =
            matches!(&errors[1], Error::InvalidArgument { argument, .. } if argument == name);
        assert!(named, "{name}: {:?}", errors[1]);
    }
    for (field, attention, shape) in [
        ("page_rows", new(), SHAPE.page_rows(6)),
        ("head_dim", new(), CacheShape::new(2, 4, 4).kv_heads(2).value_dim(6)),
        ("mask", Attention::new(), SHAPE),
    ] {
        for error in on_two_ranks(&attention, shape, |_, cache| cache.map(drop).unwrap_err()) {
            let named = matches!(&error, Error::RankMismatch { field: of, .. } if of == field);
            assert!(named, "{field}: {error:?}");
        }
    }
}

#[test]
fn bad_tensors_change_nothing_on_any_rank() {
    let causal = Attention::new().causal(true);
    let all = Sequence::<f32>::new(DIMS, None);
    on_two_ranks(&causal, SHAPE, |rank, cache| {
        let mut cache = cache.unwrap();
        all.step(&mut cache, 0..10).unwrap();
        let named = |error: Error, name: &str| {
            let text = error.to_string();
            assert!(text.starts_with(&format!("{name}: got")), "{name}: {text}");
        };
        let (k, v) = (all.k.slice(s![.., ..3, .., ..]), all.v.slice(s![.., ..3, .., ..]));
        named(cache.append(v, v).unwrap_err(), "k");
        named(cache.append(k, k).unwrap_err(), "v");
        named(cache.append(k, all.v.slice(s![.., ..2, .., ..])).unwrap_err(), "v");
        named(
            cache.append(all.k.mapv(f64::from).view(), all.v.mapv(f64::from).view()).unwrap_err(),
            "k",
        );
        named(cache.append_own(3, all.k.view(), v).unwrap_err(), "k");
        assert_eq!(cache.len(), 10);
        // rank 1 refuses, rank 0 is refused
        let attend = |cache: &mut Cache, q: &Array4<f32>, name: &str| {
            let error = cache.attend(q.view(), None).unwrap_err();
            if rank == 1 {
                named(error, name);
            } else {
                assert!(matches!(error, Error::Refused { rank: 1, .. }), "{error:?}");
            }
        };
        let good = all.q.slice(s![.., ..1, .., ..]).to_owned();
        let wide = if rank == 1 { all.k.clone() } else { good.clone() };
        attend(&mut cache, &wide, "q");
        let many = if rank == 1 { all.q.clone() } else { good.clone() };
        attend(&mut cache, &many, "q");
        // different calls are named on both ranks
        let count = 1 + rank;
        let error = cache.attend(all.q.slice(s![.., ..count, .., ..]), None).unwrap_err();
        assert!(matches!(&error, Error::RankMismatch { field, .. } if field == "queries"));
        if rank == 1 {
            cache.append(k, v).unwrap();
        }
        let error = cache.attend(good.view(), None).unwrap_err();
        assert!(matches!(&error, Error::RankMismatch { field, .. } if field == "cached rows"));
        if rank == 1 {
            let too_many = cache.truncate(14).unwrap_err();
            assert_eq!(too_many, Error::invalid("len", 14, "at most the 13 cached rows"));
            cache.truncate(10).unwrap();
        }
        let sinks = Array2::zeros((1, 2));
        let refused = cache.attend(good.view(), (rank == 1).then(|| sinks.view())).unwrap_err();
        if rank == 1 {
            named(refused, "softmax_aux");
        }
        // no queries are no error
        assert_eq!(cache.attend(all.q.slice(s![.., ..0, .., ..]), None).unwrap().out.len(), 0);
        all.step(&mut cache, 10..11).unwrap()
    })
    .into_iter()
    .reduce(|a, b| {
        assert_eq!(a.out, b.out);
        b
    });
}

#[test]
fn a_rank_that_is_missing_ends_the_call_within_the_deadline() {
    let deadline = Duration::from_secs(1);
    let all = Sequence::<f32>::new(DIMS, None);
    // rank 1 makes the cache and then neither calls nor ends, or ends: a lost peer
    for stays in [true, false] {
        let fates = each_rank(ring(3), |rank, transport| {
            let attention = Attention::new().causal(true);
            let runtime = Runtime::new().deadline(deadline).arrival_deadline(deadline);
            let mut cache = Cache::new(&attention, &runtime, SHAPE, transport)?;
            if rank == 1 {
                thread::sleep(if stays { 3 * deadline } else { Duration::ZERO });
                return Ok(None);
            }
            let start = Instant::now();
            let error = all.step(&mut cache, 0..9).unwrap_err();
            let after = start.elapsed();
            let next = cache.attend(all.q.slice(s![.., ..1, .., ..]), None).unwrap_err();
            Ok(Some((error, after, next)))
        });
        let fates: Vec<_> = fates.unwrap().into_iter().flatten().collect();
        assert_eq!(fates.len(), 2);
        for (error, after, next) in fates {
            assert!(after < deadline + Duration::from_secs(1), "{after:?}");
            let is_typed = if stays {
                matches!(error, Error::ArrivalTimeout { .. } | Error::Timeout { .. })
            } else {
                matches!(error, Error::PeerLost { .. } | Error::Aborted { .. })
                    && matches!(next, Error::Poisoned { .. })
            };
            assert!(is_typed, "{error:?}, {next:?}");
        }
    }
}

#[test]
fn faults_of_messages_end_the_cache_on_every_rank() {
    let all = Sequence::<f32>::new(DIMS, None);
    let deadline = Duration::from_secs(1);
    for injection in
        [Injection::Drop { send: 1 }, Injection::Truncate { send: 0 }, Injection::Die { step: 0 }]
    {
        let work = |rank, transport| {
            let faults = if rank == 1 { vec![injection] } else { Vec::new() };
            let transport = Fault::new(transport, 3, faults);
            let attention = Attention::new().causal(true);
            let runtime = Runtime::new().deadline(deadline);
            let mut cache = Cache::new(&attention, &runtime, SHAPE, transport)?;
            let start = Instant::now();
            let error = all.step(&mut cache, 0..9).unwrap_err();
            let after = start.elapsed();
            let next = cache.attend(all.q.slice(s![.., ..1, .., ..]), None).unwrap_err();
            let append = cache.append(all.k.view(), all.v.view()).unwrap_err();
            Ok((error, after, [next, append]))
        };
        for (error, after, later) in each_rank(ring(3), work).unwrap() {
            assert!(error.is_fatal(), "{injection:?}: {error:?}");
            assert!(after < deadline + Duration::from_secs(1), "{injection:?}: {after:?}");
            let dead = later.iter().all(|error| matches!(error, Error::Poisoned { .. }));
            assert!(dead, "{injection:?}: {later:?}");
        }
    }
}
