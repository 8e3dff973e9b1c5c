//! Decoding: every feature is correct against the oracle in the kernel of few rows and with ranges
//! of keys, ranges are divided as planned, and bits repeat.
//!
//! The KV cache on emulated devices: results, and bytes copied to the device by a token.

use std::sync::Arc;

use annulus::{
    Attention, Cache, Error, LocalCache, Runtime,
    comm::threads::{each_rank, ring},
};
use annulus_conformance::{
    Case, Draw, Masks, Setting, Subject,
    suite::{
        self,
        kv_cache::{CACHED, COPIED, Copied, Decoding, Sequence},
    },
};
use annulus_core::{Alibi, Batch, DType, DenseMask, Dims, OnHost, Result, Spec};
use annulus_cuda::Cuda;
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;
use ndarray::s;

use crate::support::{
    blocks, emulated, emulated_on, every_feature, hopper_on, masked_rows_change_no_bit,
    next_device, on_warpgroups, orders_change_no_bit, plain,
};

/// The kernel of few rows.
const DECODE: &str = "forward_decode";

/// Dims of few queries and many tiles of keys.
fn dims(q_len: usize, q_heads: usize, kv_heads: usize) -> Dims {
    Dims { batch: 2, q_len, kv_len: 523, q_heads, kv_heads, head_dim: 24, value_dim: 40 }
}

fn new(name: &str, dims: Dims, dtype: DType, change: impl Fn(&mut Case, &mut Draw)) -> Case {
    let draw = &mut Draw::new(dims.q_len as u64 + 1);
    let mut case = Case::new(name, Spec::new(dims, DType::F64), Masks::default(), draw);
    change(&mut case, draw);
    case.draw_tensors(draw);
    case.in_dtype(dtype)
}

/// A case of one query and several ranges of keys, without any feature.
pub(crate) fn bare() -> Case {
    new("bare", dims(1, 2, 1), DType::Bf16, |_, _| ())
}

/// A case with every feature of scores.
fn full(dims: Dims, dtype: DType) -> Case {
    every_feature(dims, Masks::default(), dtype)
}

fn verdict(subject: &dyn Subject, case: &Case, setting: &Setting) -> Result<(), String> {
    suite::answer(subject, case, setting).map(drop)
}

const ALL: [DType; 4] = [DType::F64, DType::F32, DType::Bf16, DType::F16];

#[test]
fn every_feature_holds_for_few_queries() {
    for (dtype, dims) in ALL.into_iter().zip([
        dims(1, 4, 2),
        Dims { batch: 1, ..dims(5, 3, 3) },
        dims(1, 8, 2),
        Dims { batch: 1, ..dims(33, 2, 1) },
    ]) {
        verdict(&plain(), &full(dims, dtype), &Setting::ALONE).unwrap();
    }
}

#[test]
fn few_queries_hold_over_rings_of_ranks() {
    // the state of one block is merged with the partial results of the next
    let dims = Dims { batch: 1, kv_len: 1100, ..dims(3, 4, 2) };
    for (dtype, ranks, layout) in
        [(DType::F32, 2, Layout::Striped), (DType::Bf16, 3, Layout::Contiguous)]
    {
        let setting = Setting::new(ranks, layout);
        verdict(&plain(), &full(dims, dtype), &setting).unwrap();
        let bare = new("no sinks", dims, dtype, |_, _| ());
        verdict(&plain(), &bare, &setting).unwrap();
    }
}

#[test]
fn few_queries_hold_on_warpgroups() {
    let dims = Dims { batch: 1, kv_len: 1040, head_dim: 16, value_dim: 24, ..dims(5, 1, 1) };
    let two = Setting::new(2, Layout::Contiguous);
    verdict(&on_warpgroups(None), &full(dims, DType::Bf16), &two).unwrap();
}

#[test]
fn the_row_maximum_of_an_unnormalized_output_is_that_of_all_ranges() {
    for dtype in [DType::F64, DType::Bf16] {
        let mut case = new("ties", dims(2, 2, 1), dtype, |case, _| case.spec.normalize = false);
        // the largest score occurs in two ranges, and twice in one of them
        let largest = case.k.slice(s![.., 3, .., ..]).mapv(|x| 1.5 * x);
        for key in [40, 300, 301] {
            case.k.slice_mut(s![.., key, .., ..]).assign(&largest);
        }
        let case = case.in_dtype(dtype);
        verdict(&plain(), &case, &Setting::ALONE).unwrap();
        verdict(&plain(), &case, &Setting::new(2, Layout::Contiguous)).unwrap();
    }
}

#[test]
fn ranges_without_a_visible_key_add_nothing() {
    for dtype in ALL {
        // a query sees keys of one range, another none at all
        let mut case = new("window", dims(3, 2, 2), dtype, |_, _| ());
        let mask = DenseMask::from_fn([1, 1, 3, 523], |[_, _, i, j]| match i {
            0 => (400..410).contains(&j),
            1 => j % 3 == 0,
            _ => false,
        });
        case.batch = Batch { attention_mask: Some(mask), ..Batch::default() };
        verdict(&plain(), &case, &Setting::ALONE).unwrap();
        // keys that no query attends to change nothing
        case.v.slice_mut(s![.., 1, .., ..]).fill(f64::NAN);
        case.k.slice_mut(s![.., 1, .., ..]).fill(f64::INFINITY);
        let out = suite::run(&plain(), &case, &Setting::ALONE).unwrap().out;
        assert!(out.iter().all(|x| x.is_finite()), "{dtype}");
    }
}

#[test]
fn a_visible_nan_reaches_its_rows_from_any_range() {
    for dtype in [DType::F32, DType::F16] {
        let mut case = new("nan", dims(2, 2, 1), dtype, |_, _| ());
        case.v[[0, 500, 0, 3]] = f64::NAN;
        case.k[[1, 200, 0, 0]] = f64::NAN;
        let got = suite::run(&plain(), &case, &Setting::ALONE).unwrap();
        for ((b, i, h, x), value) in got.out.indexed_iter() {
            assert_eq!(value.is_nan(), b == 1 || x == 3, "{dtype}: out[{b}, {i}, {h}, {x}]");
        }
        assert!(got.lse.indexed_iter().all(|((b, ..), lse)| lse.is_nan() == (b == 1)), "{dtype}");
    }
}

/// Numbers of blocks of the forward kernel and of the merge, for a case.
fn blocks_of(case: &Case, kernel: &str, hopper: bool) -> Result<[u64; 2], String> {
    blocks(case, &Setting::ALONE, [kernel, "merge_splits"], |ordinal| {
        // a block for each tile
        let on_warpgroups = || Ok(hopper_on(ordinal, None, 0)?.with_forward_blocks(usize::MAX));
        if hopper { on_warpgroups() } else { emulated_on(ordinal) }
    })
}

#[test]
fn ranges_are_blocks_and_rows_are_merged_once() {
    let plain = |dims, dtype| new("blocks", dims, dtype, |_, _| ());
    // 9 tiles of 64 keys are 4 ranges; 2 batch rows × 2 groups of packed heads; 2 × 8 rows
    let case = plain(dims(1, 8, 2), DType::Bf16);
    assert_eq!(blocks_of(&case, DECODE, false), Ok([2 * 2 * 4, 2 * 8]));
    // a group has 20 rows, of which partial results are divided less: 2 ranges
    let case = plain(dims(5, 8, 2), DType::Bf16);
    assert_eq!(blocks_of(&case, "forward_matrix", false), Ok([2 * 2 * 2, 2 * 5 * 8]));
    // above 64 dims ranges have a kernel of their own
    let case = plain(Dims { head_dim: 72, ..dims(5, 8, 2) }, DType::Bf16);
    assert_eq!(blocks_of(&case, "forward_matrix_split", false), Ok([2 * 2 * 4, 2 * 5 * 8]));
    // 17 tiles of 32 keys are 8 ranges
    let case = plain(dims(1, 2, 1), DType::F64);
    assert_eq!(blocks_of(&case, "forward", false), Ok([2 * 2 * 8, 2 * 2]));
    // 5 tiles of 128 keys are 2 ranges, of two packed heads
    let case = plain(Dims { value_dim: 24, ..dims(1, 2, 1) }, DType::F16);
    assert_eq!(blocks_of(&case, "forward_warpgroup", true), Ok([2 * 2, 2 * 2]));
    // many blocks are not divided
    let case = plain(Dims { batch: 67, head_dim: 8, value_dim: 8, ..dims(1, 2, 2) }, DType::Bf16);
    assert_eq!(blocks_of(&case, DECODE, false), Ok([67 * 2, 0]));
}

/// Checks a case that the kernel of few rows must compute.
fn few_rows(case: &Case, setting: &Setting) {
    let launched = blocks(case, setting, [DECODE, "forward_matrix"], emulated_on);
    let launched = launched.expect("a right answer");
    assert!(launched[0] > 0 && launched[1] == 0, "{}: {launched:?}", case.name);
}

#[test]
fn every_feature_holds_in_the_kernel_of_few_rows() {
    type Change = fn(&mut Case);
    // `full` has the others
    let features: [(&str, Change); 3] = [
        ("rounded logits", |case| case.spec.logits_dtype = DType::Bf16),
        ("negative scale", |case| case.spec.scale = -0.3),
        ("mask", |case| {
            let visible = |[b, _, i, j]: [usize; 4]| (j + i + 3 * b) % 7 == 0 && j % 64 != 3;
            let mask = DenseMask::from_fn([2, 1, 2, 523], visible);
            case.batch = Batch { attention_mask: Some(mask), ..Batch::default() };
        }),
    ];
    for (number, (name, change)) in features.into_iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][number % 2];
        let case = new(name, dims(2, 6, 2), dtype, |case, _| change(case));
        let window = Masks { window: Some([Some(200), Some(90)]), ..Masks::default() };
        few_rows(&case.masked(window), &Setting::ALONE);
    }
}

#[test]
fn all_dims_and_rows_hold_in_the_kernel_of_few_rows() {
    for (dtype, q_len, [q_heads, kv_heads], [head_dim, value_dim]) in [
        (DType::Bf16, 1, [1, 1], [1, 1]),
        (DType::F16, 16, [1, 1], [64, 64]),
        (DType::Bf16, 2, [8, 1], [65, 128]),
        (DType::F16, 3, [10, 2], [129, 200]),
        (DType::F16, 15, [2, 2], [40, 193]),
    ] {
        let dims = Dims { batch: 1, head_dim, value_dim, ..dims(q_len, q_heads, kv_heads) };
        // the number of keys ends a tile, or is within the keys of each warp
        let kv_len = if dtype == DType::F16 { 384 + 17 * (q_len % 4) } else { dims.kv_len };
        few_rows(&full(Dims { kv_len, ..dims }, dtype), &Setting::ALONE);
    }
}

#[test]
fn the_state_of_a_pass_enters_the_kernel_of_few_rows_once() {
    // blocks of 110 keys are not divided, so that the kernel reads and writes the state itself
    for (dtype, [head_dim, value_dim]) in
        [(DType::Bf16, [24, 40]), (DType::F16, [128, 120]), (DType::Bf16, [256, 33])]
    {
        let dims = Dims { batch: 1, kv_len: 330, head_dim, value_dim, ..dims(3, 4, 1) };
        let bare = new("no sinks", dims, dtype, |_, _| ());
        for case in [full(dims, dtype), bare] {
            few_rows(&case, &Setting::new(3, Layout::Contiguous));
        }
    }
}

#[test]
fn masked_keys_that_are_not_finite_change_no_bit_of_few_rows() {
    for (dtype, dim) in [(DType::Bf16, 64), (DType::F16, 128), (DType::Bf16, 256)] {
        masked_rows_change_no_bit(&plain(), dtype, [8, dim]).unwrap();
    }
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    // rows of forward_decode and of forward_matrix
    for (q_len, dtype) in [(2, DType::Bf16), (4, DType::F16), (5, DType::Bf16)] {
        let case = full(Dims { batch: 1, ..dims(q_len, 4, 1) }, dtype);
        orders_change_no_bit(plain, &case, 21..25);
    }
}

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
