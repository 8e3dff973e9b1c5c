//! The first seam: what a device does with one block.
//!
//! Core has validated every argument before a backend sees it; a backend reports only what a caller could not foresee (out of memory,
//! device lost) and, at plan time, what it cannot do. A backend never knows of ranks: it sees blocks of rows.

use std::{ops::ControlFlow, ops::Range, sync::Arc};

use crate::{DenseMask, Result, Rows, Space, Spec, dtype::DType};

/// Called between tiles, on the thread that called the backend. It lets a transport without a progress thread move data; the answer
/// [`ControlFlow::Break`] asks the kernel to stop as soon as it can (a peer has failed), after which its results are never read.
pub type Tick<'a> = &'a mut dyn FnMut() -> ControlFlow<()>;

/// What a backend must know of one rank's share, fixed at (re-)plan time.
#[derive(Debug, Clone)]
pub struct Local {
    /// What is computed.
    pub spec: Arc<Spec>,
    /// The query rows of this rank, in local order.
    pub queries: Arc<Rows>,
    /// The key rows of this rank, in local order.
    pub keys: Arc<Rows>,
    /// Dense mask `[b|1, heads|1, local q rows, all kv rows]`, if there is one.
    pub attention_mask: Option<Arc<DenseMask>>,
    /// The most rows that any arriving block of keys has (this rank's own included).
    pub most_block_rows: u64,
    /// The most rows that any arriving block of queries has (two-pass backward; this rank's own included).
    pub most_query_rows: u64,
}

/// Tensors of one rank that both passes read. Shapes are local: q_len and kv_len are the rows that this rank holds.
pub struct Inputs<'a, S: Space> {
    /// `[b, local q_len, q_heads, d]`.
    pub q: S::View<'a>,
    /// `[b, local kv_len, kv_heads, d]`.
    pub k: S::View<'a>,
    /// `[b, local kv_len, kv_heads, dv]`.
    pub v: S::View<'a>,
    /// `[b|1, q_heads|1, local q_len|1, global kv_len|1]`, in the accumulator's type.
    pub bias: Option<S::View<'a>>,
    /// `[q_heads|1, sinks, 1, 1]`, in the accumulator's type.
    pub sinks: Option<S::View<'a>>,
}

/// What forward writes.
pub struct Outputs<'a, S: Space> {
    /// `[b, local q_len, q_heads, dv]`, in the inputs' type.
    pub out: S::ViewMut<'a>,
    /// `[b, q_heads, local q_len, 1]`, in the accumulator's type, natural logarithm; −∞ where a row sees nothing.
    pub lse: S::ViewMut<'a>,
    /// Largest logit a row, shaped as lse; only and always where the output is not normalised.
    pub max: Option<S::ViewMut<'a>>,
    /// Σ e^{s − max} a row, shaped as lse; only and always where the output is not normalised.
    pub sum: Option<S::ViewMut<'a>>,
    /// How many keys and sinks share the largest logit, shaped as lse; only and always where the output is not normalised.
    pub ties: Option<S::ViewMut<'a>>,
}

/// What forward left and what the caller differentiates by: the inputs of backward besides [`Inputs`].
pub struct Saved<'a, S: Space> {
    /// As forward wrote it.
    pub out: S::View<'a>,
    /// As forward wrote it.
    pub lse: S::View<'a>,
    /// As forward wrote it (unnormalised only).
    pub max: Option<S::View<'a>>,
    /// As forward wrote it (unnormalised only).
    pub ties: Option<S::View<'a>>,
    /// ∂L/∂out, shaped and typed as out.
    pub dout: S::View<'a>,
    /// ∂L/∂lse, shaped and typed as lse; absent = 0. Ignored for rows that see nothing and have no sinks.
    pub dlse: Option<S::View<'a>>,
}

/// What backward writes.
pub struct Gradients<'a, S: Space> {
    /// Shaped and typed as q.
    pub dq: S::ViewMut<'a>,
    /// Shaped and typed as k.
    pub dk: S::ViewMut<'a>,
    /// Shaped and typed as v.
    pub dv: S::ViewMut<'a>,
    /// This rank's part of ∂L/∂bias, shaped and typed as its bias; present if and only if there is a bias.
    pub dbias: Option<S::ViewMut<'a>>,
    /// This rank's part of ∂L/∂sinks, shaped and typed as the sinks; present if and only if there are sinks.
    pub dsinks: Option<S::ViewMut<'a>>,
}

/// One block of rows in wire order (records of [`Spec::kv_record`] or [`Spec::query_record`]).
pub struct Block<'a, S: Space> {
    /// At least `rows.len()` records.
    pub buffer: &'a S::Buffer,
    /// After this the buffer may be read.
    pub ready: &'a S::Event,
    /// What the mask must know of each record's row, in the same order.
    pub rows: &'a Rows,
}

/// The tiles of one kind of device. One `Backend` serves one rank; a `Workspace` belongs to one plan.
///
/// The order of calls in a forward pass is `begin`, `attend`*, `finish`; in a one-pass backward `begin_backward`, then for each block
/// `attend_queries` and `attend_keys` (in that order), then `finish_backward`; in a two-pass backward all `attend_queries`, then `pack_queries`, then all
/// `attend_keys_home`, then `finish_backward`. Methods return after work is enqueued.
pub trait Backend: Send {
    /// Where its blocks live.
    type Space: Space;
    /// Everything that stays on the device across the ring: running softmax, gradients in the accumulator's type, scratch.
    type Workspace: Send;

    /// Its name in errors and on the command line.
    fn name(&self) -> &'static str;

    /// What the bits of its logits depend on. Ranks must have it alike only where one rank must find another's largest logit to the bit: in the
    /// two-pass backward of an output that is not normalised.
    fn arithmetic(&self) -> String {
        self.name().to_owned()
    }

    /// The type that weights and gradients of logits are rounded to before they are multiplied, where that is a choice of this machine and not of
    /// the backend: ranks must have it alike.
    fn narrowing(&self, spec: &Spec) -> Option<DType> {
        let _ = spec;
        None
    }

    /// Whether it can do `spec` at all, for any share of it.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] naming the feature.
    fn supports(&self, spec: &Spec) -> Result<()>;

    /// `bytes` of plan-owned memory.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::Device`].
    fn allocate(&self, bytes: u64) -> Result<<Self::Space as Space>::Buffer>;

    /// A workspace for this share. With `backward`, one that can also do the backward pass.
    ///
    /// # Errors
    /// As [`Backend::allocate`].
    fn workspace(&self, local: &Local, backward: bool) -> Result<Self::Workspace>;

    /// Fits a workspace to a new batch of the same spec; keeps what memory it can.
    ///
    /// # Errors
    /// As [`Backend::allocate`].
    fn update(&self, workspace: &mut Self::Workspace, local: &Local) -> Result<()>;

    /// Writes this rank's keys and values as records of [`Spec::kv_record`], in local order.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn pack(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        into: &mut <Self::Space as Space>::Buffer,
    ) -> Result<<Self::Space as Space>::Event>;

    /// As [`Backend::pack`], where no other rank will ever read the records: a backend that can read `inputs` where they are may leave `into` as it
    /// is, if its calls that attend to this block, until it is packed again, read them there.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn pack_alone(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        into: &mut <Self::Space as Space>::Buffer,
    ) -> Result<<Self::Space as Space>::Event> {
        self.pack(workspace, inputs, into)
    }

    /// Starts a forward pass: every row has seen nothing.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn begin(&self, workspace: &mut Self::Workspace, inputs: &Inputs<'_, Self::Space>) -> Result<()>;

    /// Folds one block of keys and values into the running softmax of every query row that sees some of it.
    ///
    /// acc ← acc·e^{m−m'} + Σ_j e^{s_ij−m'}·v_j, sum likewise, m' = max(m, max_j s_ij)
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn attend(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        block: &Block<'_, Self::Space>,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// Folds in the sinks, once, and writes the outputs.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn finish(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        outputs: &mut Outputs<'_, Self::Space>,
    ) -> Result<()>;

    /// Starts a backward pass: row statistics ([`Spec::ROW_STATISTICS`]) from out, lse, dout and dlse; dq, dk, dv, dbias ← 0.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn begin_backward(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        saved: &Saved<'_, Self::Space>,
    ) -> Result<()>;

    /// What this block of keys and values gives to this rank's dq (and dbias).
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn attend_queries(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        saved: &Saved<'_, Self::Space>,
        block: &Block<'_, Self::Space>,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// What this rank's queries give to the dk, dv of this block, **written** (not added) into `fresh` as records of
    /// [`Spec::gradient_record`] in the block's order.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn attend_keys(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        saved: &Saved<'_, Self::Space>,
        block: &Block<'_, Self::Space>,
        fresh: &mut <Self::Space as Space>::Buffer,
        tick: Tick<'_>,
    ) -> Result<<Self::Space as Space>::Event>;

    /// [`Backend::attend_queries`] and [`Backend::attend_keys`] of one block, for backends that make the logits of both at once. A backward pass
    /// calls either this for all its blocks, or the other two.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn attend_backward(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        saved: &Saved<'_, Self::Space>,
        block: &Block<'_, Self::Space>,
        fresh: &mut <Self::Space as Space>::Buffer,
        tick: Tick<'_>,
    ) -> Result<<Self::Space as Space>::Event> {
        self.attend_queries(workspace, inputs, saved, block, &mut *tick)?;
        self.attend_keys(workspace, inputs, saved, block, fresh, tick)
    }

    /// Writes this rank's queries as records of [`Spec::query_record`], in local order.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn pack_queries(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        saved: &Saved<'_, Self::Space>,
        into: &mut <Self::Space as Space>::Buffer,
    ) -> Result<<Self::Space as Space>::Event>;

    /// What a block of travelling queries (records of [`Spec::query_record`]) gives to this rank's own dk and dv, **added** to the
    /// records `home` of [`Spec::gradient_record`] (local order, all of this rank's key rows).
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn attend_keys_home(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        queries: &Block<'_, Self::Space>,
        home: &mut <Self::Space as Space>::Buffer,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// `into[place] ← from[place]` (`add` false) or `into[place] += from[place]` (`add` true) for gradient records: `places` pairs
    /// ranges of record numbers of the same length, `(into, from)`.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn combine(
        &self,
        workspace: &mut Self::Workspace,
        into: &mut <Self::Space as Space>::Buffer,
        from: &<Self::Space as Space>::Buffer,
        ready: &<Self::Space as Space>::Event,
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<<Self::Space as Space>::Event>;

    /// Writes the gradients: dq from the workspace, dk and dv from `home` (records of [`Spec::gradient_record`], local order, all
    /// of this rank's key rows), dbias, and this rank's part of dsinks.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn finish_backward(
        &self,
        workspace: &mut Self::Workspace,
        inputs: &Inputs<'_, Self::Space>,
        home: &<Self::Space as Space>::Buffer,
        gradients: &mut Gradients<'_, Self::Space>,
    ) -> Result<()>;
}
