//! Memory of a rank under a strategy: message buffers, and tensors of the heads of a member. And
//! the sizes of the buffers for the blocks that a rank receives in a pass.

use annulus_core::{BackwardMode, Dims, RowLayout, Side, Spec};

use super::{ExchangeFields, GroupLayout, HeadGrid, exchange::backward_mode};
use crate::Layout;

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

/// Returns the sizes of the buffers for blocks of these sizes, which come in this order. Block j is
/// received into buffer j modulo their number, so block j can be received once block j − number is
/// no longer used.
///
/// There are `ahead` + 1 buffers, or one for each block if these are fewer. With `further` there
/// are as many as take no more memory than `ahead` + 1 buffers of the largest block would: where
/// the blocks of some steps are small, more of them can be received ahead.
///
/// `blocks` may be in any unit, which is that of the result.
pub fn block_buffers(blocks: &[u64], ahead: usize, further: bool) -> Vec<u64> {
    let sizes = |count: usize| -> Vec<u64> {
        let size = |buffer| blocks.iter().skip(buffer).step_by(count).copied().max().unwrap_or(0);
        (0..count).map(size).collect()
    };
    let least = blocks.len().min(ahead.saturating_add(1));
    let most = if further { blocks.len() } else { least };
    let largest = u128::from(blocks.iter().copied().max().unwrap_or(0));
    let memory = largest.saturating_mul(least as u128);
    let sum = |sizes: &[u64]| sizes.iter().map(|&size| u128::from(size)).sum::<u128>();
    // no buffer is smaller than the mean of its blocks, so that most numbers need no list of sizes
    let all = sum(blocks);
    let may_fit = |count: &usize| all / blocks.len().div_ceil(*count) as u128 <= memory;
    let numbers = (least + 1..=most).rev().filter(may_fit);
    numbers.map(sizes).find(|sizes| sum(sizes) <= memory).unwrap_or_else(|| sizes(least))
}

/// Most buffers for final gradients that arrive in a one-pass backward, and for sums that are sent,
/// of the size of the largest: as many as `receive_ahead`, up to this number. In a simulation of a
/// relay with random delays a fourth buffer gains little; on packed documents, whose gradients have
/// different sizes, it takes the place of several.
pub const GRADIENT_BUFFERS: usize = 4;

/// Returns the sizes of the buffers of a one-pass backward for sums of these sizes, which are
/// computed and sent, and for final gradients of these sizes, which arrive, as [`block_buffers`]
/// does for blocks. One sum is computed while others are sent.
pub fn gradient_buffers(
    sums: &[u64],
    final_gradients: &[u64],
    receive_ahead: usize,
    further: bool,
) -> [Vec<u64>; 2] {
    let late = receive_ahead.clamp(1, GRADIENT_BUFFERS);
    // without partial gradients that arrive, their buffer is another one for sums
    let sent = late + usize::from(further);
    [block_buffers(sums, sent, further), block_buffers(final_gradients, late - 1, further)]
}

#[cfg(test)]
mod tests {
    use super::block_buffers;

    #[test]
    fn one_buffer_more_than_steps_ahead() {
        assert_eq!(block_buffers(&[5, 5, 5, 5], 1, false), [5, 5]);
        assert_eq!(block_buffers(&[5, 5, 5, 5], 1, true), [5, 5], "equal blocks take all of it");
        assert_eq!(block_buffers(&[5, 3, 4], 3, false), [5, 3, 4], "a buffer for each block");
        assert_eq!(block_buffers(&[], 3, true), [0; 0]);
    }

    #[test]
    fn a_buffer_holds_each_of_its_blocks() {
        assert_eq!(block_buffers(&[2, 7, 3, 1, 9], 1, false), [9, 7]);
    }

    #[test]
    fn small_blocks_are_received_further_ahead() {
        // 10 + 2 + 1 + 3 + 4 = 20 is the memory of two of the largest
        assert_eq!(block_buffers(&[10, 2, 1, 3, 4], 1, true), [10, 2, 1, 3, 4]);
        // one for each takes 29, four take 10 + 2 + 10 + 3, three 10 + 4 + 10: all above 20
        assert_eq!(block_buffers(&[10, 2, 10, 3, 4], 1, true), [10, 3]);
    }

    #[test]
    fn of_many_equal_blocks_no_number_is_tried() {
        // there are 2²⁰ numbers, and each would take as many steps
        assert_eq!(block_buffers(&vec![7; 1 << 20], 1, true), [7, 7]);
    }

    #[test]
    fn never_more_memory_than_of_the_largest() {
        let mut state = 1_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let blocks: Vec<u64> = (0..draw(20)).map(|_| draw(9).pow(3)).collect();
            let ahead = draw(8) as usize;
            let largest = blocks.iter().copied().max().unwrap_or(0);
            let least = block_buffers(&blocks, ahead, false);
            let further = block_buffers(&blocks, ahead, true);
            assert_eq!(least.len(), blocks.len().min(ahead + 1), "{blocks:?}, {ahead}");
            assert!(further.len() >= least.len(), "{blocks:?}, {ahead}");
            for sizes in [least, further] {
                let holds = |(block, size): (usize, &u64)| sizes[block % sizes.len()] >= *size;
                assert!(blocks.iter().enumerate().all(holds), "{blocks:?} in {sizes:?}");
                let all: u64 = sizes.iter().sum();
                assert!(all <= largest * blocks.len().min(ahead + 1) as u64, "{blocks:?}, {ahead}");
            }
        }
    }
}
