//! Kernels over tiles: told who sees whom, part by part, and queued. `parts.rs` cuts the parts.

use annulus_core::{BiasOrder, DType, DropoutMask, Result, Spec, Tick, Visibility};

use crate::{
    Level,
    copy::Layout,
    device::Gpu,
    kernels::{BiasAxes, Storage, TILE, TileVariant, Variant, numbers::TileNumbers},
    launch::{Arena, Bound, Job, Stretch},
    parts::{Sides, first_element, union},
    sight::{Owner, Part, Sight},
};

/// A tensor of vectors that a kernel reads or writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand<'a> {
    /// `None` while only its size matters.
    pub(crate) buffer: Option<&'a wgpu::Buffer>,
    pub(crate) layout: Layout,
    /// Elements of a vector.
    pub(crate) dim: usize,
    /// Bytes of an element.
    pub(crate) bytes: u64,
    pub(crate) rows: RowsOf,
}

/// Whose rows, and which heads, an operand has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowsOf {
    /// Queries; the part's query heads.
    Queries,
    /// Keys; all key heads.
    Keys,
}

/// What a kernel works on. Operands in one list share a binding.
#[derive(Debug, Clone, Default)]
pub(crate) struct Operands<'a> {
    pub(crate) q: Option<Operand<'a>>,
    pub(crate) k: Option<Operand<'a>>,
    pub(crate) v: Option<Operand<'a>>,
    pub(crate) dout: Option<Operand<'a>>,
    pub(crate) statistics: Option<Operand<'a>>,
    /// acc, dq, or dk.
    pub(crate) sums: Option<Operand<'a>>,
    /// dv.
    pub(crate) more: Option<Operand<'a>>,
    pub(crate) bias: Option<Operand<'a>>,
    /// Of the bias.
    pub(crate) gradient: Option<Operand<'a>>,
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Forward,
    Queries,
    /// `travelling`: the queries are records. `add`: to what is there.
    Keys {
        travelling: bool,
        add: bool,
    },
    Bias(BiasAxes),
}

impl Kind {
    pub(crate) const fn owner(self) -> Owner {
        match self {
            Self::Forward | Self::Queries => Owner::Queries,
            Self::Keys { .. } => Owner::Keys,
            Self::Bias(axes) => match axes {
                BiasAxes::Keys => Owner::Keys,
                _ => Owner::Queries,
            },
        }
    }

    /// The kernel; those that do the same are one.
    fn variant(self, tile: TileVariant) -> Variant {
        // only forward compares and sums up rows
        let alike = TileVariant { level: Level::Plain, ..tile };
        match self {
            Self::Forward => Variant::Forward(tile),
            Self::Queries => Variant::BackwardQueries(alike),
            Self::Keys { travelling, .. } => Variant::BackwardKeys(alike, travelling && tile.storage != Storage::F32),
            Self::Bias(axes) => Variant::BackwardBias(TileVariant { matrices: None, ..alike }, axes),
        }
    }
}

/// Places within bindings.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bases {
    q: u32,
    k: u32,
    v: u32,
    dout: u32,
    statistics: u32,
    sums: u32,
    more: u32,
    bias: u32,
    gradient: u32,
}

/// One binding: operands in the same buffer, and where their places go.
pub(crate) type Group<'a> = (Vec<Operand<'a>>, Vec<fn(&mut Bases) -> &mut u32>);

impl<'a> Operands<'a> {
    /// The bindings of a kernel after its lists, in order; an empty one is bound to nothing.
    pub(crate) fn groups(&self, kind: Kind) -> Vec<Group<'a>> {
        fn one<'a>(operand: &Option<Operand<'a>>, base: fn(&mut Bases) -> &mut u32) -> Group<'a> {
            operand.map_or_else(|| (Vec::new(), Vec::new()), |operand| (vec![operand], vec![base]))
        }
        fn pair<'a>((mut first, mut bases): Group<'a>, (second, more): Group<'a>) -> Group<'a> {
            first.extend(second);
            bases.extend(more);
            (first, bases)
        }
        let q = one(&self.q, |bases| &mut bases.q);
        let (k, v) = (one(&self.k, |bases| &mut bases.k), one(&self.v, |bases| &mut bases.v));
        let bias = one(&self.bias, |bases| &mut bases.bias);
        let sums = one(&self.sums, |bases| &mut bases.sums);
        let statistics = one(&self.statistics, |bases| &mut bases.statistics);
        let dout = one(&self.dout, |bases| &mut bases.dout);
        match kind {
            Kind::Forward => vec![q, pair(k, v), bias, sums, statistics],
            Kind::Queries => vec![q, pair(k, v), bias, sums, statistics, dout],
            Kind::Keys { .. } => vec![q, k, v, bias, pair(sums, one(&self.more, |bases| &mut bases.more)), statistics, dout],
            Kind::Bias(_) => vec![q, pair(k, v), bias, one(&self.gradient, |bases| &mut bases.gradient), statistics, dout],
        }
    }
}

/// What all parts of a call share.
pub(crate) struct Call<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) spec: &'a Spec,
    pub(crate) tile: TileVariant,
    pub(crate) kind: Kind,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) operands: Operands<'a>,
}

impl Call<'_> {
    /// Queues the kernel over all pairs that see each other.
    pub(crate) fn run(&self, arena: &mut Arena, sight: &mut Sight, tick: Tick<'_>) -> Result<()> {
        let function = self.spec.bias_function.is_some();
        let sides = Sides {
            queries: self.visibility.queries.len(),
            keys: self.visibility.keys.len(),
            per_batch: self.visibility.per_batch() || function,
            per_head: self.visibility.per_head() || function,
        };
        let keys = sides.keys;
        let parts = self.operands.cut(self.gpu, self.spec, self.kind, sides)?;
        // dk and dv of keys that no query sees are written too
        let writes_anyway = matches!(self.kind, Kind::Keys { add: false, .. });
        if parts.is_empty() && writes_anyway && keys > 0 {
            return self.write_zeros(arena);
        }
        for part in parts {
            if tick().is_break() {
                return Ok(());
            }
            sight.look(self.spec, &self.visibility, &part, self.kind.owner())?;
            // what an earlier part wrote is added to
            if sight.is_empty && !(writes_anyway && self.begins_key_heads(&part)) {
                continue;
            }
            let add = match self.kind {
                Kind::Keys { add, .. } => add || !self.begins_key_heads(&part),
                _ => false,
            };
            let mut job = Job::new(self.gpu, arena);
            self.launch(&mut job, sight, &part, add)?;
            job.submit()?;
        }
        Ok(())
    }

    /// Whether the part is the first to write its key heads.
    const fn begins_key_heads(&self, part: &Part) -> bool {
        part.queries.0 == 0 && part.heads.0.is_multiple_of(self.spec.dims.group())
    }

    /// There are no queries: gradients are 0.
    fn write_zeros(&self, arena: &mut Arena) -> Result<()> {
        let mut job = Job::new(self.gpu, arena);
        self.operands.sums.and_then(|sums| sums.buffer).into_iter().for_each(|buffer| job.clear(buffer));
        job.submit()
    }

    fn launch(&self, job: &mut Job<'_>, sight: &Sight, part: &Part, add: bool) -> Result<()> {
        let mut bases = Bases::default();
        let mut bindings = vec![job.data(&sight.words)];
        for (operands, places) in self.operands.groups(self.kind) {
            let Some((first, buffer)) = operands.first().and_then(|first| first.buffer.map(|buffer| (first, buffer))) else {
                bindings.push(Bound::Nothing);
                continue;
            };
            let (start, end) = union(&operands, part, self.spec);
            let (bound, base) = Stretch { first: start, count: end - start, bytes: first.bytes }.bind(self.gpu, buffer)?;
            bindings.push(bound);
            for (operand, place) in operands.iter().zip(places) {
                *place(&mut bases) = base + (first_element(operand, part) - start) as u32;
            }
        }
        let owned = match self.kind.owner() {
            Owner::Queries => part.queries.1,
            Owner::Keys => part.keys.1,
        };
        let tiles = owned.div_ceil(TILE) as u64;
        let dims = &self.spec.dims;
        let group = dims.group();
        let key_heads = (part.heads.0 / group, (part.heads.0 + part.heads.1).div_ceil(group) - part.heads.0 / group);
        let one_for_all = |axis: usize, count: usize| if self.spec.bias.is_some_and(|shape| shape[axis] == 1) { 1 } else { count as u64 };
        let (bias_batches, bias_heads) = (one_for_all(0, part.batches.1), one_for_all(1, part.heads.1));
        let groups = tiles
            * match self.kind {
                Kind::Forward | Kind::Queries => (part.batches.1 * part.heads.1) as u64,
                Kind::Keys { .. } => (part.batches.1 * key_heads.1) as u64,
                Kind::Bias(_) => bias_batches * bias_heads,
            };
        let shape = Shape { tiles: tiles as u32, groups: groups as u32, key_heads, bias_heads: bias_heads as u32, add };
        job.launch(self.kind.variant(self.tile), groups, bindings, |grid_width| self.numbers(sight, part, &bases, &shape, grid_width))
    }

    fn numbers(&self, sight: &Sight, part: &Part, bases: &Bases, shape: &Shape, grid_width: u32) -> TileNumbers {
        let (spec, dims) = (self.spec, &self.spec.dims);
        let layout = |operand: &Option<Operand<'_>>| operand.map_or_else(Layout::default, |operand| operand.layout);
        let operands = &self.operands;
        let [q, k, v, dout, statistics, sums, more, bias, gradient] = [
            &operands.q,
            &operands.k,
            &operands.v,
            &operands.dout,
            &operands.statistics,
            &operands.sums,
            &operands.more,
            &operands.bias,
            &operands.gradient,
        ]
        .map(layout);
        let dropout = spec.dropout.map(DropoutMask::new);
        TileNumbers {
            batch_first: part.batches.0 as u32,
            batches: part.batches.1 as u32,
            head_first: part.heads.0 as u32,
            heads: part.heads.1 as u32,
            key_head_first: shape.key_heads.0 as u32,
            key_heads: shape.key_heads.1 as u32,
            heads_a_key: dims.group() as u32,
            all_heads: dims.q_heads as u32,
            queries: part.queries.1 as u32,
            keys: part.keys.1 as u32,
            head_dim: dims.head_dim as u32,
            value_dim: dims.value_dim as u32,
            tiles: shape.tiles,
            groups: shape.groups,
            grid_width,
            lists: 0,
            runs: sight.runs,
            bits: sight.bits,
            query_rows: sight.query_rows,
            key_rows: sight.key_rows,
            function_at: sight.function_at,
            plane_batch: sight.plane_batch,
            plane_head: sight.plane_head,
            q_base: bases.q,
            q_row: q.row as u32,
            q_batch: q.batch as u32,
            q_head: q.head as u32,
            k_base: bases.k,
            k_row: k.row as u32,
            k_batch: k.batch as u32,
            k_head: k.head as u32,
            v_base: bases.v,
            v_row: v.row as u32,
            v_batch: v.batch as u32,
            v_head: v.head as u32,
            dout_base: bases.dout,
            dout_row: dout.row as u32,
            dout_batch: dout.batch as u32,
            dout_head: dout.head as u32,
            statistics_base: bases.statistics,
            statistics_row: statistics.row as u32,
            statistics_batch: statistics.batch as u32,
            statistics_head: statistics.head as u32,
            sums_base: bases.sums,
            sums_row: sums.row as u32,
            sums_batch: sums.batch as u32,
            sums_head: sums.head as u32,
            more_base: bases.more,
            more_batch: more.batch as u32,
            more_head: more.head as u32,
            bias_base: bases.bias,
            bias_row: bias.row as u32,
            bias_batch: bias.batch as u32,
            bias_head: bias.head as u32,
            bias_keys: spec.bias.map_or(1, |shape| shape[3]) as u32,
            bias_heads: shape.bias_heads,
            gradient_base: bases.gradient,
            gradient_row: gradient.row as u32,
            gradient_batch: gradient.batch as u32,
            gradient_head: gradient.head as u32,
            has_bias: u32::from(spec.bias.is_some()),
            bias_first: u32::from(spec.bias_order == BiasOrder::BeforeSoftCap),
            normalize: u32::from(spec.normalize),
            logits_dtype: match spec.logits_dtype {
                DType::F64 | DType::F32 => 0,
                DType::Bf16 => 1,
                DType::F16 => 2,
            },
            threshold: dropout.map_or(0, |mask| mask.threshold()),
            key_low: dropout.map_or(0, |mask| mask.key()[0]),
            key_high: dropout.map_or(0, |mask| mask.key()[1]),
            add: u32::from(shape.add),
            keep_scale: dropout.map_or(1.0, |mask| mask.keep_scale() as f32),
            scale: spec.scale as f32,
            cap: spec.soft_cap.map_or(0.0, |cap| cap as f32),
        }
    }
}

/// How the workgroups of one launch are dealt out.
struct Shape {
    tiles: u32,
    groups: u32,
    key_heads: (usize, usize),
    bias_heads: u32,
    add: bool,
}
