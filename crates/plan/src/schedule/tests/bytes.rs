//! Bytes of schedules compared with the documented ratios and with an enumeration of all rows.

use std::collections::BTreeSet;

use super::{LAYOUTS, masks, needs, random_needs, routes, samples};
use crate::{Layout, Needs, Route, Schedule, Traffic};
use annulus_core::{DType, Dims, Mask, RowLayout, Spec, mask};

/// Returns a schedule and its block and gradient rows relative to the full ring.
fn schedule(
    mask: &dyn Mask,
    len: usize,
    layout: &Layout,
    ranks: usize,
    route: Route,
) -> (Schedule, f64, f64) {
    let needs = needs(mask, &samples::plain(len, layout, ranks));
    let schedule = Schedule::build(&needs, route, true);
    let full = Traffic::full_ring(&needs.held, true);
    let blocks = schedule.block_rows_sent() as f64 / full.block_rows as f64;
    let gradients = schedule.gradient_rows_sent() as f64 / full.gradient_rows() as f64;
    (schedule, blocks, gradients)
}

fn near(got: f64, want: f64) -> bool {
    (got - want).abs() < 0.0005
}

#[test]
fn causal_contiguous_sends_half_of_the_full_ring() {
    for ranks in [2, 3, 4, 8, 16, 64] {
        let (schedule, blocks, gradients) = schedule(
            &mask::Causal::default(),
            4 * ranks,
            &Layout::Contiguous,
            ranks,
            Route::RelayUp,
        );
        assert_eq!((blocks, gradients), (0.5, 0.5));
        assert_eq!(schedule.hops(), ranks - 1);
    }
}

#[test]
fn causal_zigzag_downwards_sends_three_quarters() {
    for ranks in [2, 3, 4, 8, 16, 64] {
        let causal = mask::Causal::default();
        let (_, blocks, gradients) =
            schedule(&causal, 4 * ranks, &Layout::Zigzag, ranks, Route::RelayDown);
        assert_eq!((blocks, gradients), (0.75, 0.75));
        let (_, upwards, _) = schedule(&causal, 4 * ranks, &Layout::Zigzag, ranks, Route::RelayUp);
        assert!(upwards > 0.75 || ranks == 2, "{upwards}");
    }
}

#[test]
fn a_causal_window_within_a_shard_is_one_hop() {
    let ranks = 8;
    let shard = 16;
    for (left, share) in [(shard, 0.125), (shard / 2, 0.0625), (1, 0.125 / 16.0)] {
        let window = masks(left as u64)[2].1.clone();
        for route in [Route::RelayUp, Route::Direct] {
            let (schedule, blocks, gradients) =
                schedule(&*window, ranks * shard, &Layout::Contiguous, ranks, route);
            assert_eq!((blocks, gradients, schedule.hops()), (share, share, 1));
        }
    }
}

#[test]
fn a_symmetric_window_is_cheapest_on_the_direct_route() {
    let window = mask::Window::new(Some(16), Some(16));
    let (_, blocks, _) = schedule(&window, 128, &Layout::Contiguous, 8, Route::RelayUp);
    assert!(near(blocks, 0.893), "{blocks}");
    let (schedule, blocks, gradients) =
        schedule(&window, 128, &Layout::Contiguous, 8, Route::Direct);
    assert_eq!((blocks, gradients, schedule.hops()), (0.25, 0.25, 2));
}

#[test]
fn everything_is_the_full_ring_on_every_route() {
    for route in routes(4) {
        let needs = Needs::everything(vec![3, 0, 5, 2]);
        let schedule = Schedule::build(&needs, route, true);
        let full = Traffic::full_ring(&needs.held, true);
        assert_eq!(
            full,
            Traffic { block_rows: 30, partial_gradient_rows: 30, final_gradient_rows: 0 }
        );
        assert_eq!(schedule.sent().block_rows, 30);
        assert_eq!(schedule.gradient_rows_sent(), 30);
        // the owner receives each row's gradient once on a relay, from every other rank if direct,
        // and from each node with another rank once per node
        let of_nodes = |node_ranks: usize| match node_ranks {
            // the owner of a row is the only rank of its node
            1 => 3,
            4 => 1,
            _ => 2,
        };
        let final_rows = match route {
            Route::Direct => 30,
            Route::OncePerNode { node_ranks } => 10 * of_nodes(node_ranks),
            _ => 10,
        };
        assert_eq!(schedule.sent().final_gradient_rows, final_rows);
        assert_eq!(Traffic::full_ring(&needs.held, false).gradient_rows(), 0);
    }
    assert_eq!(Traffic::full_ring(&[], true), Traffic::default());
}

/// Counts row by row. On a relay, a row is sent up to the last rank that needs it, and its gradient
/// from the first such rank to the last and to the owner. Once per node this is so in every node,
/// to which the owner sends the row first.
fn enumerated(needs: &Needs, route: Route) -> Traffic {
    let ranks = needs.held.len();
    let mut traffic = Traffic::default();
    for (owner, &held) in needs.held.iter().enumerate() {
        for row in 0..held {
            let needed_at =
                |&step: &usize| needs.rows[route.user(owner, step, ranks)][owner].contains(row);
            let steps: BTreeSet<usize> = (1..ranks).filter(needed_at).collect();
            let (Some(&first), Some(&last)) = (steps.first(), steps.last()) else { continue };
            let users = steps.len() as u128;
            traffic += match route {
                Route::Direct => Traffic {
                    block_rows: users,
                    partial_gradient_rows: 0,
                    final_gradient_rows: users,
                },
                Route::OncePerNode { node_ranks } => {
                    let in_node = |node: usize| {
                        let of_node = steps.range(node * node_ranks..(node + 1) * node_ranks);
                        let [first, last] = [of_node.clone().next(), of_node.last()];
                        let (Some(&first), Some(&last)) = (first, last) else {
                            return Traffic::default();
                        };
                        // from the rank before the first one that has the row, the owner
                        let sent = last - node * node_ranks + usize::from(node > 0);
                        Traffic {
                            block_rows: sent as u128,
                            partial_gradient_rows: (last - first) as u128,
                            final_gradient_rows: 1,
                        }
                    };
                    (0..ranks / node_ranks).map(in_node).sum()
                }
                _ => Traffic {
                    block_rows: last as u128,
                    partial_gradient_rows: (last - first) as u128,
                    final_gradient_rows: 1,
                },
            };
        }
    }
    traffic
}

#[test]
fn traffic_matches_an_enumeration_of_rows() {
    let mut all: Vec<Needs> =
        (0..200).map(|seed| random_needs(1 + seed as usize % 9, seed)).collect();
    for layout in &LAYOUTS {
        for (ranks, len) in [(1, 5), (3, 20), (8, 64), (9, 5)] {
            all.extend(
                masks((len / ranks) as u64)
                    .iter()
                    .map(|(_, mask)| needs(&**mask, &samples::plain(len, layout, ranks))),
            );
            all.push(needs(&mask::Causal::default(), &samples::packed(len, 7, 2, layout, ranks)));
        }
    }
    for needs in &all {
        for route in routes(needs.held.len()) {
            let traffic = enumerated(needs, route);
            let schedule = Schedule::build(needs, route, true);
            assert_eq!(schedule.sent(), traffic);
            assert_eq!(
                (0..needs.held.len()).map(|rank| schedule.sent_by(rank)).sum::<Traffic>(),
                traffic
            );
            let forward = Schedule::build(needs, route, false).sent();
            assert_eq!(forward, Traffic { block_rows: traffic.block_rows, ..Traffic::default() });
        }
    }
}

#[test]
fn bytes_are_rows_times_row_bytes() {
    let spec = Spec::new(Dims { kv_heads: 2, value_dim: 3, ..Dims::new(2, 8, 4, 5) }, DType::Bf16);
    let traffic = Traffic { block_rows: 7, partial_gradient_rows: 2, final_gradient_rows: 1 };
    // batch 2 × heads 2 × (5 + 3) elements per row, 2 bytes each in a block, 4 in a gradient
    assert_eq!(traffic.bytes(&spec.kv_row_layout(), &spec.gradient_row_layout()), 7 * 64 + 3 * 128);
    let empty = RowLayout::new([]);
    assert_eq!(traffic.bytes(&empty, &empty), 0);
}

#[test]
fn counts_of_rows_and_bytes_beyond_64_bits_are_exact() {
    let held = vec![1 << 55; 1024];
    let full = Traffic::full_ring(&held, true);
    assert_eq!(full.block_rows, 1023 << 65);
    let spec = Spec::new(Dims::new(1, 1, 1, 1), DType::F64);
    // 16 bytes per row of keys and values, and of their gradients
    assert_eq!(full.bytes(&spec.kv_row_layout(), &spec.gradient_row_layout()), 1023 << 70);
}

#[test]
fn ranks_outside_the_ring_send_nothing() {
    let schedule = Schedule::build(&Needs::everything(vec![2, 2]), Route::RelayUp, false);
    assert_eq!(schedule.sent_by(1).block_rows, 2);
    assert_eq!(schedule.sent_by(2), Traffic::default());
}
