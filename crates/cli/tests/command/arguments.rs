//! Command lines without meaning: exit code 2, one line, nothing touched.

use crate::{
    files::Tensors,
    support::{Folder, Said},
};

#[test]
fn bad_arguments_are_code_2_and_one_line() {
    let folder = Folder::new("bad_arguments");
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    let attend = "attend --input in.safetensors --output out.safetensors";
    let cases = [
        ("", "subcommand"),
        ("frobnicate", "frobnicate"),
        ("attend --output out.safetensors", "--input"),
        ("attend --input in.safetensors", "--output"),
        (&format!("{attend} --ranks 0"), "--ranks"),
        (&format!("{attend} --ranks -1"), "-1"),
        (&format!("{attend} --ranks 1000000"), "--ranks"),
        (&format!("{attend} --threads 0"), "--threads"),
        (&format!("{attend} --threads 100000"), "--threads"),
        (&format!("{attend} --threads 1000 --ranks 100"), "--threads"),
        (&format!("{attend} --window -1,3"), "--window"),
        (&format!("{attend} --window 1,2,3"), "--window"),
        (&format!("{attend} --window left"), "--window"),
        (&format!("{attend} --scale nan"), "--scale"),
        (&format!("{attend} --scale inf"), "--scale"),
        (&format!("{attend} --scale x"), "--scale"),
        (&format!("{attend} --soft-cap 0"), "--soft-cap"),
        (&format!("{attend} --soft-cap -3"), "--soft-cap"),
        (&format!("{attend} --dropout 0.1"), "--seed"),
        (&format!("{attend} --dropout 1 --seed 1"), "--dropout"),
        (&format!("{attend} --dropout -0.5 --seed 1"), "--dropout"),
        (&format!("{attend} --seed 1"), "--dropout"),
        (&format!("{attend} --chunk 0"), "--chunk"),
        (&format!("{attend} --first-visible -1 --window 1,1"), "-1"),
        (&format!("{attend} --causal --prefix 3"), "--prefix"),
        (&format!("{attend} --deadline 0.5"), "--deadline"),
        (&format!("{attend} --layout spiral"), "--layout"),
        (&format!("{attend} --dtype f8"), "--dtype"),
        (&format!("{attend} --sinks some"), "--sinks"),
        (&format!("{attend} --bias-order during"), "--bias-order"),
        (&format!("{attend} --align centre"), "--align"),
        (&format!("{attend} --backend abacus"), "--backend"),
        (&format!("{attend} --transport pigeon"), "--transport"),
        ("check", "DIR"),
        ("check . --dtype bf16", "--dtype"),
        ("check . --ranks 1,0", "--ranks"),
        ("plan --causal --ranks 4", "--q-len"),
        ("plan --q-len 8", "--ranks"),
        ("plan --q-len 8 --ranks 2000", "--ranks"),
        ("plan --q-len 8 --ranks 2 --heads 0", "q_heads"),
        ("plan --q-len 8 --ranks 2 --heads 3 --kv-heads 2", "q_heads"),
        ("plan --q-len 8 --ranks 2 --head-dim 513", "head_dim"),
        ("bench --causal maybe", "--causal"),
        ("bench --what sideways", "--what"),
        ("bench --documents 8,8 --ns 16", "--documents"),
        ("bench --heads 3 --kv-heads 2 --ns 8", "q_heads"),
        ("make", "--out"),
        ("make --out x.safetensors --heads 0", "q_heads"),
        ("make --out x.safetensors --bias qk", "--bias"),
        ("make --out x.safetensors --q-len 8 --documents 5,4", "--documents"),
        ("make --out x.safetensors --sinks-count 2", "--sinks"),
        ("demo --len 0", "--len"),
        ("bench --transport pigeon", "--transport"),
        ("bench --ranks 0", "--ranks"),
        ("doctor --transport pigeon", "--transport"),
        ("trace split", "split"),
        ("doctor now", "now"),
    ];
    for (arguments, word) in cases {
        folder.run(arguments).failed(2, &[word]);
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn what_this_build_has_not_is_named() {
    let folder = Folder::new("unsupported");
    Tensors::qkv([4, 2, 4], [4, 2, 4], 4).write(&folder.path("in.safetensors"));
    let attend = "attend --input in.safetensors --output out.safetensors";
    #[cfg(not(feature = "cuda"))]
    folder.run(&format!("{attend} --backend cuda")).failed(1, &["cuda", "not supported", "cpu", "--features cuda"]);
    #[cfg(not(feature = "wgpu"))]
    folder.run(&format!("{attend} --backend wgpu")).failed(1, &["wgpu", "not supported", "cpu", "--features wgpu"]);
    #[cfg(feature = "wgpu")]
    folder.run(&format!("{attend} --backend wgpu --device 1000")).failed(1, &["wgpu device 1000", "this machine"]);
    folder.run(&format!("{attend} --device 0")).failed(2, &["--device", "no devices"]);
    #[cfg(not(feature = "mpi"))]
    folder.run(&format!("{attend} --transport mpi")).failed(1, &["mpi", "threads", "--features mpi"]);
    #[cfg(not(feature = "nccl"))]
    folder.run("check . --transport nccl").failed(1, &["nccl", "threads", "--features nccl"]);
    #[cfg(feature = "nccl")]
    for subcommand in ["check .", attend, "bench"] {
        folder.run(&format!("{subcommand} --transport nccl")).failed(1, &["transport nccl", "backend cpu", "--backend cuda"]);
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn an_instruction_set_that_does_not_exist_is_refused_once_and_first() {
    let folder = Folder::new("instruction_set");
    for arguments in ["attend --input none --output none", "check none", "bench", "demo", "doctor"] {
        let said = Said::from(folder.command(arguments).env("ANNULUS_CPU_ISA", "abacus").output().unwrap());
        said.failed(2, &["ANNULUS_CPU_ISA", "abacus", "portable"]);
    }
    assert!(folder.names().is_empty());
}

#[test]
fn every_help_has_examples() {
    let folder = Folder::new("help");
    for subcommand in ["", "attend", "check", "plan", "bench", "make", "demo", "doctor", "trace merge"] {
        let said = folder.succeed(&format!("{subcommand} --help"));
        assert!(said.out.contains("Example") && said.out.contains(&format!("annulus {subcommand}")), "{subcommand}");
    }
    assert!(folder.succeed("--version").out.starts_with("annulus "));
    let doctor = folder.succeed("doctor").out;
    assert!(doctor.contains("backends") && doctor.contains("cpu") && doctor.contains("threads"), "{doctor}");
}
