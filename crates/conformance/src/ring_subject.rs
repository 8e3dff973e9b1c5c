//! Any backend over any transport, driven through [`Ring`] with raw views: one thread a rank, each
//! with its own rows only.

use std::{marker::PhantomData, num::NonZeroUsize};

use annulus::comm::{
    ring::{Ring, RingOptions},
    threads::each_rank,
};
use annulus_core::{
    Backend, BackwardInputs, Batch, DType, Dims, Element, Error, Gradients, Host, HostView,
    HostViewMut, Inputs, Outputs, Result, Runs, Space, Spec, Transport, index,
};
use annulus_plan::Strategy;
use annulus_test_cases::facade::{RankAnswer, as_bias, attention, check_bytes};
use half::{bf16, f16};
use ndarray::{Array3, Array4, ArrayView4, Axis, Dimension};

use crate::{
    Answer, Case, Setting, Subject,
    device::{Device, DeviceTensor, MockSpace},
    subject::assemble,
};

/// Everything that one rank of a [`RingSubject`] is built from.
pub struct RankSetup<M: TensorMemory, B: Backend<Space = M::Space>> {
    /// TensorMemory of its tensors.
    pub memory: M,
    /// Computes its tiles.
    pub backend: B,
    /// Sends and receives its blocks.
    pub transport: Box<dyn Transport<M::Space>>,
}

/// A ring of ranks, built anew for each run by `make(ranks)`.
pub struct RingSubject<M, B, F> {
    name: String,
    make: F,
    kinds: PhantomData<fn() -> (M, B)>,
}

impl<M, B, F> RingSubject<M, B, F>
where
    M: TensorMemory,
    B: Backend<Space = M::Space>,
    F: Fn(usize) -> Result<Vec<RankSetup<M, B>>>,
{
    /// Creates a subject of this name.
    pub fn new(name: impl Into<String>, make: F) -> Self {
        Self { name: name.into(), make, kinds: PhantomData }
    }
}

impl<M, B, F> Subject for RingSubject<M, B, F>
where
    M: TensorMemory,
    B: Backend<Space = M::Space>,
    F: Fn(usize) -> Result<Vec<RankSetup<M, B>>>,
{
    fn name(&self) -> String {
        self.name.clone()
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        if setting.strategy != Strategy::Ring {
            return Err(Error::unsupported(setting.strategy.to_string(), "a ring made by hand"));
        }
        let setups = (self.make)(setting.ranks)?;
        let rank =
            |setup| -> RankJob<'_> { Box::new(move || run_rank(case, setting, setup, times)) };
        run_ranks(case, times, setups.into_iter().map(rank).collect())
    }
}

/// All work of one rank: planning and every call.
pub(crate) type RankJob<'a> = Box<dyn FnOnce() -> Result<Vec<RankAnswer>> + Send + 'a>;

/// Runs every rank on a thread of its own and assembles their answers, one for each call.
pub(crate) fn run_ranks(case: &Case, times: usize, ranks: Vec<RankJob<'_>>) -> Result<Vec<Answer>> {
    let answers = each_rank(ranks, |_, rank| rank())?;
    Ok((0..times)
        .map(|time| assemble(case, answers.iter().map(|of_rank| &of_rank[time])))
        .collect())
}

/// Plans on this rank, then computes its rows `times` times.
pub(crate) fn run_rank<M: TensorMemory, B: Backend<Space = M::Space>>(
    case: &Case,
    setting: &Setting,
    setup: RankSetup<M, B>,
    times: usize,
) -> Result<Vec<RankAnswer>> {
    let RankSetup { memory, backend, transport } = setup;
    let options = RingOptions {
        layout: setting.layout.clone(),
        route: setting.route,
        backward: true,
        second_derivatives: false,
        // a ring cannot reduce gradients in device memory: `compute` sums them over ranks, except
        // in the reproducible order, which has an order of its own for them
        local_gradients: case.spec.leaf_rows.is_none(),
        kv_block_size: None,
        receive_ahead: setting.receive_ahead.and_then(NonZeroUsize::new),
        deadline_variable: None,
        machine: None,
    };
    // the public interface has leaves of one size, too long for the tests
    let spec = attention(case).spec(case.spec.dims);
    let spec = spec.map(|spec| Spec { leaf_rows: case.spec.leaf_rows, ..spec });
    let mut ring = Ring::new(backend, transport, spec, options)?;
    let rows = |runs: &Runs| runs.iter().map(i64::cast_unsigned).collect::<Vec<u64>>();
    let q_rows = rows(ring.q_rows());
    let kv_rows = rows(ring.kv_rows());
    let batch = case.batch.select(&q_rows, &kv_rows)?;
    if case.batch != Batch::default() {
        ring.update(&batch)?;
    }
    let [q_rows, kv_rows] =
        [q_rows, kv_rows].map(|rows| rows.into_iter().map(index).collect::<Vec<usize>>());
    let tensors = RankTensors::upload(&memory, case, &q_rows, &kv_rows)?;
    let mut answers = Vec::new();
    for _ in 0..times {
        let mut answer = tensors.compute(&memory, &mut ring, case, setting.out_residual)?;
        if let (Some(lists), Some(gradient)) = (&batch.key_lists, ring.list_bias_gradient()) {
            answer.dbias = Some(as_bias(lists, &gradient, case.spec.dims.kv_len));
        }
        answers.push(RankAnswer { q_rows: q_rows.clone(), kv_rows: kv_rows.clone(), answer });
    }
    Ok(answers)
}

/// The tensors of one rank, uploaded to its memory.
struct RankTensors<M: TensorMemory> {
    inputs: Inputs<M::Tensor>,
    dout: M::Tensor,
    dlse: Option<M::Tensor>,
    q_rows: usize,
    bias_shape: Option<[usize; 4]>,
}

impl<M: TensorMemory> RankTensors<M> {
    fn upload(memory: &M, case: &Case, q_rows: &[usize], kv_rows: &[usize]) -> Result<Self> {
        let dtype = case.spec.dtype;
        let sums = case.spec.dtype.accumulator();
        let upload = |tensor: &Array4<f64>, rows: &[usize]| {
            memory.upload(tensor.select(Axis(1), rows).view(), dtype)
        };
        let bias = case.bias.as_ref().map(|bias| {
            if bias.len_of(Axis(2)) == 1 { bias.clone() } else { bias.select(Axis(2), q_rows) }
        });
        let sinks =
            case.sinks.as_ref().map(|sinks| sinks.view().insert_axis(Axis(2)).insert_axis(Axis(3)));
        let dlse = case.dlse.as_ref().map(|dlse| dlse.select(Axis(2), q_rows).insert_axis(Axis(3)));
        let maybe = |tensor: Option<ArrayView4<'_, f64>>| {
            tensor.map(|tensor| memory.upload(tensor, sums)).transpose()
        };
        let inputs = Inputs {
            q: upload(&case.q, q_rows)?,
            k: upload(&case.k, kv_rows)?,
            v: upload(&case.v, kv_rows)?,
            bias: maybe(bias.as_ref().map(|bias| bias.view()))?,
            sinks: maybe(sinks)?,
        };
        Ok(Self {
            inputs,
            dout: upload(&case.dout, q_rows)?,
            dlse: maybe(dlse.as_ref().map(|dlse| dlse.view()))?,
            q_rows: q_rows.len(),
            bias_shape: bias.as_ref().map(|bias| bias.dim().into()),
        })
    }

    fn compute<B: Backend<Space = M::Space>>(
        &self,
        memory: &M,
        ring: &mut Ring<B>,
        case: &Case,
        out_residual: bool,
    ) -> Result<Answer> {
        let sums = case.spec.dtype.accumulator();
        let made = self.forward(memory, ring, case)?;
        let gradients = self.backward(memory, ring, case, &made, out_residual)?;
        let Outputs { out, lse, max, sum, ties, .. } =
            made.try_map(|tensor| memory.download(&tensor))?;
        let Gradients { dq, dk, dv, mut dbias, dsinks } =
            gradients.try_map(|tensor| memory.download(&tensor))?;
        let rows = |tensor: Array4<f64>| -> Array3<f64> { tensor.index_axis_move(Axis(3), 0) };
        let is_local = case.spec.leaf_rows.is_none();
        let is_shared = is_local && case.spec.bias.is_some_and(|shape| shape[2] == 1);
        if let Some(dbias) = dbias.as_mut().filter(|_| is_shared) {
            sum_over_ranks(ring, sums, dbias)?;
        }
        let mut dsinks = dsinks.map(|dsinks| rows(dsinks).index_axis_move(Axis(2), 0));
        if let Some(dsinks) = dsinks.as_mut().filter(|_| is_local) {
            sum_over_ranks(ring, sums, dsinks)?;
        }
        Ok(Answer {
            out,
            lse: rows(lse),
            max: max.map(rows).unwrap_or_default(),
            sum: sum.map(rows).unwrap_or_default(),
            ties: ties.map(rows),
            dq,
            dk,
            dv,
            dbias,
            dsinks,
        })
    }

    /// Outputs hold another number before the call: results must not depend on their content.
    fn filled(memory: &M, shape: [usize; 4], dtype: DType) -> Result<M::Tensor> {
        memory.upload(Array4::from_elem(shape, 77.0).view(), dtype)
    }

    fn forward<B: Backend<Space = M::Space>>(
        &self,
        memory: &M,
        ring: &mut Ring<B>,
        case: &Case,
    ) -> Result<Outputs<M::Tensor>> {
        let dtype = case.spec.dtype;
        let Dims { batch, q_heads, value_dim, .. } = case.spec.dims;
        let out = || Self::filled(memory, [batch, self.q_rows, q_heads, value_dim], dtype);
        let statistics =
            || Self::filled(memory, [batch, q_heads, self.q_rows, 1], dtype.accumulator());
        let mut made = Outputs {
            out: out()?,
            lse: statistics()?,
            max: Some(statistics()?),
            sum: Some(statistics()?),
            ties: (!case.spec.normalize).then(statistics).transpose()?,
            out_residual: ring.has_out_residual().then(out).transpose()?,
            statistics: None,
            head_statistics: None,
        };
        let inputs = self.inputs.as_ref().map(|tensor| memory.view(tensor));
        let mut outputs = made.as_mut().map(|tensor| memory.view_mut(tensor));
        check_bytes("forward", &ring.forward(&inputs, &mut outputs)?)?;
        drop(outputs);
        Ok(made)
    }

    fn backward<B: Backend<Space = M::Space>>(
        &self,
        memory: &M,
        ring: &mut Ring<B>,
        case: &Case,
        made: &Outputs<M::Tensor>,
        out_residual: bool,
    ) -> Result<Gradients<M::Tensor>> {
        let dtype = case.spec.dtype;
        let sums = case.spec.dtype.accumulator();
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = case.spec.dims;
        let kv_rows = index(ring.kv_rows().len());
        let filled = |shape, dtype| Self::filled(memory, shape, dtype);
        let sinks_shape = case.sinks.as_ref().map(|sinks| [sinks.nrows(), sinks.ncols(), 1, 1]);
        let mut gradients = Gradients {
            dq: filled([batch, self.q_rows, q_heads, head_dim], dtype)?,
            dk: filled([batch, kv_rows, kv_heads, head_dim], dtype)?,
            dv: filled([batch, kv_rows, kv_heads, value_dim], dtype)?,
            dbias: self.bias_shape.map(|shape| filled(shape, sums)).transpose()?,
            dsinks: sinks_shape.map(|shape| filled(shape, sums)).transpose()?,
        };
        let Outputs { out, lse, max, sum, ties, out_residual: residual, .. } = made.as_ref();
        let inputs = BackwardInputs {
            forward: self.inputs.as_ref(),
            out,
            max: max.unwrap_or(lse),
            sum,
            ties,
            dout: &self.dout,
            dlse: self.dlse.as_ref(),
            out_residual: residual.filter(|_| out_residual),
        };
        let inputs = inputs.map(|tensor| memory.view(tensor));
        let mut views = gradients.as_mut().map(|tensor| memory.view_mut(tensor));
        check_bytes("backward", &ring.backward(&inputs, &mut views)?)?;
        drop(views);
        Ok(gradients)
    }
}

/// Sums every rank's contribution, rounded to the type of the gradient.
fn sum_over_ranks<B: Backend, D: Dimension>(
    ring: &mut Ring<B>,
    sums: DType,
    part: &mut ndarray::Array<f64, D>,
) -> Result<()> {
    let mut numbers: Vec<f64> = part.iter().copied().collect();
    ring.sum_over_ranks(&mut numbers)?;
    part.iter_mut().zip(numbers).for_each(|(element, number)| *element = sums.round(number));
    Ok(())
}

/// A memory space with the transfers that a test needs.
pub trait TensorMemory: Send {
    /// The space of the backend.
    type Space: Space;
    /// A caller's tensor in this space.
    type Tensor;

    /// Rounds numbers to `dtype` and copies them to a new tensor.
    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<Self::Tensor>;

    /// Waits for the queued work, then returns a tensor's numbers widened to f64.
    fn download(&self, tensor: &Self::Tensor) -> Result<Array4<f64>>;

    /// Borrows a tensor as input of a pass.
    fn view<'a>(&self, tensor: &'a Self::Tensor) -> <Self::Space as Space>::View<'a>;

    /// Borrows a tensor as output of a pass.
    fn view_mut<'a>(&self, tensor: &'a mut Self::Tensor) -> <Self::Space as Space>::ViewMut<'a>;
}

/// Host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory;

/// A tensor in host memory.
#[derive(Debug, Clone)]
pub enum HostTensor {
    /// f64 elements.
    F64(Array4<f64>),
    /// f32 elements.
    F32(Array4<f32>),
    /// bf16 elements.
    Bf16(Array4<bf16>),
    /// f16 elements.
    F16(Array4<f16>),
}

impl TensorMemory for HostMemory {
    type Space = Host;
    type Tensor = HostTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<HostTensor> {
        Ok(match dtype {
            DType::F64 => HostTensor::F64(numbers.to_owned()),
            DType::F32 => HostTensor::F32(numbers.mapv(Element::from_f64)),
            DType::Bf16 => HostTensor::Bf16(numbers.mapv(Element::from_f64)),
            DType::F16 => HostTensor::F16(numbers.mapv(Element::from_f64)),
        })
    }

    fn download(&self, tensor: &HostTensor) -> Result<Array4<f64>> {
        Ok(match tensor {
            HostTensor::F64(array) => array.clone(),
            HostTensor::F32(array) => array.mapv(Element::to_f64),
            HostTensor::Bf16(array) => array.mapv(Element::to_f64),
            HostTensor::F16(array) => array.mapv(Element::to_f64),
        })
    }

    fn view<'a>(&self, tensor: &'a HostTensor) -> HostView<'a> {
        match tensor {
            HostTensor::F64(array) => HostView::F64(array.view()),
            HostTensor::F32(array) => HostView::F32(array.view()),
            HostTensor::Bf16(array) => HostView::Bf16(array.view()),
            HostTensor::F16(array) => HostView::F16(array.view()),
        }
    }

    fn view_mut<'a>(&self, tensor: &'a mut HostTensor) -> HostViewMut<'a> {
        match tensor {
            HostTensor::F64(array) => HostViewMut::F64(array.view_mut()),
            HostTensor::F32(array) => HostViewMut::F32(array.view_mut()),
            HostTensor::Bf16(array) => HostViewMut::Bf16(array.view_mut()),
            HostTensor::F16(array) => HostViewMut::F16(array.view_mut()),
        }
    }
}

impl TensorMemory for Device {
    type Space = MockSpace;
    type Tensor = DeviceTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<DeviceTensor> {
        DeviceTensor::upload(self, numbers, dtype)
    }

    fn download(&self, tensor: &DeviceTensor) -> Result<Array4<f64>> {
        self.synchronize()?;
        tensor.download()
    }

    fn view<'a>(&self, tensor: &'a DeviceTensor) -> <MockSpace as Space>::View<'a> {
        tensor.view()
    }

    fn view_mut<'a>(&self, tensor: &'a mut DeviceTensor) -> <MockSpace as Space>::ViewMut<'a> {
        tensor.view_mut()
    }
}
