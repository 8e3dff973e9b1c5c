//! Traces of ranks, and their merge.

use serde_json::Value;

use crate::support::Folder;

const ATTEND: &str =
    "attend --input in.safetensors --output out.safetensors --trace traces --ranks";

fn events(folder: &Folder, name: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&std::fs::read(folder.path(name)).unwrap()).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn traces_of_one_run_are_merged() {
    let folder = Folder::new("trace_merge");
    folder.succeed("make --output in.safetensors --q-len 24 --heads 2 --head-dim 4");
    folder.succeed(&format!("{ATTEND} 3"));
    let result = folder.succeed("trace merge traces --output all.json");
    let all = events(&folder, "all.json");
    assert_eq!(result.out, format!("wrote all.json: {} events of 3 ranks\n", all.len()));
    let parts: Vec<Value> =
        (0..3).flat_map(|rank| events(&folder, &format!("traces/rank-{rank}.json"))).collect();
    assert_eq!(all, parts);
    for rank in 0..3 {
        assert!(
            all.iter().any(|event| event["pid"] == rank && event["name"] == "forward"),
            "rank {rank}"
        );
    }
    // the third file is left from the run before
    folder.succeed(&format!("{ATTEND} 2"));
    assert!(folder.succeed("trace merge traces --output all.json").out.contains("of 2 ranks"));
    assert!(events(&folder, "all.json").iter().all(|event| event["pid"] != 2));
}

#[test]
fn traces_of_other_runs_and_malformed_ones_are_refused() {
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
        .failed(1, &["rank-1.json", "not a trace of a rank"]);
    std::fs::remove_file(folder.path("traces/rank-1.json")).unwrap();
    folder.run("trace merge traces --output all.json").failed(1, &["rank-1.json", "No such file"]);
    folder.run("trace merge traces").failed(2, &["--output", "trace merge"]);
    assert!(!folder.path("all.json").exists());
}
