//! Planning of one rank: its arguments, its layout, and the memory of its exchange.

use annulus_core::{
    Backend, Capabilities, Error, ExchangeFields, GroupLayout, HeadField, HeadGrid, MessageBalance,
    Placement, Result, Spec, Strategy,
};

use super::{
    exchange::{Exchange, Messages},
    member_gradients,
    passes::later_tags,
    shard_tensors::ShardTensors,
};
use crate::ring::{PassKind, RingOptions, check::has_residual, planning::check_plan};

/// Part of a plan that a rank derives and allocates alone, before ranks agree that all succeeded.
pub(super) struct Prepared {
    pub(super) layout: GroupLayout,
    pub(super) ring_index: usize,
    pub(super) forward: ExchangeFields,
    pub(super) backward: ExchangeFields,
    pub(super) exchange: Exchange,
    pub(super) tensors: ShardTensors,
}

impl Prepared {
    /// Chooses the layout and allocates the tensors and messages of this rank.
    pub(super) fn new(
        spec: &Spec,
        grid: HeadGrid,
        options: &RingOptions,
        rank: usize,
        placement: Option<&Placement>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let first = grid.spec_of(spec, 0);
        let layout = GroupLayout::choose(&first, &grid, options.layout.as_ref(), placement, tick);
        let ring_index = layout.order.ring_index(rank);
        let forward = ExchangeFields::of_forward(spec, &grid);
        let backward = ExchangeFields::of_backward(spec, &grid);
        let passes = [Some(&forward), options.backward.then_some(&backward)];
        let exchange = Exchange::new(spec, grid, &layout, ring_index, passes)?;
        let tensors = ShardTensors::new(spec, &exchange, options.backward)?;
        Ok(Self { layout, ring_index, forward, backward, exchange, tensors })
    }

    /// Returns the balance of the messages that `rank` exchanges in the passes of a plan.
    pub(super) fn message_balance(
        &self,
        spec: &Spec,
        options: &RingOptions,
        rank: usize,
    ) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(rank);
        let backward = options.backward.then_some((PassKind::Backward, &self.backward));
        let passes = std::iter::once((PassKind::Forward, &self.forward)).chain(backward);
        let residual = residual(spec, &self.exchange.grid, &self.forward);
        for (pass, (kind, fields)) in passes.enumerate() {
            let [results_tag, residual_tag] = later_tags(kind);
            let residual = residual.as_slice();
            let of_residual = match kind {
                PassKind::Forward => self.exchange.output_bytes(residual),
                PassKind::Backward => self.exchange.input_bytes(residual),
            };
            for (tag, bytes) in [
                (0, self.exchange.input_bytes(&fields.inputs)),
                (results_tag, self.exchange.output_bytes(&fields.outputs)),
                (residual_tag, of_residual),
            ] {
                let Exchange { ranks, member, .. } = &self.exchange;
                let messages = Messages { ranks, member: *member, bytes, tag, step: 0 };
                messages.add_to(&mut balance, pass as u64);
            }
        }
        member_gradients::add_sums_to(&mut balance, spec, options, &self.layout.order, rank);
        balance
    }
}

/// Returns the rounding residual of out if it is exchanged: a tensor like out, of 16-bit types and
/// one key column.
pub(super) fn residual(
    spec: &Spec,
    grid: &HeadGrid,
    forward: &ExchangeFields,
) -> Option<HeadField> {
    let out = forward.outputs.first().copied();
    out.filter(|_| grid.columns() == 1 && has_residual(spec.dtype))
}

/// Checks a plan before any rank waits for another.
pub(super) fn check<B: Backend>(
    backend: &B,
    spec: Spec,
    options: &RingOptions,
    ranks: usize,
    strategy: Strategy,
) -> Result<(Spec, HeadGrid, Capabilities)> {
    spec.validate()?;
    spec.check_whole("the exchange of heads and queries")?;
    let grid = HeadGrid::of(&spec.dims, ranks, strategy)?;
    let grid = grid.ok_or_else(|| Error::invalid("strategy", strategy, "a strategy by name"))?;
    grid.check(&spec, options.backward)?;
    if let Some(layout) = &options.layout {
        layout.validate(spec.dims.q_len, spec.dims.kv_len, ranks)?;
        if let Some(rows) = spec.leaf_rows {
            layout.validate_leaves(spec.dims.q_len, spec.dims.kv_len, rows)?;
        }
    }
    let inner = RingOptions { layout: None, ..options.clone() };
    let (_, capabilities) = check_plan(backend, grid.spec_of(&spec, 0), &inner, grid.groups())?;
    Ok((spec, grid, capabilities))
}
