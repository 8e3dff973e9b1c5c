//! `plan --forward-only`: figures and choice of forward passes.

use annulus::{Attention, DType, Dims};
use annulus_plan::{StrategyTraffic, TrafficOptions};
use serde_json::{Value, json};

use crate::support::Folder;

fn plan(folder: &Folder, flags: &str) -> Value {
    serde_json::from_str(&folder.succeed(&format!("plan {flags} --json -")).out).unwrap()
}

#[test]
fn the_choice_is_within_a_tenth_of_the_best_forward_pass() {
    let folder = Folder::new("plan_forward_choice");
    let options = TrafficOptions::FORWARD;
    for [heads, kv_heads] in [[32, 32], [64, 8], [8, 1]] {
        for ranks in [8, 64, 256, 1024] {
            let len = 64 * ranks;
            let flags = format!(
                "--q-len {len} --ranks {ranks} --heads {heads} --kv-heads {kv_heads} --dtype bf16 \
                 --strategy auto --forward-only"
            );
            let planned = plan(&folder, &flags);
            let dims = Dims { q_heads: heads, ..Dims::new(1, len, heads, 64).kv_heads(kv_heads) };
            let spec = Attention::new().dtype(DType::Bf16).spec(dims).unwrap();
            let all = StrategyTraffic::of_all(&spec, ranks, &options, &mut || ()).unwrap();
            let best = all.iter().map(StrategyTraffic::total).min().unwrap() as f64;
            let ratio = planned["forward"]["sent"].as_f64().unwrap() / best;
            let name = format!("{flags}: {} {ratio}", planned["strategy"]);
            assert!((1.0..=1.1).contains(&ratio), "{name}");
        }
    }
}

#[test]
fn figures_of_a_backward_pass_are_null() {
    let folder = Folder::new("plan_forward_only");
    let machine = json!({
        "version": 1,
        "ranks_per_node": 4,
        "inside_node": { "latency": 2e-6, "bandwidth": 2e10 },
        "between_nodes": { "latency": 5e-6, "bandwidth": 1e10 },
        "node_bandwidth": 2e10,
        "rates": [{ "dtype": "f32", "head_dim": 64, "forward": 1e12, "backward": 1e12 }],
        "memory": 1u64 << 40,
    });
    std::fs::write(folder.path("machine.json"), machine.to_string()).unwrap();
    let shape = "--causal --q-len 4096 --ranks 8 --machine machine.json --rank 1";
    for strategy in ["ring", "heads:2", "grid:4x2", "all-gather", "ring --reproducible"] {
        let flags = format!("{shape} --strategy {strategy}");
        let both = plan(&folder, &flags);
        let forward = plan(&folder, &format!("{flags} --forward-only"));
        assert_eq!(both["forward"], forward["forward"], "{strategy}");
        assert!(both["backward"]["sent"].as_u64().unwrap() > 0, "{strategy}");
        assert!(forward["backward"].is_null(), "{strategy}");
        let of = |plan: &Value| {
            let name = plan["strategy"].clone();
            let all = plan["strategies"].as_array().unwrap().iter();
            all.clone().find(|of| of["name"] == name).unwrap().clone()
        };
        let [of_both, of_forward] = [&both, &forward].map(of);
        for field in ["backward_bytes_sent_total", "backward_bytes_max_rank"] {
            assert!(of_forward[field].is_null() && of_both[field].is_u64(), "{strategy} {field}");
        }
        assert_eq!(of_both["bytes_sent_total"], of_forward["bytes_sent_total"], "{strategy}");
        for field in ["memory_max_rank", "time_predicted", "bytes_between_nodes"] {
            let number = |of: &Value| of[field].as_f64().unwrap();
            let [all, less] = [number(&of_both), number(&of_forward)];
            assert!(less > 0.0 && less < all, "{strategy} {field}: {less} {all}");
        }
        let ranks = forward["per_rank"].as_array().unwrap();
        assert!(ranks.iter().all(|rank| rank["backward_bytes_sent"].is_null()), "{strategy}");
        if strategy.starts_with("grid") {
            assert_eq!(forward["passes"].as_array().unwrap().len(), 1);
            assert_eq!(forward["passes"][0], both["passes"][0]);
        }
        let program = &forward["program"];
        assert_eq!(program.get("query_steps"), None, "{strategy}");
        for step in program["steps"].as_array().unwrap() {
            assert_eq!(step["sends_gradients"], json!([]), "{strategy}");
        }
        if strategy.ends_with("reproducible") {
            let leaves = &forward["leaves"];
            assert_eq!(leaves["most_bytes"], both["leaves"]["most_bytes"]);
            assert!(leaves["most_bytes_with_backward"].is_null());
            assert!(leaves["most_partial_gradients"].is_null());
        }
        let text = folder.succeed(&format!("plan {flags} --forward-only --svg plan.svg")).out;
        assert!(text.contains(" sent forward, at most "), "{text}");
        let svg = std::fs::read_to_string(folder.path("plan.svg")).unwrap();
        for text in [text, svg] {
            for word in ["backward", "bwd", "gradient"] {
                assert!(!text.contains(word), "{strategy} {word}: {text}");
            }
        }
    }
    let refused = folder.run("plan --decode --kv-len 64 --ranks 2 --forward-only");
    assert!(refused.code != 0 && refused.err.contains("--forward-only"), "{refused:?}");
}

#[test]
fn a_picture_names_the_strategy_of_a_route() {
    let folder = Folder::new("plan_picture_of_a_route");
    let picture = |strategy: &str| {
        let flags = "--causal --q-len 512 --ranks 8 --node-ranks 4 --svg plan.svg";
        folder.succeed(&format!("plan {flags} --strategy {strategy}"));
        std::fs::read_to_string(folder.path("plan.svg")).unwrap()
    };
    assert!(picture("all-gather").contains(">all-gather: 7 hops; owners send blocks directly"));
    assert!(picture("once-per-node").contains(">once-per-node:4: "));
    assert!(!picture("ring").contains("all-gather"));
}
