//! The wgpu backend as a subject: over staged threads, and in one ring with the CPU.

use std::time::Duration;

use annulus_comm::{Checksum, Deadline, Staged, Threads, threads};
use annulus_core::{BackwardMode, DType, Result};
use annulus_cpu::Cpu;
use annulus_wgpu::{Copier, Gpu, Tensor, Wgpu, WgpuSpace};
use ndarray::{Array4, ArrayView4};

use crate::{
    Answer, Case, HostMemory, Memory, Setting, Station, Subject,
    ring_subject::{RankJob, run_rank, run_ranks},
};

/// No test waits longer than this for a peer that is silent.
const DEADLINE: Duration = Duration::from_secs(60);

/// What the backend can compute.
const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

impl Memory for Gpu {
    type Space = WgpuSpace;
    type Tensor = Tensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<Tensor> {
        Tensor::upload_rounded(self, numbers, dtype)
    }

    fn download(&self, tensor: &Tensor) -> Result<Array4<f64>> {
        tensor.download_widened()
    }

    fn view<'a>(&self, tensor: &'a Tensor) -> &'a Tensor {
        tensor
    }

    fn view_mut<'a>(&self, tensor: &'a mut Tensor) -> &'a mut Tensor {
        tensor
    }
}

/// Ranks of one device, or every other one of them on the CPU.
#[derive(Debug, Clone)]
pub struct WgpuRing {
    gpu: Gpu,
    mixed: bool,
    dtypes: Vec<DType>,
}

impl WgpuRing {
    /// All ranks on this device.
    pub fn new(gpu: Gpu) -> Self {
        Self { gpu, mixed: false, dtypes: DTYPES.to_vec() }
    }

    /// The same, asked for these element types only: every one has kernels of its own, which take a driver seconds to compile.
    #[must_use]
    pub fn only(self, dtypes: &[DType]) -> Self {
        Self { dtypes: dtypes.to_vec(), ..self }
    }

    /// Odd ranks on this device, even ones on the CPU.
    ///
    /// An unnormalised two-pass backward is done in one pass here: a row's largest logit would have to be found again by another backend, to the bit.
    pub fn mixed(gpu: Gpu) -> Self {
        Self { mixed: true, ..Self::new(gpu) }
    }

    fn job<'a>(&self, rank: usize, transport: Threads, case: &'a Case, setting: &'a Setting, times: usize) -> Result<RankJob<'a>> {
        let checked = Checksum::new(transport);
        if self.mixed && rank.is_multiple_of(2) {
            let station = Station { memory: HostMemory, backend: Cpu::new(1)?, transport: Box::new(Deadline::new(checked, DEADLINE)?) };
            return Ok(Box::new(move || run_rank(case, setting, station, times)));
        }
        let staged = Staged::<_, WgpuSpace>::new(checked, Copier::new(self.gpu.clone()));
        let station = Station {
            memory: self.gpu.clone(),
            backend: Wgpu::new(self.gpu.clone()),
            transport: Box::new(Deadline::new(staged, DEADLINE)?),
        };
        Ok(Box::new(move || run_rank(case, setting, station, times)))
    }
}

impl Subject for WgpuRing {
    fn name(&self) -> String {
        let kind = if self.mixed { "cpu and wgpu in one ring" } else { "wgpu over staged threads" };
        format!("{kind}, {}", self.gpu.level().name())
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let mut case = case.clone();
        if self.mixed && !case.spec.normalize {
            case.spec.backward = BackwardMode::OnePass;
        }
        let case = &case;
        let ranks = threads::ring(setting.ranks).into_iter().enumerate();
        let jobs = ranks.map(|(rank, transport)| self.job(rank, transport, case, setting, times)).collect::<Result<Vec<_>>>()?;
        run_ranks(case, times, jobs)
    }
}
