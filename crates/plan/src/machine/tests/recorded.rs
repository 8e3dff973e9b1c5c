//! The choice among strategies whose times were measured (`benches/record/strategies.md`).

use super::*;

/// Hosts, ranks and rows of a case, with the measured milliseconds of each strategy, forward and
/// backward.
type Case = ([usize; 3], &'static [(&'static str, f64)]);

/// 8 heads of dim 64 in f32, on hosts with links of 1 Gbit/s.
#[rustfmt::skip]
const CASES: &[Case] = &[
    ([4, 4, 2048], &[
        ("ring", 246.4), ("heads:2", 248.8), ("all-to-all", 255.8), ("grid:2x2", 235.3),
        ("grid:2x1x2", 295.1), ("pass-q", 334.3), ("all-gather", 239.3),
    ]),
    ([4, 4, 4096], &[
        ("ring", 730.0), ("heads:2", 783.5), ("all-to-all", 800.6), ("grid:2x2", 778.8),
        ("grid:2x1x2", 896.5), ("pass-q", 944.4), ("all-gather", 733.0),
    ]),
    ([4, 4, 8192], &[
        ("ring", 2672.9), ("heads:2", 2758.4), ("all-to-all", 2791.8), ("grid:2x2", 2746.7),
        ("grid:2x1x2", 2999.7), ("pass-q", 3064.7), ("all-gather", 2635.6),
    ]),
    ([2, 4, 2048], &[
        ("ring", 211.1), ("heads:2", 190.7), ("all-to-all", 238.8), ("grid:2x2", 196.7),
        ("grid:2x1x2", 229.3), ("pass-q", 315.3), ("all-gather", 208.3),
        ("once-per-node:2", 200.9),
    ]),
    ([2, 4, 4096], &[
        ("ring", 706.7), ("heads:2", 683.0), ("all-to-all", 792.4), ("grid:2x2", 682.0),
        ("grid:2x1x2", 778.5), ("pass-q", 923.3), ("all-gather", 713.9),
        ("once-per-node:2", 702.2),
    ]),
    ([2, 4, 8192], &[
        ("ring", 2632.2), ("heads:2", 2551.4), ("all-to-all", 2761.5), ("grid:2x2", 2575.1),
        ("grid:2x1x2", 2743.1), ("pass-q", 3031.1), ("all-gather", 2613.6),
        ("once-per-node:2", 2595.4),
    ]),
    ([2, 2, 2048], &[
        ("ring", 183.4), ("all-to-all", 284.2), ("pass-q", 246.9), ("all-gather", 183.2),
    ]),
    ([2, 2, 4096], &[
        ("ring", 658.2), ("all-to-all", 846.0), ("pass-q", 816.2), ("all-gather", 643.5),
    ]),
    ([2, 2, 8192], &[
        ("ring", 2508.2), ("all-to-all", 2932.8), ("pass-q", 2835.2), ("all-gather", 2553.3),
    ]),
];

/// GFLOP/s of a rank, forward and backward, in the middle of its files: with 4 ranks, two share a
/// core.
const fn rates(case: [usize; 3]) -> [f64; 2] {
    match case {
        [4, 4, _] => [46.2, 46.0],
        [2, 4, _] => [47.0, 47.0],
        _ => [95.8, 97.3],
    }
}

#[test]
fn the_choice_loses_at_most_a_tenth_to_any_strategy() {
    for &([hosts, ranks, len], times) in CASES {
        let spec = Spec::new(Dims::new(1, len, 8, 64), DType::F32);
        let [forward, backward] = rates([hosts, ranks, len]).map(|gigaflops| gigaflops * 1e9);
        let rate = ComputeRate { dtype: DType::F32, head_dim: 64, forward, backward };
        let between = link(1e-4, 1.18e8);
        let ranks_per_node = ranks / hosts;
        let machine = Machine {
            ranks_per_node,
            inside_node: Some(link(2e-5, 2e9)),
            // each rank has a link of its own
            node_bandwidth: Some(between.bandwidth * ranks_per_node as f64),
            rates: vec![rate],
            ..machine(between, 1.0)
        };
        let placement = Placement::new((0..ranks).map(|rank| rank / ranks_per_node).collect());
        let options = TrafficOptions { placement: Some(&placement), ..BOTH };
        let mut all = StrategyTraffic::of_all(&spec, ranks, &options, &mut || ()).unwrap();
        all.extend(StrategyTraffic::of_routes(&spec, ranks, &options, &mut || ()).unwrap());
        let (chosen, predictions) = machine.choose(&all, &spec, &options, &mut || ()).unwrap();
        let measured = |of: &StrategyTraffic| {
            let name = of.strategy.published_on(ranks).to_string();
            let found = times.iter().find(|(measured, _)| *measured == name);
            found.unwrap_or_else(|| panic!("{name} was not measured")).1
        };
        let best = times.iter().map(|&(_, time)| time).fold(f64::INFINITY, f64::min);
        let loss = measured(&all[chosen]) / best - 1.0;
        let name = format!("{hosts} hosts, {ranks} ranks, {len} rows: {}", all[chosen].strategy);
        assert!(loss <= 0.1, "{name} loses {loss:.3}");
        for (of, predicted) in all.iter().zip(&predictions) {
            let ratio = predicted.seconds * 1e3 / measured(of);
            assert!((0.8..1.1).contains(&ratio), "{name}, {}: {ratio:.3}", of.strategy);
        }
    }
}
