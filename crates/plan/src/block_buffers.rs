//! Buffers for the blocks that a rank receives in a pass.

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
