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
fn nodes_change_no_bit_of_a_given_route() {
    let plain = subjects::cpu();
    let placed = [2, 3].map(|nodes| round_robin(nodes, &Crossings::default()));
    for (number, configuration) in suite::pairwise().into_iter().enumerate() {
        let case = configuration.case();
        let setting = Setting { layout: None, ..configuration.setting([4, 6, 7][number % 3]) };
        let route = Some(setting.route.unwrap_or(Route::RelayUp));
        let setting = Setting { route, ..setting };
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

/// Rails of given nodes over one process, and by name over nodes that a transport reports.
#[test]
fn rails_compute_the_attention_over_any_nodes() {
    let plain = subjects::cpu();
    let placed = [2, 3].map(|nodes| round_robin(nodes, &Crossings::default()));
    for (number, configuration) in suite::pairwise().into_iter().enumerate() {
        let case = configuration.case();
        let (ranks, nodes) = [(4, 2), (6, 2), (6, 3), (8, 2), (9, 3)][number % 5];
        let rails = |node_ranks| {
            let up = number % 2 == 0;
            if up { Route::RailsUp { node_ranks } } else { Route::RailsDown { node_ranks } }
        };
        let setting = Setting { layout: None, ..configuration.setting(ranks) };
        let run = |subject: &dyn Subject, node_ranks| {
            let setting = Setting { route: Some(rails(node_ranks)), ..setting.clone() };
            let answers = subject.run(&case, &setting, 1);
            answers
                .unwrap_or_else(|error| panic!("{configuration} on {setting}: {error}"))
                .remove(0)
        };
        let answer = run(&plain, ranks / nodes);
        run(&placed[nodes - 2], 0)
            .same_bits(&answer)
            .unwrap_or_else(|wrong| panic!("{configuration} on {setting}: {wrong}"));
        Judge::new(&case)
            .unwrap()
            .check(&answer)
            .unwrap_or_else(|wrong| panic!("{configuration} on {setting}: {wrong}"));
    }
}

#[test]
fn on_rails_every_rank_of_a_node_sends_to_the_next_node() {
    let dims = Dims::new(1, 48, 2, 4);
    let case = Case::new("full", Spec::new(dims, DType::F32), Masks::default(), &mut Draw::new(1));
    let pairs = |ranks, nodes, route| -> BTreeSet<(usize, usize)> {
        let crossings = Crossings::default();
        let setting = Setting { ranks, route, ..Setting::ALONE };
        round_robin(nodes, &crossings).run(&case, &setting, 1).unwrap();
        crossings.pairs()
    };
    // ranks of a node are every second one, in ascending order: rank r sends to the rank after it
    let up: BTreeSet<_> = [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)].into();
    assert_eq!(pairs(6, 2, Some(Route::RailsUp { node_ranks: 0 })), up);
    assert_eq!(pairs(6, 2, None), up, "chosen for full attention");
    let down: BTreeSet<_> = [(0, 2), (1, 0), (2, 1), (3, 5), (4, 3), (5, 4)].into();
    assert_eq!(pairs(6, 3, Some(Route::RailsDown { node_ranks: 0 })), down);
}

#[test]
fn rails_that_do_not_fit_the_nodes_are_refused() {
    let dims = Dims::new(1, 24, 2, 4);
    let case = Case::new("full", Spec::new(dims, DType::F32), Masks::default(), &mut Draw::new(1));
    let refusal = |subject: &dyn Subject, ranks, layout, node_ranks| {
        let route = Some(Route::RailsUp { node_ranks });
        let setting = Setting { ranks, layout, route, ..Setting::ALONE };
        subject.run(&case, &setting, 1).map(drop).unwrap_err().to_string()
    };
    let nodes = |nodes| round_robin(nodes, &Crossings::default());
    let contiguous = Some(Layout::Contiguous);
    for (why, refused) in [
        ("no nodes", refusal(&subjects::cpu(), 4, None, 0)),
        ("one node", refusal(&nodes(1), 4, None, 0)),
        ("uneven nodes", refusal(&nodes(2), 5, None, 0)),
        ("nodes that alternate on the ring", refusal(&nodes(2), 4, contiguous, 0)),
    ] {
        let want = "route: got rails-up, want several nodes with as many ranks each";
        assert!(refused.contains(want), "{why}: {refused}");
    }
    let refused = refusal(&subjects::cpu(), 4, None, 3);
    assert!(refused.contains("want nodes of a divisor of 4 ranks"), "{refused}");
}
