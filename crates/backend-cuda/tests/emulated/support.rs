//! Emulated devices as subjects of the conformance suite.

use std::{
    cell::Cell,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use annulus_conformance::{Case, Draw, Masks, Setting, Subject};
use annulus_core::{DType, Dims, Result, Spec, mask::Predicate};
use annulus_cuda::{
    Cuda, Level,
    device::{Compiler, Device, ImageCache, Stream},
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
    let run = |case: &Case| {
        let answers = subject.run(case, &Setting::ALONE, 1).map_err(|error| error.to_string())?;
        Ok::<_, String>(answers.into_iter().next())
    };
    let want = run(&clean)?.ok_or("no answer")?;
    run(&poisoned)?.ok_or("no answer")?.same_bits(&want)
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

fn cache() -> ImageCache {
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
