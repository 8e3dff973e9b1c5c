//! Rings of processes: by whichever way their blocks go, each rank's rows are those of one rank alone.

use std::{path::PathBuf, time::Duration};

use annulus::{
    Attention, Dims, Error, Layout, RankPlan, Result, Tensors,
    comm::{
        Staged,
        cuda::CudaCopier,
        mpi::{DeviceMpi, Mpi, Settings},
        nccl::Nccl,
    },
};
use annulus_core::{Control, Transport};
use annulus_cuda::{
    Cuda, Hosted,
    device::{Cache, Compiler, CudaBlocks, Device, Stream, Symbols, cudarc::driver::sys::CUresult, emulator, nccl::NcclSymbols},
};
use ndarray::{Array4, Axis};

/// How blocks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Staged,
    /// MPI takes device memory.
    Direct,
    /// Even ranks one way, odd ranks the other.
    Mixed,
    /// MPI carries NCCL's unique id, and small messages.
    Nccl,
}

const LEN: usize = 150;
/// No rank waits longer for a silent one.
const DEADLINE: Duration = Duration::from_secs(60);

fn numbers(heads: usize, shift: usize) -> Array4<f32> {
    Array4::from_shape_fn((1, LEN, heads, 16), |(_, i, h, c)| ((i * 7 + h * 3 + c * 5 + shift) % 13) as f32 * 0.1 - 0.5)
}

/// Memory that only copies through the host would ask for.
unsafe extern "C" fn none(_: *mut *mut std::ffi::c_void, _: usize) -> CUresult {
    CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// A rank's plan.
fn plan(layout: Layout, link: Link) -> Result<RankPlan<Hosted>> {
    let mpi = Mpi::world(Settings::default())?;
    let staged = link == Link::Staged || link == Link::Mixed && !mpi.rank().is_multiple_of(2);
    let symbols = if staged { emulator::symbols() } else { Symbols { allocate_host: none, ..emulator::symbols() } };
    let device = Device::with_symbols(symbols, 0)?;
    let transport: Box<dyn Transport<CudaBlocks>> = match link {
        Link::Nccl => Box::new(Nccl::with_symbols(mpi, &device, Ok(emulator::nccl_symbols()), DEADLINE)?),
        _ if staged => Box::new(Staged::new(mpi, CudaCopier::new(&device)?)),
        _ => Box::new(DeviceMpi::new(mpi, &device)?),
    };
    plan_over(layout, &device, transport, DEADLINE)
}

/// A rank's plan over NCCL's functions.
pub(crate) fn plan_over_nccl(symbols: NcclSymbols, deadline: Duration) -> Result<RankPlan<Hosted>> {
    let device = Device::with_symbols(emulator::symbols(), 0)?;
    let nccl = Nccl::with_symbols(Mpi::world(Settings::default())?, &device, Ok(symbols), deadline)?;
    plan_over(Layout::Contiguous, &device, Box::new(nccl), deadline)
}

fn plan_over(layout: Layout, device: &Device, transport: Box<dyn Transport<CudaBlocks>>, deadline: Duration) -> Result<RankPlan<Hosted>> {
    let cache = Cache::new(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels"));
    let compiler = Compiler::with_symbols(emulator::compiler_symbols(), Some(cache))?;
    let cuda = Cuda::on(Stream::new(device)?, compiler, Vec::new());
    let attention = Attention::new().causal().deadline(deadline);
    RankPlan::new(&attention, Dims { kv_heads: 1, ..Dims::new(1, LEN, 2, 16) }, Some(layout), Hosted::new(cuda), transport)
}

/// out, dq, dk, dv of this rank's rows, and the same rows of one rank alone. `between` is called between the passes.
pub(crate) fn attend(mut plan: RankPlan<Hosted>, between: impl FnOnce()) -> Result<[[Array4<f32>; 4]; 2]> {
    let [q_rows, kv_rows] = [plan.q_rows(), plan.kv_rows()].map(|rows| rows.iter().map(|row| row as usize).collect::<Vec<_>>());
    let (q, k, v, dout) = (numbers(2, 0), numbers(1, 1), numbers(1, 2), numbers(2, 3));
    let of = |whole: &Array4<f32>, rows: &[usize]| whole.select(Axis(1), rows);
    let share = (of(&q, &q_rows), of(&k, &kv_rows), of(&v, &kv_rows), of(&dout, &q_rows));
    let tensors = Tensors::new(share.0.view(), share.1.view(), share.2.view());
    let forward = plan.forward(&tensors)?;
    between();
    let backward = plan.backward(&tensors, &forward, share.3.view(), None)?;
    let mut alone = Attention::new().causal().plan(Dims { kv_heads: 1, ..Dims::new(1, LEN, 2, 16) }, 1, None)?;
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let want = alone.forward(&tensors)?;
    let wanted = alone.backward(&tensors, &want, dout.view(), None)?;
    let wanted = [of(&want.out, &q_rows), of(&wanted.dq, &q_rows), of(&wanted.dk, &kv_rows), of(&wanted.dv, &kv_rows)];
    Ok([[forward.out, backward.dq, backward.dk, backward.dv], wanted])
}

/// Every layout by every way, forward and backward: the result is right, and the same to the bit by whichever way. How many rings there were.
pub(crate) fn all() -> Result<String> {
    let mut rings = 0;
    let here = Mpi::world(Settings::default())?;
    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped] {
        let mut first: Option<[Array4<f32>; 4]> = None;
        for link in [Link::Staged, Link::Direct, Link::Mixed, Link::Nccl] {
            let [got, want] = attend(plan(layout.clone(), link)?, || ())?;
            for (name, (got, want)) in ["out", "dq", "dk", "dv"].into_iter().zip(got.iter().zip(&want)) {
                let error = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
                // a NaN is within no tolerance
                let close = error < 1e-4 && got.iter().all(|number| number.is_finite());
                if !close || got.dim() != want.dim() {
                    return Err(Error::Device { what: format!("{name} of {layout:?}, {link:?}: error {error}") });
                }
            }
            let same = first.get_or_insert_with(|| got.clone()).iter().zip(&got).all(|(first, got)| first == got);
            rings += 1;
            if !same {
                return Err(Error::Device { what: format!("other bits than staged: {layout:?}, {link:?}") });
            }
        }
    }
    let said = format!("device memory over mpi: {rings} rings of {} ranks, staged, from device memory, mixed, by nccl", here.ranks());
    Ok(if here.rank() == 0 { said } else { String::new() })
}
