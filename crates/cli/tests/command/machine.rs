//! `measure`, the machine file, and `plan --machine`.

use serde_json::{Value, json};

use crate::support::Folder;

fn write(folder: &Folder, machine: &Value) {
    std::fs::write(folder.path("machine.json"), machine.to_string()).unwrap();
}

/// The crates `annulus-machine-file` and `annulus-plan` test all fields.
#[test]
fn wrong_fields_name_the_file_and_the_field() {
    let folder = Folder::new("machine_errors");
    let good = folder.write_machine(1e9, 1e12);
    let plan = "plan --q-len 64 --ranks 8 --machine machine.json";
    folder.succeed(plan);
    for (field, wrong) in [
        ("/inside_node/latency", json!("bogus")),
        ("/rates/0/head_dim", json!(-1)),
        ("/rates/0/forward", json!(0)),
    ] {
        let mut changed = good.clone();
        *changed.pointer_mut(field).unwrap() = wrong;
        write(&folder, &changed);
        let name = field.rsplit('/').next().unwrap();
        folder.run(plan).failed(1, &["machine.json", name]);
    }
    std::fs::write(folder.path("machine.json"), "[]").unwrap();
    folder.run(plan).failed(1, &["machine.json", "is not a machine"]);
    folder.run(&plan.replace("machine.json", "none.json")).failed(1, &["--machine none.json"]);
}

#[test]
fn plan_predicts_the_time_of_every_strategy() {
    let folder = Folder::new("plan_machine");
    // 64:8 heads on 8 ranks: the ring sends the fewest bytes
    let flags = "--causal --q-len 8192 --ranks 8 --heads 64 --kv-heads 8 --strategy auto";
    // on the nodes of the machine, whose ring has rails
    let without = folder.plan(&format!("{flags} --node-ranks 4"));
    assert_eq!(without["strategy"], "ring");
    let null = ["time_predicted", "exposed_predicted", "bytes_inside_node", "bytes_between_nodes"];
    for of in without["strategies"].as_array().unwrap() {
        for field in null {
            assert_eq!(of.get(field), Some(&Value::Null), "{field}");
        }
    }
    for (between, flops, want) in [(1e6, 1e13, "heads:4"), (1e10, 1e11, "ring")] {
        folder.write_machine(between, flops);
        let flags = format!("{flags} --machine machine.json");
        let planned = folder.plan(&flags);
        assert_eq!(planned["strategy"], want);
        let all = planned["strategies"].as_array().unwrap();
        let time = |of: &Value| of["time_predicted"].as_f64().unwrap();
        let chosen = all.iter().find(|of| of["name"] == want).unwrap();
        assert!(all.iter().all(|of| time(chosen) <= 1.01 * time(of)), "{all:?}");
        for (of, before) in all.iter().zip(without["strategies"].as_array().unwrap()) {
            assert!(time(of) > of["exposed_predicted"].as_f64().unwrap(), "{of}");
            let number = |field: &str| of[field].as_u64().unwrap();
            let sent = number("bytes_sent_total") + number("backward_bytes_sent_total");
            assert_eq!(number("bytes_inside_node") + number("bytes_between_nodes"), sent);
            assert_eq!(of["fits_memory"], true);
            for same in ["name", "grid", "bytes_sent_total", "bytes_max_rank", "memory_max_rank"] {
                assert_eq!(of[same], before[same]);
            }
        }
        let text = folder.succeed(&format!("plan {flags}")).out;
        let marked: Vec<&str> = text.lines().filter(|line| line.starts_with("* ")).collect();
        assert_eq!(marked.len(), 1, "{text}");
        assert!(marked[0].starts_with(&format!("* {want} ")), "{text}");
        assert!(marked[0].contains(" exposed; ") && marked[0].contains("predicted "), "{text}");
    }
    let mut small = folder.write_machine(1e6, 1e13);
    small["memory"] = json!(1);
    write(&folder, &small);
    let text = folder.succeed(&format!("plan {flags} --machine machine.json")).out;
    assert!(text.contains("more than its memory"), "{text}");
}

#[test]
fn attend_and_bench_choose_by_the_machine() {
    let folder = Folder::new("attend_machine");
    let shape = "--heads 64 --kv-heads 8";
    folder.succeed(&format!("make --output in.st --q-len 256 {shape} --head-dim 8"));
    let attend = "attend --input in.st --output out.st --ranks 8 --causal --json --strategy auto";
    let bench =
        format!("bench --what fwd --ns 256 --ds 8 {shape} --causal true --ranks 8 --strategy auto");
    let flags = "--machine machine.json";
    for (between, flops, want) in [(1e6, 1e13, "heads:4"), (1e10, 1e9, "ring")] {
        folder.write_machine(between, flops);
        for line in [format!("{attend} {flags}"), format!("{bench} --machine machine.json")] {
            assert_eq!(folder.json(&line)["strategy"], want, "{line}");
        }
    }
    std::fs::write(folder.path("machine.json"), "{}").unwrap();
    for line in [format!("{attend} {flags}"), format!("{bench} --machine machine.json")] {
        folder.run(&line).failed(1, &["--machine machine.json", "missing field"]);
    }
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn measure_writes_a_machine_that_plan_reads() {
    let folder = Folder::new("measure");
    // a head dim that is named twice is measured once
    let flags = "measure --ranks 2 --threads 1 --dtype f32,bf16 --ds 4,8,4";
    let printed = folder.succeed(&format!("{flags} --out machine.json")).out;
    let lines = ["inside nodes", "f32 dim 4", "bf16 dim 8", "memory", "wrote machine.json"];
    for line in lines {
        let count = printed.lines().filter(|printed| printed.starts_with(line)).count();
        assert_eq!(count, 1, "{line}: {printed}");
    }
    let machine: Value = serde_json::from_str(&folder.text("machine.json")).unwrap();
    assert_eq!((&machine["version"], &machine["ranks_per_node"]), (&json!(1), &json!(2)));
    assert_eq!(
        (&machine["between_nodes"], &machine["node_bandwidth"]),
        (&Value::Null, &Value::Null)
    );
    let rates = machine["rates"].as_array().unwrap();
    let of: Vec<(&str, u64)> = rates
        .iter()
        .map(|rate| (rate["dtype"].as_str().unwrap(), rate["head_dim"].as_u64().unwrap()))
        .collect();
    assert_eq!(of, [("f32", 4), ("f32", 8), ("bf16", 4), ("bf16", 8)]);
    for rate in rates {
        for pass in ["forward", "backward"] {
            let rate = rate[pass].as_f64().unwrap();
            assert!(rate > 1e5 && rate < 1e15, "{rate}");
        }
    }
    let flags_of_plan = "plan --q-len 64 --ranks 2 --head-dim 8 --machine machine.json";
    let text = folder.succeed(flags_of_plan).out;
    assert!(text.contains("predicted "), "{text}");
    // ranks on more than one node
    let wrong = folder.run(&flags_of_plan.replace("--ranks 2", "--ranks 4"));
    wrong.failed(2, &["--machine", "no link between_nodes"]);
    // to standard output, and of one rank, which has no link
    let machine = folder.json("measure --ranks 1 --threads 1 --ds 4");
    assert_eq!((&machine["ranks_per_node"], &machine["inside_node"]), (&json!(1), &Value::Null));
    folder.run(&format!("{flags} --out none/machine.json")).failed(1, &["--out none/machine.json"]);
    assert_eq!(folder.names(), ["machine.json"]);
}
