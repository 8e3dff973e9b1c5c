//! `--backend wgpu` on the first adapter. Without an adapter these tests print NOT RUN, and with
//! `ANNULUS_REQUIRE=wgpu` they fail.

use serde_json::Value;

use crate::{
    figures::has_bench_fields,
    support::{Folder, RunResult, Tensors},
};

/// Variable that forces a level.
const LEVEL: &str = "ANNULUS_WGPU_LEVEL";

/// Variable that forces a register tile.
const TILE: &str = "ANNULUS_WGPU_REGISTER_TILE";

/// Variable that forces a query tile.
const QUERY_TILE: &str = "ANNULUS_WGPU_QUERY_TILE";

/// A variable that forces kernels, and its value.
type Forced<'a> = Option<(&'a str, &'a str)>;

/// Runs the command, with the chosen kernels or forced ones.
fn run(folder: &Folder, arguments: &str, forced: Forced<'_>) -> RunResult {
    let mut command = folder.command(arguments);
    command.env_remove(LEVEL).env_remove(TILE).env_remove(QUERY_TILE).envs(forced);
    RunResult::from(command.output().unwrap())
}

#[track_caller]
fn succeed(folder: &Folder, arguments: &str) -> RunResult {
    let result = run(folder, arguments, None);
    assert_eq!((result.code, result.err.as_str()), (0, ""), "annulus {arguments}");
    result
}

/// Returns the lines of `doctor` about adapters; empty without an adapter.
fn adapters(folder: &Folder, forced: Forced<'_>) -> Vec<String> {
    let result = run(folder, "doctor", forced);
    assert_eq!(result.code, 0, "{result:?}");
    let lines: Vec<String> =
        result.out.lines().filter(|line| line.starts_with("wgpu ")).map(str::to_owned).collect();
    if lines.iter().any(|line| line.contains("no adapter")) {
        let required = std::env::var("ANNULUS_REQUIRE")
            .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
        assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
        eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
        return Vec::new();
    }
    assert!(!lines.is_empty(), "{result:?}");
    lines
}

fn has_no_adapter(folder: &Folder) -> bool {
    adapters(folder, None).is_empty()
}

#[test]
fn decode_on_wgpu_agrees_with_the_cpu() {
    let folder = Folder::new("wgpu_decode");
    if has_no_adapter(&folder) {
        return;
    }
    folder.succeed("make --output in.safetensors --q-len 70 --heads 4 --kv-heads 2 --head-dim 6");
    let decode = |backend: &str| {
        let done = succeed(
            &folder,
            &format!(
                "decode --input in.safetensors --output {backend}.safetensors --causal --ranks 2 \
                 --prefill 65 --prefill-chunk 30 --page-rows 7 --backend {backend} --json"
            ),
        );
        let figures: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!(figures["backend"], backend);
        // out, maximum and sum of 4 heads, to the other rank
        assert_eq!(figures["tokens"]["bytes_per_token_most"], 2 * 4 * (6 + 2) * 4);
    };
    decode("wgpu");
    decode("cpu");
    folder.close(["wgpu.safetensors", "cpu.safetensors"], &["out", "lse"], 2e-6);
}

#[test]
fn attend_on_wgpu_agrees_with_the_cpu() {
    let folder = Folder::new("wgpu_attend");
    if has_no_adapter(&folder) {
        return;
    }
    folder.succeed(
        "make --output in.safetensors --batch 2 --q-len 43 --kv-len 39 --heads 4 --kv-heads 2 \
         --head-dim 6 --value-dim 5 --backward --bias 1h1k --sinks per-head --sinks-count 2 \
         --mask 0.7 --segments 3",
    );
    let attend = "attend --input in.safetensors --sinks per-head --backward --dtype f32";
    for flags in [
        "--causal --window 9,none --ranks 3",
        "--unnormalized --soft-cap 2 --dropout 0.3 --seed 5 --ranks 2 --layout striped",
    ] {
        folder.succeed(&format!("{attend} {flags} --output cpu.safetensors"));
        let result = succeed(
            &folder,
            &format!("{attend} {flags} --output wgpu.safetensors --backend wgpu --device 0"),
        );
        assert!(result.out.contains("backward"), "{result:?}");
        let files = ["wgpu.safetensors", "cpu.safetensors"];
        let [got, want] = files.map(|name| Tensors::read(&folder.path(name)));
        let names: Vec<&str> = want.all.keys().map(String::as_str).collect();
        assert!(got.all.keys().eq(&names), "{:?}", got.all.keys());
        folder.close(files, &names, 1e-4);
    }
}

#[test]
fn bench_on_wgpu_uses_timestamps_of_the_device() {
    let folder = Folder::new("wgpu_bench");
    if has_no_adapter(&folder) {
        return;
    }
    let result =
        succeed(&folder, "bench --backend wgpu --ns 64 --ds 8 --heads 2 --causal true --ranks 2");
    let lines: Vec<Value> =
        result.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    let gpu = annulus_wgpu::Gpu::open(&annulus_wgpu::Options::default()).unwrap();
    let clock = if annulus_wgpu::Stopwatch::is_there(&gpu) { "device" } else { "host" };
    for line in lines {
        assert_eq!(
            (&line["backend"], &line["clock"]),
            (&Value::from("wgpu"), &Value::from(clock)),
            "{line}"
        );
        // positive, and far below half a minute at this size
        assert!(line["ms"].as_f64().is_some_and(|ms| ms > 0.0 && ms < 30e3), "{line}");
        has_bench_fields(&line);
    }
}

#[test]
fn doctor_lists_the_chosen_level_and_all_supported_ones() {
    let folder = Folder::new("wgpu_doctor");
    let chosen = adapters(&folder, None);
    for (line, adapter) in chosen.iter().zip(annulus_wgpu::Gpu::list()) {
        assert!(line.contains(&format!(", level {}", adapter.chosen.name())), "{line}");
        let all: Vec<&str> = adapter.levels.iter().map(|level| level.name()).collect();
        assert!(line.ends_with(&format!("{LEVEL} forces one of: {}", all.join(" "))), "{line}");
        assert_eq!(adapter.record.is_some(), adapter.chosen != annulus_wgpu::Level::Plain);
    }
    // and the register tile, which can be forced, too
    for (line, adapter) in chosen.iter().zip(annulus_wgpu::Gpu::list()) {
        let tile = adapter.register_tile.name();
        assert!(line.contains(&format!(", register tile {tile}, ")), "{line}");
    }
    for line in adapters(&folder, Some((TILE, "2x4"))) {
        assert!(line.contains(", register tile 2x4 (forced; else "), "{line}");
    }
    for line in adapters(&folder, Some((TILE, "abacus"))) {
        let refused = format!("no register tile: {TILE}: got abacus, want one of 4x4, 2x4");
        assert!(line.contains(&refused), "{line}");
    }
    // the default query tile only of adapters with the level at which it may be another than 32
    let forced = adapters(&folder, Some((QUERY_TILE, "64")));
    for ((line, forced), adapter) in chosen.iter().zip(forced).zip(annulus_wgpu::Gpu::list()) {
        let has_choice = adapter.levels.contains(&annulus_wgpu::Level::Matrix);
        assert_eq!(adapter.query_tile, has_choice.then_some(annulus_wgpu::QueryTileSize::Of32));
        assert_eq!(line.contains(", query tile 32, level "), has_choice, "{line}");
        let words = ", query tile 64 (forced; else 32), level ";
        assert!(forced.contains(words), "{forced}");
    }
    // another name is an error at every level
    for line in adapters(&folder, Some((QUERY_TILE, "abacus"))) {
        let refused = format!(", no query tile: {QUERY_TILE}: got abacus, want one of 32, 64");
        assert!(line.contains(&refused), "{line}");
    }
    // a forced level is listed with the one that would be chosen
    for line in adapters(&folder, Some((LEVEL, "plain"))) {
        assert!(line.contains(", level plain (forced; else "), "{line}");
    }
    for line in adapters(&folder, Some((LEVEL, "abacus"))) {
        assert!(
            line.contains("no level: ANNULUS_WGPU_LEVEL: got abacus, want one of plain, matrix"),
            "{line}"
        );
    }
}

#[test]
fn unsupported_requests_on_wgpu_are_refused() {
    let folder = Folder::with_input("wgpu_refusals");
    if has_no_adapter(&folder) {
        return;
    }
    let attend = "attend --input in.safetensors --output out.safetensors --backend wgpu";
    run(&folder, &format!("{attend} --dtype f64"), None)
        .failed(1, &["f64", "not supported", "wgpu"]);
    run(&folder, &format!("{attend} --device 1000"), None)
        .failed(1, &["wgpu device 1000", "counted from 0"]);
    run(&folder, &format!("{attend} --device first"), None).failed(2, &["--device", "first"]);
    run(&folder, attend, Some((LEVEL, "abacus"))).failed(2, &[LEVEL, "abacus", "plain, matrix"]);
    run(&folder, attend, Some((TILE, "abacus"))).failed(2, &[TILE, "abacus", "4x4, 2x4"]);
    run(&folder, attend, Some((QUERY_TILE, "abacus"))).failed(2, &[QUERY_TILE, "abacus", "32, 64"]);
    assert_eq!(folder.names(), ["in.safetensors"]);
}
