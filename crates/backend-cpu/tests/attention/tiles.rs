//! Products on tiles, emulated or by AMX: sums of bf16 terms against multiply-adds, values that are
//! not finite, and the reproducible order.

use std::sync::Arc;

use annulus::{Division, LocalRing, Plan};
use annulus_core::{DType, Dims, LEAF_ROWS, Precision, Spec, mask};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;
use annulus_test_cases::{Answer, Case, Draw, Masks, facade};
use ndarray::{Array2, Array4, Zip, s};

use crate::{self as support, assert_close, ranks::OnRanks};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// Returns the widest instruction set without pairs.
fn multiply_adds() -> Isa {
    let isas = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];
    isas.into_iter().find(|isa| isa.is_available()).unwrap()
}

fn run(case: &Case, isa: Isa, layout: &Layout, ranks: usize) -> Answer {
    case.run(&|| Cpu::new(1)?.with_isa(isa), layout, ranks).unwrap()
}

fn four(answer: &Answer) -> [&Array4<f64>; 4] {
    [&answer.out, &answer.dq, &answer.dk, &answer.dv]
}

/// Returns the relative root mean square errors of out, dq, dk and dv.
fn errors(got: &Answer, want: &Answer) -> [f64; 4] {
    let norm = |array: &Array4<f64>| array.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (got, want) = (four(got), four(want));
    std::array::from_fn(|i| norm(&(got[i] - want[i])) / norm(want[i]))
}

/// Returns a causal case of two query heads of one KV head.
fn case(dtype: DType, seed: u64) -> Case {
    case_with(dtype, seed, Arc::new(mask::Causal::default()))
}

fn case_with(dtype: DType, seed: u64, mask: mask::SharedMask) -> Case {
    let mut spec = Spec::new(Dims { kv_heads: 1, ..Dims::new(1, 107, 2, 24) }, dtype);
    spec.mask = mask;
    let mut case = support::case(spec, &mut Draw::new(seed));
    case.dlse = None;
    case
}

#[test]
fn sums_of_terms_are_as_exact_as_multiply_adds() {
    // factors of q, of v, of dout, and the decades over which elements of v and dout spread
    let every = [(1.0, 1.0, 1.0, 0), (20.0, 1.0, 1.0, 0), (100.0, 1.0, 1.0, 0), (0.5, 1.0, 1.0, 4)];
    let wide =
        [(1.0, 1e-30, 1.0, 0), (1.0, 1e30, 1.0, 0), (1.0, 1e-36, 1.0, 0), (1.0, 1.0, 1e-33, 0)];
    // subnormal numbers of f16
    let subnormal = [(1.0, 1e-6, 1.0, 0), (1e-6, 1.0, 1e-6, 0)];
    let cases = DTYPES.into_iter().flat_map(|dtype| {
        let more = match dtype {
            DType::F32 => &wide[..],
            DType::F16 => &subnormal[..],
            _ => &wide[..2],
        };
        every.iter().chain(more).map(move |&of| (dtype, of))
    });
    for (number, (dtype, (of_q, of_v, of_dout, decades))) in cases.enumerate() {
        let mut draw = Draw::new(40 + number as u64);
        let mut case = case(dtype, 30 + number as u64);
        let mut spread = |x: f64| x * 10f64.powf((draw.uniform() - 0.5) * f64::from(decades));
        case.q *= of_q;
        case.v.mapv_inplace(|x| of_v * spread(x));
        case.dout.mapv_inplace(|x| of_dout * spread(x));
        let case = case.in_dtype(dtype);
        check_errors(&case, &format!("q × {of_q:e}, v × {of_v:e}, dout × {of_dout:e}, {decades}"));
    }
    for dtype in DTYPES {
        // scores of about −180: lanes without a key, of score 0, would have a probability of ∞
        let mut case = case_with(dtype, 90, Arc::new(mask::Everything));
        case.q.slice_mut(s![.., .., .., 0]).mapv_inplace(|x| x + 30.0);
        case.k.slice_mut(s![.., .., .., 0]).mapv_inplace(|x| x - 30.0);
        check_errors(&case.in_dtype(dtype), "low scores");
    }
}

/// Asserts that errors are at most about those of multiply-adds.
fn check_errors(case: &Case, what: &str) {
    let want = support::oracle(case);
    let of_isa = |isa| errors(&run(case, isa, &Layout::Contiguous, 1), &want);
    let (ours, plain) = (of_isa(Isa::AmxEmulated), of_isa(multiply_adds()));
    for (ours, plain) in ours.into_iter().zip(plain) {
        let dtype = case.spec.dtype;
        assert!(ours <= 1.05 * plain, "{dtype}, {what}: {ours:e}, with multiply-adds {plain:e}");
    }
}

#[test]
fn bits_in_the_reproducible_order_do_not_depend_on_the_ranks() {
    for (number, dtype) in DTYPES.into_iter().enumerate() {
        // a window, so that a block lacks masked keys of a leaf: it has rows 148 to 191 of a tile
        let masks = Masks { causal: true, window: Some([Some(108), None]), ..Masks::default() };
        let dims = Dims { kv_heads: 1, ..Dims::new(1, 2 * LEAF_ROWS as usize + 37, 2, 8) };
        let mut spec = Spec::new(dims, dtype);
        spec.leaf_rows = Some(LEAF_ROWS);
        if dtype == DType::Bf16 {
            spec.precision = Precision::Default;
        }
        let draw = &mut Draw::new(70 + number as u64);
        let mut case = Case::new("", spec, masks, draw);
        case.draw_tensors(draw);
        case.dlse = None;
        let case = case.in_dtype(dtype);
        let one = run(&case, Isa::AmxEmulated, &Layout::Contiguous, 1);
        assert_close(&one, &support::oracle(&case), 1e-2, "reproducible");
        assert!(one.same_bits(&run(&case, multiply_adds(), &Layout::Contiguous, 1)).is_err());
        for (layout, ranks) in [(Layout::Striped, 2), (Layout::Zigzag, 3)] {
            let many = run(&case, Isa::AmxEmulated, &layout, ranks);
            one.same_bits(&many).unwrap_or_else(|error| panic!("{dtype}, {ranks} ranks: {error}"));
        }
    }
}

#[test]
fn a_ring_of_ranks_with_tiles_and_without_is_refused_in_the_reproducible_order() {
    let case = case(DType::F32, 1);
    let ring = |reproducible: bool| {
        let attention = facade::attention(&case).reproducible(reproducible);
        let dims = case.spec.dims;
        LocalRing::from_plans((attention, Division::new()), dims, 2, |rank, setup, endpoint| {
            let isa = [multiply_adds(), Isa::AmxEmulated][rank];
            Plan::with_backend(setup, dims, Cpu::new(1)?.with_isa(isa)?, endpoint)
        })
    };
    let error = ring(true).unwrap_err();
    assert!(matches!(error, annulus::Error::RankMismatch { .. }), "{error}");
    assert!(error.to_string().contains("amx-emulated"), "{error}");
    ring(false).unwrap();
}

#[test]
fn a_value_that_is_not_finite_stays_in_its_rows() {
    const LEN: usize = 107;
    for (number, dtype) in DTYPES.into_iter().enumerate() {
        let clean = case(dtype, 60 + number as u64);
        let clean_run = run(&clean, Isa::AmxEmulated, &Layout::Contiguous, 1);
        let poisons = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        for (index, row) in [0, 41, 74].into_iter().enumerate() {
            let poison = poisons[(number + index) % 3];
            for tensor in 0..4 {
                let mut case = clean.clone();
                let of_case = [&mut case.q, &mut case.k, &mut case.v, &mut case.dout];
                of_case.into_iter().nth(tensor).unwrap()[[0, row, 0, 5]] = poison;
                let got = run(&case, Isa::AmxEmulated, &Layout::Contiguous, 1);
                let want = run(&case, multiply_adds(), &Layout::Contiguous, 1);
                let what = format!("{dtype}, tensor {tensor}, {poison} in row {row}");
                // rows of queries that attend to a key, or keys that a query attends to
                let before = if tensor == 0 || tensor == 3 { row } else { LEN };
                let untouched = s![.., ..row, .., ..];
                assert_eq!(got.out.slice(untouched), clean_run.out.slice(untouched), "{what}");
                assert_eq!(got.dq.slice(untouched), clean_run.dq.slice(untouched), "{what}");
                if before < LEN {
                    let after = s![.., row + 1.., .., ..];
                    for (got, clean) in [
                        (&got.dk, &clean_run.dk),
                        (&got.dv, &clean_run.dv),
                        (&got.out, &clean_run.out),
                    ] {
                        assert_eq!(got.slice(after), clean.slice(after), "{what}");
                    }
                }
                for (index, (got, want)) in four(&got).into_iter().zip(four(&want)).enumerate() {
                    Zip::indexed(got).and(want).for_each(|at, got, want| {
                        let close = (got - want).abs() <= 0.05 * (1.0 + want.abs());
                        assert!(
                            got.is_finite() == want.is_finite() && (close || !want.is_finite()),
                            "{what}: out, dq, dk or dv ({index}) {at:?}: {got:e}, want {want:e}"
                        );
                    });
                }
            }
        }
    }
}

/// Documents that begin at odd rows share a pair of bf16 with the row before.
#[test]
fn masked_values_that_are_not_finite_change_no_bit() {
    const LEN: usize = 150;
    let isas = [Isa::Avx512Bf16, Isa::Amx, Isa::AmxEmulated].into_iter();
    let runs = isas.filter(|isa| isa.is_available()).flat_map(|isa| {
        let dtypes = if isa == Isa::Avx512Bf16 { &DTYPES[2..] } else { &DTYPES };
        dtypes.iter().flat_map(move |&dtype| [13, 64, 77].map(|first| (isa, dtype, first)))
    });
    for (isa, dtype, first) in runs {
        let mut spec = Spec::new(Dims::new(1, LEN, 1, 24), dtype);
        spec.precision = Precision::Default;
        let mut clean = support::case(spec, &mut Draw::new(970 + first as u64));
        clean.dlse = None;
        let ids = Array2::from_shape_fn((1, LEN), |(_, row)| i32::from(row >= first));
        clean.batch.q_segment_ids = Some(ids.clone());
        clean.batch.kv_segment_ids = Some(ids);
        let want = run(&clean, isa, &Layout::Contiguous, 1);
        for (row, poison) in [(first - 1, f64::NAN), (first, f64::INFINITY)] {
            let mut poisoned = clean.clone();
            for tensor in [&mut poisoned.q, &mut poisoned.k, &mut poisoned.v, &mut poisoned.dout] {
                tensor.slice_mut(s![.., row, .., ..]).fill(poison);
            }
            let got = run(&poisoned, isa, &Layout::Contiguous, 1);
            let rows = if row < first { first..LEN } else { 0..first };
            for (index, (got, want)) in four(&got).into_iter().zip(four(&want)).enumerate() {
                let [got, want] =
                    [got, want].map(|array| array.slice(s![.., rows.clone(), .., ..]));
                assert_eq!(got, want, "{isa}, {dtype}: out, dq, dk or dv ({index}), row {row}");
            }
        }
    }
}

#[test]
fn grouped_queries_decode_on_tiles() {
    if !Isa::Avx512Bf16.is_available() {
        return eprintln!("NOT RUN: strips of keys are narrower than a tile");
    }
    // least packed rows of a KV head on tiles
    for (dtype, least) in [(DType::Bf16, 16), (DType::F16, 32), (DType::F32, 64)] {
        for (group, q_len) in [(5, 3), (8, 2), (8, 4), (21, 3), (16, 5)] {
            let dims = Dims {
                q_len,
                kv_len: 706,
                q_heads: 2 * group,
                value_dim: 24,
                ..Dims::new(1, 0, 2, 64)
            };
            let mut spec = Spec::new(dims, dtype);
            spec.alignment = annulus_core::Alignment::BottomRight;
            // the first queries attend to no key of the last tile
            spec.mask = Arc::new(mask::Causal::default());
            let case = support::case(spec, &mut Draw::new(least as u64));
            let run = |isa| {
                let cpu = || Cpu::new(1)?.with_isa(isa);
                case.run_forward(&cpu, &Layout::Contiguous, 1).unwrap()
            };
            let (on_tiles, on_vectors) = (run(Isa::AmxEmulated), run(Isa::Avx512Bf16));
            let what = format!("{dtype}, {group} × {q_len} packed rows");
            assert_eq!(on_tiles == on_vectors, group * q_len < least, "{what}");
            let want = support::oracle(&case);
            let error = |out: &Array4<f64>| (out - &want.out).mapv(|x| x * x).sum().sqrt();
            let [ours, plain] = [&on_tiles, &on_vectors].map(|(out, _)| error(out));
            assert!(ours <= 1.05 * plain, "{what}: {ours:e}, with multiply-adds {plain:e}");
        }
    }
}
