//! Features that random cases are unlikely to cover: head dims up to the largest, pairs of choices,
//! the exact pairs that dropout drops.
//!
//! A sample of the golden cases in f16 at level `matrix`. Their expected arrays are for f32 and f64;
//! the oracle, which gives these arrays (`facade.rs` of the suite), computes those of the rounded
//! inputs. `annulus check --backend wgpu` runs the cases in f32.
//!
//! Strategies other than the ring, for tensors in host memory: their exchanges are messages in host
//! memory, the blocks of their rings are on the device.

use annulus::{Dims, Layout, LocalRing, Plan, Spec, comm::Staged};
use annulus_conformance::{Case, Draw, FacadeOn, Masks, Setting, golden, suite, wgpu::WgpuRing};
use annulus_core::{Backend, BackwardMode, DType, Dropout, HostViews, Precision};
use annulus_wgpu::{Copier, Gpu, Level, Options, Wgpu, WgpuSpace};
use ndarray::{Array1, ArrayView1, ArrayView2, s};

use crate::{adapter, answer, gpu, gpu_at, open};

#[test]
fn head_dims_from_1_to_256_hold() {
    let Some(gpu) = gpu() else { return };
    // the smallest and the largest kernels; golden cases cover the others, because lavapipe
    // compiles each for seconds
    let dims = [(1, 256), (33, 32), (256, 31)];
    for (number, (head_dim, value_dim)) in dims.into_iter().enumerate() {
        let dims =
            Dims { batch: 1, q_len: 9, kv_len: 37, q_heads: 2, kv_heads: 1, head_dim, value_dim };
        let mut spec = Spec::new(dims, DType::F64);
        spec.backward = if number % 2 == 0 { BackwardMode::OnePass } else { BackwardMode::TwoPass };
        let case = Case::new(
            format!("{head_dim} and {value_dim}"),
            spec,
            Masks::default(),
            &mut Draw::new(number as u64),
        );
        answer(&gpu, &case.in_dtype(DType::F32), &Setting::new(2, Layout::Contiguous));
    }
}

#[test]
fn a_sample_of_the_pairs_of_choices_holds() {
    let Some(gpu) = gpu() else { return };
    for (number, configuration) in
        suite::pairwise().iter().enumerate().filter(|(number, _)| number % 7 == 3)
    {
        answer(
            &gpu,
            &configuration.case().in_dtype(DType::F32),
            &configuration.setting([3, 1, 4, 2][number % 4]),
        );
    }
}

/// One case for each score epilogue that has kernels of its own, and one of all.
fn of_epilogues() -> Vec<Case> {
    let dims = Dims { kv_heads: 1, value_dim: 28, ..Dims::new(1, 75, 2, 20) };
    let causal = || Masks { causal: true, ..Masks::default() };
    let case = |name: &str, change: &dyn Fn(&mut Spec)| {
        let mut spec = Spec::new(dims, DType::F64);
        change(&mut spec);
        Case::new(name, spec, causal(), &mut Draw::new(3))
    };
    let bias = Some([1, 2, 75, 75]);
    let dropout = Some(Dropout { probability: 0.3, seed: 7 });
    let mut cases = vec![
        case("simple", &|_| {}),
        case("soft cap", &|spec| spec.soft_cap = Some(2.0)),
        case("dropout", &|spec| spec.dropout = dropout),
        case("bias", &|spec| spec.bias = bias),
        case("all", &|spec| {
            spec.soft_cap = Some(2.0);
            spec.dropout = dropout;
            spec.bias = bias;
        }),
    ];
    // queries and pairs that the bias alone masks
    for bias in cases.iter_mut().filter_map(|case| case.bias.as_mut()) {
        bias.slice_mut(s![.., .., 50, ..]).fill(f64::NEG_INFINITY);
        bias.slice_mut(s![.., 0, 60.., 7]).fill(f64::NEG_INFINITY);
    }
    cases
}

fn epilogues_hold(gpu: &Gpu, dtype: DType) {
    for case in of_epilogues() {
        // heads are packed on two ranks, and not on one
        for setting in [Setting::ALONE, Setting::new(2, Layout::Zigzag)] {
            answer(gpu, &case.in_dtype(dtype), &setting);
        }
    }
}

#[test]
fn every_score_epilogue_holds() {
    let Some(gpu) = gpu() else { return };
    epilogues_hold(&gpu, DType::F32);
}

/// Returns the device at level `matrix`; `None` if the adapter does not have it, which
/// `the_matrix_level_holds_if_the_adapter_has_it` reports.
fn matrix_gpu() -> Option<Gpu> {
    let has_matrices = adapter()?.levels.contains(&Level::Matrix);
    has_matrices.then(|| gpu_at(Level::Matrix)).flatten()
}

#[test]
fn the_matrix_level_holds_for_every_score_epilogue() {
    let Some(gpu) = matrix_gpu() else { return };
    epilogues_hold(&gpu, DType::F16);
}

/// As on CUDA: [`Precision`] does not keep matrices from f16 inputs, and permits no rounding of
/// others.
#[test]
fn the_matrix_level_alone_rounds_probabilities_and_those_of_f16_alone_at_every_precision() {
    let levels = adapter().map(|adapter| adapter.levels).unwrap_or_default();
    for gpu in levels.into_iter().filter_map(gpu_at) {
        let level = gpu.level();
        let backend = Wgpu::new(gpu);
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for precision in [Precision::Highest, Precision::High, Precision::Default] {
                let mut spec = Spec::new(Dims::new(1, 40, 2, 32), dtype);
                spec.precision = precision;
                let rounds = level == Level::Matrix && dtype == DType::F16;
                let got = backend.capabilities(&spec).unwrap().probs_dtype;
                assert_eq!(got, rounds.then_some(DType::F16), "{level:?} {dtype:?} {precision:?}");
            }
        }
    }
}

#[test]
fn the_matrix_level_holds_for_large_and_small_score_gradients() {
    let Some(gpu) = matrix_gpu() else { return };
    let dims = Dims { q_len: 40, kv_len: 40, ..Dims::new(1, 40, 2, 32) };
    // exponents of factors of q, k, v and dout; P is almost 1 / 40
    for (name, [q, k, v, dout], is_large) in
        [("large", [-9, -9, 8, 12], true), ("small", [-9, 9, -8, -12], false)]
    {
        let mut case =
            Case::new(name, Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(5));
        for (numbers, exponent) in
            [(&mut case.q, q), (&mut case.k, k), (&mut case.v, v), (&mut case.dout, dout)]
        {
            *numbers *= 2.0_f64.powi(exponent);
        }
        let case = case.in_dtype(DType::F16);
        // dS of one query and one head, in f16 without a factor infinite or subnormal
        let dout: ArrayView1<'_, f64> = case.dout.slice(s![0, 0, 0, ..]);
        let values: ArrayView2<'_, f64> = case.v.slice(s![0, .., 0, ..]);
        let dprobs: Array1<f64> = values.dot(&dout);
        let mean = dprobs.mean().unwrap();
        let largest = dprobs.iter().map(|dp| (dp - mean).abs() / 40.0).fold(0.0, f64::max);
        assert!(
            if is_large { largest > 65504.0 } else { largest < 2.0_f64.powi(-19) },
            "{largest}"
        );
        answer(&gpu, &case, &Setting::new(2, Layout::Contiguous));
    }
}

/// Finite values of which an invocation's sum overflows f16, as a NaN or infinity would make it.
#[test]
fn the_matrix_level_holds_for_values_whose_sum_overflows() {
    let Some(gpu) = matrix_gpu() else { return };
    let dims = Dims { q_len: 40, kv_len: 40, ..Dims::new(1, 40, 2, 32) };
    let mut case =
        Case::new("overflow", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(6));
    case.v.mapv_inplace(|x| 30000.0 + 4000.0 * x.clamp(-2.0, 2.0));
    let case = case.in_dtype(DType::F16);
    assert!(case.v.iter().all(|&v| v < 65504.0 && 4.0 * v > 65504.0));
    answer(&gpu, &case, &Setting::new(2, Layout::Contiguous));
}

#[test]
fn the_matrix_level_holds_for_golden_cases() {
    let Some(folder) = golden::folder().expect("a readable setting") else { return };
    let Some(gpu) = matrix_gpu() else { return };
    let ring = WgpuRing::new(gpu);
    let settings = [Setting::ALONE, Setting::new(3, Layout::Zigzag)];
    let cases = golden::read(&folder).expect("golden cases");
    // an odd step: both settings
    let cases = cases.iter().enumerate().step_by(7);
    assert!(cases.len() >= 15, "only {} cases", cases.len());
    let judge = |(number, golden): (usize, &golden::Golden)| {
        suite::answer(&ring, &golden.case.in_dtype(DType::F16), &settings[number % 2]).err()
    };
    let wrong: Vec<String> = cases.filter_map(judge).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn strategies_are_the_oracle() {
    let Some(gpu) = open(&Options::default()) else { return };
    // two element types: each has its own kernels, which a driver compiles for seconds
    let facade =
        FacadeOn::new("facade on wgpu", &[DType::F32, DType::Bf16], |attention, dims, ranks| {
            LocalRing::from_plans(attention, dims, ranks, |_, setup, endpoint| {
                let copier = Copier::new(gpu.clone());
                let staged = Staged::<_, HostViews<WgpuSpace>>::new(endpoint, copier);
                Plan::with_backend(setup, dims, Wgpu::on_host(gpu.clone()), staged)
            })
        });
    suite::strategies(&facade, 0..6).unwrap();
}
