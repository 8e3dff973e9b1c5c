//! Memory of a rank under a strategy: message buffers, and tensors of the heads of a member.

use super::{ExchangeFields, GroupLayout, HeadGrid, exchange::backward_mode};
use crate::{BackwardMode, Dims, RowLayout, Side, Spec};

/// Buffers of blocks in a ring: the own block, two in flight on a direct route, and the parts of the
/// last one.
const RING_BLOCKS: u128 = 4;
/// Buffers of gradients in a one-pass backward: three partial sums, the tail of the own block, the
/// final gradients and the sum.
const RING_GRADIENTS: u128 = 6;
/// Message buffers of an exchange: two to send and two to receive.
const EXCHANGE_BUFFERS: u128 = 4;

/// Returns an upper bound of the bytes that a rank keeps between passes, besides the memory of its
/// backend. Exact for the exchange; blocks of a ring count as the largest shard.
pub(super) fn most_bytes(
    spec: &Spec,
    grid: &HeadGrid,
    layout: &GroupLayout,
    backward: bool,
) -> u128 {
    let Dims { q_len, kv_len, .. } = spec.dims;
    let groups = grid.groups();
    let most = |side, len| {
        let rows = (0..groups).map(|group| layout.of_groups.shard(side, len, group, groups).len());
        rows.max().unwrap_or(0)
    };
    let rows = [most(Side::Q, q_len), most(Side::Kv, kv_len)];
    let ring = ring_bytes(&spec.of_heads(grid, 0), groups, rows, backward);
    if grid.members() == 1 {
        return ring;
    }
    let ranks = groups * grid.members();
    let of_rank = |index| {
        let rows = |side, len| layout.of_ranks.shard(side, len, index, ranks).len();
        [rows(Side::Q, q_len), rows(Side::Kv, kv_len)]
    };
    let of_ranks: Vec<[u64; 2]> = (0..ranks).map(of_rank).collect();
    let forward = ExchangeFields::of_forward(spec);
    let of_backward = ExchangeFields::of_backward(spec);
    let message = forward.most_bytes(grid, &of_ranks);
    let mut tensors = forward.tensor_bytes(grid, rows);
    if !backward {
        return ring + tensors + EXCHANGE_BUFFERS * message;
    }
    let message = message.max(of_backward.most_bytes(grid, &of_ranks));
    // dout, dlse and the gradients; the other inputs are those and results of the forward pass
    let further = ExchangeFields {
        inputs: forward.outputs[..2].to_vec(),
        outputs: of_backward.outputs.clone(),
    };
    tensors += further.tensor_bytes(grid, rows);
    if grid.replicas() > 1 {
        let own = of_ranks.iter().map(|rows| rows[1]).max().unwrap_or(0);
        tensors += u128::from(own) * u128::from(spec.gradient_row_layout().bytes());
    }
    ring + tensors + EXCHANGE_BUFFERS * message
}

/// Returns an upper bound of the bytes of the message buffers of a ring.
fn ring_bytes(spec: &Spec, groups: usize, [q, kv]: [u64; 2], backward: bool) -> u128 {
    let bytes = |rows: u64, row: RowLayout| u128::from(rows) * u128::from(row.bytes());
    let block = bytes(kv, spec.kv_row_layout());
    let gradient = bytes(kv, spec.gradient_row_layout());
    let is_two_pass = backward_mode(spec) == BackwardMode::TwoPass;
    let query_row = match spec.leaf_rows {
        Some(_) => spec.whole_query_row_layout(None),
        None => spec.query_row_layout(),
    };
    let blocks = if groups > 1 { RING_BLOCKS } else { 1 };
    let of_backward = match (backward, is_two_pass) {
        (false, _) => 0,
        (true, true) if groups > 1 => gradient + blocks * bytes(q, query_row),
        (true, false) if groups > 1 => RING_GRADIENTS * gradient,
        (true, _) => gradient,
    };
    blocks * block + of_backward
}
