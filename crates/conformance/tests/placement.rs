//! Ranks assigned to nodes round robin: a ring whose order is free passes each node once, and
//! computes the same bits as without nodes.

use std::{collections::BTreeSet, time::Duration};

use annulus_comm::{Deadline, threads};
use annulus_conformance::{
    Case, Crossings, Draw, HostMemory, Judge, Masks, Placed, RankSetup, RingSubject, Setting,
    Subject, subjects, suite,
};
use annulus_core::{DType, Dims, Layout, Placement, Result, Route, Spec};
use annulus_cpu::Cpu;

/// The CPU over threads, with rank r on node r mod `nodes`.
fn round_robin(nodes: usize, crossings: &Crossings) -> impl Subject + use<> {
    let crossings = crossings.clone();
    RingSubject::new(
        "cpu over threads on nodes",
        move |ranks| -> Result<Vec<RankSetup<HostMemory, Cpu>>> {
            let placement = Placement::new((0..ranks).map(|rank| rank % nodes).collect());
            let setup = |endpoint| {
                let transport = Deadline::new(
                    Placed::new(endpoint, placement.clone(), crossings.clone()),
                    Duration::from_secs(60),
                )?;
                Ok(RankSetup {
                    memory: HostMemory,
                    backend: Cpu::new(1)?,
                    transport: Box::new(transport),
                })
            };
            threads::ring(ranks).into_iter().map(setup).collect()
        },
    )
}

#[test]
fn a_relay_enters_each_node_once() {
    let dims = Dims::new(1, 24, 2, 4);
    let case = Case::new("full", Spec::new(dims, DType::F32), Masks::default(), &mut Draw::new(1));
    let pairs = |ranks, nodes, layout, route| -> BTreeSet<(usize, usize)> {
        let crossings = Crossings::default();
        round_robin(nodes, &crossings)
            .run(&case, &Setting { ranks, layout, route, ..Setting::ALONE }, 1)
            .unwrap();
        crossings.pairs()
    };
    for (ranks, nodes) in [(4, 2), (6, 2), (6, 3), (7, 3), (5, 5)] {
        for route in [Route::RelayUp, Route::RelayDown] {
            assert_eq!(
                pairs(ranks, nodes, None, Some(route)).len(),
                nodes,
                "{ranks} ranks on {nodes} nodes, {route:?}"
            );
        }
    }
    // a given layout fixes the ring order, whatever the nodes
    assert_eq!(pairs(6, 2, Some(Layout::Contiguous), Some(Route::RelayUp)).len(), 6);
    assert_eq!(pairs(6, 1, None, None).len(), 0);
}

#[test]
fn nodes_change_no_bit() {
    let plain = subjects::cpu();
    let placed = [2, 3].map(|nodes| round_robin(nodes, &Crossings::default()));
    for (number, configuration) in suite::pairwise().into_iter().enumerate() {
        let case = configuration.case();
        let setting = Setting { layout: None, ..configuration.setting([4, 6, 7][number % 3]) };
        let run = |subject: &dyn Subject| subject.run(&case, &setting, 1).unwrap().remove(0);
        let answer = run(&placed[number % 2]);
        answer
            .same_bits(&run(&plain))
            .unwrap_or_else(|wrong| panic!("{configuration} on {setting}: {wrong}"));
        if number % 5 == 0 {
            Judge::new(&case).unwrap().check(&answer).unwrap();
        }
    }
}
