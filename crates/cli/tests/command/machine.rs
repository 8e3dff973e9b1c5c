//! `measure`, the machine file, and `plan --machine`.

use serde_json::{Value, json};

use crate::support::Folder;

fn write(folder: &Folder, machine: &Value) {
    std::fs::write(folder.path("machine.json"), machine.to_string()).unwrap();
}

#[test]
fn wrong_fields_name_the_file_and_the_field() {
    let folder = Folder::new("machine_errors");
    let good = folder.write_machine(1e9, 1e12);
    let plan = "plan --q-len 64 --ranks 8 --machine machine.json";
    folder.succeed(plan);
    let refused = |machine: &Value, texts: &[&str]| {
        write(&folder, machine);
        let result = folder.run(plan);
        let all: Vec<&str> = [&["--machine machine.json"], texts].concat();
        assert_ne!(result.code, 0, "{machine}");
        let line = result.err.strip_suffix('\n').unwrap();
        assert!(!line.contains('\n') && result.out.is_empty(), "{line}");
        for text in all {
            let file = text.strip_prefix("--machine ").unwrap_or(text);
            assert!(line.contains(file), "{line}: {text}");
        }
    };
    let fields = "/version /ranks_per_node /inside_node /inside_node/latency /inside_node/bandwidth \
                  /between_nodes /between_nodes/latency /node_bandwidth /rates /rates/0/dtype \
                  /rates/0/head_dim /rates/0/forward /rates/0/backward /memory";
    for field in fields.split_whitespace() {
        let (parent, name) = field.rsplit_once('/').unwrap();
        // missing
        let mut changed = good.clone();
        changed.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(name);
        refused(&changed, &["missing field", name]);
        // of a wrong type
        let mut changed = good.clone();
        *changed.pointer_mut(field).unwrap() = json!("bogus");
        refused(&changed, &[name]);
        // negative and 0; a wrong type for some
        for wrong in [json!(-1), json!(0)] {
            let mut changed = good.clone();
            *changed.pointer_mut(field).unwrap() = wrong;
            refused(&changed, &[name]);
        }
    }
    for parent in ["", "/inside_node", "/rates/0"] {
        let mut changed = good.clone();
        changed.pointer_mut(parent).unwrap()["latencies"] = json!(1);
        refused(&changed, &["unknown field `latencies`"]);
    }
    let mut other = good.clone();
    other["version"] = json!(2);
    other["bandwidths"] = json!([]);
    refused(&other, &["version: got 2, want 1"]);
    for (text, want) in [
        ("[]", "is not a machine"),
        ("", "is not a machine"),
        ("{\"version\": NaN}", "is not a machine"),
        ("{\"version\": 1} {}", "is not a machine"),
    ] {
        std::fs::write(folder.path("machine.json"), text).unwrap();
        folder.run(plan).failed(1, &["machine.json", want]);
    }
    let huge = good.to_string().replace("1000000000.0", "1e999");
    assert!(huge.contains("1e999"), "{huge}");
    std::fs::write(folder.path("machine.json"), huge).unwrap();
    folder.run(plan).failed(1, &["machine.json", "number out of range"]);
    folder.run(&plan.replace("machine.json", "none.json")).failed(1, &["--machine none.json"]);
}

#[test]
fn plan_predicts_the_strategies_of_documents() {
    let folder = Folder::new("plan_documents_machine");
    folder.write_machine(1e9, 1e11);
    let documents = "--causal --documents 512,2048,1000,4632 --ranks 4 --heads 8";
    let mut times = Vec::new();
    for layout in ["contiguous", "balanced"] {
        let flags = format!("{documents} --layout {layout} --machine machine.json");
        let planned = folder.plan(&flags);
        let strategies = planned["strategies"].as_array().unwrap();
        let names: Vec<&str> = strategies.iter().map(|of| of["name"].as_str().unwrap()).collect();
        let grids = ["grid:2x2", "grid:2x1x2", "pass-q"];
        assert_eq!(
            names,
            [&["ring", "heads:2", "all-to-all"][..], &grids, &["all-gather"]].concat()
        );
        // the bytes are those of the plan without a machine
        let bytes = folder.plan(&format!("{documents} --layout {layout}"));
        for (of, without) in strategies.iter().zip(bytes["strategies"].as_array().unwrap()) {
            for field in ["name", "bytes_sent_total", "work_max_over_mean", "redundancy"] {
                assert_eq!(of[field], without[field], "{field}");
            }
            assert!(without["time_predicted"].is_null());
        }
        let time = |of: &Value| of["time_predicted"].as_f64().unwrap();
        times.push(time(&strategies[0]));
        // the choice is the one with the least time, and has the figures of its line
        let auto = folder.plan(&format!("{flags} --strategy auto"));
        let least = strategies.iter().map(time).fold(f64::INFINITY, f64::min);
        let near = |of: &&Value| time(of) <= 1.01 * least;
        let least = strategies.iter().find(near).unwrap();
        assert_eq!(auto["strategy"], least["name"]);
        for field in ["bytes_sent_total", "work_max_over_mean", "redundancy"] {
            assert_eq!(auto[field], least[field], "{field}");
        }
    }
    // the rank with the longest document has the most work, unless the layout balances it
    assert!(times[1] < 0.9 * times[0], "{times:?}");
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

/// The case of two ranks that `annulus-core` computes by hand.
#[test]
fn seconds_are_those_of_the_model() {
    let folder = Folder::new("plan_machine_seconds");
    let block_bytes = 512.0 * 128.0 * 4.0;
    let flops = 512.0 * 512.0 * 4.0 * 64.0;
    let mut machine = folder.write_machine(block_bytes / 4.0, flops);
    machine["ranks_per_node"] = json!(1);
    machine["between_nodes"]["latency"] = json!(0.1);
    machine["node_bandwidth"] = json!(1e12);
    write(&folder, &machine);
    let planned = folder.plan("--q-len 1024 --ranks 2 --heads 1 --machine machine.json");
    let seconds = planned["strategies"][0]["time_predicted"].as_f64().unwrap();
    // and a latency before and after each pass
    let agreements = 4.0 * 0.1;
    let passes = 5.1 + 4.1 + 5.0 / 3.0 + 4.0;
    assert!((seconds - (agreements + passes)).abs() < 1e-9, "{seconds}");
    let text = folder.succeed("plan --q-len 1024 --ranks 2 --heads 1 --machine machine.json").out;
    assert!(text.contains("* ring ") && text.contains("predicted 15.267 s"), "{text}");
    // a ring of many ranks is predicted, too
    let planned = folder.plan("--q-len 4096 --ranks 512 --heads 1 --machine machine.json");
    let seconds = planned["strategies"][0]["time_predicted"].as_f64().unwrap();
    assert!(seconds > 511.0 * 0.1, "{seconds}");
    // documents of one rank each send nothing: the agreements alone are exposed
    let planned = folder.plan("--documents 32,32 --ranks 2 --machine machine.json");
    let exposed = planned["strategies"][0]["exposed_predicted"].as_f64().unwrap();
    assert!((exposed - agreements).abs() < 1e-9, "{exposed}");
    let wrong = "plan --q-len 64 --ranks 2 --dtype bf16 --machine machine.json";
    folder.run(wrong).failed(2, &["--machine"]);
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
