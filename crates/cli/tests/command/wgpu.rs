//! `--backend wgpu` on whatever adapter there is. Where there is none these tests say NOT RUN, and with `ANNULUS_REQUIRE=wgpu` they fail.

use serde_json::Value;

use crate::{
    files::Tensors,
    support::{Folder, Said},
};

/// Which level is forced.
const LEVEL: &str = "ANNULUS_WGPU_LEVEL";

/// Runs the command, at the chosen level or a forced one.
fn run(folder: &Folder, arguments: &str, level: Option<&str>) -> Said {
    let mut command = folder.command(arguments);
    command.env_remove(LEVEL);
    if let Some(level) = level {
        command.env(LEVEL, level);
    }
    Said::from(command.output().unwrap())
}

#[track_caller]
fn succeed(folder: &Folder, arguments: &str) -> Said {
    let said = run(folder, arguments, None);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "annulus {arguments}");
    said
}

/// The lines of `doctor` on adapters; none where there is nothing to test on.
fn adapters(folder: &Folder, level: Option<&str>) -> Vec<String> {
    let said = run(folder, "doctor", level);
    assert_eq!(said.code, 0, "{said:?}");
    let lines: Vec<String> =
        said.out.lines().filter(|line| line.starts_with("wgpu ")).map(str::to_owned).collect();
    if lines.iter().any(|line| line.contains("no adapter")) {
        let required = std::env::var("ANNULUS_REQUIRE")
            .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
        assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
        eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
        return Vec::new();
    }
    assert!(!lines.is_empty(), "{said:?}");
    lines
}

fn there_is_none(folder: &Folder) -> bool {
    adapters(folder, None).is_empty()
}

#[test]
fn attend_on_wgpu_writes_what_the_cpu_writes() {
    let folder = Folder::new("wgpu_attend");
    if there_is_none(&folder) {
        return;
    }
    folder.succeed(
        "make --output in.safetensors --batch 2 --q-len 43 --kv-len 39 --heads 4 --kv-heads 2 --head-dim 6 --value-dim 5 --backward --bias 1h1k \
         --sinks per-head --sinks-count 2 --mask 0.7 --segments 3",
    );
    let attend = "attend --input in.safetensors --sinks per-head --backward --dtype f32";
    for flags in [
        "--causal --window 9,none --ranks 3",
        "--unnormalized --soft-cap 2 --dropout 0.3 --seed 5 --ranks 2 --layout striped",
    ] {
        folder.succeed(&format!("{attend} {flags} --output cpu.safetensors"));
        let said = succeed(
            &folder,
            &format!("{attend} {flags} --output wgpu.safetensors --backend wgpu --device 0"),
        );
        assert!(said.out.contains("backward"), "{said:?}");
        let [want, got] =
            ["cpu", "wgpu"].map(|name| Tensors::read(&folder.path(&format!("{name}.safetensors"))));
        assert_eq!(want.all.keys().collect::<Vec<_>>(), got.all.keys().collect::<Vec<_>>());
        for name in want.all.keys() {
            for (want, got) in want.numbers(name).into_iter().zip(got.numbers(name)) {
                assert!(
                    want == got || (want - got).abs() <= 1e-4 * want.abs().max(1.0),
                    "{flags}: {name}: {got} for {want}"
                );
            }
        }
    }
}

#[test]
fn a_bench_on_wgpu_is_timed_by_the_device_where_it_has_timestamps() {
    let folder = Folder::new("wgpu_bench");
    if there_is_none(&folder) {
        return;
    }
    let said =
        succeed(&folder, "bench --backend wgpu --ns 64 --ds 8 --heads 2 --causal true --ranks 2");
    let lines: Vec<Value> =
        said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    let gpu = annulus_wgpu::Gpu::open(&annulus_wgpu::Options::default()).unwrap();
    let clock = if annulus_wgpu::Stopwatch::is_there(&gpu) { "device" } else { "host" };
    for line in lines {
        assert_eq!(
            (&line["backend"], &line["clock"]),
            (&Value::from("wgpu"), &Value::from(clock)),
            "{line}"
        );
        // a pass takes some time, and not half a minute at this size
        assert!(line["ms"].as_f64().is_some_and(|ms| ms > 0.0 && ms < 30e3), "{line}");
        for field in [
            "what",
            "dtype",
            "threads",
            "batch",
            "heads",
            "head_dim",
            "n",
            "causal",
            "gflops",
            "gflops_cpu",
        ] {
            assert!(!line[field].is_null(), "{field} in {line}");
        }
    }
}

#[test]
fn doctor_names_the_chosen_level_and_those_that_can_be_forced() {
    let folder = Folder::new("wgpu_doctor");
    let chosen = adapters(&folder, None);
    for (line, adapter) in chosen.iter().zip(annulus_wgpu::Gpu::list()) {
        assert!(line.contains(&format!(", level {}", adapter.chosen.name())), "{line}");
        let all: Vec<&str> = adapter.levels.iter().map(|level| level.name()).collect();
        assert!(line.ends_with(&format!("{LEVEL} forces one of: {}", all.join(" "))), "{line}");
        assert_eq!(adapter.record.is_some(), adapter.chosen != annulus_wgpu::Level::Plain);
    }
    // a forced level is told with the one that would be chosen, and is what computes
    for line in adapters(&folder, Some("plain")) {
        assert!(line.contains(", level plain (forced; else "), "{line}");
    }
    for line in adapters(&folder, Some("abacus")) {
        assert!(
            line.contains(
                "no level: ANNULUS_WGPU_LEVEL: got abacus, want one of plain, subgroup, matrix"
            ),
            "{line}"
        );
    }
}

#[test]
fn what_wgpu_cannot_do_is_one_line_and_no_file() {
    let folder = Folder::new("wgpu_refusals");
    if there_is_none(&folder) {
        return;
    }
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    let attend = "attend --input in.safetensors --output out.safetensors --backend wgpu";
    run(&folder, &format!("{attend} --dtype f64"), None)
        .failed(1, &["f64", "not supported", "wgpu"]);
    run(&folder, &format!("{attend} --device 1000"), None)
        .failed(1, &["wgpu device 1000", "counted from 0"]);
    run(&folder, &format!("{attend} --device first"), None).failed(2, &["--device", "first"]);
    run(&folder, attend, Some("abacus")).failed(2, &[LEVEL, "abacus", "plain, subgroup, matrix"]);
    assert_eq!(folder.names(), ["in.safetensors"]);
}
