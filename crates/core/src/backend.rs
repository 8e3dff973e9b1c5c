//! Interface of a backend, which computes the tiles of one rank on a device.
//!
//! A pass is a value, so that the compiler checks the order of calls:
//!
//! ```text
//! Backend ──workspace──▶ Workspace
//!
//! Workspace ──forward──▶ ForwardPass     local_kv, attend…, attend_last, finish
//! Workspace ─backward──▶ BackwardPass    local_kv, attend_kv…,
//!                                        local_queries, attend_queries…   (two-pass only)
//!                                        reduce…, finish
//! ```
//! The ring validates every argument before it calls a backend. A backend therefore returns only
//! errors of the device (out of memory, a lost device) and, when a plan is made, unsupported
//! features. It has no notion of ranks, only of blocks of rows. Calls return once their work is
//! enqueued.

use std::ops::Range;

use crate::{
    BackwardInputs, BackwardMode, Block, DType, Error, Gradients, Inputs, KeyLists, LeafSums,
    Outputs, RankShard, Result, RowSet, Space, Spec, TangentInputs, TangentOutputs, Tick, View,
    ViewMut,
};

/// Properties of a backend for one [`Spec`], which ranks compare when a plan is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Name of the backend in errors and on the command line.
    pub name: &'static str,
    /// Identifies the arithmetic that determines the results bit for bit. Ranks compare it only if
    /// their bits must be equal: in the reproducible order, and in the two-pass backward of an
    /// output that is not normalised, where one rank reproduces another's row maximum exactly.
    pub numerics_id: String,
    /// Type to which P and dS are rounded before their products, if it is narrower than the
    /// accumulator's and depends on the machine. Must be equal on all ranks.
    pub probs_dtype: Option<DType>,
    /// Rows of a KV tile. Blocks are divided at multiples of the largest tile of all ranks, so that
    /// no kernel computes a tile in two parts. In a space with parts ([`Space::HAS_PARTS`]) a
    /// multiple of 8, so that records of any length are divided at multiples of 8 bytes.
    pub kv_tile: u64,
    /// True if the backend folds and merges leaves in the reproducible order
    /// ([`RankShard::leaves`]), in a forward pass, in a backward pass in two passes over several
    /// ranks, and in one pass on one rank.
    pub reproducible: bool,
    /// True if the backend writes and reads the rounding residual of out
    /// ([`Outputs::out_residual`]).
    pub out_residual: bool,
    /// True if the backend computes second derivatives ([`Workspace::tangents`]).
    pub second_derivatives: bool,
    /// True if the backend computes biases of a table ([`Spec::bias_table`]) and their gradient.
    pub bias_table: bool,
    /// True if the backend writes [`Outputs::statistics`].
    pub statistics: bool,
}

/// Passes that a [`Workspace`] is allocated for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// The forward pass only.
    Forward,
    /// Forward and backward.
    Both,
}

/// Operation of [`BackwardPass::reduce`] on the target's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Overwrites them.
    Copy,
    /// Adds to them.
    Add,
}

/// Pairs `(into, from)` of ranges of record numbers, of equal lengths.
pub type RangePairs = [(Range<u64>, Range<u64>)];

/// Computes the tiles of one rank on one kind of device.
pub trait Backend: Send + 'static {
    /// Memory space of its blocks and tensors.
    type Space: Space;
    /// Workspace of a plan.
    type Workspace: Workspace<Space = Self::Space>;

    /// Checks that the backend supports `spec` with any shard, and returns its properties.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] naming the feature.
    fn capabilities(&self, spec: &Spec) -> Result<Capabilities>;

    /// Allocates a block of `bytes` bytes.
    fn allocate(&self, bytes: u64) -> Result<<Self::Space as Space>::Buffer>;

    /// Writes `bytes` of a block from host memory. `fill` writes them, once: in place if the host
    /// can access the block, else to memory from which they are copied, and no other byte is. If it
    /// fails, the bytes are unspecified.
    ///
    /// # Ordering
    /// After all work on the block that is enqueued, before the event that is returned.
    ///
    /// # Errors
    /// The error of `fill`. As [`Backend::allocate`]. [`crate::Error::Internal`] if the bytes are
    /// not in the block, or if the block has another owner that the device does not order.
    fn write_block(
        &self,
        into: &mut <Self::Space as Space>::Buffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<<Self::Space as Space>::Event>;

    /// Allocates the workspace of a plan.
    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<Self::Workspace>;
}

/// Expands, inside `impl Backend for Wrapper`, to the named methods of [`Backend`], each of which
/// calls that of `self.inner`.
///
/// # Examples
/// A backend under another name.
/// ```
/// use annulus_core::{Backend, Capabilities, Result, Spec};
///
/// struct Named<B> {
///     inner: B,
///     name: &'static str,
/// }
///
/// impl<B: Backend> Backend for Named<B> {
///     type Space = B::Space;
///     type Workspace = B::Workspace;
///
///     annulus_core::forward_backend! { allocate write_block workspace }
///
///     fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
///         Ok(Capabilities { name: self.name, ..self.inner.capabilities(spec)? })
///     }
/// }
/// ```
#[macro_export]
macro_rules! forward_backend {
    (@ capabilities) => {
        fn capabilities(&self, spec: &$crate::Spec) -> $crate::Result<$crate::Capabilities> {
            self.inner.capabilities(spec)
        }
    };
    (@ allocate) => {
        fn allocate(
            &self,
            bytes: u64,
        ) -> $crate::Result<<Self::Space as $crate::Space>::Buffer> {
            self.inner.allocate(bytes)
        }
    };
    (@ write_block) => {
        fn write_block(
            &self,
            into: &mut <Self::Space as $crate::Space>::Buffer,
            bytes: std::ops::Range<u64>,
            fill: &mut dyn FnMut(&mut [u8]) -> $crate::Result<()>,
        ) -> $crate::Result<<Self::Space as $crate::Space>::Event> {
            self.inner.write_block(into, bytes, fill)
        }
    };
    (@ workspace) => {
        fn workspace(
            &self,
            shard: &$crate::RankShard,
            passes: $crate::Passes,
        ) -> $crate::Result<Self::Workspace> {
            self.inner.workspace(shard, passes)
        }
    };
    ($($method:ident)*) => { $( $crate::forward_backend!(@ $method); )* };
}

/// Memory of a plan that stays on the device across the ring: accumulators, softmax statistics,
/// gradients in the accumulator's type, scratch.
pub trait Workspace: Send + 'static {
    /// Memory space of the backend.
    type Space: Space;
    /// A forward pass under way.
    type Forward<'p>: ForwardPass<Self::Space>
    where
        Self: 'p;
    /// A backward pass under way.
    type Backward<'p>: BackwardPass<Self::Space>
    where
        Self: 'p;

    /// Adapts the workspace to a new batch of the same spec. Reuses memory if possible.
    ///
    /// If another rank then rejects the batch, the ring calls this again with the old one.
    fn update(&mut self, shard: &RankShard) -> Result<()>;

    /// Refuses key lists that the workspace cannot compute; if `sends_queries`, queries are sent to
    /// other ranks, with their lists ([`RankShard::received_lists`]). Default: refuses those with a
    /// bias, and those of queries that are sent.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_lists(&self, lists: &KeyLists, sends_queries: bool) -> Result<()> {
        let by = "this backend: use cpu";
        match lists.bias() {
            Some(_) => Err(Error::unsupported("key_list_bias", by)),
            None if sends_queries => {
                let what = "key_lists in a two-pass backward over several ranks";
                Err(Error::unsupported(what, by))
            }
            None => Ok(()),
        }
    }

    /// Returns the gradient of the bias of the key lists that the last backward pass has computed,
    /// one number for each listed pair. Default: none.
    fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        None
    }

    /// Returns the bytes of memory that it keeps between passes, on the device or the host. Later
    /// passes of the same kind add nothing.
    fn bytes(&self) -> u64;

    /// Starts a forward pass: acc ← 0, m ← −∞, ℓ ← 0. Ticks while inputs are copied to a device;
    /// after a break the results of the pass are never read.
    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<View<'p, Self::Space>>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>>;

    /// Starts a backward pass: delta and the other row statistics ([`Spec::ROW_STATISTICS`]) from
    /// out, max, sum, dout and dlse; dq, dbias ← 0. Ticks as [`Workspace::forward`].
    ///
    /// # Errors
    /// [`crate::Error::Device`]; [`crate::Error::Internal`] of a workspace for
    /// [`Passes::Forward`].
    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<View<'p, Self::Space>>,
        mode: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>>;

    /// Starts a JVP or, with [`TangentInputs::dout`], a double backward. Ticks as
    /// [`Workspace::forward`]. `list_bias` is the direction of the bias of the key lists, one number
    /// for each listed pair; `None` is 0.
    ///
    /// The default serves backends without second derivatives
    /// ([`Capabilities::second_derivatives`]).
    ///
    /// # Errors
    /// [`Error::Internal`] by default; [`Error::Device`], [`Error::OutOfMemory`].
    fn tangents<'p>(
        &'p mut self,
        inputs: TangentInputs<View<'p, Self::Space>>,
        list_bias: Option<&[f64]>,
        tick: Tick<'_>,
    ) -> Result<Box<dyn TangentPass<Self::Space> + 'p>> {
        let _ = (inputs, list_bias, tick);
        Err(Error::internal("second derivatives of a backend that has none"))
    }
}

/// A forward pass: KV blocks are merged into the online softmax of every local query.
pub trait ForwardPass<S: Space> {
    /// Packs this rank's keys and values as records of [`Spec::kv_row_layout`], in local order.
    ///
    /// Other ranks read the records of the local keys `sent`. A pass that attends to the local
    /// block by its inputs ([`Block::first_local`]) may leave the other records unwritten.
    fn local_kv(&mut self, into: &mut S::Buffer, sent: &RowSet) -> Result<S::Event>;

    /// Merges one KV block into the online softmax of every query that attends to it.
    ///
    /// S = scale·QKᵀ, m' = max(m, rowmax S), acc ← acc·e^(m − m') + e^(S − m')·V,
    /// ℓ ← ℓ·e^(m − m') + rowsum e^(S − m'), m ← m'
    fn attend(&mut self, kv: &Block<'_, S>, tick: Tick<'_>) -> Result<()>;

    /// As [`ForwardPass::attend`], for the last block of the pass; by default the same.
    ///
    /// The pass may write the outputs of rows whose softmax is complete while their accumulators
    /// are in a near cache. [`ForwardPass::finish`] is called with the same outputs and writes
    /// those that are missing.
    fn attend_last(
        &mut self,
        kv: &Block<'_, S>,
        outputs: &mut Outputs<ViewMut<'_, S>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let _ = outputs;
        self.attend(kv, tick)
    }

    /// Merges the sinks, once, and writes the outputs. The work is O(rows · (dim + sinks)), during
    /// which the other ranks wait for the end of the call, so it ticks like the tiles.
    fn finish(self, outputs: &mut Outputs<ViewMut<'_, S>>, tick: Tick<'_>) -> Result<()>;
}

/// A backward pass. In one pass, dK and dV of a KV block are computed with dQ and travel with the
/// block; in two passes, the queries travel after the keys, and dK and dV never leave their rank.
pub trait BackwardPass<S: Space> {
    /// As [`ForwardPass::local_kv`].
    fn local_kv(&mut self, into: &mut S::Buffer, sent: &RowSet) -> Result<S::Event>;

    /// Packs this rank's queries as records of [`Spec::query_row_layout`], in local order, for a
    /// two-pass backward.
    fn local_queries(&mut self, into: &mut S::Buffer) -> Result<S::Event>;

    /// Accumulates dQ and dbias of one KV block. With `dkv`, also **writes** (does not add) the
    /// local queries' contribution to its dK and dV as records of [`Spec::gradient_row_layout`], in
    /// the block's order. `dkv` is `None` only in a two-pass backward, for blocks of other ranks.
    fn attend_kv(
        &mut self,
        kv: &Block<'_, S>,
        dkv: Option<&mut S::Buffer>,
        tick: Tick<'_>,
    ) -> Result<S::Event>;

    /// **Adds** the contribution of a query block to the local dK and dV in `dkv`, records of
    /// [`Spec::gradient_row_layout`] of all local keys, for a two-pass backward. In the
    /// reproducible order, where `dkv` is the same buffer in all calls of a pass, it holds the root
    /// of the tree after the last call, and is unspecified before.
    fn attend_queries(
        &mut self,
        queries: &Block<'_, S>,
        dkv: &mut S::Buffer,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// Copies or adds gradient records: `into[pair.0] ← from[pair.1]` or `+=`.
    fn reduce(
        &mut self,
        into: &mut S::Buffer,
        from: &S::Buffer,
        ready: &S::Event,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<S::Event>;

    /// Writes the terms of the sums over leaves of all ranks, in the reproducible order: dsinks,
    /// and dbias of a bias with one row and one column, or of a table. `dkv` is as in [`BackwardPass::finish`],
    /// before which this is called once, after the last block. Lists that there are no terms for
    /// are left empty.
    ///
    /// The default serves backends without leaves ([`Capabilities::reproducible`]).
    ///
    /// # Errors
    /// [`crate::Error::Internal`] by default; [`crate::Error::Device`].
    fn leaf_sums(&mut self, dkv: &S::Buffer, sums: &mut LeafSums, tick: Tick<'_>) -> Result<()> {
        let _ = (dkv, sums, tick);
        Err(crate::Error::internal("sums over leaves of a backend without leaves"))
    }

    /// Writes the gradients: dk and dv from `dkv` (records of [`Spec::gradient_row_layout`] of all
    /// local keys), dq, and this rank's parts of dbias and dsinks. In the reproducible order the
    /// ring writes what [`BackwardPass::leaf_sums`] returned the terms of. Ticks as
    /// [`ForwardPass::finish`].
    fn finish(
        self,
        dkv: &S::Buffer,
        gradients: &mut Gradients<ViewMut<'_, S>>,
        tick: Tick<'_>,
    ) -> Result<()>;
}

/// A JVP or a double backward: every quantity of the forward pass with its tangent and, of a double
/// backward, then every quantity of the backward pass with its tangent.
///
/// ```text
/// JVP               local_kv, attend…, write_tangents
/// double backward   local_kv, attend…, write_tangents,  local_kv, attend_kv…, reduce…, finish
/// ```
/// KV blocks are records of [`Spec::tangent_row_layout`].
pub trait TangentPass<S: Space> {
    /// Packs this rank's keys and values and their tangents, in local order.
    fn local_kv(&mut self, into: &mut S::Buffer) -> Result<S::Event>;

    /// Merges one KV block into the online softmax, and into its tangent, of every query that
    /// attends to it.
    ///
    /// As [`ForwardPass::attend`], and acc' ← acc'·e^(m − m') + e^(S − m')·(Ṡ∘V + V̇),
    /// μ ← μ·e^(m − m') + rowsum e^(S − m')·Ṡ
    fn attend(&mut self, kv: &Block<'_, S>, tick: Tick<'_>) -> Result<()>;

    /// Merges the sinks, once, and writes the tangents of out and lse. Ticks as
    /// [`ForwardPass::finish`].
    fn write_tangents(
        &mut self,
        outputs: &mut TangentOutputs<ViewMut<'_, S>>,
        tick: Tick<'_>,
    ) -> Result<()>;

    /// Accumulates the tangents of dQ and dbias of one KV block, and **writes** the local queries'
    /// contribution to the tangents of its dK and dV, as [`BackwardPass::attend_kv`]. Only of a
    /// double backward, like the methods below.
    fn attend_kv(
        &mut self,
        kv: &Block<'_, S>,
        dkv: &mut S::Buffer,
        tick: Tick<'_>,
    ) -> Result<S::Event>;

    /// As [`BackwardPass::reduce`].
    fn reduce(
        &mut self,
        into: &mut S::Buffer,
        from: &S::Buffer,
        ready: &S::Event,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<S::Event>;

    /// Writes the tangents of the gradients, as [`BackwardPass::finish`].
    fn finish(
        &mut self,
        dkv: &S::Buffer,
        gradients: &mut Gradients<ViewMut<'_, S>>,
        tick: Tick<'_>,
    ) -> Result<()>;
}
