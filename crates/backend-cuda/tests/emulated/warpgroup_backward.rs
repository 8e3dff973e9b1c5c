//! Warpgroup backward on emulated GPUs of compute capability 9.0: which kernels serve a pass,
//! masks, score options, and numbers that are not finite.

use std::{sync::Arc, time::Duration};

use annulus_comm::{Deadline, Staged, threads};
use annulus_conformance::{
    Case, Draw, Judge, Masks, RankSetup, RingSubject, Setting, Subject, TensorMemory, suite,
};
use annulus_core::{Alibi, BackwardMode, BiasOrder, DType, Dims, Dropout, Error, Result, Spec};
use annulus_cuda::{
    Cuda, Variant,
    device::{CudaCopier, CudaSpace, CudaTensor, CudaView, CudaViewMut},
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;
use ndarray::{Array4, ArrayView4, s};

use crate::{
    common::{CudaMemory, DEADLINE, OnMultiplesOfEight, staged},
    mistakes::{Of, Planted},
    support::{hopper, hopper_on, masked_rows_change_no_bit, next_device, with_seed},
};

/// Kernels of dQ, and of dK and dV: on warpgroups without and with a score epilogue, on tensor
/// cores.
const QUERIES: [&str; 3] = [
    "backward_queries_warpgroup",
    "backward_queries_warpgroup_epilogue",
    "backward_queries_matrix",
];
const KEYS: [&str; 3] =
    ["backward_keys_warpgroup", "backward_keys_warpgroup_epilogue", "backward_keys_matrix"];

/// One batch row, heads 2 : 1, `queries` queries and 300 keys: full tiles and partial ones on both
/// sides.
fn dims(queries: usize, dim: usize) -> Dims {
    Dims { q_len: queries, kv_len: 300, kv_heads: 1, ..Dims::new(1, 300, 2, dim) }
}

/// Emulated GPUs with split backward kernels, perhaps with a planted mistake.
fn split_kernels(planted: Option<Planted>) -> impl Subject {
    staged("emulated cuda with split backward kernels", Duration::ZERO, move || hopper(planted))
}

fn text(error: Error) -> String {
    error.to_string()
}

/// Verdict on a case on one rank, and the numbers of blocks of [`QUERIES`] and [`KEYS`].
fn run_on(case: &Case, fewest_rows: usize) -> Result<[[u64; 3]; 2], String> {
    let ordinal = next_device();
    let subject =
        staged("one emulated gpu", Duration::ZERO, move || hopper_on(ordinal, None, fewest_rows));
    let answers = subject.run(case, &Setting::ALONE, 1).map_err(text)?;
    Judge::new(case).map_err(text)?.check(&answers[0])?;
    Ok([QUERIES, KEYS].map(|names| names.map(|name| emulator::blocks(ordinal, name))))
}

fn plain_case(name: &str, dims: Dims, dtype: DType) -> Case {
    let masks = Masks { causal: true, ..Masks::default() };
    Case::new(name, Spec::new(dims, DType::F64), masks, &mut Draw::new(3)).in_dtype(dtype)
}

#[test]
fn variants_serve_dims_up_to_128() {
    let cuda = hopper(None).unwrap();
    let name = |dim| {
        let spec = Spec::new(Dims::new(1, 8, 2, dim), DType::Bf16);
        cuda.backward_variant(&spec).unwrap().to_string()
    };
    assert_eq!(
        [64, 72, 136].map(name),
        ["bf16 64 warpgroup backward", "bf16 128 warpgroup backward", "bf16 256"]
    );
    // strides that are no multiples of 16 bytes; unnormalised outputs; 32-bit products
    assert_eq!(name(71), "bf16 128");
    let spec = Spec { normalize: false, ..Spec::new(Dims::new(1, 8, 2, 64), DType::F16) };
    assert_eq!(Variant::backward_on_warpgroups(&spec), Ok(None));
    let spec = Spec::new(Dims::new(1, 8, 2, 64), DType::F32);
    assert_eq!(cuda.backward_variant(&spec).unwrap().to_string(), "f32 64");
}

#[test]
fn kernels_are_chosen_by_dims_queries_and_score_epilogue() {
    // three tiles of 128 queries for each of two heads, three of 128 keys
    let case = |dim| plain_case("causal", dims(300, dim), DType::Bf16);
    assert_eq!(run_on(&case(16), Cuda::MIN_WARPGROUP_ROWS), Ok([[6, 0, 0], [3, 0, 0]]));
    let mut capped = case(16);
    capped.spec.soft_cap = Some(3.0);
    assert_eq!(run_on(&capped, Cuda::MIN_WARPGROUP_ROWS), Ok([[0, 6, 0], [0, 3, 0]]));
    // fewer queries than a tile has: level matrix, with tiles of 128 queries, and of 64 keys
    let few = plain_case("few", dims(127, 16), DType::Bf16);
    assert_eq!(run_on(&few, Cuda::MIN_WARPGROUP_ROWS), Ok([[0, 0, 2], [0, 0, 5]]));
    assert_eq!(run_on(&few, 0), Ok([[2, 0, 0], [3, 0, 0]]));
    // 256 dims: tiles of 64, and two blocks for each tile of keys
    assert_eq!(run_on(&case(136), 0), Ok([[0, 0, 10], [0, 0, 10]]));
}

#[test]
fn every_dim_type_and_backward_mode_holds() {
    for (dtype, dim, causal, backward, ranks) in [
        (DType::Bf16, 128, false, BackwardMode::OnePass, 1),
        (DType::F16, 128, true, BackwardMode::TwoPass, 2),
        (DType::F16, 64, false, BackwardMode::TwoPass, 3),
        (DType::Bf16, 64, true, BackwardMode::OnePass, 2),
        // values narrower than keys: the rest of the panels is zeros
        (DType::Bf16, 80, true, BackwardMode::TwoPass, 1),
    ] {
        let masks = Masks { causal, ..Masks::default() };
        let spec = Spec::new(Dims { value_dim: 40, ..dims(300, dim) }, DType::F64);
        let spec = Spec { backward, ..spec };
        let case = Case::new("dims", spec, masks, &mut Draw::new(2)).in_dtype(dtype);
        let setting = Setting::new(ranks, Layout::Zigzag);
        let answers = split_kernels(None).run(&case, &setting, 1).unwrap();
        let judge = Judge::new(&case).unwrap();
        for answer in &answers {
            judge.check(answer).unwrap_or_else(|wrong| panic!("{dtype} {dim}: {wrong}"));
        }
    }
}

#[test]
fn score_options_hold() {
    type Change = fn(&mut Spec);
    let changes: [(&str, Change); 8] = [
        ("soft cap", |spec| spec.soft_cap = Some(1.5)),
        ("alibi", |spec| spec.bias_function = Some(Arc::new(Alibi::published(2)))),
        ("bias", |spec| spec.bias = Some([1, 2, 150, 300])),
        ("bias before cap", |spec| {
            spec.bias = Some([1, 1, 1, 300]);
            spec.bias_order = BiasOrder::BeforeSoftCap;
            spec.soft_cap = Some(2.0);
        }),
        ("dropout", |spec| spec.dropout = Some(Dropout { probability: 0.4, seed: 8 })),
        ("rounded scores", |spec| spec.logits_dtype = DType::Bf16),
        ("negative scale", |spec| spec.scale = -0.3),
        ("zero scale", |spec| spec.scale = 0.0),
    ];
    for (name, change) in changes {
        let mut spec = Spec::new(dims(150, 24), DType::F64);
        change(&mut spec);
        let masks = Masks { window: Some([Some(170), Some(90)]), ..Masks::default() };
        let mut case = Case::new(name, spec, masks, &mut Draw::new(4));
        if name == "rounded scores" {
            // multiples of 1/4 have exact products and sums: no order of summation changes the
            // rounding of a score
            let quarter = |x: f64| (4.0 * x).round() / 4.0;
            [&mut case.q, &mut case.k].into_iter().for_each(|tensor| tensor.mapv_inplace(quarter));
        }
        let case = case.in_dtype(DType::Bf16);
        let [queries, keys] = run_on(&case, 0).unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
        assert!(queries[1] > 0 && keys[1] > 0, "{name}: {queries:?} {keys:?}");
    }
}

/// Scores whose lse is beyond the bound of fused exponents, in full tiles and in partial ones.
#[test]
fn large_scores_hold() {
    for causal in [false, true] {
        let mut spec = Spec::new(dims(200, 16), DType::F64);
        spec.scale = 1.0;
        let masks = Masks { causal, ..Masks::default() };
        let mut case = Case::new("large", spec, masks, &mut Draw::new(5));
        // one dim adds the same 2048 to all scores, which leaves the probabilities as they are
        case.q.slice_mut(s![.., .., .., 0]).fill(32.0);
        case.k.slice_mut(s![.., .., .., 0]).fill(64.0);
        let case = case.in_dtype(DType::F16);
        let [queries, keys] = run_on(&case, 0).unwrap_or_else(|wrong| panic!("{causal}: {wrong}"));
        assert!(queries[0] > 0 && keys[0] > 0);
    }
}

#[test]
fn masked_rows_that_are_not_finite_change_no_bit() {
    for dim in [64, 128] {
        masked_rows_change_no_bit(&split_kernels(None), DType::F16, [300, dim])
            .unwrap_or_else(|wrong| panic!("{dim}: {wrong}"));
    }
}

/// Elements that are not finite in K, Q and dO reach only the gradients of pairs that are visible,
/// in tiles in the middle of a pass.
#[test]
fn masked_non_finite_elements_change_nothing() {
    type Change = fn(&mut Spec);
    let changes: [(&str, Change); 2] =
        [("plain", |_| ()), ("soft cap", |spec| spec.soft_cap = Some(3.0))];
    for (name, change) in changes {
        let mut spec = Spec::new(dims(300, 16), DType::F64);
        change(&mut spec);
        let masks = Masks { window: Some([Some(20), Some(20)]), ..Masks::default() };
        let mut case = Case::new(name, spec, masks, &mut Draw::new(9)).in_dtype(DType::Bf16);
        // of queries 180 … 220, and through them of keys 160 … 240
        case.k[[0, 200, 0, 3]] = f64::NAN;
        // keys 0 … 40 and 20 … 60
        case.q[[0, 20, 1, 5]] = f64::INFINITY;
        case.dout[[0, 40, 0, 7]] = f64::NAN;
        let answer = split_kernels(None).run(&case, &Setting::ALONE, 1).unwrap().remove(0);
        let want = case.truth().unwrap().backward;
        for (what, got, want) in [
            ("dq", &answer.dq, &want.dq),
            ("dk", &answer.dk, &want.dk),
            ("dv", &answer.dv, &want.dv),
        ] {
            for ((index, got), want) in got.indexed_iter().zip(want) {
                assert_eq!(got.is_nan(), want.is_nan(), "{name}: {what}{index:?}: {got} {want}");
                let near = want.is_nan() || (got - want).abs() < 0.02 + 0.02 * want.abs();
                assert!(near, "{name}: {what}{index:?}: got {got}, want {want}");
            }
        }
        assert!(answer.dq[[0, 180, 0, 0]].is_nan() && answer.dq[[0, 179, 0, 0]].is_finite());
        assert!(answer.dk[[0, 60, 0, 0]].is_nan() && answer.dk[[0, 61, 0, 0]].is_finite());
        assert!(answer.dv[[0, 60, 0, 7]].is_nan() && answer.dv[[0, 61, 0, 7]].is_finite());
    }
}

/// Rows that begin at odd multiples of two bytes, which TMA cannot read.
struct RaggedRows(CudaMemory);

/// A tensor with one element between its rows.
struct RaggedTensor {
    padded: CudaTensor,
    shape: [usize; 4],
}

impl RaggedTensor {
    fn strides(&self) -> [i64; 4] {
        let [_, rows, heads, dim] = self.shape.map(|length| length as i64);
        let row = heads * dim + 1;
        [rows * row, row, dim, 1]
    }
}

impl TensorMemory for RaggedRows {
    type Space = CudaSpace;
    type Tensor = RaggedTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<RaggedTensor> {
        let (batch, rows, heads, dim) = numbers.dim();
        let padded = Array4::from_shape_fn((batch, rows, 1, heads * dim + 1), |(b, row, _, x)| {
            if x < heads * dim { numbers[[b, row, x / dim, x % dim]] } else { f64::NAN }
        });
        let padded = self.0.upload(padded.view(), dtype)?;
        Ok(RaggedTensor { padded, shape: [batch, rows, heads, dim] })
    }

    fn download(&self, tensor: &RaggedTensor) -> Result<Array4<f64>> {
        let [batch, rows, heads, dim] = tensor.shape;
        let padded = self.0.download(&tensor.padded)?;
        Ok(Array4::from_shape_fn((batch, rows, heads, dim), |(b, row, head, x)| {
            padded[[b, row, 0, head * dim + x]]
        }))
    }

    fn view<'a>(&self, tensor: &'a RaggedTensor) -> CudaView<'a> {
        let of = tensor.padded.view();
        // SAFETY: the strides stay within the padded tensor, which is borrowed as long.
        unsafe { CudaView::from_raw(of.address(), of.dtype(), tensor.shape, tensor.strides()) }
    }

    fn view_mut<'a>(&self, tensor: &'a mut RaggedTensor) -> CudaViewMut<'a> {
        let (shape, strides) = (tensor.shape, tensor.strides());
        let of = tensor.padded.view_mut();
        // SAFETY: as for `view`; the padded tensor is borrowed mutably.
        unsafe { CudaViewMut::from_raw(of.address(), of.dtype(), shape, strides) }
    }
}

/// dK and dV of tensors that TMA cannot read run on tensor cores; dQ streams records and does not.
#[test]
fn tensors_that_tma_cannot_read_run_on_mma_sync() {
    let ordinal = next_device();
    let subject = RingSubject::new("ragged rows", move |ranks| -> Result<Vec<_>> {
        let setup = |transport| {
            let backend = hopper_on(ordinal, None, 0)?;
            let copier = CudaCopier::new(backend.stream().device())?;
            let staged = Staged::<_, CudaSpace>::new(transport, copier);
            let memory = RaggedRows(CudaMemory(backend.stream().clone()));
            Ok(RankSetup { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
        };
        threads::ring(ranks).into_iter().map(setup).collect()
    });
    let case = plain_case("ragged", dims(150, 24), DType::Bf16);
    let answer = subject.run(&case, &Setting::ALONE, 1).unwrap().remove(0);
    Judge::new(&case).unwrap().check(&answer).unwrap();
    let blocks = [QUERIES, KEYS].map(|names| names.map(|name| emulator::blocks(ordinal, name)));
    assert_eq!(blocks, [[4, 0, 0], [0, 0, 5]]);
}

/// Two panels of dims. Enough keys that the dQ pass uses stages again, and enough queries that the
/// dK/dV pass does; or with `few` pairs, so that one more visible key changes the result.
fn case(few: bool) -> Case {
    let (q_len, kv_len) = if few { (70, 70) } else { (330, 390) };
    let dims =
        Dims { batch: 1, q_len, kv_len, q_heads: 1, kv_heads: 1, head_dim: 72, value_dim: 80 };
    let masks =
        Masks { causal: few, window: (!few).then_some([None, Some(300)]), ..Masks::default() };
    Case::new("stages", Spec::new(dims, DType::F64), masks, &mut Draw::new(5)).in_dtype(DType::F16)
}

#[test]
fn random_cases_hold_in_split_kernels() {
    suite::random_cases(&OnMultiplesOfEight(split_kernels(None)), 200..230).unwrap();
}

#[test]
fn the_order_of_threads_and_copies_changes_no_bit() {
    let case = case(false);
    let run = |seed| {
        with_seed(seed, || split_kernels(None).run(&case, &Setting::ALONE, 1)).unwrap().remove(0)
    };
    let want = run(21);
    for seed in 22..25 {
        run(seed).same_bits(&want).unwrap();
    }
}

/// Verdict on a case with a planted mistake.
pub(crate) fn verdict(of: Of, planted: Planted) -> Result<(), String> {
    let mut case = case(matches!(of, Of::FewPairs | Of::MaskedNan));
    if of == Of::MaskedNan {
        case.k[[0, 69, 0, 0]] = f64::NAN;
    }
    let answers = split_kernels(Some(planted)).run(&case, &Setting::ALONE, 1).map_err(text)?;
    if of != Of::MaskedNan {
        return Judge::new(&case).map_err(text)?.check(&answers[0]);
    }
    // of all queries but the last
    let is_finite = answers[0].dq.slice(s![0, ..69, 0, ..]).iter().all(|x| x.is_finite());
    if is_finite { Ok(()) } else { Err("dq[0, ..69, 0, ..] is not finite".into()) }
}
