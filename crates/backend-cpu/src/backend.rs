//! The backend: threads, instruction set, capabilities.
//!
//! Fingerprint of the arithmetic: ranks with the same one compute the same bits.

use std::{ops::Range, sync::Arc};

use annulus_core::{
    Backend, Capabilities, DType, Fingerprint, Host, HostBuffer, Passes, Precision, RankShard,
    Result, Spec,
};

use crate::{
    simd::{dispatch::IsaToken, isa::Isa},
    threads::team::Team,
    tile::tile_mask::TILE,
    workspace::state::{CpuWorkspace, PassState, TypedState},
};

/// Tiled exact attention on the threads of one host.
///
/// # Examples
/// ```
/// use annulus_core::{Backend, Dims, DType, Spec};
/// let cpu = annulus_cpu::Cpu::new(2)?;
/// let capabilities = cpu.capabilities(&Spec::new(Dims::new(1, 4096, 8, 64), DType::Bf16))?;
/// assert_eq!(capabilities.name, "cpu");
/// # Ok::<(), annulus_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Cpu {
    team: Arc<Team>,
    forced: Option<Isa>,
}

impl Cpu {
    /// Maximum number of threads of one rank.
    ///
    /// The bound is above the core count of current machines. A mistyped larger number would spend
    /// minutes starting threads before it failed.
    pub const MOST_THREADS: usize = 1024;

    /// Creates a backend that works on `threads` threads: the calling thread and a pool of `threads
    /// - 1` others.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming `threads` if `threads` is 0 or above
    /// [`Cpu::MOST_THREADS`], [`annulus_core::Error::Device`] if the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > Self::MOST_THREADS {
            return Err(annulus_core::Error::invalid(
                "threads",
                threads,
                format!("at most {}", Self::MOST_THREADS),
            ));
        }
        Ok(Self { team: Arc::new(Team::new(threads)?), forced: None })
    }

    /// Fixes the instruction set of all kernels to `isa`. [`Isa::VARIABLE`] is then ignored.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if the machine lacks `isa`.
    pub fn with_isa(self, isa: Isa) -> Result<Self> {
        IsaToken::new(isa).map(|_| Self { forced: Some(isa), ..self })
    }

    /// Returns the number of threads, the calling thread included.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Returns the instruction set of the kernels, except for specs for which [`Cpu::isa_for`]
    /// selects another.
    ///
    /// # Errors
    /// As [`Isa::chosen`].
    pub fn isa(&self) -> Result<Isa> {
        self.forced.map_or_else(Isa::chosen, Ok)
    }

    /// Returns the instruction set of the kernels for `spec`.
    ///
    /// A forced instruction set has priority. Otherwise bf16, f16 and f32 inputs run on [`Isa::Amx`]
    /// where it is available, and bf16 inputs with [`Precision::Default`] on [`Isa::Avx512Bf16`]
    /// where the processor is known to be faster with it; all other specs run on [`Cpu::isa`].
    ///
    /// # Errors
    /// As [`Isa::chosen`].
    pub fn isa_for(&self, spec: &Spec) -> Result<Isa> {
        if let Some(forced) = self.forced.map_or_else(Isa::forced, |isa| Ok(Some(isa)))? {
            return Ok(forced);
        }
        let rounds = spec.dtype == DType::Bf16
            && spec.precision == Precision::Default
            && spec.leaf_rows.is_none();
        let pairs = if spec.dtype == DType::F64 { None } else { Isa::fast_pairs() };
        let pairs = pairs.filter(|&isa| isa == Isa::Amx || rounds);
        Ok(pairs.unwrap_or_else(Isa::widest))
    }
}

impl Backend for Cpu {
    type Space = Host;
    type Workspace = CpuWorkspace;

    /// Accepts every valid spec. Products of f32 inputs are as exact as f32 at every
    /// [`Spec::precision`]. P and dS are rounded to bf16 for bf16 inputs where the instruction set
    /// [multiplies pairs](Isa::multiplies_pairs): on AMX with [`Precision::Default`] only, on others
    /// not in the reproducible order.
    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        spec.validate()?;
        let isa = self.isa_for(spec)?;
        let rounds = spec.dtype == DType::Bf16
            && isa.multiplies_pairs()
            && if isa.has_tiles() {
                spec.precision == Precision::Default
            } else {
                spec.leaf_rows.is_none()
            };
        Ok(Capabilities {
            name: "cpu",
            numerics_id: id(isa),
            probs_dtype: rounds.then_some(DType::Bf16),
            kv_tile: TILE as u64,
            reproducible: true,
            out_residual: true,
            second_derivatives: true,
            bias_table: true,
            statistics: true,
        })
    }

    fn allocate(&self, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::zeroed(bytes)
    }

    fn write_block(
        &self,
        into: &mut HostBuffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        into.write(bytes, fill)
    }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<CpuWorkspace> {
        let token = IsaToken::new(self.isa_for(&shard.spec)?)?;
        let threads = self.team.threads();
        let backward = passes == Passes::Both;
        let state = match shard.spec.dtype.accumulator() {
            DType::F64 => {
                TypedState::F64(Box::new(PassState::new(shard, token, threads, backward)?))
            }
            _ => TypedState::F32(Box::new(PassState::new(shard, token, threads, backward)?)),
        };
        // in a forked child: threads of its own
        let team = if self.team.has_threads() {
            Arc::clone(&self.team)
        } else {
            Arc::new(Team::new(threads)?)
        };
        Ok(CpuWorkspace { team, dtype: shard.spec.dtype, state })
    }
}

/// Version of the kernels' arithmetic. Increased by every change that alters a bit of a result: the
/// order of a sum, the size of a KV tile, a coefficient of e^x.
const VERSION: u32 = 3;

/// Returns the fingerprint of the kernels on `isa`.
///
/// The epilogue computes e^x and ln x of f64 by the C library, whose variants round differently on
/// different processors: its results at some points are part of the fingerprint.
pub fn id(isa: Isa) -> String {
    let points = (0..512u32).map(|index| f64::from(index) * 0.043 + 1e-3);
    let of_library = points.fold(Fingerprint::new(), |all, x| {
        all.number((-x).exp().to_bits()).number(x.ln().to_bits())
    });
    format!("cpu {} v{VERSION} libm {:016x}", isa.name(), of_library.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_have_their_own_fingerprint() {
        let ids = Isa::ALL.map(id);
        assert!(ids.iter().enumerate().all(|(index, id)| !ids[..index].contains(id)), "{ids:?}");
        assert_eq!(id(Isa::Portable), ids[0]);
    }
}
