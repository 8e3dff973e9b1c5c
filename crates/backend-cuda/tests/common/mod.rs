//! CUDA memory spaces for the conformance suite, and rings of CUDA backends.

use std::time::Duration;

use annulus::{Attention, LocalRing, Plan, Setup, comm::ring::Ring};
use annulus_comm::{Deadline, Staged, threads};
use annulus_conformance::{
    Answer, Case, FacadeOn, RankSetup, RingSubject, Setting, Subject, TensorMemory,
    device::{decode, encode},
    suite,
};
use annulus_core::{DType, Dims, Error, HostViews, Result, Spec};
use annulus_cuda::{
    Cuda, Variant,
    device::{CudaCopier, CudaSpace, CudaTensor, CudaView, CudaViewMut, Stream},
};
use ndarray::{Array4, ArrayView4, s};

/// Declares tests of a verdict each.
macro_rules! verdicts {
    ($($(#[$doc:meta])* $name:ident: $verdict:expr;)*) => {
        $($(#[$doc])* #[test]
        fn $name() {
            $verdict.unwrap();
        })*
    };
}
pub(crate) use verdicts;

/// Longest wait of a test for a peer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Tensors in CUDA memory.
pub(crate) struct CudaMemory(pub(crate) Stream);

impl TensorMemory for CudaMemory {
    type Space = CudaSpace;
    type Tensor = CudaTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<CudaTensor> {
        let mut bytes = Vec::with_capacity(numbers.len() * dtype.bytes());
        numbers.iter().for_each(|&number| encode(number, dtype, &mut bytes));
        CudaTensor::upload(&self.0, &bytes, dtype, numbers.dim().into())
    }

    fn download(&self, tensor: &CudaTensor) -> Result<Array4<f64>> {
        let bytes = tensor.download()?;
        let dtype = tensor.view().dtype();
        let numbers = bytes.chunks_exact(dtype.bytes()).map(|bytes| decode(dtype, bytes)).collect();
        Array4::from_shape_vec(tensor.view().shape(), numbers).map_err(Error::internal)
    }

    fn view<'a>(&self, tensor: &'a CudaTensor) -> CudaView<'a> {
        tensor.view()
    }

    fn view_mut<'a>(&self, tensor: &'a mut CudaTensor) -> CudaViewMut<'a> {
        tensor.view_mut()
    }
}

/// Ring with one rank per backend from `make`, blocks staged through pinned host memory, each
/// message delayed by up to `delay`.
pub(crate) fn staged(name: &str, delay: Duration, make: impl Fn() -> Result<Cuda>) -> impl Subject {
    RingSubject::new(name, move |ranks| -> Result<Vec<RankSetup<CudaMemory, Cuda>>> {
        let setup = |(rank, transport)| {
            let backend = make()?;
            let late =
                annulus_conformance::device::Fault::random_delays(transport, rank as u64, delay);
            let staged =
                Staged::<_, CudaSpace>::new(late, CudaCopier::new(backend.stream().device())?);
            let memory = CudaMemory(backend.stream().clone());
            Ok(RankSetup { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
        };
        threads::ring(ranks).into_iter().enumerate().map(setup).collect()
    })
}

/// The facade for tensors in host memory, blocks staged through pinned host memory.
pub(crate) fn hosted(name: &str, make: impl Fn() -> Result<Cuda> + Sync) -> impl Subject {
    let dtypes = [DType::F32, DType::F64, DType::Bf16, DType::F16];
    FacadeOn::new(name, &dtypes, move |setup, dims, ranks| {
        let setup = setup.clone().map_runtime(|runtime| runtime.deadline(DEADLINE));
        LocalRing::from_plans(setup, dims, ranks, |_, setup, endpoint| {
            let cuda = make()?;
            let copier = CudaCopier::new(cuda.stream().device())?;
            let staged = Staged::<_, HostViews<CudaSpace>>::new(endpoint, copier);
            Plan::with_backend(setup, dims, cuda.on_host(), staged)
        })
    })
}

/// True for the errors with which NCCL or RCCL refuses several ranks on one GPU: of the call that
/// creates a communicator, or, as it is non-blocking, of its state later; and on the other ranks an
/// abort.
pub(crate) fn refuses_a_shared_gpu(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::Comm { .. } | Error::Aborted { .. })
        && (text.contains("ncclCommInitRank") || text.contains("CCL: "))
}

/// Checks a case whose head and value dims fill a variant of `dim`, over more than one tile.
/// `ragged` leaves a few dims free, so that rows begin at any even address.
pub(crate) fn wide(
    subject: &dyn Subject,
    dtype: DType,
    dim: usize,
    causal: bool,
    ragged: bool,
) -> Result<(), String> {
    let (head_dim, value_dim) = if ragged { (dim - 1, dim / 2 + 3) } else { (dim, dim / 2 + 8) };
    let dims =
        Dims { batch: 1, q_len: 70, kv_len: 97, q_heads: 2, kv_heads: 1, head_dim, value_dim };
    let masks = annulus_conformance::Masks { causal, ..Default::default() };
    let case = Case::new(
        format!("dim {dim}"),
        Spec::new(dims, DType::F64),
        masks,
        &mut annulus_conformance::Draw::new(dim as u64),
    );
    suite::answer(subject, &case.in_dtype(dtype), &Setting::ALONE).map(drop)
}

/// Ring of one rank on `cuda`.
pub(crate) fn ring(cuda: &Cuda, attention: &Attention, dims: Dims) -> Result<Ring<Cuda>> {
    let copier = CudaCopier::new(cuda.stream().device())?;
    let staged = Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), copier);
    let transport = Box::new(Deadline::new(staged, DEADLINE)?);
    let setup = Setup::from(attention);
    Ring::new(cuda.clone(), transport, setup.spec(dims), setup.ring_options())
}

/// Subject that pads a case's dims with zeros to multiples of 8, so that warpgroups serve every
/// normalized case.
pub(crate) struct OnMultiplesOfEight<S>(pub(crate) S);

impl<S: Subject> Subject for OnMultiplesOfEight<S> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn dtypes(&self) -> &[DType] {
        &[DType::Bf16, DType::F16]
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let Dims { head_dim, value_dim, .. } = case.spec.dims;
        let mut wide = case.clone();
        wide.spec.dims.head_dim = head_dim.next_multiple_of(8);
        wide.spec.dims.value_dim = value_dim.next_multiple_of(8);
        for tensor in [&mut wide.q, &mut wide.k, &mut wide.v, &mut wide.dout] {
            *tensor = padded(tensor);
        }
        let served = Variant::on_warpgroups(&wide.spec)?.is_some();
        let is_wide = wide.spec.dims.head_dim.max(wide.spec.dims.value_dim) > 128;
        assert!(served == case.spec.normalize || is_wide, "{}", case.name);
        let cut = |tensor: &Array4<f64>, dim| tensor.slice(s![.., .., .., ..dim]).to_owned();
        let answers = self.0.run(&wide, setting, times)?.into_iter().map(|answer| Answer {
            out: cut(&answer.out, value_dim),
            dq: cut(&answer.dq, head_dim),
            dk: cut(&answer.dk, head_dim),
            dv: cut(&answer.dv, value_dim),
            ..answer
        });
        Ok(answers.collect())
    }
}

/// Pads the dims with zeros to a multiple of 8.
fn padded(tensor: &Array4<f64>) -> Array4<f64> {
    let (batch, rows, heads, dim) = tensor.dim();
    Array4::from_shape_fn((batch, rows, heads, dim.next_multiple_of(8)), |(b, row, head, x)| {
        if x < dim { tensor[[b, row, head, x]] } else { 0.0 }
    })
}
