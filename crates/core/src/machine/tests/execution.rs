//! Steps that are made by hand: which of two ranks a message waits for, and which waits for it.

use super::*;
use crate::machine::{
    execution::execute,
    pace::{BlockPace, Pace},
    timed_step::TimedStep,
};

/// A block that is forwarded with receives one step ahead.
const BLOCK: BlockPace = BlockPace { ahead: 0, frees: None, from_local: false, in_parts: false };

/// Ranks with tiles of these seconds, and messages.
fn step<const RANKS: usize>(compute: [f64; RANKS], transfers: &[Transfer]) -> TimedStep {
    TimedStep {
        compute: compute.to_vec(),
        transfers: transfers.to_vec(),
        ..TimedStep::idle(compute.len())
    }
}

fn block(from: usize, to: usize, bytes: f64, pace: BlockPace) -> Transfer {
    Transfer { pace: Pace::Block(pace), ..Transfer::in_step(from, to, bytes) }
}

fn seconds(steps: &[TimedStep]) -> PassTime {
    let machine = machine(link(0.5, 1.0), 1.0);
    let ranks = steps[0].compute.len();
    let nodes: Vec<usize> = (0..ranks).collect();
    let network = Network::new(&machine, &nodes).unwrap();
    execute(&network, steps, ranks, &mut LinkBytes::default()).time()
}

#[test]
fn a_message_begins_when_both_ranks_have_reached_its_step() {
    for [from, to] in [[0, 1], [1, 0]] {
        let steps = [step([1.0, 3.0], &[]), step([0.0; 2], &[Transfer::in_step(from, to, 1.0)])];
        // rank 0 waits for 2 s, then both for 1.5 s, which is the time beyond the tiles of rank 1
        assert_eq!(seconds(&steps), PassTime { seconds: 4.5, exposed: 1.5 });
    }
}

#[test]
fn a_rank_waits_for_its_sends_at_the_end_of_a_ring() {
    let in_parts = BlockPace { in_parts: true, ..BLOCK };
    let messages = [block(0, 1, 10.0, BLOCK), block(1, 0, 1.0, in_parts)];
    let steps = |ends_ring| {
        [
            step([1.0; 2], &messages),
            step([1.0, 0.0], &[]),
            TimedStep { ends_ring, ..step([5.0, 0.0], &[]) },
            step([2.0, 0.0], &[]),
        ]
    };
    // the parts have arrived at 1.5 s, the send ends at 10.5 s; rank 0 has tiles of 9 s
    assert_eq!(seconds(&steps(true)), PassTime { seconds: 12.5, exposed: 3.5 });
    // within a ring only rank 1 waits for the block
    assert_eq!(seconds(&steps(false)), PassTime { seconds: 10.5, exposed: 1.5 });
    // rank 0 waits for the part that arrives at 1.5 s
    let steps = [step([1.0; 2], &messages[1..]), step([0.0; 2], &[])];
    assert_eq!(seconds(&steps).seconds, 1.5);
}

#[test]
fn gradients_wait_for_buffers() {
    let gradient = |from, sent, frees| Transfer {
        pace: Pace::FinalGradient { sent, frees },
        ..Transfer::in_step(from, 0, 10.0)
    };
    let seconds = |sent, frees, ends_ring| {
        let steps = [
            step([1.0; 3], &[gradient(1, sent, None)]),
            step([1.0; 3], &[gradient(2, 9, frees)]),
            TimedStep { ends_ring, ..step([5.0; 3], &[]) },
        ];
        seconds(&steps).seconds
    };
    // the first arrives at 10.5 s, the second follows it on the link and arrives at 20.5 s, or from
    // 10.5 s on into its buffer; the owner waits for both at the end of the ring
    assert_eq!(seconds(9, None, true), 20.5);
    assert_eq!(seconds(9, Some(1), true), 21.0);
    // within the ring nobody waits, but the sender of the first if it has no buffer
    assert_eq!(seconds(9, Some(1), false), 7.0);
    assert_eq!(seconds(1, Some(1), false), 10.5 + 6.0);
}

#[test]
fn waiting_for_the_tiles_of_another_rank_is_exposed() {
    // messages of no bytes take 0.5 s, under the tiles: both ranks have tiles of 4 s, and rank 1
    // ends 3 s + 3 s after the begin
    let both = [Transfer::in_step(0, 1, 0.0), Transfer::in_step(1, 0, 0.0)];
    let uneven = [step([1.0, 3.0], &both), step([0.0; 2], &both), step([3.0, 1.0], &both)];
    assert_eq!(seconds(&uneven), PassTime { seconds: 6.5, exposed: 2.5 });
    // tiles alone: nothing is exposed, however uneven they are
    let tiles = [step([1.0, 3.0], &[]), step([2.0, 1.0], &[])];
    assert_eq!(seconds(&tiles), PassTime { seconds: 4.0, exposed: 0.0 });
    // steps that are repeated take as long as the slowest rank
    let mut repeated = step([1.0, 2.0], &[]);
    repeated.repeats = 3;
    let steps = [repeated, step([5.0, 0.0], &[])];
    // 3 · 2 s, then 5 s; rank 0 has tiles of 3 + 5 s
    assert_eq!(seconds(&steps), PassTime { seconds: 11.0, exposed: 3.0 });
}
