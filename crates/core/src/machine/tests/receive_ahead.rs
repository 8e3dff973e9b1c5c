//! Receives that are posted ahead: uneven steps, buffers, and links that move one block at a time.

use super::*;
use crate::machine::{
    execution::execute,
    pace::{BlockPace, Pace},
    ring_steps::RingSteps,
    steps::GridPlan,
    timed_step::TimedStep,
};

/// A network that takes no time.
fn fast() -> Machine {
    machine(link(1e-30, 1e30), 1.0)
}

fn ahead(receive_ahead: usize, route: Route) -> TrafficOptions<'static> {
    TrafficOptions {
        receive_ahead,
        route: Some(route),
        layout: Some(&Layout::Contiguous),
        ..FORWARD
    }
}

/// The steps of a forward and of a backward pass of a ring.
fn steps(
    spec: &Spec,
    traffic: &StrategyTraffic,
    options: &TrafficOptions<'_>,
) -> [Vec<TimedStep>; 2] {
    let machine = fast();
    let seconds = GridPlan { traffic, spec, options, machine: &machine }.pair_seconds().unwrap();
    let ring = RingSteps::new(traffic, spec, options, seconds, None, &mut || ()).unwrap();
    [ring.forward(), ring.backward()]
}

/// The steps of a forward pass without a mask, whose tiles on `rank` take `tiles(rank, step)`.
fn of_tiles(
    ranks: usize,
    options: &TrafficOptions<'_>,
    tiles: impl Fn(usize, usize) -> f64,
) -> Vec<TimedStep> {
    let spec = Spec::new(Dims::new(1, 64 * ranks, 1, 64), DType::F32);
    let traffic = traffic_of(&spec, ranks, 1, options);
    let [mut steps, _] = steps(&spec, &traffic, options);
    for (number, step) in steps.iter_mut().enumerate() {
        step.compute = (0..ranks).map(|rank| tiles(rank, number)).collect();
    }
    steps
}

fn time(machine: &Machine, steps: &[TimedStep], ranks: usize) -> PassTime {
    let nodes: Vec<usize> = (0..ranks).collect();
    let network = Network::new(machine, &nodes).unwrap();
    execute(&network, steps, ranks, &mut LinkBytes::default()).time()
}

#[test]
fn enough_buffers_hide_uneven_steps() {
    // each rank has one long step; ranks 0 and 3 have theirs early, and rank 4 the last
    let long = [0, 3, 2, 1, 5, 4];
    let tiles = |rank: usize, step: usize| if long[rank] == step { 20.0 } else { 1.0 };
    for route in [Route::Direct, Route::RelayUp] {
        let of = |steps| time(&fast(), &of_tiles(6, &ahead(steps, route), tiles), 6);
        let all = of(5);
        is_near(all.seconds, 25.0);
        assert!(all.exposed < 1e-9, "{route:?} {all:?}");
        let one = of(1);
        assert!(one.exposed > 10.0, "{route:?} {one:?}");
    }
}

#[test]
fn a_late_neighbour_stops_a_rank_once_its_buffers_are_full() {
    const RANKS: usize = 8;
    // rank 0 is in step 1 until 101 s; rank 1 has as much to do in its last step
    let tiles = |rank: usize, step: usize| match (rank, step) {
        (0, 1) => 100.0,
        (1, 7) => 100.0,
        _ => 1.0,
    };
    let of = |steps| time(&fast(), &of_tiles(RANKS, &ahead(steps, Route::RelayUp), tiles), RANKS);
    for steps in 1..RANKS {
        // rank 0 forwards the blocks of steps 1 to `steps`, and those of later ones from 101 s on:
        // rank 1 then begins step `steps` + 2
        let stopped = 201.0 + RANKS as f64 - (steps + 3) as f64;
        is_near(of(steps).seconds, if steps <= 5 { stopped } else { 107.0 });
    }
}

#[test]
fn a_rank_sends_one_block_after_another() {
    // blocks take 1 s, all tiles nothing: however many receives are posted
    for route in Route::ALL {
        for steps in [1, 3, 7] {
            let block = 64.0 * 2.0 * 64.0 * 4.0;
            let machine = machine(link(1e-30, block), 1.0);
            let steps = of_tiles(8, &ahead(steps, route), |_, _| 0.0);
            is_near(time(&machine, &steps, 8).seconds, 7.0);
        }
    }
}

#[test]
fn a_slow_link_moves_one_forwarded_block_after_another() {
    const RANKS: usize = 8;
    // blocks take 1 s from node to node; those of the ranks of a node reach its last rank at once
    let block = 64.0 * 2.0 * 64.0 * 4.0;
    let machine = Machine {
        ranks_per_node: 4,
        inside_node: Some(link(1e-30, 1e30)),
        ..machine(link(1e-30, block), 1.0)
    };
    let nodes: Vec<usize> = (0..RANKS).map(|rank| rank / 4).collect();
    let network = Network::new(&machine, &nodes).unwrap();
    for steps in [1, 3, RANKS - 1] {
        let steps = of_tiles(RANKS, &ahead(steps, Route::RelayUp), |_, _| 0.0);
        let executed = execute(&network, &steps, RANKS, &mut LinkBytes::default());
        is_near(executed.seconds, 7.0);
    }
}

#[test]
fn all_gather_receives_every_block_ahead() {
    let spec = Spec::new(Dims::new(1, 512, 1, 64), DType::F32);
    let options = TrafficOptions { layout: Some(&Layout::Contiguous), ..FORWARD };
    let frees = |strategy| {
        let tick = &mut || ();
        let traffic = StrategyTraffic::of_strategy(&spec, 8, strategy, &options, tick).unwrap();
        let [forward, _] = steps(&spec, &traffic, &options);
        let blocks = forward.iter().flat_map(|step| &step.transfers);
        let taken = blocks.filter(|transfer| match transfer.pace {
            Pace::Block(BlockPace { frees, .. }) => frees.is_some(),
            _ => false,
        });
        taken.count()
    };
    assert_eq!(frees(Strategy::AllGather), 0);
    // the ring has two buffers for the 8 blocks of each rank
    assert_eq!(frees(Strategy::Ring), 8 * 6);
}

/// A ring over six ranks whose gradients are all final, and the steps of its backward pass.
fn backward(receive_ahead: usize) -> Vec<TimedStep> {
    let spec = Spec::new(Dims::new(1, 64 * 6, 1, 64), DType::F32);
    let options = TrafficOptions { backward: true, ..ahead(receive_ahead, Route::Direct) };
    let [_, backward] = steps(&spec, &traffic_of(&spec, 6, 1, &options), &options);
    backward
}

#[test]
fn no_step_waits_for_a_final_gradient() {
    let mut steps = backward(3);
    for (number, step) in steps.iter_mut().enumerate() {
        // each rank is late in another step, and none computes after the last block
        let tiles = |rank: usize| if rank == number { 20.0 } else { 1.0 };
        step.compute = (0..6).map(|rank| if number < 6 { tiles(rank) } else { 0.0 }).collect();
    }
    is_near(time(&fast(), &steps, 6).seconds, 25.0);
}

#[test]
fn gradients_have_buffers() {
    let of = |receive_ahead| {
        let steps = backward(receive_ahead);
        let all = steps.iter().flat_map(|step| &step.transfers);
        let [mut senders, mut owners] = [0; 2];
        for transfer in all {
            if let Pace::FinalGradient { sent, frees } = transfer.pace {
                senders += usize::from(sent == receive_ahead.min(3));
                owners += usize::from(frees == Some(receive_ahead.min(3)));
            }
        }
        [senders, owners]
    };
    // a rank computes five sums, all but the last `ahead` + 1 of which free a buffer for another,
    // and receives five final gradients, of which `ahead` have a buffer from the begin
    assert_eq!(of(1), [6 * 3, 6 * 4]);
    assert_eq!(of(2), [6 * 2, 6 * 3]);
    assert_eq!(of(3), [6, 6 * 2]);
    assert_eq!(of(5), of(3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn more_receives_ahead_never_take_longer(
        spec in specs(), ranks in 2usize..9, route in prop::option::of(0usize..3),
        ranks_per_node in 1usize..5, bandwidth in 1e2f64..1e6,
        tiles in prop::collection::vec(0.0f64..10.0, 97),
    ) {
        let route = route.map(|route| Route::ALL[route]);
        let machine = Machine {
            ranks_per_node,
            ..two_nodes(link(1e-2, 2.0 * bandwidth), link(1e-1, bandwidth), 1.0)
        };
        let nodes: Vec<usize> = (0..ranks).map(|rank| rank / ranks_per_node).collect();
        let placement = Placement::new(nodes.clone());
        let network = Network::new(&machine, &nodes).unwrap();
        let mut before: Option<[f64; 2]> = None;
        for receive_ahead in [1, 2, 3, ranks] {
            let placement = route.is_none().then_some(&placement);
            let layout = Some(&Layout::Contiguous);
            let options = TrafficOptions { route, receive_ahead, placement, layout, ..BOTH };
            let traffic = traffic_of(&spec, ranks, 1, &options);
            let of_pass = |steps: &mut Vec<TimedStep>| {
                for (number, step) in steps.iter_mut().enumerate() {
                    for (rank, compute) in step.compute.iter_mut().enumerate() {
                        *compute = tiles[(number * ranks + rank) % tiles.len()];
                    }
                }
                execute(&network, steps, ranks, &mut LinkBytes::default()).seconds
            };
            let seconds = steps(&spec, &traffic, &options).each_mut().map(of_pass);
            if let Some(before) = before {
                for (now, before) in seconds.iter().zip(before) {
                    prop_assert!(*now <= before * (1.0 + 1e-12), "{now} {before} {receive_ahead}");
                }
            }
            before = Some(seconds);
            // a rank sends its bytes one after another, here over the faster link at best
            let most = traffic.forward.iter().copied().max().unwrap_or(0) as f64;
            prop_assert!(seconds[0] >= most / (2.0 * bandwidth) * (1.0 - 1e-12));
        }
    }
}
