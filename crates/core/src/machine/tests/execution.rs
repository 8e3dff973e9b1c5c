//! Steps that are made by hand: which of two ranks a message waits for, and which waits for it.

use super::*;
use crate::machine::{
    execution::execute,
    pace::{BlockPace, Pace},
    timed_step::TimedStep,
};

/// A block that is forwarded with receives one step ahead.
const BLOCK: BlockPace = BlockPace { ahead: 0, frees: None, from_local: false, in_parts: false };

/// Two ranks: tiles of these seconds, and messages.
fn step(compute: [f64; 2], transfers: &[Transfer]) -> TimedStep {
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
    with_overlap(1.0, steps)
}

fn with_overlap(overlap: f64, steps: &[TimedStep]) -> PassTime {
    let machine = Machine { overlap, ..machine(link(0.5, 1.0), 1.0) };
    let network = Network::new(&machine, &[0, 1]).unwrap();
    execute(&network, steps, 2, &mut LinkBytes::default()).time()
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
fn messages_move_slower_under_tiles() {
    // at half of 1 byte/s, 3.5 s of tiles after the latency hide 1.75 bytes
    for tiles in [[4.0; 2], [4.0, 0.0], [0.0, 4.0]] {
        let steps = |bytes| [step(tiles, &[block(0, 1, bytes, BLOCK)]), step([1.0; 2], &[])];
        let of = |overlap, bytes| with_overlap(overlap, &steps(bytes)).seconds;
        assert_eq!([1.75, 2.0].map(|bytes| of(0.5, bytes)), [5.0, 5.25], "{tiles:?}");
        // bytes of 2 s: hidden, or after the tiles
        assert_eq!([1.0, 0.0].map(|overlap| of(overlap, 2.0)), [5.0, 7.0], "{tiles:?}");
    }
    // the first message has moved at 4.25 s, when the tiles of the second step begin. The second
    // one is sent at 4 s, as soon as the link is free, and moves under these tiles from 4.5 to
    // 5.75 s
    let ahead = BlockPace { ahead: 1, ..BLOCK };
    let steps = |bytes| {
        [
            step([2.0, 0.0], &[block(1, 0, 3.0, BLOCK)]),
            step([1.5, 0.0], &[block(1, 0, bytes, ahead)]),
            step([0.0; 2], &[]),
        ]
    };
    assert_eq!(with_overlap(0.5, &steps(0.625)).seconds, 5.75);
    assert_eq!(with_overlap(0.5, &steps(1.0)).seconds, 6.125);
    // a mean step is as slow as one that is executed
    let messages = [Transfer::in_step(0, 1, 2.0)];
    let repeated = TimedStep { repeats: 2, ..step([4.0; 2], &messages) };
    assert_eq!(with_overlap(0.5, &[repeated]).seconds, 2.0 * 4.25);
    // 0.25 of 4 bytes have arrived at 1 s; half of them at 2.75 s. Tiles of 2 s hide 1 byte, those
    // of 1 s and of 0.5 s less; the last 0.25 s of the last part are waited for
    let in_parts = BlockPace { in_parts: true, ..BLOCK };
    let steps = [step([1.0; 2], &[block(0, 1, 4.0, in_parts)]), step([0.0, 4.0], &[])];
    assert_eq!(with_overlap(0.5, &steps), PassTime { seconds: 7.0, exposed: 2.0 });
    assert_eq!(seconds(&steps).seconds, 6.5);
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
