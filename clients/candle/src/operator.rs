//! The operator in candle's graph.
//!
//! A custom operator of candle has at most three inputs, and attention has up to five. Two
//! operators are chained by a **token**, a tensor of one number that nothing else reads:
//!
//! ```text
//! token = Inputs(q, k, v)                 out = Outputs(token, bias, sinks)
//!
//! backward, in the order of the graph:
//!   Outputs: computes dq, dk, dv, dbias, dsinks; keeps dq, dk, dv under a number n
//!            gradients: dtoken = n, dbias, dsinks
//!   Inputs:  takes dq, dk, dv of number dtoken
//! ```
//!
//! `Outputs` alone reads the token, so dtoken is exactly n, also in several passes over one graph.
//!
//! Every gradient is the result of an operator `Gradient` that has no backward pass, so that a
//! derivative of a gradient is an error instead of zero.
//!
//! Tensors of candle are viewed as those of ndarray, with their strides.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use annulus::{
    Backward, Batch, Forward, ForwardView, Tensors,
    ndarray::{
        Array, ArrayView, ArrayView2, ArrayView4, Dim, Dimension, IntoDimension, Ix, ShapeBuilder,
    },
};
use candle_core::{
    CpuStorage, CustomOp3, Device, Error, Layout, Result, Shape, Storage, StorageRef, Tensor,
    WithDType,
};

use crate::{
    Options,
    options::{SharedPlan, lock},
};

/// An element type of both libraries.
pub(crate) trait Element: annulus::Element<Accumulator: WithDType> + WithDType {}

impl<T: annulus::Element<Accumulator: WithDType> + WithDType> Element for T {}

/// Computes the attention, and records it in the graph if an input is tracked.
pub(crate) fn attend<T: Element>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    let Options { bias, sinks, batch, .. } = options;
    let inputs = Arguments {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        bias: bias.clone(),
        sinks: sinks.clone(),
    };
    let (plan, mut forward) = inputs.with::<T, _>(|tensors| {
        let plan = options.plan(tensors)?;
        let forward = lock(&plan).forward(tensors, batch.as_ref()).map_err(Error::wrap)?;
        Ok((plan, forward))
    })?;
    // the graph has out; the operator keeps the rest
    let out = std::mem::replace(&mut forward.out, Array::from_elem((0, 0, 0, 0), zero::<T>()));
    let (out, shape) = flat(out);
    let further = [bias.as_ref(), sinks.as_ref()];
    let tracked = [q, k, v].into_iter().chain(further.into_iter().flatten()).any(Tensor::track_op);
    if !tracked {
        return Tensor::from_vec(out, shape, &Device::Cpu);
    }
    if !options.has_backward() {
        let got = "true, with a tensor that has a gradient";
        return Err(invalid("forward_only", got, "false"));
    }
    let call = Arc::new(Call {
        inputs,
        plan,
        batch: batch.clone(),
        forward,
        passes: AtomicU64::new(0),
        gradients: Mutex::default(),
    });
    let token = q.apply_op3(k, v, Inputs(Arc::clone(&call)))?;
    let out = Once::new(out, shape);
    let [bias, sinks] = further.map(|further| further.unwrap_or(&token));
    token.apply_op3(bias, sinks, Outputs { call, out })
}

/// The tensors of a call.
struct Arguments {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Option<Tensor>,
    sinks: Option<Tensor>,
}

impl Arguments {
    /// Calls `pass` with views of the tensors.
    fn with<T: Element, R>(&self, pass: impl FnOnce(&Tensors<'_, T>) -> Result<R>) -> Result<R> {
        let [q, k, v] = [("q", &self.q), ("k", &self.k), ("v", &self.v)]
            .map(|(name, tensor)| Read::new(name, tensor));
        let bias = self.bias.as_ref().map(|bias| Read::new("bias", bias));
        let sinks = self.sinks.as_ref().map(|sinks| Read::new("sinks", sinks));
        let bias: Option<ArrayView4<'_, T::Accumulator>> =
            bias.as_ref().map(Read::view).transpose()?;
        let softmax_aux: Option<ArrayView2<'_, T::Accumulator>> =
            sinks.as_ref().map(Read::view).transpose()?;
        pass(&Tensors { q: q.view()?, k: k.view()?, v: v.view()?, bias, softmax_aux })
    }
}

/// One call of [`attend`] whose gradients can be asked for.
struct Call<T: Element> {
    inputs: Arguments,
    plan: SharedPlan,
    batch: Option<Arc<Batch>>,
    /// Outputs of the forward pass, without out.
    forward: Forward<T>,
    /// Number of backward passes.
    passes: AtomicU64,
    /// dq, dk and dv of backward passes in which [`Inputs`] has not taken them.
    gradients: Mutex<HashMap<u64, [Tensor; 3]>>,
}

impl<T: Element> Call<T> {
    /// Computes all gradients from out and ∂L/∂out.
    fn backward(&self, out: &Tensor, dout: &Tensor) -> Result<Backward<T>> {
        let (out, dout) = (Read::new("out", out), Read::new("dout", dout));
        let forward = ForwardView { out: out.view()?, ..self.forward.view() };
        self.inputs.with::<T, _>(|tensors| {
            let zeros = |dims| Array::from_elem(dims, zero::<T>());
            let wide = zero::<T::Accumulator>();
            let mut gradients = Backward {
                dq: zeros(tensors.q.dim()),
                dk: zeros(tensors.k.dim()),
                dv: zeros(tensors.v.dim()),
                dbias: tensors.bias.map(|bias| Array::from_elem(bias.dim(), wide)),
                dsoftmax_aux: tensors.softmax_aux.map(|aux| Array::from_elem(aux.dim(), wide)),
                reports: Vec::new(),
            };
            let view = gradients.view_mut();
            lock(&self.plan)
                .backward(tensors, self.batch.as_ref(), &forward, dout.view()?, view)
                .map_err(Error::wrap)?;
            Ok(gradients)
        })
    }
}

/// The operator of q, k and v: its result is the token.
struct Inputs<T: Element>(Arc<Call<T>>);

impl<T: Element> CustomOp3 for Inputs<T> {
    fn name(&self) -> &'static str {
        "annulus attention, q k v"
    }

    fn cpu_fwd(
        &self,
        _q: &CpuStorage,
        _: &Layout,
        _k: &CpuStorage,
        _: &Layout,
        _v: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F64(vec![0.0]), Shape::from(())))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _token: &Tensor,
        pass: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let pass = pass.to_scalar::<f64>()? as u64;
        let Some([dq, dk, dv]) = lock(&self.0.gradients).remove(&pass) else {
            return Err(Error::msg("attention: the gradients of this backward pass are missing"));
        };
        let of = |input: &Tensor, gradient| input.track_op().then_some(gradient);
        Ok((of(q, dq), of(k, dk), of(v, dv)))
    }
}

/// The operator of the token, the bias and the sinks: its result is out. An input that a call does
/// not have is the token too.
struct Outputs<T: Element> {
    call: Arc<Call<T>>,
    out: Once<T>,
}

impl<T: Element> CustomOp3 for Outputs<T> {
    fn name(&self) -> &'static str {
        "annulus attention"
    }

    fn cpu_fwd(
        &self,
        _token: &CpuStorage,
        _: &Layout,
        _bias: &CpuStorage,
        _: &Layout,
        _sinks: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.out.take()
    }

    fn bwd(
        &self,
        token: &Tensor,
        bias: &Tensor,
        sinks: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Backward { dq, dk, dv, dbias, dsoftmax_aux, .. } = self.call.backward(out, dout)?;
        let inputs = [token, bias, sinks];
        let dtoken = if token.track_op() {
            let pass = self.call.passes.fetch_add(1, Ordering::Relaxed) + 1;
            let [dq, dk, dv] = [dq, dk, dv].map(|gradient| Gradient::of(gradient, inputs));
            lock(&self.call.gradients).insert(pass, [dq?, dk?, dv?]);
            Some(Tensor::new(pass as f64, &Device::Cpu)?)
        } else {
            None
        };
        // without a bias or sinks, the token in their place gets no gradient
        let dbias = dbias.filter(|_| bias.track_op()).map(|dbias| Gradient::of(dbias, inputs));
        let dsinks =
            dsoftmax_aux.filter(|_| sinks.track_op()).map(|dsinks| Gradient::of(dsinks, inputs));
        Ok((dtoken, dbias.transpose()?, dsinks.transpose()?))
    }
}

/// A gradient as a result that depends on all inputs and cannot be differentiated: it has the
/// default `bwd`, which is an error.
struct Gradient<T: WithDType>(Once<T>);

impl<T: WithDType> Gradient<T> {
    fn of<D: Dimension>(
        gradient: Array<T, D>,
        [token, bias, sinks]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let (elements, shape) = flat(gradient);
        token.apply_op3(bias, sinks, Self(Once::new(elements, shape)))
    }
}

impl<T: WithDType> CustomOp3 for Gradient<T> {
    fn name(&self) -> &'static str {
        "the gradient of annulus attention"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.take()
    }
}

/// Elements that the forward pass of an operator moves into candle's storage.
struct Once<T>(Mutex<Option<Vec<T>>>, Shape);

impl<T: WithDType> Once<T> {
    fn new(elements: Vec<T>, shape: Shape) -> Self {
        Self(Mutex::new(Some(elements)), shape)
    }

    fn take(&self) -> Result<(CpuStorage, Shape)> {
        match lock(&self.0).take() {
            Some(elements) => Ok((T::to_cpu_storage_owned(elements), self.1.clone())),
            None => Err(Error::msg("attention: its result was taken already")),
        }
    }
}

fn zero<T: annulus::Element>() -> T {
    T::from_f64(0.0)
}

/// Returns the elements of an array in standard order, without a copy, and its shape.
fn flat<T, D: Dimension>(array: Array<T, D>) -> (Vec<T>, Shape) {
    let shape = Shape::from(array.shape());
    (array.into_raw_vec_and_offset().0, shape)
}

/// Creates an error of candle that names an argument.
pub(crate) fn invalid(argument: &str, got: impl ToString, want: impl ToString) -> Error {
    Error::wrap(annulus::Error::invalid(argument, got, want))
}

/// A tensor that is locked for reading, under the name of its argument.
pub(crate) struct Read<'a> {
    name: &'static str,
    tensor: &'a Tensor,
    storage: StorageRef<'a>,
}

impl<'a> Read<'a> {
    pub(crate) fn new(name: &'static str, tensor: &'a Tensor) -> Self {
        Self { name, tensor, storage: tensor.storage_and_layout().0 }
    }

    /// Returns the elements as a view of `N` axes, without a copy.
    pub(crate) fn view<T: WithDType, const N: usize>(
        &self,
    ) -> Result<ArrayView<'_, T, Dim<[Ix; N]>>>
    where
        [Ix; N]: IntoDimension<Dim = Dim<[Ix; N]>>,
        Dim<[Ix; N]>: Dimension,
    {
        let (shape, strides) = (self.tensor.dims(), self.tensor.stride());
        let (Ok(dims), Ok(steps)) = (<[Ix; N]>::try_from(shape), <[Ix; N]>::try_from(strides))
        else {
            return Err(invalid(self.name, format!("{shape:?}"), format!("{N} axes")));
        };
        let Storage::Cpu(storage) = &*self.storage else {
            return Err(invalid(self.name, "a tensor on a GPU", "one on the CPU"));
        };
        let dtype = self.tensor.dtype();
        if dtype != T::DTYPE {
            return Err(invalid(self.name, dtype.as_str(), T::DTYPE.as_str()));
        }
        let elements = T::cpu_storage_as_slice(storage)?;
        let view = if self.tensor.elem_count() == 0 {
            ArrayView::from_shape(dims.into_dimension(), &[])
        } else {
            let first = self.tensor.layout().start_offset();
            let strided = dims.into_dimension().strides(steps.into_dimension());
            ArrayView::from_shape(strided, &elements[first..])
        };
        view.map_err(|error| invalid(self.name, error, "strides inside the storage"))
    }
}
