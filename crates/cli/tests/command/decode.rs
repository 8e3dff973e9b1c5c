//! `decode` from file to file, compared with one attention over all rows.

use serde_json::Value;

use crate::{files::Tensors, support::Folder};

const MAKE: &str = "make --output in.st --batch 2 --q-len 300 --heads 4 --kv-heads 2 \
                    --head-dim 16 --value-dim 12 --sinks per-head --sinks-count 2";

fn decode(folder: &Folder, flags: &str) -> Value {
    let done = folder.succeed(&format!("decode --input in.st --output out.st {flags} --json"));
    serde_json::from_str(&done.out).unwrap()
}

/// Compares tensors of two files, of the last rows of the first one.
fn close(folder: &Folder, [got, want]: [&str; 2], tolerance: f64) {
    let [got, want] = [got, want].map(|name| Tensors::read(&folder.path(name)));
    for name in ["out", "lse"] {
        let [got, want] = [&got, &want].map(|file| file.numbers(name));
        assert_eq!(got.len(), want.len(), "{name}");
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let error = (got - want).abs() / want.abs().max(1.0);
            assert!(error < tolerance, "{name} {index}: {got}, {want}");
        }
    }
}

#[test]
fn a_prefill_and_tokens_are_one_attention() {
    let folder = Folder::new("decode");
    folder.succeed(MAKE);
    let masks =
        ["--causal", "--causal --window 40,0 --soft-cap 5", "--causal --dropout 0.2 --seed 3"];
    for (mask, ranks) in masks.into_iter().zip([1, 3, 4]) {
        folder.succeed(&format!("attend --input in.st --output whole.st {mask} --quiet"));
        for steps in
            ["--prefill 290 --prefill-chunk 64", "--prefill 0", "--prefill 300 --page-rows 7"]
        {
            let figures = decode(&folder, &format!("{mask} --ranks {ranks} {steps}"));
            close(&folder, ["out.st", "whole.st"], 2e-5);
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
    folder.succeed(&MAKE.replace("300", "1100"));
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

/// (ranks − 1) · (value dim + maximum + sum) · 4 bytes of each rank, with one head.
#[test]
fn bytes_of_a_token_do_not_depend_on_the_cached_rows() {
    let folder = Folder::new("decode_bytes");
    for rows in [1_000, 32_000, 1_000_000] {
        folder.succeed(&format!(
            "make --output in.st --q-len 3 --kv-len {rows} --heads 1 --head-dim 4"
        ));
        let figures = decode(&folder, "--causal --ranks 8 --threads 1");
        let tokens = &figures["tokens"];
        let number = |field: &str| tokens[field].as_u64().unwrap();
        assert_eq!((number("calls"), number("bytes_sent")), (3, number("bytes_predicted")));
        let a_token = 8 * 7 * (4 + 2) * 4;
        assert_eq!(number("bytes_per_token_least"), a_token, "{rows} rows");
        assert_eq!(number("bytes_per_token_most"), a_token, "{rows} rows");
        // rows without queries are appended without a message
        assert_eq!(figures["prefill"]["bytes_sent"], 0);
        assert_eq!(figures["prefill_rows"], rows - 3);
    }
}

#[test]
fn the_summary_has_the_bytes_of_a_token() {
    let folder = Folder::new("decode_summary");
    folder.succeed(MAKE);
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
