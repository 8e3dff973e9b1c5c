//! `Strategy::Auto` on a machine: the least predicted time, the same machine on all ranks, and
//! machines that are refused.

use annulus::{
    Attention, DType, Dims, Division, Error, LocalRing, Plan, Result, Setup, Strategy,
    comm::threads::{each_rank, ring},
    planning::{ComputeRate, Link, Machine},
};

/// 64 query and 8 KV heads.
const DIMS: Dims =
    Dims { batch: 1, q_len: 512, kv_len: 512, q_heads: 64, kv_heads: 8, head_dim: 8, value_dim: 8 };
const RANKS: usize = 8;

fn link(latency: f64, bandwidth: f64) -> Link {
    Link { latency, bandwidth }
}

/// Two nodes of four ranks.
fn machine(inside: Link, between: Link, flops: f64) -> Machine {
    Machine {
        ranks_per_node: 4,
        inside_node: Some(inside),
        between_nodes: Some(between),
        node_bandwidth: Some(4.0 * between.bandwidth),
        rates: vec![ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: flops,
            backward: flops,
        }],
        memory: 1 << 40,
    }
}

/// Tiles take longer than messages, which are hidden in a ring.
fn slow_ranks() -> Machine {
    machine(link(1e-6, 1e9), link(1e-6, 1e9), 1e9)
}

/// Messages between nodes take longer than all else.
fn slow_network() -> Machine {
    machine(link(1e-6, 1e11), link(1e-3, 1e6), 1e13)
}

fn auto(machine: Option<Machine>) -> Setup {
    let division = Division::new().strategy(Strategy::Auto).machine(machine);
    Setup::from((Attention::new().causal(true), division))
}

/// Strategy of each rank, which has the machine of its number.
fn plan(machine_of: impl Fn(usize) -> Option<Machine> + Sync) -> Vec<Result<Strategy>> {
    let rank = |rank, transport| {
        Ok(Plan::new(auto(machine_of(rank)), DIMS, transport).map(|plan| plan.strategy()))
    };
    each_rank(ring(RANKS), rank).expect("no rank fails outside of its plan")
}

#[test]
fn the_least_predicted_time_is_taken() {
    let of = |machine: Option<Machine>| {
        let ring = LocalRing::new(auto(machine), DIMS, RANKS).unwrap();
        ring.plan().strategy()
    };
    assert_eq!(of(Some(slow_ranks())), Strategy::Ring);
    assert_eq!(of(Some(slow_network())), Strategy::HeadsRing { heads: 4 });
    // the fewest bytes
    assert_eq!(of(None), Strategy::Ring);
    for strategy in plan(|_| Some(slow_network())) {
        assert_eq!(strategy, Ok(Strategy::HeadsRing { heads: 4 }));
    }
    // a strategy that is not auto would ignore the machine
    let ring = Division::new().machine(slow_network());
    let refused = LocalRing::new((Attention::new(), ring), DIMS, RANKS).unwrap_err().to_string();
    assert_eq!(
        refused,
        "machine: got one, for ring, want none: the strategy auto alone depends on it"
    );
}

#[test]
fn ranks_with_other_machines_are_refused() {
    let other = Machine { memory: 1 << 41, ..slow_network() };
    // the same strategy is chosen, another one is, and one rank has no machine
    for of_rank_3 in [Some(other), Some(slow_ranks()), None] {
        let planned = plan(|rank| if rank == 3 { of_rank_3.clone() } else { Some(slow_network()) });
        for strategy in planned {
            let Err(Error::RankMismatch { field, rank, got, rank0 }) = strategy else {
                panic!("{strategy:?}");
            };
            assert_eq!((field.as_str(), rank), ("machine", 3));
            let shown = format!("fingerprint {:016x}", slow_network().fingerprint());
            assert_eq!(rank0, shown);
            assert_eq!(got == "none", of_rank_3.is_none(), "{got}");
        }
    }
}

#[test]
fn machines_that_do_not_fit_are_refused() {
    // also where it has no effect
    let wrong = Machine { memory: 0, ..slow_network() };
    let refused = LocalRing::new((Attention::new(), Division::new().machine(wrong)), DIMS, RANKS);
    assert!(refused.unwrap_err().to_string().starts_with("machine.memory: got 0"));
    // one rank alone refuses, and the others return its error
    let planned = plan(|rank| {
        let memory = if rank == 5 { 0 } else { 1 << 40 };
        Some(Machine { memory, ..slow_network() })
    });
    for (rank, strategy) in planned.into_iter().enumerate() {
        let text = strategy.unwrap_err().to_string();
        let refused = if rank == 5 { "" } else { "rank 5 refused the call: " };
        assert_eq!(text, format!("{refused}machine.memory: got 0, want at least 1"));
    }
}
