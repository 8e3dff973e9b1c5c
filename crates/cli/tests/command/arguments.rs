//! Invalid command lines: exit code 2, one line, no file changed. And the environment variables of
//! a launcher, in single processes; `scripts/mpi-command` tests jobs of several processes.

use crate::support::{Folder, RunResult};

#[test]
fn bad_arguments_are_code_2_and_one_line() {
    let folder = Folder::with_input("bad_arguments");
    let attend = "attend --input in.safetensors --output out.safetensors";
    let cases = [
        ("frobnicate", "frobnicate"),
        ("attend --output out.safetensors", "--input"),
        ("attend --input in.safetensors", "--output"),
        (&format!("{attend} --ranks 0"), "--ranks"),
        (&format!("{attend} --ranks -inf"), "-i"),
        (&format!("{attend} --causal --quiet --json"), "--quiet"),
        (&format!("{attend} --ranks 1000000"), "--ranks"),
        (&format!("{attend} --threads 0"), "--threads"),
        (&format!("{attend} --threads 100000"), "--threads"),
        (&format!("{attend} --window -1,3"), "--window"),
        (&format!("{attend} --scale nan"), "--scale"),
        (&format!("{attend} --soft-cap 0"), "--soft-cap"),
        (&format!("{attend} --dropout 0.1"), "--seed"),
        (&format!("{attend} --dropout 1 --seed 1"), "--dropout"),
        (&format!("{attend} --seed 1"), "--dropout"),
        (&format!("{attend} --chunk 0"), "--chunk"),
        (&format!("{attend} --first-visible -1 --window 1,1"), "--first-visible"),
        (&format!("{attend} --first-visible 3"), "--window"),
        (&format!("{attend} --bias-order before"), "--soft-cap"),
        ("plan --q-len 8 --ranks 2 --first-visible 3", "--window"),
        (&format!("{attend} --causal --prefix 3"), "--prefix"),
        (&format!("{attend} --deadline 0.5"), "--deadline"),
        (&format!("{attend} --seed 18446744073709551616 --dropout 0"), "--seed"),
        (&format!("{attend} --layout spiral"), "--layout"),
        (&format!("{attend} --sinks some"), "--sinks"),
        (&format!("{attend} --align centre"), "--align"),
        (&format!("{attend} --backend abacus"), "--backend"),
        ("check", "DIR"),
        ("check . --dtype f8", "--dtype"),
        ("check . --ranks 1,0", "--ranks"),
        ("plan --causal --ranks 4", "--q-len"),
        ("plan --q-len 8 --ranks 65537", "--ranks"),
        ("plan --q-len 8 --ranks 2 --heads 0", "--heads"),
        (
            "plan --q-len 8 --ranks 2 --heads 3 --kv-heads 2",
            "--heads: got 3, want a multiple of --kv-heads (2)",
        ),
        ("plan --q-len 8 --ranks 2 --head-dim 1025", "--head-dim"),
        ("bench --causal maybe", "--causal"),
        ("bench --what sideways", "--what"),
        ("bench --documents 8,8 --ns 16", "--documents"),
        (
            "bench --heads 3 --kv-heads 2 --ns 8",
            "--heads: got 3, want a multiple of --kv-heads (2)",
        ),
        ("make --output x.safetensors --heads 0", "--heads"),
        ("make --output x.safetensors --bias qk", "--bias"),
        ("make --output x.safetensors --q-len 8 --documents 5,4", "--documents"),
        ("make --output x.safetensors --sinks-count 2", "--sinks"),
        ("demo --len 0", "--len"),
        ("bench --transport pigeon", "--transport"),
        ("demo --force", "--dir"),
        ("bench --ds 1025", "--ds"),
        ("make --output x.safetensors --batch 9223372036854775808", "2^63 bytes"),
        ("make --output x.safetensors --mask 1.5", "--mask"),
        ("completions tcsh", "SHELL"),
        ("trace merge", "annulus trace merge"),
    ];
    for (arguments, word) in cases {
        folder.run(arguments).failed(2, &[word]);
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn missing_features_of_the_build_are_named() {
    let folder = Folder::with_input("unsupported");
    let attend = "attend --input in.safetensors --output out.safetensors";
    #[cfg(not(feature = "cuda"))]
    folder
        .run(&format!("{attend} --backend cuda"))
        .failed(1, &["cuda", "not supported", "cpu", "--features cuda"]);
    #[cfg(not(feature = "wgpu"))]
    folder
        .run(&format!("{attend} --backend wgpu"))
        .failed(1, &["wgpu", "not supported", "cpu", "--features wgpu"]);
    #[cfg(feature = "wgpu")]
    folder
        .run(&format!("{attend} --backend wgpu --device 1000"))
        .failed(1, &["wgpu device 1000", "this machine"]);
    folder.run(&format!("{attend} --device 0")).failed(2, &["--device", "no devices"]);
    #[cfg(not(feature = "mpi"))]
    folder
        .run(&format!("{attend} --transport mpi"))
        .failed(1, &["mpi", "threads", "--features mpi"]);
    #[cfg(not(feature = "nccl"))]
    folder.run("check . --transport nccl").failed(1, &["nccl", "threads", "--features nccl"]);
    #[cfg(feature = "nccl")]
    for subcommand in ["check .", attend, "bench"] {
        folder
            .run(&format!("{subcommand} --transport nccl"))
            .failed(1, &["transport nccl", "backend cpu", "--backend cuda or hip"]);
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn an_unknown_instruction_set_is_refused_before_files_are_read() {
    let folder = Folder::new("instruction_set");
    for arguments in ["attend --input none --output none", "check none", "bench", "demo", "doctor"]
    {
        let result = RunResult::from(
            folder.command(arguments).env("ANNULUS_CPU_ISA", "abacus").output().unwrap(),
        );
        result.failed(2, &["ANNULUS_CPU_ISA", "abacus", "portable"]);
        // the report is there all the same
        let is_report = result.out.contains("available: ") && result.out.contains("transports");
        assert_eq!(is_report, arguments == "doctor", "{result:?}");
    }
    assert!(folder.names().is_empty());
}

#[test]
fn every_help_has_examples() {
    let folder = Folder::new("help");
    let subcommands = "attend check plan bench measure make demo doctor completions";
    for subcommand in subcommands.split(' ').chain(["", "trace merge"]) {
        let result = folder.succeed(&format!("{subcommand} --help"));
        assert!(
            result.out.contains("Example") && result.out.contains(&format!("annulus {subcommand}")),
            "{subcommand}"
        );
    }
    assert!(folder.succeed("--version").out.starts_with("annulus "));
    let doctor = folder.succeed("doctor").out;
    assert!(
        doctor.contains("backends") && doctor.contains("cpu") && doctor.contains("threads"),
        "{doctor}"
    );
}

#[test]
fn without_a_subcommand_help_is_printed_with_code_2() {
    let folder = Folder::new("no_subcommand");
    for (arguments, word) in [("", "Commands:"), ("trace", "merge")] {
        let result = folder.run(arguments);
        assert_eq!((result.code, result.out.as_str()), (2, ""), "{result:?}");
        assert!(result.err.contains("Usage: annulus") && result.err.contains(word), "{result:?}");
    }
}

#[test]
fn file_names_may_be_any_bytes_and_other_values_may_not() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let folder = Folder::new("not_utf8");
    let run = |arguments: &[&[u8]]| {
        let mut command = folder.command("");
        command.args(arguments.iter().map(|bytes| OsStr::from_bytes(bytes)));
        RunResult::from(command.output().unwrap())
    };
    run(&[b"plan", b"--q-len", b"\xff"]).failed(2, &["UTF-8"]);
    run(&[b"\xff"]).failed(2, &["subcommand"]);
    let name = b"\xff\x1b[2J.json";
    let made = run(&[b"plan", b"--q-len", b"8", b"--ranks", b"2", b"--json", name]);
    assert_eq!((made.code, made.err.as_str()), (0, ""), "{made:?}");
    assert!(folder.path("").join(OsStr::from_bytes(name)).exists());
}

/// Values of variables end in one line that names the variable.
#[test]
fn malformed_variables_are_named() {
    let folder = Folder::new("variables");
    folder.succeed("make --output in.safetensors --q-len 8 --heads 1 --head-dim 4");
    for (variable, arguments) in [
        ("ANNULUS_CPU_ISA", "bench --what fwd --ns 8 --ds 4 --heads 1"),
        ("ANNULUS_DEADLINE", "attend --input in.safetensors --output out.safetensors"),
    ] {
        for value in ["bogus", "-1", "1e400", "\u{1b}[2J\n", &"v".repeat(100_000)] {
            let run = folder.command(arguments).env(variable, value).output().unwrap();
            let result = RunResult::from(run);
            result.failed(result.code, &[variable]);
            assert!((1..=2).contains(&result.code), "{value:.20}: {result:?}");
        }
    }
    let run = folder.command("demo --len 16 --ranks 1").env("TMPDIR", "nowhere").output();
    RunResult::from(run.unwrap()).failed(1, &["nowhere", "No such file"]);
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn errors_name_the_flag_that_resolves_them() {
    let folder = Folder::new("mended_by_a_flag");
    folder.succeed(
        "make --output in.safetensors --q-len 8 --heads 2 --head-dim 4 --sinks shared \
         --sinks-count 2",
    );
    let attend = "attend --input in.safetensors --output out.safetensors";
    let cases = [
        (
            format!("{attend} --backward --sinks shared"),
            &["dout", "make --backward", "no --backward"][..],
        ),
        (attend.to_owned(), &["softmax_aux", "--sinks shared", "--sinks per-head"]),
        (
            format!("{attend} --soft-cap 3 --bias-order after --sinks shared"),
            &["bias", "make --bias", "no --bias-order"],
        ),
        (
            "attend --input nowhere.safetensors --output out.safetensors".to_owned(),
            &["--input nowhere.safetensors: No such file"],
        ),
        (
            "attend --input in.safetensors --output nowhere/out.safetensors --sinks shared"
                .to_owned(),
            &["--output nowhere/out.safetensors: "],
        ),
    ];
    for (arguments, words) in cases {
        folder.run(&arguments).failed(1, words);
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn flags_have_equal_names_in_all_subcommands_and_aliases_work() {
    let folder = Folder::new("flag_names");
    folder.succeed("make --output a.safetensors --q-len 8 --heads 1 --head-dim 4 --mask 1");
    folder.succeed("make --out b.safetensors --q-len 8 --heads 1 --head-dim 4 --mask 1");
    assert_eq!(
        std::fs::read(folder.path("a.safetensors")).unwrap(),
        std::fs::read(folder.path("b.safetensors")).unwrap()
    );
    folder.succeed("attend --in a.safetensors --out c.safetensors --trace traces");
    folder.succeed("trace merge traces --output d.json");
    folder.succeed("trace merge traces --out e.json");
    let result = folder.succeed("bench --what fwd --ns 16 --ds 8 --heads 1 --causal");
    assert!(
        result.out.lines().count() == 1 && result.out.contains("\"causal\":true"),
        "{result:?}"
    );
    for (help, words) in [
        ("attend", &["1 to 128"][..]),
        ("plan", &["1 to 65536", "--value-dim"]),
        ("bench", &["1 to 128"]),
        ("make", &["0 to 1"]),
    ] {
        let help = folder.succeed(&format!("{help} --help")).out;
        assert!(
            words.iter().all(|word| help.contains(word)) && !help.contains("--out <"),
            "{help}"
        );
    }
}

#[test]
fn quiet_prints_nothing_and_json_is_one_object() {
    let folder = Folder::new("quiet");
    assert_eq!(
        folder
            .succeed(
                "make --quiet --output in.safetensors --q-len 64 --heads 2 --head-dim 8 --backward"
            )
            .out,
        ""
    );
    let attend = "attend --input in.safetensors --output out.safetensors --ranks 2 --backward \
                  --trace traces";
    assert_eq!(folder.succeed(&format!("{attend} --quiet")).out, "");
    assert_eq!(folder.succeed("trace merge traces --output all.json -q").out, "");
    let summary = folder.json(&format!("{attend} --json"));
    assert_eq!(
        (&summary["ranks"], &summary["dtype"], &summary["output"]),
        (&2.into(), &"f32".into(), &"out.safetensors".into())
    );
    assert_eq!(summary["visible_pairs"], 2.0 * 64.0 * 64.0);
    let passes = summary["passes"].as_array().unwrap();
    assert_eq!((&passes[0]["pass"], &passes[1]["pass"]), (&"forward".into(), &"backward".into()));
    // one hop of the KV shard of each rank
    assert_eq!(passes[0]["bytes_sent"], 64 * 2 * 2 * 8 * 4);
    assert_eq!(passes[0]["bytes_predicted"], passes[0]["bytes_sent"]);
    assert_eq!(passes[0]["per_rank"].as_array().unwrap().len(), 2);
    let doctor = folder.json("doctor --json");
    assert!(
        doctor["annulus"][0].as_str().unwrap().starts_with(env!("CARGO_PKG_VERSION"))
            && doctor["threads"].is_array(),
        "{doctor}"
    );
}

#[test]
fn the_demo_replaces_files_only_with_force() {
    let folder = Folder::new("demo_replaces");
    folder.succeed("demo --len 64 --ranks 2 --dir kept");
    let first = std::fs::read(folder.path("kept/input.safetensors")).unwrap();
    folder
        .run("demo --len 32 --ranks 2 --dir kept")
        .failed(2, &["--dir", "kept/input.safetensors", "--force"]);
    assert_eq!(std::fs::read(folder.path("kept/input.safetensors")).unwrap(), first);
    folder.succeed("demo --len 32 --ranks 2 --dir kept --force");
    assert_ne!(std::fs::read(folder.path("kept/input.safetensors")).unwrap(), first);
}

#[test]
fn completions_have_flags_of_all_subcommands() {
    let folder = Folder::new("completions");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = folder.succeed(&format!("completions {shell}")).out;
        assert!(
            ["attend", "deadline", "sinks-count", "merge", "prefill-chunk"]
                .iter()
                .all(|word| script.contains(word)),
            "{shell}"
        );
    }
}

#[test]
fn the_version_has_the_commit_of_a_repository() {
    let folder = Folder::new("version");
    let version = folder.succeed("--version").out;
    let package = concat!("annulus ", env!("CARGO_PKG_VERSION"));
    let commit = version.trim().strip_prefix(package).unwrap();
    let in_repository =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.git").exists();
    let is_commit = commit.len() == 15
        && commit.starts_with(" (")
        && commit[2..14].bytes().all(|digit| digit.is_ascii_hexdigit());
    assert!(is_commit || (commit.is_empty() && !in_repository), "{version}");
    let doctor = folder.succeed("doctor").out;
    assert!(doctor.contains(version.trim().strip_prefix("annulus ").unwrap()), "{doctor}");
}

const ATTEND: &str = "attend --input in.safetensors --output out.safetensors";

/// Runs the command as process `rank` of `size` of a PMI launcher.
fn run_as(folder: &Folder, arguments: &str, rank: usize, size: usize) -> RunResult {
    let mut command = folder.command(arguments);
    command.env("PMI_RANK", rank.to_string()).env("PMI_SIZE", size.to_string());
    RunResult::from(command.output().unwrap())
}

#[test]
#[cfg(not(feature = "mpi"))]
fn without_mpi_a_job_of_several_processes_is_refused_once() {
    let folder = Folder::with_input("launcher_refused");
    for arguments in [ATTEND, "check .", "bench"] {
        run_as(&folder, arguments, 0, 4)
            .failed(1, &["4 processes", "PMI", "--features mpi", "--transport threads"]);
        let result = run_as(&folder, arguments, 3, 4);
        assert_eq!((result.code, result.out.as_str(), result.err.as_str()), (1, "", ""));
    }
    folder
        .run("bench --transport mpi")
        .failed(1, &["mpi", "threads", "cargo build", "--features mpi"]);
    assert!(run_as(&folder, "doctor", 0, 4).out.contains("warning"));
    assert_eq!(run_as(&folder, "doctor", 1, 4).out, "");
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn one_process_and_transport_threads_are_rings_of_threads() {
    let folder = Folder::with_input("launcher_threads");
    let alone = run_as(&folder, &format!("{ATTEND} --ranks 2"), 0, 1);
    assert_eq!(alone.code, 0, "{alone:?}");
    // independent of the other processes: it prints its output on any rank
    let result = run_as(&folder, &format!("{ATTEND} --ranks 2 --transport threads"), 3, 4);
    assert!(result.code == 0 && result.out.starts_with("2 ranks of "), "{result:?}");
    let result =
        run_as(&folder, "attend --input none --output out.safetensors --transport threads", 3, 4);
    result.failed(1, &["none", "No such file"]);
}

#[test]
fn single_process_subcommands_are_refused_under_a_launcher() {
    let folder = Folder::with_input("launcher_alone");
    for (arguments, word) in [
        ("make --output x.safetensors", "make"),
        ("plan --q-len 8 --ranks 2", "plan"),
        ("demo --dir kept", "demo"),
        ("trace merge . --output y.json", "trace"),
    ] {
        run_as(&folder, arguments, 0, 2).failed(2, &[word, "2 processes", "without the launcher"]);
        assert_eq!(run_as(&folder, arguments, 1, 2).err, "");
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}
