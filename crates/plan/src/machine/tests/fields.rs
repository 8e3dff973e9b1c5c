//! Fields that are refused, and the rate of a head dim.

use super::*;

#[test]
fn wrong_fields_are_named() {
    let mut good = two_nodes(link(1e-6, 1e9), link(1e-5, 1e8), 1e12);
    good.rates[0].token = Some(TokenRate { bandwidth: 1e10, further_heads: 1e11 });
    good.check().unwrap();
    type Change = fn(&mut Machine, f64);
    let numbers: [(&str, Change); 9] = [
        ("inside_node.latency", |m, x| m.inside_node.as_mut().unwrap().latency = x),
        ("inside_node.bandwidth", |m, x| m.inside_node.as_mut().unwrap().bandwidth = x),
        ("between_nodes.latency", |m, x| m.between_nodes.as_mut().unwrap().latency = x),
        ("between_nodes.bandwidth", |m, x| m.between_nodes.as_mut().unwrap().bandwidth = x),
        ("node_bandwidth", |m, x| m.node_bandwidth = Some(x)),
        ("rates[0].forward", |m, x| m.rates[0].forward = x),
        ("rates[0].backward", |m, x| m.rates[0].backward = x),
        ("rates[0].token.bandwidth", |m, x| m.rates[0].token.as_mut().unwrap().bandwidth = x),
        ("rates[0].token.further_heads", |m, x| {
            m.rates[0].token.as_mut().unwrap().further_heads = x;
        }),
    ];
    for (field, change) in numbers {
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut machine = good.clone();
            change(&mut machine, wrong);
            let error = machine.check().unwrap_err().to_string();
            let want = format!("{field}: got {wrong}, want a finite number above 0");
            assert_eq!(error, want);
        }
    }
    type Ruin = fn(&mut Machine);
    let others: [(&str, Ruin); 7] = [
        ("ranks_per_node: got 0, want at least 1", |m| m.ranks_per_node = 0),
        ("memory: got 0, want at least 1", |m| m.memory = 0),
        ("rates: got none, want at least one", |m| m.rates.clear()),
        ("rates[0].head_dim: got 0, want at least 1", |m| m.rates[0].head_dim = 0),
        ("inside_node: got null, want a link", |m| m.inside_node = None),
        ("node_bandwidth: got null, want a number", |m| m.node_bandwidth = None),
        ("node_bandwidth: got a number, want null", |m| m.between_nodes = None),
    ];
    for (want, change) in others {
        let mut machine = good.clone();
        change(&mut machine);
        let error = machine.check().unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
        assert_ne!(machine.fingerprint(), good.fingerprint(), "{want}");
    }
    for (field, change) in numbers {
        let mut machine = good.clone();
        change(&mut machine, 3.0);
        assert_ne!(machine.fingerprint(), good.fingerprint(), "{field}");
    }
}

#[test]
fn the_nearest_head_dim_has_the_rate() {
    let rate = |head_dim, forward| ComputeRate {
        head_dim,
        forward,
        ..machine(link(1.0, 1.0), 1.0).rates[0]
    };
    let machine = Machine {
        rates: vec![rate(64, 1.0), rate(128, 2.0), rate(256, 3.0)],
        ..machine(link(1.0, 1.0), 1.0)
    };
    let of = |head_dim| machine.rate(DType::F32, head_dim).unwrap().forward;
    assert_eq!([1, 64, 90, 91, 128, 200, 512].map(of), [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
}
