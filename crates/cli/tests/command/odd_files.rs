//! Missing, malformed and inconsistent input files: exit code 1, one line that names the error, no
//! output.

use safetensors::Dtype;

use crate::{files::Tensors, support::Folder};

const ATTEND: &str = "attend --input in.safetensors --output out.safetensors";

/// Returns a file with this header text and `data` bytes of zeros.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn refused(folder: &Folder, flags: &str, words: &[&str]) {
    folder.run(&format!("{ATTEND} {flags}")).failed(1, words);
    assert!(
        folder.names().iter().all(|name| name == "in.safetensors"),
        "{:?} after {words:?}",
        folder.names()
    );
}

#[test]
fn files_that_are_not_safetensors_files_are_refused() {
    let folder = Folder::new("no_safetensors");
    refused(&folder, "", &["in.safetensors", "No such file"]);
    std::fs::create_dir(folder.path("in.safetensors")).unwrap();
    refused(&folder, "", &["directory"]);
    std::fs::remove_dir(folder.path("in.safetensors")).unwrap();

    let tensor = r#""query":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}"#;
    let second = |begin, end| {
        let shape = "[1,1,1,1]";
        format!(
            r#"{{{tensor},"key":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#
        )
    };
    let one = |dtype: &str, shape: &str, end: &str| {
        format!(r#"{{"query":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    };
    let mut not_text = raw("{??}", 0);
    not_text[9] = 0xff;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "truncated"),
        (vec![1, 2, 3], "truncated"),
        (u64::MAX.to_le_bytes().to_vec(), "is not a safetensors file"),
        (100_000_001u64.to_le_bytes().to_vec(), "is not a safetensors file"),
        (1000u64.to_le_bytes().to_vec(), "truncated"),
        (raw("not json", 0), "malformed"),
        (raw("[]", 0), "malformed"),
        (raw(r#"{"query":{"dtype":"F32"}}"#, 0), "malformed"),
        (raw(r#"{"query":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}"#, 0), "malformed"),
        (not_text, "malformed"),
        (raw(&format!("{{{tensor}}}"), 3), "truncated"),
        (raw(&format!("{{{tensor}}}"), 5), "after its last tensor"),
        (raw(&second(2, 6), 6), "overlaps"),
        (raw(&second(0, 4), 4), "overlaps"),
        (raw(&second(5, 9), 9), "gap"),
        (raw(&format!("{{{tensor},{tensor}}}"), 4), "two tensors"),
        (raw(&one("F8_E4M3", "[1,1,1,1]", "1"), 1), "F8_E4M3"),
        (raw(&one("C64", "[1,1,1,1]", "8"), 8), "C64"),
        (raw(&one("F32", "[1,1,1,2]", "4"), 4), "shape"),
        (raw(&one("F32", "[4294967296,4294967296,4294967296]", "4"), 4), "shape"),
        (raw(r#"{"query":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 4), "4..0"),
        (raw("{}", 0), "query"),
    ];
    for (bytes, word) in cases {
        std::fs::write(folder.path("in.safetensors"), bytes).unwrap();
        refused(&folder, "", &[word]);
    }
}

#[test]
fn inconsistent_tensors_are_named() {
    let folder = Folder::new("misfits");
    let good = || Tensors::qkv([6, 4, 8], [6, 2, 8], 8).f32("dout", &[1, 6, 4, 8], |_| 1.0);
    let unequal = || Tensors::qkv([6, 4, 8], [5, 2, 8], 8);
    let numbers = |dtype, shape: &[usize], width: usize| {
        (dtype, shape.to_vec(), vec![0u8; shape.iter().product::<usize>() * width])
    };
    let put =
        |tensors: Tensors, name: &str, (dtype, shape, bytes): (Dtype, Vec<usize>, Vec<u8>)| {
            tensors.with(name, dtype, &shape, bytes)
        };
    let zeros = |tensors: Tensors, name: &str, shape: &[usize]| tensors.f32(name, shape, |_| 0.0);
    let ids = |tensors: Tensors, name: &str, ids: &[i64]| tensors.i64(name, &[1, ids.len()], ids);
    let packed =
        |tensors: Tensors, name: &str, ends: &[i64]| tensors.i64(name, &[ends.len()], ends);
    let cases: Vec<(Tensors, &str, &[&str])> = vec![
        (good().without("key"), "", &["key", "no such tensor"]),
        (good().without("value"), "", &["value", "no such tensor"]),
        (zeros(good(), "query", &[6, 4, 8]), "", &["query", "4 dimensions"]),
        (zeros(good(), "query", &[1, 6, 3, 8]).without("dout"), "", &["q_heads", "multiple"]),
        (zeros(good(), "query", &[1, 6, 0, 8]).without("dout"), "", &["q_heads", "at least 1"]),
        (zeros(good(), "query", &[0, 6, 4, 8]), "", &["key", "shape"]),
        (zeros(good(), "key", &[1, 6, 2, 7]), "", &["key", "[1, 6, 2, 8]"]),
        (zeros(good(), "key", &[2, 6, 2, 8]), "", &["key", "[1, 6, 2, 8]"]),
        (zeros(good(), "value", &[1, 5, 2, 8]), "", &["value", "[1, 6, 2, 8]"]),
        (zeros(good(), "value", &[1, 6, 1, 8]), "", &["value", "[1, 6, 2, 8]"]),
        (Tensors::qkv([2, 1, 513], [2, 1, 513], 1), "", &["head_dim", "513"]),
        (put(good(), "key", numbers(Dtype::BF16, &[1, 6, 2, 8], 2)), "", &["key", "BF16"]),
        (put(good(), "query", numbers(Dtype::I32, &[1, 6, 4, 8], 4)), "", &["query", "float"]),
        (
            zeros(good(), "attention_mask", &[1, 1, 6, 6]),
            "",
            &["attention_mask", "F32", "integer or bool"],
        ),
        (
            put(good(), "attention_mask", numbers(Dtype::BOOL, &[1, 1, 6, 5], 1)),
            "",
            &["attention_mask", "[1, 1, 6, 5]"],
        ),
        (
            put(good(), "attention_mask", numbers(Dtype::U8, &[1, 3, 6, 6], 1)),
            "",
            &["attention_mask", "[1, 3, 6, 6]"],
        ),
        (ids(good(), "q_segment_ids", &[0; 5]), "", &["q_segment_ids", "[1, 5]"]),
        (zeros(good(), "q_segment_ids", &[1, 6]), "", &["q_segment_ids", "F32"]),
        (ids(good(), "kv_segment_ids", &[1 << 40; 6]), "", &["kv_segment_ids", "32 bits"]),
        (ids(unequal(), "q_segment_ids", &[0; 6]), "", &["q_segment_ids", "kv_segment_ids"]),
        (ids(good(), "q_positions", &[0; 7]), "", &["q_positions", "[1, 7]"]),
        (ids(good(), "kv_positions", &[i64::MIN; 6]), "", &["kv_positions"]),
        (packed(good(), "cum_seqlens_q", &[1, 6]), "", &["cum_seqlens_q", "first number"]),
        (packed(good(), "cum_seqlens_q", &[0, 4, 3]), "", &["cum_seqlens_q", "ascending"]),
        (packed(good(), "cum_seqlens_k", &[0, 7]), "", &["cum_seqlens_k", "at most 6"]),
        (packed(good(), "cum_seqlens_k", &[]), "", &["cum_seqlens_k", "0 as the first number"]),
        (
            packed(packed(good(), "cum_seqlens_q", &[0, 6]), "cum_seqlens_k", &[0, 3, 6]),
            "",
            &["cum_seqlens_k", "1 sequences"],
        ),
        (packed(unequal(), "cum_seqlens_q", &[0, 5]), "", &["cum_seqlens_q", "alone"]),
        (good().i64("cum_seqlens_q", &[1, 2], &[0, 6]), "", &["cum_seqlens_q", "[sequences + 1]"]),
        (zeros(good(), "bias", &[1, 1, 6, 5]), "", &["bias", "[1, 1, 6, 5]"]),
        (put(good(), "bias", numbers(Dtype::I32, &[1, 1, 6, 6], 4)), "", &["bias", "float"]),
        (
            zeros(good(), "softmax_aux", &[4]),
            "",
            &["softmax_aux", "--sinks shared or --sinks per-head"],
        ),
        (zeros(good(), "softmax_aux", &[3]), "--sinks per-head", &["softmax_aux", "[3]"]),
        (zeros(good(), "softmax_aux", &[4, 1]), "--sinks shared", &["softmax_aux", "[4, 1]"]),
        (zeros(good(), "softmax_aux", &[0]), "--sinks shared", &["softmax_aux", "at least one"]),
        (good(), "--sinks shared", &["softmax_aux", "no such tensor"]),
        (good().without("dout"), "--backward", &["dout", "no such tensor"]),
        (zeros(good(), "dout", &[1, 6, 4, 7]), "--backward", &["dout", "[1, 6, 4, 8]"]),
        (zeros(good(), "dlse", &[1, 6, 4]), "--backward", &["dlse", "[1, 4, 6]"]),
    ];
    for (tensors, flags, words) in cases {
        tensors.write(&folder.path("in.safetensors"));
        refused(&folder, flags, words);
        refused(&folder, &format!("{flags} --ranks 3"), words);
    }
}

#[test]
fn outputs_that_cannot_be_written_are_named() {
    let folder = Folder::new("no_output");
    Tensors::qkv([6, 4, 8], [6, 2, 8], 8).write(&folder.path("in.safetensors"));
    folder
        .run("attend --input in.safetensors --output nowhere/out.safetensors")
        .failed(1, &["nowhere", "No such file"]);
    folder
        .run("attend --input in.safetensors --output .")
        .failed(1, &["is a directory, want a regular file"]);
    folder
        .run("attend --input in.safetensors --output /dev/null")
        .failed(1, &["/dev/null", "is a device, want a regular file"]);
    folder.run("make --output nowhere/in.safetensors --q-len 8").failed(1, &["nowhere"]);
    folder.run("plan --q-len 8 --ranks 2 --svg nowhere/ring.svg").failed(1, &["nowhere"]);
    assert_eq!(folder.names(), ["in.safetensors"]);
}
