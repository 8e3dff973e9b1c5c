//! Missing, malformed and inconsistent input files: exit code 1, one line that names the error, no
//! output.

use safetensors::Dtype;

use crate::{
    limits::soon,
    support::{Folder, Tensors},
};

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
    let second = |begin: u64, end: u64| {
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
    let malformed = "is not a safetensors file";
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "truncated"),
        (u64::MAX.to_le_bytes().to_vec(), malformed),
        (1000u64.to_le_bytes().to_vec(), "truncated"),
        (raw("not json", 0), malformed),
        (raw(&"[".repeat(100_000), 0), malformed),
        (raw(r#"{"query":{"dtype":"F32"}}"#, 0), "missing field"),
        (not_text, malformed),
        (raw(&format!("{{{tensor}}}"), 3), "truncated"),
        (raw(&format!("{{{tensor}}}"), 5), "after its last tensor"),
        (raw(&second(2, 6), 6), "invalid offset"),
        (raw(&second(4, u64::MAX), 8), "invalid shape"),
        (raw(&one("F8_E4M3", "[1,1,1,1]", "1"), 1), "query: got F8_E4M3"),
        (raw(&one("Q99", "[1,1,1,1]", "8"), 8), "Q99"),
        (raw(&one("F32", "[1,1,1,2]", "4"), 4), "invalid shape"),
        (raw(&one("F32", "[4294967296,4294967296,4294967296]", "4"), 4), "overflow"),
        (raw(&one("F32", "[0,4294967296,4294967296,4]", "0"), 0), "query: got shape"),
        (raw("{}", 0), "query"),
    ];
    for (bytes, word) in cases {
        std::fs::write(folder.path("in.safetensors"), bytes).unwrap();
        refused(&folder, "", &[word]);
    }
}

#[test]
fn inputs_that_are_not_regular_files_are_refused() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let folder = Folder::new("no_regular_files");
    let path = folder.path("in.safetensors");
    for (kind, word) in [(FileType::Fifo, "a pipe"), (FileType::Socket, "a socket")] {
        mknodat(CWD, &path, kind, Mode::RUSR | Mode::WUSR, 0).unwrap();
        // opening a pipe would block
        soon(&folder, ATTEND).failed(1, &[word]);
        std::fs::remove_file(&path).unwrap();
    }
    for (target, word) in [("/dev/zero", "a device"), ("in.safetensors", "symbolic links")] {
        std::os::unix::fs::symlink(target, &path).unwrap();
        refused(&folder, "", &[word]);
        std::fs::remove_file(&path).unwrap();
    }
}

/// Header of query, key and value, with `more` entries and their bytes before the data.
fn header(more: &str, first: u64) -> String {
    let entry = |name: &str, index: u64| {
        let [begin, end] = [first + 64 * index, first + 64 * (index + 1)];
        format!(r#""{name}":{{"data_offsets":[{begin},{end}],"shape":[1,4,2,2],"dtype":"F32"}}"#)
    };
    // in another order than the data
    format!("{{{}{more},{},{}}}", entry("value", 2), entry("key", 1), entry("query", 0))
}

#[test]
fn unusual_files_are_accepted() {
    let folder = Folder::new("unusual_files");
    for (more, first) in [
        ("", 0),
        (r#","__metadata__":{"format":"pt"}"#, 0),
        // not aligned, of a type without a kernel, without elements, with a later field
        (r#","a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}"#, 3),
        (r#","a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}"#, 8),
        (r#","a":{"dtype":"F64","shape":[3,0],"data_offsets":[0,0]}"#, 0),
        (r#","a":{"dtype":"F64","shape":[],"data_offsets":[0,8],"later":[{}]}"#, 8),
    ] {
        for text in [header(more, first), format!(" \n{}\t ", header(more, first))] {
            let bytes = raw(&text, 192 + usize::try_from(first).unwrap());
            std::fs::write(folder.path("in.safetensors"), bytes).unwrap();
            let result = folder.run(ATTEND);
            assert_eq!(result.code, 0, "{text}: {result:?}");
        }
    }
}

/// Damaged headers and texts: an error of one line that names the file, or success.
#[test]
fn damaged_files_end_in_one_line() {
    let folder = Folder::new("damaged_files");
    folder.succeed("make --output in.safetensors --q-len 6 --heads 2 --head-dim 4 --bias 11qk");
    let input = std::fs::read(folder.path("in.safetensors")).unwrap();
    let text = 8 + usize::try_from(u64::from_le_bytes(*input.first_chunk().unwrap())).unwrap();
    folder.succeed(&format!("{ATTEND} --trace ."));
    let trace = std::fs::read(folder.path("rank-0.json")).unwrap();
    let index = br#"{"format":"annulus-cases-1","cases":[{"id":"a","file":"in.safetensors"}]}"#;
    let files = [
        ("in.safetensors", &input[..], 8..text, ATTEND),
        ("rank-0.json", &trace[..], 0..trace.len(), "trace merge . --output all.json"),
        ("index.json", &index[..], 0..index.len(), "check . --ranks 1 --layout contiguous"),
    ];
    // a linear congruential generator (Knuth, MMIX)
    let mut state = 20_261_129u64;
    let mut below = |end: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    for (name, good, damaged, arguments) in files {
        for number in 0..40 {
            let mut bytes = good.to_vec();
            let at = damaged.start + below(damaged.len());
            match number % 3 {
                0 => bytes[at] = below(256) as u8,
                1 => drop(bytes.drain(at..(at + 1 + below(12)).min(good.len()))),
                _ => bytes.truncate(at),
            }
            std::fs::write(folder.path(name), bytes).unwrap();
            let result = folder.run(arguments);
            if result.code != 0 {
                result.failed(1, &[]);
            }
            assert!(!folder.names().iter().any(|name| name.contains("partial")), "{result:?}");
        }
        std::fs::write(folder.path(name), good).unwrap();
    }
}

#[test]
fn malformed_indexes_and_traces_name_the_file_and_the_field() {
    let folder = Folder::new("malformed_texts");
    std::fs::create_dir(folder.path("traces")).unwrap();
    for (text, words) in [
        ("", &["EOF"][..]),
        ("{\"cases\":[]}", &["missing field `format`"]),
        ("{\"format\":3,\"cases\":[]}", &["format: invalid type"]),
        ("{\"format\":\"other\",\"cases\":[]}", &["format: got other"]),
        ("{\"format\":\"annulus-cases-1\",\"cases\":{}}", &["cases: invalid type"]),
        ("{\"format\":\"annulus-cases-1\",\"cases\":[]} x", &["trailing"]),
    ] {
        std::fs::write(folder.path("index.json"), text).unwrap();
        folder.run("check .").failed(1, &[&["index.json"], words].concat());
    }
    for (text, words) in [
        ("", &["EOF"][..]),
        ("{\"traceEvents\":[]}", &["missing field `otherData`"]),
        ("{\"otherData\":{\"run\":3,\"ranks\":1},\"traceEvents\":[]}", &["otherData.run"]),
        ("{\"otherData\":{\"run\":\"1\",\"ranks\":0},\"traceEvents\":[]}", &["ranks: got 0"]),
        ("{\"otherData\":{\"run\":\"1\",\"ranks\":2},\"traceEvents\":[]}", &["rank-1.json"]),
        ("{\"otherData\":{\"run\":\"1\",\"ranks\":1},\"traceEvents\":[3]}", &["traceEvents[0]"]),
    ] {
        std::fs::write(folder.path("traces/rank-0.json"), text).unwrap();
        let result = folder.run("trace merge traces --output all.json");
        result.failed(1, &[&["rank-"], words].concat());
    }
    assert_eq!(folder.names(), ["index.json", "traces"]);
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
        (zeros(good(), "query", &[6, 4, 8]), "", &["query", "4 dimensions"]),
        (zeros(good(), "query", &[1, 6, 3, 8]).without("dout"), "", &["q_heads", "multiple"]),
        (zeros(good(), "query", &[0, 6, 4, 8]), "", &["key", "shape"]),
        (zeros(good(), "value", &[1, 5, 2, 8]), "", &["value", "[1, 6, 2, 8]"]),
        (Tensors::qkv([2, 1, 1025], [2, 1, 1025], 1), "", &["head_dim", "1025"]),
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
        (ids(good(), "q_segment_ids", &[0; 5]), "", &["q_segment_ids", "[1, 5]"]),
        (zeros(good(), "q_segment_ids", &[1, 6]), "", &["q_segment_ids", "F32"]),
        (ids(good(), "kv_segment_ids", &[1 << 40; 6]), "", &["kv_segment_ids", "32 bits"]),
        (ids(unequal(), "q_segment_ids", &[0; 6]), "", &["q_segment_ids", "kv_segment_ids"]),
        (ids(good(), "kv_positions", &[i64::MIN; 6]), "", &["kv_positions"]),
        (packed(good(), "cum_seqlens_q", &[0, 4, 3]), "", &["cum_seqlens_q", "ascending"]),
        (good().i64("cum_seqlens_q", &[1, 2], &[0, 6]), "", &["cum_seqlens_q", "[sequences + 1]"]),
        (zeros(good(), "bias", &[1, 1, 6, 5]), "", &["bias", "[1, 1, 6, 5]"]),
        (put(good(), "bias", numbers(Dtype::I32, &[1, 1, 6, 6], 4)), "", &["bias", "float"]),
        (
            zeros(good(), "softmax_aux", &[4]),
            "",
            &["softmax_aux", "--sinks shared or --sinks per-head"],
        ),
        (zeros(good(), "softmax_aux", &[4, 1]), "--sinks shared", &["softmax_aux", "[4, 1]"]),
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
