//! `check` on a folder of cases that the test writes.

use annulus::Attention;
use annulus_core::{Batch, DType, Dims, oracle};
use ndarray::Array4;
use serde_json::{Value, json};

use crate::support::{Folder, RunResult, Tensors};

const DIMS: Dims =
    Dims { batch: 1, q_len: 7, kv_len: 5, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 3 };

/// Causal case in which the bottom-right alignment leaves two rows without visible keys.
pub(crate) fn case(id: &str) -> Value {
    let arrays = json!({ "out": 1e-4, "lse": 1e-4, "dq": 1e-4, "dk": 1e-4, "dv": 1e-4 });
    json!({
        "id": id,
        "file": format!("{id}.safetensors"),
        "dims": {
            "batch": 1, "q_len": 7, "kv_len": 5, "q_heads": 2, "kv_heads": 1, "head_dim": 4,
            "value_dim": 3
        },
        "params": {
            "causal": true, "sliding_window": null, "attention_sink_size": 0, "chunk_size": null,
            "logits_soft_cap": null, "softmax_scale": 0.7, "normalize_output": true,
            "softmax_aux": null, "bias_order": "after_soft_cap", "alignment": "bottom_right",
            "dropout_prob": 0.0, "dropout_seed": null
        },
        "tolerance": { "f32": arrays, "f64": arrays }
    })
}

fn tensors() -> Tensors {
    let file = Tensors::qkv([7, 2, 4], [5, 1, 4], 3)
        .f32("dout", &[1, 7, 2, 3], |index| (index as f32).cos());
    let array =
        |name: &str, shape: [usize; 4]| Array4::from_shape_vec(shape, file.numbers(name)).unwrap();
    let spec = Attention::new()
        .dtype(DType::F64)
        .causal(true)
        .softmax_scale(0.7)
        .align(annulus::Alignment::BottomRight)
        .spec(DIMS)
        .unwrap();
    let q = array("query", [1, 7, 2, 4]);
    let k = array("key", [1, 5, 1, 4]);
    let v = array("value", [1, 5, 1, 3]);
    let dout = array("dout", [1, 7, 2, 3]);
    let batch = Batch::default();
    let problem = oracle::Problem {
        spec: &spec,
        batch: &batch,
        q: q.view(),
        k: k.view(),
        v: v.view(),
        bias: None,
        sinks: None,
    };
    let forward = oracle::forward(&problem).unwrap();
    let backward = oracle::backward(&problem, dout.view(), None).unwrap();
    assert_eq!(forward.lse[[0, 0, 1]], f64::NEG_INFINITY);
    file.f64("out", &[1, 7, 2, 3], forward.out)
        .f64("lse", &[1, 2, 7], forward.lse)
        .f64("dq", &[1, 7, 2, 4], backward.dq)
        .f64("dk", &[1, 5, 1, 4], backward.dk)
        .f64("dv", &[1, 5, 1, 3], backward.dv)
}

pub(crate) fn write(folder: &Folder, cases: &[Value]) {
    let index = json!({ "format": "annulus-cases-1", "cases": cases });
    std::fs::write(folder.path("index.json"), index.to_string()).unwrap();
}

/// Writes a folder `cases` with one case that passes.
pub(crate) fn write_cases(folder: &Folder) {
    std::fs::create_dir(folder.path("cases")).unwrap();
    let index = json!({ "format": "annulus-cases-1", "cases": [case("one")] });
    std::fs::write(folder.path("cases/index.json"), index.to_string()).unwrap();
    tensors().write(&folder.path("cases/one.safetensors"));
}

#[track_caller]
fn ends(result: &RunResult, code: i32, last: &str) {
    assert_eq!((result.code, result.out.lines().last()), (code, Some(last)), "{result:?}");
}

#[test]
fn correct_cases_pass_on_every_ring() {
    let folder = Folder::new("check_right");
    write(&folder, &[case("one"), case("two")]);
    tensors().write(&folder.path("one.safetensors"));
    tensors().write(&folder.path("two.safetensors"));
    // 5 rank counts, 3 layouts, 2 types
    ends(&folder.succeed("check ."), 0, "60 passed, 0 failed");
    ends(
        &folder.succeed("check . --case o?e --ranks 1,33 --layout auto --dtype f64"),
        0,
        "2 passed, 0 failed",
    );
    ends(&folder.run("check . --case three"), 1, "0 passed, 0 failed");
    // 3 rank counts, 3 strategies, 2 types; 3 ranks have no groups of 2
    let strategies = "check . --case one --ranks 2,3,4 --layout contiguous \
                      --strategy ring,heads:2,auto --skip-unsupported";
    ends(&folder.succeed(strategies), 0, "16 passed, 0 failed");
}

#[test]
fn cases_pass_in_16_bits_by_the_oracle() {
    let folder = Folder::new("check_16_bits");
    let mut one = case("one");
    // what the file says about other types does not count
    one["tolerance"] = json!({});
    write(&folder, &[one]);
    tensors().f64("dk", &[1, 5, 1, 4], [9.0; 20]).write(&folder.path("one.safetensors"));
    let flags = "check . --ranks 1,2 --layout contiguous --dtype f16,bf16";
    ends(&folder.succeed(flags), 0, "4 passed, 0 failed");
    ends(&folder.run("check . --ranks 1 --dtype f32"), 1, "0 passed, 3 failed");
}

#[test]
fn wrong_arrays_are_printed_with_error_and_tolerance() {
    let folder = Folder::new("check_wrong");
    write(&folder, &[case("one")]);
    let flags = "check . --ranks 2 --layout zigzag --dtype f64";
    let mut off = tensors().numbers("dk");
    off[3] += 0.5;
    tensors().f64("dk", &[1, 5, 1, 4], off).write(&folder.path("one.safetensors"));
    let result = folder.run(flags);
    ends(&result, 1, "0 passed, 1 failed");
    assert!(
        result.out.starts_with(
            "FAIL one ranks=2 layout=zigzag dtype=f64: dk error 5.000e-1 tolerance 1.000e-4\n"
        ),
        "{result:?}"
    );
    assert_eq!(result.out.lines().count(), 2);
    // a finite value where −∞ is computed
    let mut lse = tensors().numbers("lse");
    lse[0] = 0.0;
    tensors().f64("lse", &[1, 2, 7], lse.clone()).write(&folder.path("one.safetensors"));
    assert!(folder.run(flags).out.contains("lse error inf"));
    // an expected NaN never passes
    lse[0] = f64::NAN;
    tensors().f64("lse", &[1, 2, 7], lse).write(&folder.path("one.safetensors"));
    assert!(folder.run(flags).out.contains("lse error NaN"));
    // another shape
    tensors().f64("dv", &[1, 5, 1, 1], [0.0; 5]).write(&folder.path("one.safetensors"));
    ends(&folder.run(flags), 1, "0 passed, 1 failed");
}

#[test]
fn malformed_and_unsupported_cases_fail_alone() {
    let folder = Folder::new("check_malformed");
    tensors().write(&folder.path("one.safetensors"));
    let changed = |id: &str, change: &dyn Fn(&mut Value)| {
        let mut case = case("one");
        case["id"] = Value::from(id);
        change(&mut case);
        case
    };
    let cases = [
        case("one"),
        changed("file", &|case| case["file"] = "nowhere.safetensors".into()),
        changed("dims", &|case| case["dims"]["q_len"] = 8.into()),
        changed("window", &|case| case["params"]["sliding_window"] = json!([-1, 2])),
        changed("missing", &|case| case["params"] = json!({ "causal": true })),
        changed("array", &|case| case["tolerance"]["f64"]["dbias"] = json!(0.1)),
        changed("seed", &|case| case["params"]["dropout_prob"] = json!(0.5)),
        changed("tolerance", &|case| case["tolerance"] = json!({})),
        changed("parameter", &|case| case["params"]["rotary"] = json!(10000)),
    ];
    write(&folder, &cases);
    let flags = "check . --ranks 2 --layout contiguous --dtype f64";
    let result = folder.run(flags);
    ends(&result, 1, "1 passed, 8 failed");
    assert_eq!(
        result.out.lines().filter(|line| line.starts_with("FAIL ")).count(),
        8,
        "{result:?}"
    );
    assert!(result.out.contains("rotary is not supported"));
    let result = folder.run(&format!("{flags} --case *e* --skip-unsupported"));
    ends(&result, 1, "1 passed, 2 failed");
    assert!(result.out.contains("2 unsupported"), "{result:?}");
    let result = folder.succeed(&format!("{flags} --case parameter --skip-unsupported"));
    assert_eq!(result.out, "1 unsupported\n0 passed, 0 failed\n");
}

#[test]
fn reproducible_rings_have_the_same_bits() {
    let folder = Folder::new("check_reproducible");
    write(&folder, &[case("one")]);
    tensors().write(&folder.path("one.safetensors"));
    folder.run("check . --threads 2").failed(2, &["--threads", "--reproducible"]);
    let result = folder.succeed("check . --reproducible --ranks 1,2,3 --dtype f32");
    // 3 sizes, 3 layouts, 1 and 2 threads
    assert!(result.out.contains("18 passed, 0 failed"), "{}", result.out);
}
