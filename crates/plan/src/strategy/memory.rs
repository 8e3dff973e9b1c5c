//! Memory of a rank under a strategy: message buffers, and tensors of the heads of a member.

use super::{ExchangeFields, GroupLayout, HeadGrid, exchange::backward_mode};
use crate::{GRADIENT_BUFFERS, Layout};
use annulus_core::{BackwardMode, Dims, RowLayout, Side, Spec};

/// Buffers of blocks in a ring, besides those of the receives that are posted: the own block, the
/// current one on a direct route, and the parts of the last one.
const RING_BLOCKS: u128 = 3;
/// Buffers of gradients in a one-pass backward, besides a partial sum and final gradients for each
/// step that receives are posted ahead: two partial sums, the tail of the own block and the sum.
const RING_GRADIENTS: u128 = 4;
/// Message buffers of an exchange: two to send and two to receive.
const EXCHANGE_BUFFERS: u128 = 4;

/// Returns an upper bound of the bytes that a rank keeps between passes, besides the memory of its
/// backend. Exact for the exchange; blocks of a ring count as the largest shard.
pub(super) fn most_bytes(
    spec: &Spec,
    grid: &HeadGrid,
    layout: &GroupLayout,
    receive_ahead: usize,
    backward: bool,
) -> u128 {
    let Dims { q_len, kv_len, .. } = spec.dims;
    let groups = grid.groups();
    let most = |side, len| {
        let of_column =
            |of: &Layout| (0..groups).map(|group| of.shard(side, len, group, groups).len()).max();
        layout.of_columns.iter().filter_map(of_column).max().unwrap_or(0)
    };
    let rows = [most(Side::Q, q_len), most(Side::Kv, kv_len)];
    let ring = ring_bytes(&grid.spec_of(spec, 0), groups, rows, receive_ahead, backward);
    if grid.members() == 1 {
        return ring;
    }
    let ranks = groups * grid.members();
    let of_rank = |index| {
        let rows = |side, len| layout.of_ranks.shard(side, len, index, ranks).len();
        [rows(Side::Q, q_len), rows(Side::Kv, kv_len)]
    };
    let of_ranks: Vec<[u64; 2]> = (0..ranks).map(of_rank).collect();
    let forward = ExchangeFields::of_forward(spec, grid);
    let of_backward = ExchangeFields::of_backward(spec, grid);
    let message = forward.most_bytes(grid, &of_ranks);
    let mut tensors = forward.tensor_bytes(grid, rows);
    if grid.columns() > 1 {
        let own = of_ranks.iter().map(|rows| rows[0]).max().unwrap_or(0);
        tensors += merge_bytes(spec, own, backward);
        // lse of the own heads is computed, and not exchanged
        let lines = [spec.dims.batch, grid.q_heads(0).len(), spec.dtype.accumulator().bytes()];
        tensors += lines.iter().fold(u128::from(rows[0]), |bytes, &len| bytes * len as u128);
    }
    if !backward {
        return ring + tensors + EXCHANGE_BUFFERS * message;
    }
    let message = message.max(of_backward.most_bytes(grid, &of_ranks));
    // dout, dlse and the gradients; the other inputs are those and results of the forward pass
    let ties = usize::from(!spec.normalize);
    let dout_and_dlse = of_backward.inputs.iter().rev().skip(ties).take(2);
    let further = ExchangeFields {
        inputs: dout_and_dlse.copied().collect(),
        outputs: of_backward.outputs.clone(),
    };
    tensors += further.tensor_bytes(grid, rows);
    if grid.replicas() > 1 {
        let own = of_ranks.iter().map(|rows| rows[1]).max().unwrap_or(0);
        tensors += u128::from(own) * u128::from(spec.gradient_row_layout().bytes());
    }
    ring + tensors + EXCHANGE_BUFFERS * message
}

/// Returns the bytes of the merge of the partial results of `rows` own queries: out in f64, row
/// maximum, row sum and number of maxima; of a backward pass −delta and dq in the accumulator's
/// type, and of an output that is not normalised the share of each maximum.
fn merge_bytes(spec: &Spec, rows: u64, backward: bool) -> u128 {
    let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
    let ties = usize::from(!spec.normalize);
    let numbers = if backward { 1 + ties + head_dim } else { 0 };
    let of_backward = numbers * spec.dtype.accumulator().bytes();
    let row = (value_dim + 3) * size_of::<f64>() + of_backward;
    u128::from(rows) * [batch, q_heads, row].map(|len| len as u128).iter().product::<u128>()
}

/// Returns an upper bound of the bytes of the message buffers of a ring.
fn ring_bytes(
    spec: &Spec,
    groups: usize,
    [q, kv]: [u64; 2],
    receive_ahead: usize,
    backward: bool,
) -> u128 {
    let bytes = |rows: u64, row: RowLayout| u128::from(rows) * u128::from(row.bytes());
    let block = bytes(kv, spec.kv_row_layout());
    let gradient = bytes(kv, spec.gradient_row_layout());
    let is_two_pass = backward_mode(spec) == BackwardMode::TwoPass;
    let query_row = match spec.leaf_rows {
        Some(_) => spec.whole_query_row_layout(None),
        None => spec.query_row_layout(),
    };
    let ahead = receive_ahead.min(groups - 1) as u128;
    let blocks = if groups > 1 { RING_BLOCKS + ahead } else { 1 };
    let of_backward = match (backward, is_two_pass) {
        (false, _) => 0,
        (true, true) if groups > 1 => gradient + blocks * bytes(q, query_row),
        (true, false) if groups > 1 => {
            (RING_GRADIENTS + 2 * ahead.min(GRADIENT_BUFFERS as u128)) * gradient
        }
        (true, _) => gradient,
    };
    blocks * block + of_backward
}
