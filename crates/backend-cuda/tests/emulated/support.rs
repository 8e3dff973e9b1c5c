//! Emulated devices as subjects of the conformance suite.

use std::{
    cell::Cell,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use annulus_conformance::{Case, Draw, Masks, Setting, Subject, suite};
use annulus_core::{
    Alibi, Alignment, BackwardInputs, BiasOrder, DType, Dims, Dropout, Inputs, Result, SinkShape,
    Spec, mask::Predicate,
};
use annulus_cuda::{
    Cuda, Level,
    device::{Compiler, CudaView, Device, ImageCache, Stream},
};
use annulus_cuda_emulator as emulator;
use ndarray::Axis;

use crate::{
    common::{hosted, staged},
    mistakes::Planted,
};

thread_local! {
    /// Seed of the devices that this thread allots.
    static SEED: Cell<u64> = const { Cell::new(emulator::DEFAULT_SEED) };
}

/// Checks that rows that are not finite and that are masked for all others change no bit, in tiles
/// in the middle of a pass of `q_len` queries.
///
/// Tensor cores round otherwise than scalar units do. So a tile that has such rows must be
/// multiplied by the same instructions as others.
pub(crate) fn masked_rows_change_no_bit(
    subject: &dyn Subject,
    dtype: DType,
    [q_len, dim]: [usize; 2],
) -> std::result::Result<(), String> {
    const QUERIES: [u64; 3] = [5, 130, 299];
    const KEYS: [u64; 4] = [3, 64, 200, 385];
    let dims = Dims { kv_len: 390, kv_heads: 1, ..Dims::new(1, q_len, 2, dim) };
    let visible = Predicate::of_pairs("other rows than those", |query, key| {
        !QUERIES.contains(&query.row) && !KEYS.contains(&key.row)
    });
    let masks = Masks {
        window: Some([Some(60), Some(150)]),
        objects: vec![Arc::new(visible)],
        ..Masks::default()
    };
    let case = Case::new("masked rows", Spec::new(dims, DType::F64), masks, &mut Draw::new(9));
    let clean = case.in_dtype(dtype);
    let mut poisoned = clean.clone();
    for (tensor, rows, value) in [
        (&mut poisoned.q, &QUERIES[..], f64::NEG_INFINITY),
        (&mut poisoned.k, &KEYS, f64::NAN),
        (&mut poisoned.v, &KEYS, f64::INFINITY),
        (&mut poisoned.dout, &QUERIES, f64::NAN),
    ] {
        for row in rows.iter().map(|&row| annulus_core::index(row)) {
            // few queries lack the last ones
            if row < tensor.len_of(Axis(1)) {
                tensor.index_axis_mut(Axis(1), row).fill(value);
            }
        }
    }
    let want = suite::run(subject, &clean, &Setting::ALONE)?;
    suite::run(subject, &poisoned, &Setting::ALONE)?.same_bits(&want)
}

/// A case in which every head has its own bias, slope, sinks and dropout.
pub(crate) fn every_feature(dims: Dims, masks: Masks, dtype: DType) -> Case {
    let Dims { batch, q_len, kv_len, q_heads, .. } = dims;
    let draw = &mut Draw::new(q_len as u64);
    let name = format!("every feature, {q_len} queries of {q_heads} heads");
    let mut case = Case::new(name, Spec::new(dims, DType::F64), masks, draw);
    case.spec.alignment = Alignment::BottomRight;
    case.spec.bias = Some([1, q_heads, q_len, kv_len]);
    case.spec.bias_function = Some(Arc::new(Alibi::published(q_heads)));
    case.spec.sinks = Some(SinkShape { per_head: true, count: 2 });
    case.spec.dropout = Some(Dropout { probability: 0.3, seed: 77 });
    case.spec.soft_cap = Some(5.0);
    case.dlse = Some(draw.tensor((batch, q_heads, q_len)));
    case.draw_tensors(draw);
    // a bias of −∞ masks the pair, for one head only
    case.bias.iter_mut().flatten().step_by(17).for_each(|bias| *bias = f64::NEG_INFINITY);
    case.in_dtype(dtype)
}

type Change = fn(&mut Spec);

/// Changes of a spec that change the scores.
pub(crate) const SCORE_OPTIONS: [(&str, Change); 8] = [
    ("soft cap", |spec| spec.soft_cap = Some(1.5)),
    ("alibi", |spec| spec.bias_function = Some(Arc::new(Alibi::published(2)))),
    ("bias", |spec| spec.bias = Some([1, 2, spec.dims.q_len, spec.dims.kv_len])),
    ("dropout", |spec| spec.dropout = Some(Dropout { probability: 0.4, seed: 8 })),
    ("bias before cap", |spec| {
        spec.bias = Some([1, 1, 1, spec.dims.kv_len]);
        spec.bias_order = BiasOrder::BeforeSoftCap;
        spec.soft_cap = Some(2.0);
    }),
    ("rounded scores", |spec| spec.logits_dtype = DType::Bf16),
    ("negative scale", |spec| spec.scale = -0.3),
    ("zero scale", |spec| spec.scale = 0.0),
];

/// Inputs of a backward pass without gradients of lse.
pub(crate) const fn backward_inputs<'a>(
    forward: Inputs<CudaView<'a>>,
    [out, lse, dout]: [CudaView<'a>; 3],
) -> BackwardInputs<CudaView<'a>> {
    BackwardInputs {
        forward,
        out,
        max: lse,
        sum: None,
        ties: None,
        dout,
        dlse: None,
        out_residual: None,
    }
}

/// Blocks of `kernels` in a pass on a device that all ranks share, whose answer must be right.
pub(crate) fn blocks<const N: usize>(
    case: &Case,
    setting: &Setting,
    kernels: [&str; N],
    open: impl Fn(usize) -> Result<Cuda>,
) -> std::result::Result<[u64; N], String> {
    let ordinal = next_device();
    let subject = staged("one emulated gpu", Duration::ZERO, || open(ordinal));
    suite::answer(&subject, case, setting)?;
    Ok(kernels.map(|kernel| emulator::blocks(ordinal, kernel)))
}

/// Requires the same bits in all orders of threads, blocks and copies with these seeds.
pub(crate) fn orders_change_no_bit<S: Subject>(
    subject: impl Fn() -> S,
    case: &Case,
    seeds: Range<u64>,
) {
    let run = |seed| with_seed(seed, || suite::run(&subject(), case, &Setting::ALONE));
    let want = run(seeds.start).expect("an answer");
    for answer in seeds.skip(1).map(run) {
        answer.and_then(|answer| answer.same_bits(&want)).expect("the same bits");
    }
}

/// Allots one device to every rank of every run, so that a failed device affects one run only. All
/// tests together take more devices than there are: a device that was used before starts anew.
pub(crate) fn next_device() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let ordinal = NEXT.fetch_add(1, Ordering::Relaxed) % emulator::DEVICES;
    emulator::set_seed(ordinal, SEED.get());
    emulator::plant(ordinal, 0);
    emulator::clear_counts(ordinal);
    ordinal
}

/// Calls `run`, with devices whose blocks and threads run in the order of this seed.
pub(crate) fn with_seed<T>(seed: u64, run: impl FnOnce() -> T) -> T {
    let before = SEED.replace(seed);
    let result = run();
    SEED.set(before);
    result
}

/// The emulated compiler with a cache in the folder for test files.
pub(crate) fn compiler() -> Result<Compiler> {
    Compiler::with_symbols(emulator::compiler_symbols(), Some(cache()))
}

pub(crate) fn cache() -> ImageCache {
    ImageCache::new(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels"))
}

/// A backend on a new emulated device.
pub(crate) fn emulated() -> Result<Cuda> {
    emulated_on(next_device())
}

/// A backend on emulated device `ordinal`.
pub(crate) fn emulated_on(ordinal: usize) -> Result<Cuda> {
    let device = Device::with_symbols(emulator::symbols(), ordinal)?;
    Ok(Cuda::on(Stream::new(&device)?, compiler()?))
}

/// As [`emulated_on`], with a planted mistake.
pub(crate) fn planted_on(ordinal: usize, planted: Planted) -> Result<Cuda> {
    planted.plant(ordinal);
    Ok(emulated_on(ordinal)?.edited(planted.edit()))
}

/// Ring of emulated devices, messages delayed by up to `delay`.
pub(crate) fn delayed(delay: Duration) -> impl Subject {
    staged("emulated cuda over staged threads", delay, emulated)
}

/// As [`delayed`], without delay.
pub(crate) fn plain() -> impl Subject {
    delayed(Duration::ZERO)
}

/// A backend at the warpgroup level on an emulated device of compute capability 9.0, with the
/// kernels as they are or with a planted mistake.
pub(crate) fn hopper(planted: Option<Planted>) -> Result<Cuda> {
    // the cases have few queries
    hopper_on(next_device(), planted, 0)
}

/// As [`hopper`] on device `ordinal`, with the fewest rows for which warpgroups are used.
pub(crate) fn hopper_on(ordinal: usize, planted: Option<Planted>, rows: usize) -> Result<Cuda> {
    let device = Device::with_symbols(emulator::hopper_symbols(), ordinal)?;
    let compiler = Compiler::with_symbols(emulator::hopper_compiler_symbols(), Some(cache()))?;
    let mut cuda = Cuda::on(Stream::new(&device)?, compiler).with_min_warpgroup_rows(rows);
    if let Some(planted) = planted {
        planted.plant(ordinal);
        cuda = cuda.edited(planted.edit());
    }
    cuda.at_level(Level::Warpgroup)
}

/// As [`plain`] on warpgroups: see [`hopper`].
pub(crate) fn on_warpgroups(planted: Option<Planted>) -> impl Subject {
    staged("emulated cuda on warpgroups over staged threads", Duration::ZERO, move || {
        hopper(planted)
    })
}

/// As [`plain`], for tensors in host memory.
pub(crate) fn plain_hosted() -> impl Subject {
    hosted("hosted emulated cuda over staged threads", emulated)
}
