//! Options of an attention, and the plans that calls with equal lengths share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "mpi")]
use annulus::comm::mpi::Mpi;
use annulus::{
    Attention, BackwardViewMut, Batch, DType, Dims, Division, Forward, ForwardView, LocalRing,
    Plan, Runtime, Setup, SinkShape, Tensors, ndarray::Array2, ndarray::ArrayView4,
};
use candle_core::{Result, Tensor};

use crate::operator::{Read, invalid};

/// Plans of one setup that are kept; the oldest makes room for another length or type.
const PLANS: usize = 8;

/// Plans one rank of a ring.
type PlanRank = dyn Fn(&Setup, Dims) -> annulus::Result<Plan> + Send + Sync;

/// Mathematics, further tensors and ranks of an [`attention`](crate::attention).
///
/// A model makes one value for each kind of layer and passes it to every call. The first call of a
/// length and type makes a plan, which later calls and clones share.
///
/// # Examples
/// GPT-OSS: a learnable sink per query head, and a sliding window.
/// ```
/// use annulus_candle::{Options, annulus::Attention, attention};
/// use candle_core::{Device, Tensor, Var};
///
/// let x = Tensor::randn(0f32, 1.0, (2, 300, 4, 32), &Device::Cpu)?;
/// let sinks = Var::zeros((4, 1), candle_core::DType::F32, &Device::Cpu)?; // [q_heads, sinks]
/// let attention_of_layer = Attention::new().causal(true).sliding_window(127, 0);
/// let options = Options::new(attention_of_layer).sinks(sinks.as_tensor().clone());
/// let gradients = attention(&x, &x, &x, &options)?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&sinks).unwrap().dims(), [4, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Options {
    setup: Setup,
    ranks: Ranks,
    pub(crate) bias: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) batch: Option<Arc<Batch>>,
    plans: Arc<Mutex<Vec<(Key, SharedPlan)>>>,
}

/// The ranks that a call computes on.
#[derive(Clone)]
enum Ranks {
    /// All ranks are threads of this process; tensors are whole.
    Local(usize),
    /// This process is one rank, with its rows of sequences of `q_len` and `kv_len` rows.
    One { q_len: usize, kv_len: usize, plan: Arc<PlanRank> },
}

/// What a plan depends on besides the setup: lengths, type, shapes of bias and sinks.
type Key = (Dims, DType, Option<[usize; 4]>, Option<SinkShape>);

/// A plan that several operators of a graph use in turn.
pub(crate) type SharedPlan = Arc<Mutex<BatchPlan>>;

impl Options {
    /// Starts with `attention` on one rank, all cores of the machine, and no further tensors.
    ///
    /// The element type is that of q; [`Attention::dtype`] has no effect.
    pub fn new(attention: Attention) -> Self {
        Self {
            setup: attention.into(),
            ranks: Ranks::Local(1),
            bias: None,
            sinks: None,
            batch: None,
            plans: Arc::default(),
        }
    }

    /// Division of the attention among ranks: layout, route, strategy. Default: chosen by the mask.
    #[must_use]
    pub fn division(self, division: Division) -> Self {
        Self { setup: self.setup.map_division(|_| division), plans: Arc::default(), ..self }
    }

    /// Threads, deadlines and hooks. Default: the cores divided by the ranks of this process; one
    /// thread with [`Options::over`].
    #[must_use]
    pub fn runtime(self, runtime: Runtime) -> Self {
        Self { setup: self.setup.map_runtime(|_| runtime), plans: Arc::default(), ..self }
    }

    /// Computes on a ring of `ranks` ranks in this process ([`LocalRing`]). Default: 1.
    #[must_use]
    pub fn ranks(self, ranks: usize) -> Self {
        Self { ranks: Ranks::Local(ranks), plans: Arc::default(), ..self }
    }

    /// Computes as one rank of a ring of processes, which `plan` plans over a transport. Tensors
    /// have this rank's rows ([`Division::rank_rows`]) of sequences of `q_len` and `kv_len` rows.
    ///
    /// # Shapes
    /// A bias with rows has this rank's queries × all keys. Segment ids are of this rank's rows.
    ///
    /// # Ordering
    /// Calls and backward passes are collective.
    #[must_use]
    pub fn over(
        self,
        q_len: usize,
        kv_len: usize,
        plan: impl Fn(&Setup, Dims) -> annulus::Result<Plan> + Send + Sync + 'static,
    ) -> Self {
        let ranks = Ranks::One { q_len, kv_len, plan: Arc::new(plan) };
        Self { ranks, plans: Arc::default(), ..self }
    }

    /// Computes as one rank of `ring`, over MPI, as [`Options::over`]. Every plan has a handle of
    /// its own to the endpoint.
    ///
    /// # Ordering
    /// Local. All ranks make their options, and handles of other uses, in the same order
    /// ([`Mpi::share`]).
    ///
    /// # Errors
    /// As [`Mpi::share`].
    #[cfg(feature = "mpi")]
    pub fn over_mpi(self, q_len: usize, kv_len: usize, ring: &Mpi) -> Result<Self> {
        let ring = Mutex::new(ring.share().map_err(candle_core::Error::wrap)?);
        Ok(self.over(q_len, kv_len, move |setup, dims| {
            let handle = lock(&ring).share()?;
            Plan::new(setup, dims, handle)
        }))
    }

    /// Adds a bias to the scores. −∞ masks its pair. Default: none.
    ///
    /// # Shapes
    /// `[batch|1, q_heads|1, q_len|1, kv_len|1]`, f32, or f64 if q is f64.
    #[must_use]
    pub fn bias(self, bias: impl Into<Option<Tensor>>) -> Self {
        Self { bias: bias.into(), ..self }
    }

    /// Adds attention sinks: scores without a value. Default: none.
    ///
    /// # Shapes
    /// `[q_heads|1, sinks]`, f32, or f64 if q is f64.
    #[must_use]
    pub fn sinks(self, sinks: impl Into<Option<Tensor>>) -> Self {
        Self { sinks: sinks.into(), ..self }
    }

    /// Sets the segment ids of queries, and of keys if they differ: a query attends to keys of its
    /// segment. Negative ids are padding.
    ///
    /// # Shapes
    /// `[batch, q_len]` and `[batch, kv_len]`, integers.
    ///
    /// # Errors
    /// Ids that are not integers, or do not fit 32 bits.
    pub fn segment_ids<'a>(self, q: &Tensor, kv: impl Into<Option<&'a Tensor>>) -> Result<Self> {
        let q_segment_ids = Some(ids("q_segment_ids", q)?);
        let kv_segment_ids = kv.into().map(|kv| ids("kv_segment_ids", kv)).transpose()?;
        Ok(self.batch(Batch { q_segment_ids, kv_segment_ids, ..Batch::default() }))
    }

    /// Sets segment ids, positions, packed lengths and a dense mask. Default: none.
    #[must_use]
    pub fn batch(self, batch: impl Into<Option<Batch>>) -> Self {
        Self { batch: batch.into().map(Arc::new), ..self }
    }

    /// Returns false if the attention is for forward passes only.
    pub(crate) fn has_backward(&self) -> bool {
        self.setup.ring_options().backward
    }

    /// Returns the plan for tensors of these shapes. Collective if it makes one.
    pub(crate) fn plan<T: annulus::Element>(&self, tensors: &Tensors<'_, T>) -> Result<SharedPlan> {
        let (batch, q_rows, q_heads, head_dim) = tensors.q.dim();
        let (_, kv_rows, kv_heads, value_dim) = tensors.v.dim();
        let (q_len, kv_len) = match self.ranks {
            Ranks::Local(_) => (q_rows, kv_rows),
            Ranks::One { q_len, kv_len, .. } => (q_len, kv_len),
        };
        let dims = Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim };
        let bias = tensors.bias.as_ref().map(|bias| match bias.dim() {
            (_, _, 1, _) if q_rows == 1 && q_len > 1 => {
                let want = "a bias of several rows, or several queries on this rank";
                Err(invalid("bias", "one row, which is that of a query or of all", want))
            }
            (batch, heads, rows, keys) if rows == q_rows => Ok([batch, heads, q_len, keys]),
            (batch, heads, rows, keys) => Ok([batch, heads, rows, keys]),
        });
        let sinks = tensors.softmax_aux.as_ref().map(|sinks| match sinks.dim() {
            (heads, count) if heads == q_heads => Ok(SinkShape::per_head(count)),
            (1, count) => Ok(SinkShape::shared(count)),
            got => Err(invalid("sinks", format!("{got:?}"), format!("[{q_heads} or 1, sinks]"))),
        });
        let key = (dims, T::DTYPE, bias.transpose()?, sinks.transpose()?);
        let mut plans = lock(&self.plans);
        if let Some((_, plan)) = plans.iter().find(|(made, _)| *made == key) {
            return Ok(Arc::clone(plan));
        }
        let made = self.make(&key).map_err(candle_core::Error::wrap)?;
        let plan = Arc::new(Mutex::new(BatchPlan { plan: made, batch: None }));
        if plans.len() == PLANS {
            plans.remove(0);
        }
        plans.push((key, Arc::clone(&plan)));
        Ok(plan)
    }

    fn make(&self, &(dims, dtype, bias, sinks): &Key) -> annulus::Result<AnyPlan> {
        let setup = self.setup.clone().map_attention(|attention| {
            let attention = attention.dtype(dtype);
            // without a tensor, a declaration of the caller's stays, and the pass refuses it
            let attention = if bias.is_some() { attention.bias(bias) } else { attention };
            if sinks.is_some() { attention.softmax_aux(sinks) } else { attention }
        });
        match &self.ranks {
            Ranks::Local(ranks) => Ok(AnyPlan::Ring(LocalRing::new(setup, dims, *ranks)?)),
            Ranks::One { plan, .. } => Ok(AnyPlan::Rank(plan(&setup, dims)?)),
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ranks = match self.ranks {
            Ranks::Local(ranks) => format!("{ranks} in this process"),
            Ranks::One { q_len, kv_len, .. } => format!("one of {q_len} queries, {kv_len} keys"),
        };
        f.debug_struct("Options")
            .field("setup", &self.setup)
            .field("ranks", &ranks)
            .field("bias", &self.bias)
            .field("sinks", &self.sinks)
            .field("batch", &self.batch)
            .finish_non_exhaustive()
    }
}

/// A plan, and the batch that it is adapted to.
pub(crate) struct BatchPlan {
    plan: AnyPlan,
    batch: Option<Arc<Batch>>,
}

enum AnyPlan {
    Ring(LocalRing),
    Rank(Plan),
}

impl BatchPlan {
    /// Adapts the plan to the batch of a call, unless it is that of the last call.
    fn update(&mut self, batch: Option<&Arc<Batch>>) -> annulus::Result<()> {
        if self.batch.as_ref().map(Arc::as_ptr) == batch.map(Arc::as_ptr) {
            return Ok(());
        }
        let none = Batch::default();
        let next = batch.map_or(&none, |batch| batch);
        match &mut self.plan {
            AnyPlan::Ring(ring) => ring.update(next)?,
            AnyPlan::Rank(plan) => plan.update(next)?,
        }
        self.batch = batch.cloned();
        Ok(())
    }

    /// Computes out and the softmax statistics.
    pub(crate) fn forward<T: annulus::Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        batch: Option<&Arc<Batch>>,
    ) -> annulus::Result<Forward<T>> {
        self.update(batch)?;
        match &mut self.plan {
            AnyPlan::Ring(ring) => ring.forward(tensors),
            AnyPlan::Rank(plan) => plan.forward(tensors),
        }
    }

    /// Computes the gradients into `gradients`.
    pub(crate) fn backward<T: annulus::Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        batch: Option<&Arc<Batch>>,
        forward: &ForwardView<'_, T>,
        dout: ArrayView4<'_, T>,
        gradients: BackwardViewMut<'_, T>,
    ) -> annulus::Result<()> {
        self.update(batch)?;
        match &mut self.plan {
            AnyPlan::Ring(ring) => {
                ring.backward_into(tensors, forward, dout, None, gradients).map(drop)
            }
            AnyPlan::Rank(plan) => {
                plan.backward_into(tensors, forward, dout, None, gradients).map(drop)
            }
        }
    }
}

/// Locks a mutex. A panic of another thread leaves plans usable, or poisoned by the library.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads segment ids.
fn ids(name: &'static str, ids: &Tensor) -> Result<Array2<i32>> {
    if !ids.dtype().is_int() {
        return Err(invalid(name, ids.dtype().as_str(), "integers"));
    }
    let wide = ids.to_dtype(candle_core::DType::I64)?;
    let read = Read::new(name, &wide);
    let wide = read.view::<i64, 2>()?;
    if let Some(id) = wide.iter().find(|&&id| i32::try_from(id).is_err()) {
        return Err(invalid(name, id, "ids of 32 bits"));
    }
    Ok(wide.mapv(|id| id as i32))
}
