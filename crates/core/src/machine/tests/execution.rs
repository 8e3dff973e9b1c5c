//! Steps that are made by hand: which of two ranks a message waits for, and which waits for it.

use super::*;
use crate::machine::{prediction::execute, timed_step::TimedStep};

/// Two ranks: tiles of these seconds, messages of these bytes, and a rank whose message arrives in
/// parts.
fn step(compute: [f64; 2], transfers: &[[f64; 3]], in_parts: [bool; 2]) -> TimedStep {
    let transfer =
        |&[from, to, bytes]: &[f64; 3]| Transfer { from: from as usize, to: to as usize, bytes };
    TimedStep {
        compute: compute.to_vec(),
        transfers: transfers.iter().map(transfer).collect(),
        in_parts: in_parts.to_vec(),
        repeats: 1,
    }
}

fn seconds(steps: &[TimedStep]) -> PassTime {
    let machine = machine(link(0.5, 1.0), 1.0);
    let network = Network::new(&machine, &[0, 1]).unwrap();
    execute(&network, steps, 2, &mut LinkBytes::default()).time()
}

#[test]
fn a_message_begins_when_both_ranks_have_reached_its_step() {
    for [from, to] in [[0.0, 1.0], [1.0, 0.0]] {
        let steps =
            [step([1.0, 3.0], &[], [false; 2]), step([0.0; 2], &[[from, to, 1.0]], [false; 2])];
        // rank 0 waits for 2 s, then both for 1.5 s, which is the time beyond the tiles of rank 1
        assert_eq!(seconds(&steps), PassTime { seconds: 4.5, exposed: 1.5 });
    }
}

#[test]
fn a_rank_waits_for_its_sends_after_the_parts_that_it_receives() {
    let messages = [[0.0, 1.0, 10.0], [1.0, 0.0, 1.0]];
    let steps = [
        step([1.0; 2], &messages, [true, false]),
        step([1.0, 0.0], &[], [false; 2]),
        step([5.0, 0.0], &[], [false; 2]),
    ];
    // the parts have arrived at 1.5 s, the send ends at 10.5 s; rank 0 has tiles of 7 s
    assert_eq!(seconds(&steps), PassTime { seconds: 15.5, exposed: 8.5 });
    // rank 0 waits for the part that arrives at 1.5 s
    let steps = [step([1.0; 2], &messages[1..], [true, false]), step([0.0; 2], &[], [false; 2])];
    assert_eq!(seconds(&steps).seconds, 1.5);
}

#[test]
fn waiting_for_the_tiles_of_another_rank_is_exposed() {
    // messages of no bytes take 0.5 s, under the tiles: both ranks have tiles of 4 s, and rank 1
    // ends 3 s + 3 s after the begin
    let both = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]];
    let uneven = [
        step([1.0, 3.0], &both, [false; 2]),
        step([0.0; 2], &both, [false; 2]),
        step([3.0, 1.0], &both, [false; 2]),
    ];
    assert_eq!(seconds(&uneven), PassTime { seconds: 6.5, exposed: 2.5 });
    // tiles alone: nothing is exposed, however uneven they are
    let tiles = [step([1.0, 3.0], &[], [false; 2]), step([2.0, 1.0], &[], [false; 2])];
    assert_eq!(seconds(&tiles), PassTime { seconds: 4.0, exposed: 0.0 });
    // steps that are repeated take as long as the slowest rank
    let mut repeated = step([1.0, 2.0], &[], [false; 2]);
    repeated.repeats = 3;
    let steps = [repeated, step([5.0, 0.0], &[], [false; 2])];
    // 3 · 2 s, then 5 s; rank 0 has tiles of 3 + 5 s
    assert_eq!(seconds(&steps), PassTime { seconds: 11.0, exposed: 3.0 });
}
