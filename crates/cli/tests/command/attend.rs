//! `attend` and `decode` from file to file: compared with the oracle, and with one attention over
//! all rows.

use annulus::{Attention, BiasOrder, SinkShape, bias::BiasTable};
use annulus_core::{DType, Dims};
use annulus_test_cases::{Answer, Case, golden};
use ndarray::{Array4, Axis};
use serde_json::{Value, json};

use crate::{
    check,
    support::{Folder, Tensors},
};

/// Command line of an input with every optional tensor.
const MAKE: &str = "make --output in.safetensors --batch 2 --q-len 23 --kv-len 29 --heads 4 \
                    --kv-heads 2 --head-dim 6 --value-dim 5 --backward --bias 1h1k \
                    --sinks per-head --sinks-count 2 --mask 0.7 --segments 3";
const DIMS: Dims =
    Dims { batch: 2, q_len: 23, kv_len: 29, q_heads: 4, kv_heads: 2, head_dim: 6, value_dim: 5 };

/// The tensors of the input file, as `annulus check` reads them.
fn read(folder: &Folder) -> Case {
    let mut entry = check::case("in");
    entry["dims"] = json!({
        "batch": 2, "q_len": 23, "kv_len": 29, "q_heads": 4, "kv_heads": 2, "head_dim": 6,
        "value_dim": 5
    });
    entry["params"]["softmax_aux"] = "per_head".into();
    entry["tolerance"] = json!({});
    check::write(folder, &[entry]);
    let mut all = golden::read(&folder.path("")).unwrap();
    std::fs::remove_file(folder.path("index.json")).unwrap();
    all.remove(0).case
}

/// Computes the output tensors with the oracle, by name.
fn expected(file: &Case, attention: &Attention) -> Vec<(&'static str, Vec<f64>)> {
    let attention = attention.clone().dtype(DType::F64).bias([1, 4, 1, 29]);
    let spec = attention.softmax_aux(SinkShape::per_head(2)).spec(DIMS).unwrap();
    let truth = Case { spec: spec.clone(), ..file.clone() }.truth().unwrap();
    let statistics = truth.forward.statistics.clone();
    let truth = Answer::of(truth, spec.normalize);
    let is_written = |name: &str| match name {
        "max" | "sum" => !spec.normalize,
        name => name != "ties",
    };
    let arrays = truth.arrays().into_iter().filter(|(name, _)| is_written(name));
    let mut all: Vec<_> =
        arrays.map(|(name, array)| (name, array.iter().copied().collect())).collect();
    if spec.statistics {
        all.push(("statistics", statistics.iter().copied().collect()));
        all.push(("head_statistics", by_head(&statistics)));
    }
    all
}

/// Maximum and mean of each statistic of each head, over the rows with a visible key.
fn by_head(statistics: &Array4<f64>) -> Vec<f64> {
    let of = |head: usize, index: usize| {
        let of_head = statistics.index_axis(Axis(1), head);
        let rows = of_head.lanes(Axis(2)).into_iter().filter(|row| row[1] > f64::NEG_INFINITY);
        let numbers: Vec<f64> = rows.map(|row| row[index]).collect();
        let largest = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        [largest, numbers.iter().sum::<f64>() / numbers.len() as f64]
    };
    let heads = 0..statistics.len_of(Axis(1));
    heads.flat_map(|head| (0..3).flat_map(move |index| of(head, index))).collect()
}

fn same(got: &Tensors, want: &[(&'static str, Vec<f64>)], tolerance: f64) {
    for (name, want) in want {
        let got = got.numbers(name);
        assert_eq!(got.len(), want.len(), "{name}");
        for (got, want) in got.iter().zip(want) {
            assert!(
                got == want || (got - want).abs() <= tolerance * want.abs().max(1.0),
                "{name}: {got} for {want}"
            );
        }
    }
    assert_eq!(got.all.len(), want.len());
}

#[test]
fn flags_change_the_result_as_the_oracle_does() {
    let folder = Folder::new("attend_all");
    folder.succeed(MAKE);
    let file = read(&folder);
    let attend = "attend --input in.safetensors --output out.safetensors --sinks per-head \
                  --backward --dtype f64";
    let window = || Attention::new().causal(true).sliding_window(9, None).attention_sink_size(2);
    let cases = [
        (attend.to_owned(), Attention::new()),
        (format!("{attend} --causal --window 9,none --first-visible 2 --ranks 3"), window()),
        (
            format!("{attend} --chunk 8 --scale -0.3 --soft-cap 2 --ranks 4 --layout zigzag"),
            Attention::new().chunk_size(8).softmax_scale(-0.3).logits_soft_cap(2.0),
        ),
        (
            format!(
                "{attend} --soft-cap 1.5 --bias-order before --ranks 3 --layout striped --threads 2"
            ),
            Attention::new().logits_soft_cap(1.5).bias_order(BiasOrder::BeforeSoftCap),
        ),
        (
            format!("{attend} --causal --align bottom-right --ranks 5"),
            Attention::new().causal(true).align(annulus::Alignment::BottomRight),
        ),
        (
            format!("{attend} --dropout 0.3 --seed 77 --ranks 3 --layout contiguous"),
            Attention::new().dropout(0.3, 77),
        ),
        (
            format!("{attend} --unnormalized --prefix 7 --ranks 2"),
            Attention::new().unnormalized(true).prefix_len(7),
        ),
        (
            format!(
                "{attend} --causal --soft-cap 2 --statistics --bias-table clipped:10,18 --ranks 3"
            ),
            Attention::new()
                .causal(true)
                .logits_soft_cap(2.0)
                .statistics(true)
                .bias_table(BiasTable::clipped(10, 18).unwrap()),
        ),
        (format!("{attend} --causal --ranks 40"), Attention::new().causal(true)),
        (format!("{attend} --causal --ranks 4 --strategy heads:2"), Attention::new().causal(true)),
        (format!("{attend} --causal --ranks 4 --strategy grid:2x2"), Attention::new().causal(true)),
    ];
    for (arguments, attention) in cases {
        let result = folder.succeed(&arguments);
        same(&Tensors::read(&folder.path("out.safetensors")), &expected(&file, &attention), 1e-10);
        assert!(
            result.out.contains("forward")
                && result.out.contains("backward")
                && result.out.contains("wrote out.safetensors"),
            "{result:?}"
        );
        assert_eq!(folder.names(), ["in.safetensors", "out.safetensors"]);
    }
}

#[test]
fn key_lists_are_the_equal_dense_mask() {
    let folder = Folder::new("attend_lists");
    folder.succeed(MAKE);
    let file = Tensors::read(&folder.path("in.safetensors"));
    let want = expected(&read(&folder), &Attention::new());
    let [mut offsets, mut indices] = [vec![0], Vec::new()];
    for row in file.all["attention_mask"].2.chunks_exact(DIMS.kv_len) {
        indices.extend((0..).zip(row).filter(|(_, visible)| **visible != 0).map(|(key, _)| key));
        offsets.push(indices.len() as i64);
    }
    let listed = file.without("attention_mask");
    let listed = listed.i64("key_list_offsets", &[offsets.len()], &offsets);
    let pairs = [indices.len()];
    let listed = listed.i64("key_list_indices", &pairs, &indices);
    listed.write(&folder.path("lists.safetensors"));
    let attend = "attend --input lists.safetensors --output out.safetensors --sinks per-head \
                  --backward --dtype f64";
    for ranks in [1, 3] {
        folder.succeed(&format!("{attend} --ranks {ranks}"));
        same(&Tensors::read(&folder.path("out.safetensors")), &want, 1e-12);
    }
    // a number a pair is the equal dense bias, and has its gradient
    let (rows, keys) = (DIMS.q_len, DIMS.kv_len);
    let shape = [1, 1, rows, keys];
    let dense: Vec<f64> = (0..rows * keys).map(|at| (at % 11) as f64 * 0.2 - 1.0).collect();
    let places: Vec<usize> = (0..rows)
        .flat_map(|row| {
            let entries = offsets[row] as usize..offsets[row + 1] as usize;
            indices[entries].iter().map(move |&key| row * keys + key as usize).collect::<Vec<_>>()
        })
        .collect();
    let bias: Vec<f64> = places.iter().map(|&place| dense[place]).collect();
    let listed = Tensors::read(&folder.path("lists.safetensors"));
    let file = Tensors::read(&folder.path("in.safetensors")).without("bias");
    file.f64("bias", &shape, dense).write(&folder.path("lists.safetensors"));
    folder.succeed(attend);
    let want = Tensors::read(&folder.path("out.safetensors"));
    let biased = listed.without("bias");
    let unsorted = Tensors::read(&folder.path("in.safetensors")).without("attention_mask");
    let unsorted = unsorted.i64("key_list_offsets", &[offsets.len()], &offsets);
    let biased = biased.f64("key_list_bias", &pairs, bias);
    biased.write(&folder.path("lists.safetensors"));
    let dbias = want.numbers("dbias");
    let gradient = places.iter().map(|&at| dbias[at]).collect();
    let names = ["out", "lse", "dq", "dk", "dv", "dsoftmax_aux"];
    let mut want: Vec<_> = names.into_iter().map(|name| (name, want.numbers(name))).collect();
    want.push(("dkey_list_bias", gradient));
    for (ranks, layout) in [(1, "contiguous"), (3, "zigzag")] {
        let ring = format!("--ranks {ranks} --layout {layout} --dtype f64");
        let sent = folder.json(&format!("{} {ring} --json", attend.replace("--dtype f64", "")));
        same(&Tensors::read(&folder.path("out.safetensors")), &want, 1e-12);
        // the plan of the same lists has the bytes that were sent
        let planned = folder.plan(&format!("--lists lists.safetensors {ring}"));
        for (index, pass) in ["forward_bytes", "backward_bytes"].into_iter().enumerate() {
            assert_eq!(planned[pass].as_u64().unwrap() > 0, ranks > 1);
            assert_eq!(planned[pass], sent["passes"][index]["bytes_sent"], "{pass}");
        }
    }
    let halo = folder.succeed(
        "plan --neighborhood 4x9:3x3:edge=clip --q-len 36 --layout boxes:4x9 --ranks 2 --rank 0",
    );
    assert!(halo.out.contains("  #####+...\n  #####+...\n"), "{halo:?}");
    indices.reverse();
    let unsorted = unsorted.i64("key_list_indices", &pairs, &indices);
    unsorted.write(&folder.path("lists.safetensors"));
    folder.run(attend).failed(1, &["key_lists", "row 0, entry 1"]);
}

#[test]
fn element_types_are_converted_on_reading() {
    let folder = Folder::new("attend_types");
    folder.succeed(MAKE);
    let want = expected(&read(&folder), &Attention::new().causal(true));
    for (dtype, name, tolerance) in
        [("f32", "F32", 1e-4), ("bf16", "BF16", 0.15), ("f16", "F16", 0.05)]
    {
        let flags = format!("--causal --backward --sinks per-head --dtype {dtype} --ranks 3");
        folder.succeed(&format!("attend --input in.safetensors --output out.safetensors {flags}"));
        let got = Tensors::read(&folder.path("out.safetensors"));
        assert_eq!(format!("{:?}", got.all["out"].0), name);
        assert_eq!(format!("{:?}", got.all["lse"].0), "F32");
        if dtype != "f16" {
            same(&got, &want, tolerance);
        }
    }
}

#[test]
fn bytes_sent_equal_the_prediction_and_the_output_may_be_the_input() {
    let folder = Folder::new("attend_bytes");
    folder.succeed("make --output x.safetensors --q-len 64 --heads 2 --head-dim 8");
    let result = folder.succeed(
        "attend --input x.safetensors --output x.safetensors --causal --ranks 4 --layout zigzag \
         --trace traces",
    );
    // 3 hops of 3/4 of 64 rows, 2 tensors, 2 heads of dim 8, 4 bytes
    let bytes = 64 * 3 * 3 / 4 * 2 * 2 * 8 * 4;
    assert_eq!(bytes, 18 << 10);
    assert!(result.out.contains("sent 18.0 KiB (18 432 bytes) as predicted"), "{result:?}");
    assert_eq!(folder.names(), ["traces", "x.safetensors"]);
    assert!(Tensors::read(&folder.path("x.safetensors")).all.contains_key("out"));
    for rank in 0..4 {
        let trace = std::fs::read(folder.path(&format!("traces/rank-{rank}.json"))).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
        assert!(
            trace["traceEvents"].as_array().unwrap().iter().any(|event| event["name"] == "forward")
        );
    }
}

#[test]
fn lengths_may_be_zero_and_unknown_tensors_are_noted() {
    let folder = Folder::new("attend_empty");
    Tensors::qkv([0, 2, 4], [5, 2, 4], 4)
        .f32("querry", &[1], |_| 0.0)
        .write(&folder.path("in.safetensors"));
    let result = folder.run("attend --input in.safetensors --output out.safetensors --ranks 2");
    assert_eq!(
        (result.code, result.err.as_str()),
        (0, "annulus: note: in.safetensors: not an input tensor, ignored: querry\n")
    );
    assert_eq!(Tensors::read(&folder.path("out.safetensors")).all["out"].1, [1, 0, 2, 4]);
    Tensors::qkv([3, 2, 4], [0, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder.succeed("attend --input in.safetensors --output out.safetensors --ranks 2");
    let got = Tensors::read(&folder.path("out.safetensors"));
    assert!(got.numbers("out").iter().all(|&number| number == 0.0));
    assert!(got.numbers("lse").iter().all(|&number| number == f64::NEG_INFINITY));
}

#[test]
fn the_demo_verifies_itself() {
    let folder = Folder::new("demo");
    let result = folder.succeed("demo --len 300 --ranks 3 --dir kept");
    assert!(
        result.out.contains("verified 128 rows") && result.out.contains("3 ranks"),
        "{result:?}"
    );
    assert_eq!(folder.names(), ["kept"]);
    assert_eq!(
        Tensors::read(&folder.path("kept/output.safetensors")).all["out"].1,
        [1, 300, 8, 64]
    );
}

const MAKE_CACHE: &str = "make --output in.st --batch 2 --q-len 300 --heads 4 --kv-heads 2 \
                    --head-dim 16 --value-dim 12 --sinks per-head --sinks-count 2";

fn decode(folder: &Folder, flags: &str) -> Value {
    folder.json(&format!("decode --input in.st --output out.st {flags} --json"))
}

#[test]
fn a_prefill_and_tokens_are_one_attention() {
    let folder = Folder::new("decode");
    folder.succeed(MAKE_CACHE);
    let masks =
        ["--causal", "--causal --window 40,0 --soft-cap 5", "--causal --dropout 0.2 --seed 3"];
    for (mask, ranks) in masks.into_iter().zip([1, 3, 4]) {
        folder.succeed(&format!("attend --input in.st --output whole.st {mask} --quiet"));
        for steps in
            ["--prefill 290 --prefill-chunk 64", "--prefill 0", "--prefill 300 --page-rows 7"]
        {
            let figures = decode(&folder, &format!("{mask} --ranks {ranks} {steps}"));
            folder.close(["out.st", "whole.st"], &["out", "lse"], 2e-5);
            assert_eq!(
                (figures["rows"].as_u64(), figures["ranks"].as_u64()),
                (Some(300), Some(ranks))
            );
            let rows: Vec<u64> = figures["per_rank"]
                .as_array()
                .unwrap()
                .iter()
                .map(|rank| rank["rows"].as_u64().unwrap())
                .collect();
            let page = figures["page_rows"].as_u64().unwrap();
            assert_eq!(rows.iter().sum::<u64>(), 300);
            assert!(rows.iter().max().unwrap() - rows.iter().min().unwrap() <= page, "{rows:?}");
        }
    }
}

#[test]
fn the_reproducible_order_has_the_bits_of_attend() {
    let folder = Folder::new("decode_reproducible");
    folder.succeed(&MAKE_CACHE.replace("300", "1100"));
    folder.succeed("attend --input in.st --output whole.st --causal --reproducible --quiet");
    let whole = Tensors::read(&folder.path("whole.st"));
    let steps = "--causal --reproducible --prefill 1090 --prefill-chunk 400";
    for (ranks, pages) in [(1, ""), (3, "--page-rows 512"), (4, "--page-rows 1048576")] {
        let figures = decode(&folder, &format!("--ranks {ranks} {steps} {pages}"));
        let file = Tensors::read(&folder.path("out.st"));
        for name in ["out", "lse"] {
            assert_eq!(file.numbers(name), whole.numbers(name), "{name} on {ranks} ranks");
        }
        let tokens = &figures["tokens"];
        assert_eq!(tokens["bytes_sent"], tokens["bytes_predicted"]);
        // a page that is longer than the file takes no more memory than all of its rows
        assert_eq!(figures["page_rows"], [256, 512, 2048][ranks / 2], "{ranks} ranks");
    }
    let run = folder.run("decode --input in.st --output o.st --reproducible --page-rows 300");
    run.failed(2, &["page-rows", "256 times a power of two"]);
}

#[test]
fn the_summary_has_the_bytes_of_a_token() {
    let folder = Folder::new("decode_summary");
    folder.succeed(MAKE_CACHE);
    let flags =
        "decode --input in.st --output out.st --causal --ranks 2 --prefill 296 --prefill-chunk 100";
    let text = folder.succeed(flags).out;
    // 2 ranks · batch 2 · 4 heads · (12 + 2) numbers of 4 bytes
    let lines =
        ["prefill   296 rows in 3 calls: ", "tokens    4: ", " and 896 B each, 896 B predicted"];
    for line in lines {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert_eq!(folder.succeed(&format!("{flags} --quiet")).out, "");
}

#[test]
fn what_a_cache_does_not_have_is_refused() {
    let folder = Folder::new("decode_refused");
    let refuse = |make: &str, flags: &str, code: i32, words: &[&str]| {
        folder.succeed(&format!("make --output in.st --q-len 8 --heads 1 --head-dim 4 {make}"));
        let run = folder.run(&format!("decode --input in.st --output out.st {flags}"));
        run.failed(code, words);
        assert_eq!(folder.names(), ["in.st"]);
    };
    refuse("--bias 1h1k", "--causal", 1, &["bias is not supported by the KV cache"]);
    refuse("--segments 2", "--causal", 1, &["q_segment_ids is not supported by the KV cache"]);
    refuse("", "--documents 3,5", 2, &["--documents", "one sequence for each batch row"]);
    refuse("", "--prefill 9", 2, &["--prefill: got 9, want 0", "to 8"]);
    refuse("--kv-len 20", "--prefill 11", 2, &["--prefill: got 11, want 12", "to 20"]);
    refuse("--kv-len 5", "", 1, &["query: q_len: got 8, want at most the 5 rows of key"]);
    refuse("", "--page-rows 4294967297", 2, &["--page-rows", "4294967297"]);
    let messages = ["transport nccl is not supported by the KV cache", "in host memory"];
    refuse("", "--transport nccl", 1, &messages);
    refuse("", "--device 1", 2, &["--device: got 1", "no devices"]);
}
