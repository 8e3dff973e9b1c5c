//! Emulated devices in processes of their own: blocks go over MPI from device memory, or staged through the host, and by whichever way, each rank's rows
//! are those of one rank alone, to the same bits. The memory of an emulated device is the host's, so any MPI takes it. Run under a launcher; see
//! `scripts/mpi-test`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use annulus::{
    Attention, Dims, Error, Layout, RankPlan, Result, Tensors,
    comm::{
        Staged,
        cuda::CudaCopier,
        mpi::{DeviceMpi, Launch, Mpi, Settings},
    },
};
use annulus_core::{Control, Transport};
use annulus_cuda::{
    Cuda, Hosted,
    device::{Cache, Compiler, CudaBlocks, Device, Stream, Symbols, cudarc::driver::sys::CUresult, emulator},
};
use ndarray::{Array4, Axis};

/// How blocks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Direct,
    Staged,
    /// Even ranks one way, odd ranks the other.
    Mixed,
}

const LEN: usize = 150;

fn numbers(heads: usize, shift: usize) -> Array4<f32> {
    Array4::from_shape_fn((1, LEN, heads, 16), |(_, i, h, c)| ((i * 7 + h * 3 + c * 5 + shift) % 13) as f32 * 0.1 - 0.5)
}

/// Memory that only copies through the host would ask for.
unsafe extern "C" fn none(_: *mut *mut std::ffi::c_void, _: usize) -> CUresult {
    CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

/// A rank's plan, and whether it goes by way of the host.
fn plan(layout: Layout, link: Link) -> Result<RankPlan<Hosted>> {
    let mpi = Mpi::world(Settings::default())?;
    let direct = link == Link::Direct || link == Link::Mixed && mpi.rank().is_multiple_of(2);
    let symbols = if direct { Symbols { allocate_host: none, ..emulator::symbols() } } else { emulator::symbols() };
    let device = Device::with_symbols(symbols, 0)?;
    let cache = Cache::new(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels"));
    let compiler = Compiler::with_symbols(emulator::compiler_symbols(), Some(cache))?;
    let cuda = Cuda::on(Stream::new(&device)?, compiler, Vec::new());
    let transport: Box<dyn Transport<CudaBlocks>> =
        if direct { Box::new(DeviceMpi::new(mpi, &device)?) } else { Box::new(Staged::new(mpi, CudaCopier::new(&device)?)) };
    let attention = Attention::new().causal().deadline(Duration::from_secs(60));
    RankPlan::new(&attention, Dims { kv_heads: 1, ..Dims::new(1, LEN, 2, 16) }, Some(layout), Hosted::new(cuda), transport)
}

/// out, dq, dk, dv of this rank's rows, and the same rows of one rank alone.
fn attend(layout: Layout, link: Link) -> Result<[[Array4<f32>; 4]; 2]> {
    let mut plan = plan(layout, link)?;
    let [q_rows, kv_rows] = [plan.q_rows(), plan.kv_rows()].map(|rows| rows.iter().map(|row| row as usize).collect::<Vec<_>>());
    let (q, k, v, dout) = (numbers(2, 0), numbers(1, 1), numbers(1, 2), numbers(2, 3));
    let of = |whole: &Array4<f32>, rows: &[usize]| whole.select(Axis(1), rows);
    let share = (of(&q, &q_rows), of(&k, &kv_rows), of(&v, &kv_rows), of(&dout, &q_rows));
    let tensors = Tensors::new(share.0.view(), share.1.view(), share.2.view());
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, share.3.view(), None)?;
    let mut alone = Attention::new().causal().plan(Dims { kv_heads: 1, ..Dims::new(1, LEN, 2, 16) }, 1, None)?;
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let want = alone.forward(&tensors)?;
    let wanted = alone.backward(&tensors, &want, dout.view(), None)?;
    let wanted = [of(&want.out, &q_rows), of(&wanted.dq, &q_rows), of(&wanted.dk, &kv_rows), of(&wanted.dv, &kv_rows)];
    Ok([[forward.out, backward.dq, backward.dk, backward.dv], wanted])
}

/// How many rings, of how many ranks, were the same; said by rank 0.
fn run() -> Result<String> {
    let _launch = Launch::begin()?;
    let mut rings = 0;
    let here = Mpi::world(Settings::default())?;
    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped] {
        let mut first: Option<[Array4<f32>; 4]> = None;
        for link in [Link::Staged, Link::Direct, Link::Mixed] {
            let [got, want] = attend(layout.clone(), link)?;
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
    let said = format!("device memory over mpi: {rings} rings of {} ranks, from device memory, staged and mixed", here.ranks());
    Ok(if here.rank() == 0 { said } else { String::new() })
}

fn main() -> ExitCode {
    match run() {
        Ok(said) => {
            print!("{said}{}", if said.is_empty() { "" } else { "\n" });
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("device memory over mpi: {error}");
            ExitCode::FAILURE
        }
    }
}
