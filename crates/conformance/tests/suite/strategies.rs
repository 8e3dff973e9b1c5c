//! Strategies by their published names on 2, 3, 4 and 8 ranks: the bytes
//! and bits of their forms, and what they refuse. And ranks assigned to nodes round robin: a
//! ring whose order is free passes each node once, and computes the same bits as without nodes.

use std::{collections::BTreeSet, time::Duration};

use annulus::{Attention, Division, LocalRing, Setup, Tensors};
use annulus_comm::Deadline;
use annulus_conformance::{
    Case, Crossings, Draw, HostMemory, Judge, Masks, Placed, RankSetup, Setting, Subject, subjects,
    suite,
};
use annulus_core::{Control, DType, Dims, Error, Placement, Result, Spec};
use annulus_cpu::Cpu;
use annulus_plan::{Layout, Route, Strategy};
use ndarray::Array4;

const DIMS: Dims =
    Dims { batch: 2, q_len: 61, kv_len: 61, q_heads: 8, kv_heads: 2, head_dim: 8, value_dim: 6 };

/// out, dq and dk of all ranks, and the bytes that each rank sends in both passes.
type Results = ([Array4<f32>; 3], Vec<[u64; 2]>);

fn run(setup: &Setup, dims: Dims, ranks: usize) -> Result<Results> {
    let tensor = |heads: usize, dim: usize| {
        let of = |(b, i, h, c)| ((b * 3 + i * 7 + h * 5 + c) % 13) as f32 * 0.125 - 0.75;
        Array4::from_shape_fn((dims.batch, dims.q_len, heads, dim), of)
    };
    let [q, k, v] = [tensor(8, 8), tensor(2, 8), tensor(2, 6)];
    let dout = tensor(8, 6);
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let mut ring = LocalRing::new(setup, dims, ranks)?;
    let forward = ring.forward(&tensors)?;
    let gradients = ring.backward(&tensors, &forward, dout.view(), None)?;
    let reports = forward.reports.iter().zip(&gradients.reports);
    let sent = reports.map(|reports| {
        <[_; 2]>::from(reports).map(|report| {
            assert_eq!(report.bytes_sent, report.bytes_predicted);
            report.bytes_sent
        })
    });
    let sent = sent.collect();
    Ok(([forward.out, gradients.dq, gradients.dk], sent))
}

#[test]
fn a_name_has_the_bits_and_the_bytes_of_its_form() {
    let causal = Attention::new().causal(true);
    for ranks in [2, 4, 8] {
        let node_ranks = ranks / 2;
        let once_per_node = Route::OncePerNode { node_ranks };
        let forms = [
            (
                Strategy::AllToAll,
                Setup::from((
                    &causal,
                    Division::new().strategy(Strategy::HeadsRing { heads: ranks }),
                )),
            ),
            (
                Strategy::PassQ,
                Setup::from((
                    &causal,
                    Division::new().strategy(Strategy::Grid { heads: 1, queries: 1, keys: ranks }),
                )),
            ),
            (Strategy::AllGather, Setup::from((&causal, Division::new().route(Route::Direct)))),
            (
                Strategy::OncePerNode { node_ranks },
                Setup::from((&causal, Division::new().route(once_per_node))),
            ),
        ];
        for (name, form) in forms {
            let by_name = Setup::from((&causal, Division::new().strategy(name)));
            assert_eq!(
                run(&by_name, DIMS, ranks),
                run(&form, DIMS, ranks),
                "{name}, {ranks} ranks"
            );
            let [plan, of_form] =
                [&by_name, &form].map(|of| LocalRing::new(of, DIMS, ranks).expect("a plan"));
            let [plan, of_form] = [&plan, &of_form].map(LocalRing::plan);
            assert_eq!((plan.strategy(), plan.route()), (of_form.strategy(), of_form.route()));
            assert_eq!(plan.strategy(), name.on_ranks(ranks));
            let more = plan.buffer_bytes() > of_form.buffer_bytes();
            // with two ranks there is one block to receive
            assert_eq!(more, name == Strategy::AllGather && ranks > 2, "{name}, {ranks} ranks");
        }
    }
}

#[test]
fn what_a_name_does_not_fit_is_refused_with_the_plan() {
    let refused = |strategy, ranks: usize, want: &str| {
        let plan =
            LocalRing::new((Attention::new(), Division::new().strategy(strategy)), DIMS, ranks);
        let error = plan.map(drop).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert_eq!(error.to_string(), want);
    };
    // threads are on one node
    refused(
        Strategy::OncePerNode { node_ranks: 0 },
        4,
        "strategy: got once-per-node, want several nodes with as many ranks each, which are \
         neighbours on the ring",
    );
    let other = Setup::from((
        Attention::new(),
        Division::new().strategy(Strategy::AllGather).route(Route::RelayUp),
    ));
    let error = LocalRing::new(other, DIMS, 4).map(drop).unwrap_err();
    assert_eq!(
        error.to_string(),
        "route: got relay-up, want none, or direct: that of strategy all-gather"
    );
    let reproducible = Setup::from((
        Attention::new().reproducible(true),
        Division::new().strategy(Strategy::PassQ),
    ));
    let error = LocalRing::new(reproducible, DIMS, 4).map(drop).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

/// The CPU over threads, with rank r on node r mod `nodes`.
fn round_robin(nodes: usize, crossings: &Crossings) -> impl Subject + use<> {
    let crossings = crossings.clone();
    subjects::over_threads("cpu over threads on nodes", move |_, endpoint| {
        let nodes = (0..endpoint.ranks()).map(|rank| rank % nodes).collect();
        let placed = Placed::new(endpoint, Placement::new(nodes), crossings.clone());
        let transport = Box::new(Deadline::new(placed, Duration::from_secs(60))?);
        Ok(RankSetup { memory: HostMemory, backend: Cpu::new(1)?, transport })
    })
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

/// A given route, or rails: of given nodes over one process, and by name over nodes that a
/// transport reports.
#[test]
fn nodes_change_no_bit_of_a_given_route() {
    let plain = subjects::cpu();
    let placed = [2, 3].map(|nodes| round_robin(nodes, &Crossings::default()));
    for (number, configuration) in suite::pairwise().into_iter().enumerate() {
        let case = configuration.case();
        let (ranks, nodes) = [(4, 2), (6, 2), (6, 3), (7, 3), (8, 2), (9, 3)][number % 6];
        let setting = Setting { layout: None, ..configuration.setting(ranks) };
        let [given, by_name] = [ranks / nodes, 0].map(|node_ranks| match number % 4 {
            0 if ranks != 7 => Route::RailsUp { node_ranks },
            1 if ranks != 7 => Route::RailsDown { node_ranks },
            _ => setting.route.unwrap_or(Route::RelayUp),
        });
        let run = |subject: &dyn Subject, route| {
            let setting = Setting { route: Some(route), ..setting.clone() };
            let answers = subject.run(&case, &setting, 1);
            let context = |error| panic!("{configuration} on {setting}: {error}");
            answers.unwrap_or_else(context).remove(0)
        };
        let answer = run(&plain, given);
        let verdict = run(&placed[nodes - 2], by_name).same_bits(&answer);
        let verdict = verdict.and_then(|()| Judge::new(&case).unwrap().check(&answer));
        verdict.unwrap_or_else(|wrong| panic!("{configuration} on {setting}: {wrong}"));
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
