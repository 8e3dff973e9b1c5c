//! The wgpu backend as a subject: over staged threads, for tensors in host memory, and in one ring
//! with the CPU.

use std::time::Duration;

use annulus::{LocalRing, Plan, backend::wgpu_rank};
use annulus_comm::{Deadline, Staged, Threads, threads};
use annulus_core::{BackwardMode, DType, Result};
use annulus_cpu::Cpu;
use annulus_wgpu::{Copier, Gpu, Tensor, Wgpu, WgpuSpace};
use ndarray::{Array4, ArrayView4};

use crate::{
    Answer, Case, HostMemory, RankSetup, Setting, Subject, TensorMemory,
    ring_subject::{RankJob, run_rank, run_ranks},
    subject::run_facade,
};

/// Longest wait for a silent peer: far above any test's time. On a busy machine a software driver
/// takes more than a minute for a kernel.
const DEADLINE: Duration = Duration::from_secs(240);

/// Element types of the backend.
const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

impl TensorMemory for Gpu {
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

/// Kinds of ranks in a [`WgpuRing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ranks {
    /// All on the device, tensors in its memory.
    OnDevice,
    /// All on the device, tensors in host memory.
    OnHost,
    /// Odd ranks on the device, even ranks on the CPU.
    Mixed,
}

/// A ring of ranks that share one or several wgpu devices.
#[derive(Debug, Clone)]
pub struct WgpuRing {
    /// Used by the ranks round robin.
    gpus: Vec<Gpu>,
    ranks: Ranks,
    dtypes: Vec<DType>,
}

impl WgpuRing {
    /// Creates a ring with all ranks on this device and tensors in its memory.
    pub fn new(gpu: Gpu) -> Self {
        Self { gpus: vec![gpu], ranks: Ranks::OnDevice, dtypes: DTYPES.to_vec() }
    }

    /// Adds a device: the ranks use all of them round robin.
    #[must_use]
    pub fn and(mut self, gpu: Gpu) -> Self {
        self.gpus.push(gpu);
        self
    }

    /// Restricts the element types: each has its own kernels, which a driver compiles for seconds.
    #[must_use]
    pub fn only(self, dtypes: &[DType]) -> Self {
        Self { dtypes: dtypes.to_vec(), ..self }
    }

    /// Creates a ring with all ranks on this device and tensors in host memory ([`Wgpu::on_host`]).
    pub fn on_host(gpu: Gpu) -> Self {
        Self { ranks: Ranks::OnHost, ..Self::new(gpu) }
    }

    /// Creates a ring with odd ranks on this device and even ranks on the CPU.
    ///
    /// The backward pass of an unnormalized output runs in one pass here: in two passes one backend
    /// would have to reproduce the row maxima of the other bit for bit.
    pub fn mixed(gpu: Gpu) -> Self {
        Self { ranks: Ranks::Mixed, ..Self::new(gpu) }
    }

    fn job<'a>(
        &self,
        rank: usize,
        transport: Threads,
        case: &'a Case,
        setting: &'a Setting,
        times: usize,
    ) -> Result<RankJob<'a>> {
        let gpu = &self.gpus[rank % self.gpus.len()];
        if self.ranks == Ranks::Mixed && rank.is_multiple_of(2) {
            let setup = RankSetup {
                memory: HostMemory,
                backend: Cpu::new(1)?,
                transport: Box::new(Deadline::new(transport, DEADLINE)?),
            };
            return Ok(Box::new(move || run_rank(case, setting, setup, times)));
        }
        let staged = Staged::<_, WgpuSpace>::new(transport, Copier::new(gpu.clone()));
        let setup = RankSetup {
            memory: gpu.clone(),
            backend: Wgpu::new(gpu.clone()),
            transport: Box::new(Deadline::new(staged, DEADLINE)?),
        };
        Ok(Box::new(move || run_rank(case, setting, setup, times)))
    }

    /// Computes a case by the facade, for tensors in host memory.
    fn run_on_host(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        run_facade(case, setting, times, &|setup, dims, ranks| {
            let setup = setup.clone().map_runtime(|runtime| runtime.deadline(DEADLINE));
            LocalRing::from_plans(setup, dims, ranks, |rank, setup, endpoint| {
                let gpu = &self.gpus[rank % self.gpus.len()];
                let (backend, transport) = wgpu_rank(gpu, endpoint);
                Plan::with_backend(setup, dims, backend, transport)
            })
        })
    }
}

impl Subject for WgpuRing {
    fn name(&self) -> String {
        let kind = match self.ranks {
            Ranks::OnDevice => "wgpu over staged threads",
            Ranks::OnHost => "wgpu for host tensors over staged threads",
            Ranks::Mixed => "cpu and wgpu in one ring",
        };
        let levels: Vec<&str> = self.gpus.iter().map(|gpu| gpu.level().name()).collect();
        format!("{kind}, {}", levels.join(" and "))
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let mut case = case.clone();
        if self.ranks == Ranks::Mixed && !case.spec.normalize {
            case.spec.backward = BackwardMode::OnePass;
        }
        let case = &case;
        if self.ranks == Ranks::OnHost {
            return self.run_on_host(case, setting, times);
        }
        let ranks = threads::ring(setting.ranks).into_iter().enumerate();
        let jobs = ranks
            .map(|(rank, transport)| self.job(rank, transport, case, setting, times))
            .collect::<Result<Vec<_>>>()?;
        run_ranks(case, times, jobs)
    }
}
