//! Traces: a file for each rank, and all of them joined.

use serde_json::Value;

use crate::support::Folder;

const ATTEND: &str =
    "attend --input in.safetensors --output out.safetensors --trace traces --ranks";

fn events(folder: &Folder, name: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&std::fs::read(folder.path(name)).unwrap()).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn the_traces_of_a_run_become_one() {
    let folder = Folder::new("trace_merge");
    folder.succeed("make --output in.safetensors --q-len 24 --heads 2 --head-dim 4");
    folder.succeed(&format!("{ATTEND} 3"));
    let said = folder.succeed("trace merge traces --output all.json");
    let all = events(&folder, "all.json");
    assert_eq!(said.out, format!("wrote all.json: {} events of 3 ranks\n", all.len()));
    let parts: Vec<Value> =
        (0..3).flat_map(|rank| events(&folder, &format!("traces/rank-{rank}.json"))).collect();
    assert_eq!(all, parts);
    for rank in 0..3 {
        assert!(
            all.iter().any(|event| event["pid"] == rank && event["name"] == "forward"),
            "rank {rank}"
        );
    }
    // a later run of fewer ranks leaves the third file behind: it is no part of that run
    folder.succeed(&format!("{ATTEND} 2"));
    assert!(folder.succeed("trace merge traces --output all.json").out.contains("of 2 ranks"));
    assert!(events(&folder, "all.json").iter().all(|event| event["pid"] != 2));
}

#[test]
fn what_is_no_trace_of_one_run_is_refused() {
    let folder = Folder::new("trace_refused");
    folder.run("trace merge traces --output all.json").failed(1, &["rank-0.json", "No such file"]);
    folder.succeed("make --output in.safetensors --q-len 24 --heads 2 --head-dim 4");
    folder.succeed(&format!("{ATTEND} 2"));
    let old = std::fs::read(folder.path("traces/rank-1.json")).unwrap();
    folder.succeed(&format!("{ATTEND} 2"));
    std::fs::write(folder.path("traces/rank-1.json"), old).unwrap();
    folder.run("trace merge traces --output all.json").failed(1, &["rank-1.json", "another run"]);
    std::fs::write(folder.path("traces/rank-1.json"), "{\"traceEvents\":[]}").unwrap();
    folder
        .run("trace merge traces --output all.json")
        .failed(1, &["rank-1.json", "no trace of a rank"]);
    std::fs::remove_file(folder.path("traces/rank-1.json")).unwrap();
    folder.run("trace merge traces --output all.json").failed(1, &["rank-1.json", "No such file"]);
    folder.run("trace merge traces").failed(2, &["--output", "trace merge --help"]);
    assert!(!folder.path("all.json").exists());
}
