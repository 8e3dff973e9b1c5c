//! Rules for malformed indexes of cases and malformed traces.

use serde_json::{Value, json};

use super::{Case, Content, Expected, rng::Rng, words, writer::Model};

pub(super) fn cases() -> Vec<Case> {
    [indexes(), cases_of_an_index(), files_of_cases(), traces(), random()].concat()
}

const CHECK: &str = "check . --ranks 2 --layout contiguous --dtype f64";

/// Case that passes: all its tensors are zero.
fn good() -> Value {
    let arrays = json!({ "out": 1e-4 });
    json!({
        "id": "one",
        "file": "one.safetensors",
        "dims": {
            "batch": 1, "q_len": 3, "kv_len": 3, "q_heads": 1, "kv_heads": 1, "head_dim": 4,
            "value_dim": 4
        },
        "params": {
            "causal": true, "sliding_window": [1, null], "attention_sink_size": 0, "chunk_size": 3,
            "logits_soft_cap": 2.0, "softmax_scale": 0.7, "normalize_output": true,
            "softmax_aux": null, "bias_order": "after_soft_cap", "alignment": "bottom_right",
            "dropout_prob": 0.0, "dropout_seed": 1
        },
        "tolerance": { "f32": arrays, "f64": arrays }
    })
}

fn tensors() -> Model {
    ["query", "key", "value", "dout", "out"]
        .iter()
        .fold(Model::default(), |model, name| model.zeros(name, "F32", &[1, 3, 1, 4]))
}

fn index(cases: &Value) -> Vec<u8> {
    json!({ "format": "annulus-cases-1", "cases": cases }).to_string().into_bytes()
}

/// Run of `check` on an index and the file of [`good`].
fn check(
    rule: impl Into<String>,
    index: Content,
    file: Content,
    named: &'static str,
    expected: Expected,
) -> Case {
    Case {
        rule: rule.into(),
        arguments: CHECK.into(),
        files: vec![("index.json".into(), index), ("one.safetensors".into(), file)],
        file: named,
        expected,
    }
}

fn of_index(rule: impl Into<String>, index: impl Into<Vec<u8>>, expected: Expected) -> Case {
    check(
        rule,
        Content::File(index.into()),
        Content::File(tensors().bytes()),
        "index.json",
        expected,
    )
}

/// Indexes that are malformed as a whole.
fn indexes() -> Vec<Case> {
    let text = String::from_utf8(index(&json!([good()]))).unwrap();
    let mut cases = vec![of_index("a good index", text.clone(), Expected::Accepted)];
    for tenth in 0..10 {
        cases.push(of_index(
            format!("cut at {tenth}/10"),
            &text.as_bytes()[..text.len() * tenth / 10],
            words(&["not an index of cases"]),
        ));
    }
    for bad in [
        "",
        "null",
        "3",
        "[]",
        "\"x\"",
        "{}",
        "{\"cases\":[]}",
        "{\"format\":\"annulus-cases-1\"}",
        "[\"annulus-cases-1\",[]]",
        "{\"format\":3,\"cases\":[]}",
        "{\"format\":\"annulus-cases-1\",\"cases\":{}}",
        "{\"format\":\"annulus-cases-1\",\"cases\":3}",
        "{\"format\":\"annulus-cases-1\",\"cases\":[],\"cases\":[]}",
    ] {
        cases.push(of_index(format!("index {bad}"), bad, words(&["not an index of cases"])));
    }
    cases.push(of_index("more after it", format!("{text} x"), words(&["trailing"])));
    cases.push(of_index(
        "not UTF-8",
        [text.as_bytes(), &[0xff]].concat(),
        words(&["not UTF-8", "byte"]),
    ));
    cases.push(of_index("very deep", "[".repeat(100_000), words(&["not an index of cases"])));
    cases.push(of_index(
        "deep in a case",
        text.replacen("[{", &format!("[{}", "[".repeat(100_000)), 1),
        words(&["not an index of cases"]),
    ));
    for format in ["annulus-cases-9", "", "annulus-cases-1 ", "\u{1b}[2J"] {
        let text = json!({ "format": format, "cases": [good()] }).to_string();
        cases.push(of_index(
            format!("format {format:?}"),
            text,
            words(&["format", "want annulus-cases-1"]),
        ));
    }
    let long = json!({ "format": "x".repeat(1 << 20), "cases": [] }).to_string();
    cases.push(of_index("a long format", long, words(&["format", "(1048576 bytes)"])));
    cases.push(of_index("no case", index(&json!([])), words(&["--case"])));
    for (content, word) in [
        (Content::Folder, "directory"),
        (Content::Pipe, "a pipe"),
        (Content::Socket, "a socket"),
        (Content::Link("/dev/zero".into()), "a device"),
        (Content::Link("index.json".into()), "symbolic links"),
        (Content::Link("nowhere".into()), "No such file"),
    ] {
        cases.push(check(
            format!("an index that is {content:?}"),
            content,
            Content::Folder,
            "index.json",
            words(&[word]),
        ));
    }
    cases
}

/// Cases with a missing or invalid field.
fn cases_of_an_index() -> Vec<Case> {
    let mut cases = Vec::new();
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!("x"),
        json!([]),
        json!({}),
        json!([1, 2, 3]),
        json!({ "a": [1] }),
    ];
    let paths = [
        "/id",
        "/file",
        "/dims",
        "/params",
        "/tolerance",
        "/dims/batch",
        "/dims/q_len",
        "/dims/head_dim",
        "/params/causal",
        "/params/sliding_window",
        "/params/attention_sink_size",
        "/params/chunk_size",
        "/params/softmax_aux",
        "/params/bias_order",
        "/params/alignment",
        "/params/normalize_output",
        "/params/logits_soft_cap",
        "/params/dropout_prob",
        "/tolerance/f64",
        "/tolerance/f64/out",
    ];
    for path in paths {
        let field = path.rsplit('/').next().unwrap();
        for value in &values {
            let mut case = good();
            *case.pointer_mut(path).unwrap() = value.clone();
            // values of a valid type: refused or accepted
            let expected = match (field, value) {
                ("id" | "file", Value::String(_))
                | ("causal" | "normalize_output", Value::Bool(_)) => Expected::Either,
                (_, Value::Null) if path.starts_with("/params") => Expected::Either,
                ("f64", Value::Object(map)) if map.is_empty() => Expected::Either,
                ("tolerance", Value::Object(map)) if map.is_empty() => Expected::Either,
                ("logits_soft_cap" | "dropout_prob" | "out", Value::Number(_)) => Expected::Either,
                _ => words(&[field]),
            };
            let either = matches!(expected, Expected::Either);
            let mut case = of_index(format!("{path} is {value}"), index(&json!([case])), expected);
            if either {
                // the file that is named depends on the value
                case.file = "annulus";
            }
            cases.push(case);
        }
        let mut case = good();
        let parent = &path[..path.len() - field.len() - 1];
        case.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(field);
        // optional fields, and tolerances, without which a case is unsupported
        if !["sliding_window", "chunk_size", "softmax_aux", "logits_soft_cap", "f64", "out"]
            .contains(&field)
        {
            cases.push(of_index(
                format!("no {path}"),
                index(&json!([case])),
                words(&[&format!("missing field `{field}`")]),
            ));
        }
    }
    for bad in [
        json!(null),
        json!(3),
        json!("one"),
        json!([]),
        json!([[]]),
        json!(["one", "one.safetensors", {}, {}, {}]),
    ] {
        cases.push(of_index(
            format!("a case that is {bad}"),
            index(&json!([bad])),
            words(&["case (no id, number 0)", "expected an object"]),
        ));
    }
    let dims = json!([1, 3, 3, 1, 1, 4, 4]);
    let mut case = good();
    case["dims"] = dims;
    cases.push(of_index(
        "dims as an array",
        index(&json!([case])),
        words(&["dims", "expected an object"]),
    ));
    let mut case = good();
    case["params"]["sliding_window"] = json!([-1, 2]);
    cases.push(of_index("a negative window", index(&json!([case])), words(&["sliding_window"])));
    // after a valid case
    let mut case = good();
    case["dims"]["q_len"] = json!("x");
    cases.push(of_index(
        "the second case",
        index(&json!([good(), case])),
        words(&["1 failed", "dims.q_len"]),
    ));
    cases
}

/// Cases with malformed files.
fn files_of_cases() -> Vec<Case> {
    let of_file = |rule: &str, file: Content, groups: &[&str]| {
        check(rule, Content::File(index(&json!([good()]))), file, "one.safetensors", words(groups))
    };
    let bytes = tensors().bytes();
    let mut cases = vec![
        of_file("a folder", Content::Folder, &["directory"]),
        of_file("a pipe", Content::Pipe, &["a pipe"]),
        of_file("a device", Content::Link("/dev/zero".into()), &["a device"]),
        of_file("nowhere", Content::Link("nowhere".into()), &["No such file"]),
        of_file("empty", Content::File(Vec::new()), &["truncated"]),
        of_file("cut", Content::File(bytes[..bytes.len() - 1].to_vec()), &["truncated"]),
        of_file("longer", Content::File([bytes.clone(), vec![0]].concat()), &["1 bytes after"]),
        of_file(
            "another length",
            Content::File(
                tensors()
                    .replaced("query", "F32", &[1, 2, 1, 4])
                    .replaced("dout", "F32", &[1, 2, 1, 4])
                    .bytes(),
            ),
            &["dims"],
        ),
    ];
    for name in ["query", "key", "value", "dout", "out"] {
        cases.push(of_file(
            &format!("no {name}"),
            Content::File(tensors().without(name).bytes()),
            &[name],
        ));
        cases.push(of_file(
            &format!("{name} of integers"),
            Content::File(tensors().replaced(name, "I32", &[1, 3, 1, 4]).bytes()),
            &[name],
        ));
        let mut strange = tensors();
        let index = strange.index(name);
        strange.entries[index].dtype = "\"F8_E4M3\"".into();
        cases.push(of_file(
            &format!("{name} of a strange dtype"),
            Content::File(strange.bytes()),
            &[name, "F8_E4M3"],
        ));
    }
    cases
}

/// Trace of a single rank.
fn trace() -> Value {
    json!({
        "otherData": { "run": "17", "ranks": 1 },
        "traceEvents": [{ "name": "forward", "pid": 0, "ts": 1.5 }],
        "displayTimeUnit": "ms"
    })
}

fn merge(rule: impl Into<String>, content: Content, expected: Expected) -> Case {
    Case {
        rule: rule.into(),
        arguments: "trace merge traces --output all.json".into(),
        files: vec![("traces/rank-0.json".into(), content)],
        file: "rank-",
        expected,
    }
}

fn traces() -> Vec<Case> {
    let text = |text: &str| Content::File(text.as_bytes().to_vec());
    let of = |value: &Value| text(&value.to_string());
    let whole = trace().to_string();
    let mut cases = vec![merge("a good trace", of(&trace()), Expected::Accepted)];
    let no_trace = || words(&["rank-0.json: is not a trace of a rank"]);
    for tenth in 0..10 {
        cases.push(merge(
            format!("cut at {tenth}/10"),
            text(&whole[..whole.len() * tenth / 10]),
            no_trace(),
        ));
    }
    for bad in [
        "null",
        "3",
        "[]",
        "\"x\"",
        "{}",
        "{\"traceEvents\":[]}",
        "{\"otherData\":{}}",
        "[[\"17\",1],[]]",
        "{]",
        "{\"otherData\":[\"17\",1],\"traceEvents\":[]}",
    ] {
        cases.push(merge(format!("trace {bad}"), text(bad), no_trace()));
    }
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!("x"),
        json!([]),
        json!({}),
        json!([1]),
        json!(3),
    ];
    for path in
        ["/otherData", "/otherData/run", "/otherData/ranks", "/traceEvents", "/traceEvents/0"]
    {
        let field = path.rsplit('/').next().unwrap();
        for value in &values {
            let mut other = trace();
            *other.pointer_mut(path).unwrap() = value.clone();
            let expected = match (field, value) {
                ("run", Value::String(_)) | ("0", Value::Object(_)) => Expected::Accepted,
                ("traceEvents", Value::Array(all)) if all.is_empty() => Expected::Accepted,
                ("ranks", Value::Number(number)) if number.as_u64() == Some(3) => {
                    words(&["rank-1.json", "No such file"])
                }
                ("0", _) => words(&["rank-0.json", "traceEvents[0]"]),
                ("otherData", Value::Object(_)) => words(&["rank-0.json", "missing field `run`"]),
                _ => words(&["rank-0.json", field]),
            };
            cases.push(merge(format!("{path} is {value}"), of(&other), expected));
        }
    }
    for ranks in [json!(0), json!(2), json!(1_000_000_000_000u64), json!(u64::MAX), json!(1e300)] {
        let mut other = trace();
        other["otherData"]["ranks"] = ranks.clone();
        cases.push(merge(
            format!("{ranks} ranks"),
            of(&other),
            words(&["rank-0.json|rank-1.json", "ranks|No such file"]),
        ));
    }
    cases.push(merge("more after it", text(&format!("{whole} x")), no_trace()));
    cases.push(merge("very deep", text(&"[".repeat(100_000)), no_trace()));
    cases.push(merge(
        "a deep event",
        text(&whole.replacen("1.5", &"[".repeat(100_000), 1)),
        no_trace(),
    ));
    cases.push(merge(
        "not UTF-8",
        Content::File([whole.as_bytes(), &[0xff]].concat()),
        words(&["rank-0.json", "not UTF-8"]),
    ));
    for (content, word) in [
        (Content::Folder, "directory"),
        (Content::Pipe, "a pipe"),
        (Content::Socket, "a socket"),
        (Content::Link("/dev/zero".into()), "a device"),
        (Content::Link("rank-0.json".into()), "symbolic links"),
    ] {
        cases.push(merge(
            format!("a trace that is {content:?}"),
            content,
            words(&["rank-0.json", word]),
        ));
    }
    // the second of two
    let mut two = trace();
    two["otherData"]["ranks"] = json!(2);
    let mut other = two.clone();
    other["otherData"]["run"] = json!("\u{1b}[2J");
    for (rule, second, word) in [
        ("of another run", of(&other), "another run"),
        ("of another number of ranks", of(&trace()), "another run"),
        ("that is a pipe", Content::Pipe, "a pipe"),
        ("that is empty", text(""), "not a trace of a rank"),
    ] {
        let mut case =
            merge(format!("a second trace {rule}"), of(&two), words(&["rank-1.json", word]));
        case.files.push(("traces/rank-1.json".into(), second));
        cases.push(case);
    }
    cases
}

/// Texts with a few bytes changed, removed or repeated.
fn random() -> Vec<Case> {
    let mut rng = Rng::new(17);
    let mut changed = |text: &[u8]| {
        let mut text = text.to_vec();
        for _ in 0..=rng.below(3) {
            let at = rng.below(text.len());
            let end = (at + 1 + rng.below(12)).min(text.len());
            match rng.below(3) {
                0 => text[at] = rng.next().to_le_bytes()[0],
                1 => drop(text.drain(at..end)),
                _ => {
                    let piece = text[at..end].to_vec();
                    drop(text.splice(at..at, piece));
                }
            }
        }
        text
    };
    let index = index(&json!([good()]));
    let trace = trace().to_string();
    let mut cases = Vec::new();
    for number in 0..60 {
        let mut case =
            of_index(format!("random index {number}"), changed(&index), Expected::Either);
        case.file = "annulus";
        cases.push(case);
        cases.push(merge(
            format!("random trace {number}"),
            Content::File(changed(trace.as_bytes())),
            Expected::Either,
        ));
    }
    cases
}
