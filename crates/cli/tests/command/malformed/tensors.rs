//! Rules for malformed safetensors files.

use super::{
    Case, Content, Expected,
    rng::Rng,
    words,
    writer::{Entry, Model, width, with_header},
};

/// Tensors of [`good`] with their shapes.
const SHAPES: [(&str, [usize; 4]); 4] = [
    ("query", [1, 6, 4, 8]),
    ("key", [1, 6, 2, 8]),
    ("value", [1, 6, 2, 8]),
    ("dout", [1, 6, 4, 8]),
];

/// Alternatives for inconsistent tensors, of which any may be named.
const ANY: &str = "query|key|value|dout";

/// Consistent query, key, value and dout.
fn good() -> Model {
    SHAPES.iter().fold(Model::default(), |model, (name, shape)| model.zeros(name, "F32", shape))
}

/// [`good`] with every optional tensor, for the flags [`FULL`].
fn full() -> Model {
    good()
        .zeros("dlse", "F32", &[1, 4, 6])
        .zeros("bias", "F32", &[1, 4, 6, 6])
        .zeros("softmax_aux", "F32", &[4, 1])
        .numbers("attention_mask", "U8", &[1, 1, 6, 6], &[1; 36])
        .numbers("q_segment_ids", "I32", &[1, 6], &[0, 0, 0, 1, 1, 1])
        .numbers("kv_segment_ids", "I32", &[1, 6], &[0, 0, 0, 1, 1, 1])
        .numbers("q_positions", "I64", &[1, 6], &[0, 1, 2, 3, 4, 5])
        .numbers("kv_positions", "I64", &[1, 6], &[0, 1, 2, 3, 4, 5])
}

/// Flags of [`full`].
const FULL: &str = "--backward --sinks per-head";

/// JSON values that are neither a dtype nor a shape nor offsets.
const VALUES: [&str; 14] = [
    "null",
    "true",
    "3",
    "-1",
    "1.5",
    "1e400",
    "18446744073709551616",
    "{}",
    "[[1]]",
    "[null]",
    "[\"1\"]",
    "[1.5]",
    "[-1]",
    "{\"a\":[1,2]}",
];

pub(super) fn cases() -> Vec<Case> {
    [
        odd(),
        truncated(),
        lengths(),
        texts(),
        fields(),
        names(),
        metadata(),
        offsets(),
        shapes(),
        relations(),
        dtypes(),
        integers(),
        sinks(),
        other_files(),
        random(),
    ]
    .concat()
}

fn refused(rule: String, model: &Model, groups: &[&str]) -> Case {
    Case::attend(rule, "--backward", model.bytes(), words(groups))
}

fn accepted(rule: impl Into<String>, flags: &str, model: &Model) -> Case {
    Case::attend(rule, flags, model.bytes(), Expected::Accepted)
}

/// Files that are unusual and valid.
fn odd() -> Vec<Case> {
    let mut cases = vec![
        accepted("good", "--backward", &good()),
        accepted("full", FULL, &full()),
        accepted("full, striped", &format!("{FULL} --ranks 3 --layout striped"), &full()),
    ];
    // unknown tensors are ignored, of any dtype and name
    for dtype in
        ["F8_E4M3", "F8_E5M2", "F4", "F6_E2M3", "C64", "U128", "float32", "", "f32", "\u{1b}[2J"]
    {
        let mut model = good().tensor("strange", "U8", &[16], vec![1; 16]);
        let last = model.entries.len() - 1;
        model.entries[last].dtype = serde_json::to_string(dtype).unwrap();
        cases.push(accepted(format!("a strange tensor of dtype {dtype:?}"), "", &model));
        // of an unknown dtype, so that the shape does not determine the bytes
        model.entries[last].shape = "[3,18446744073709551615]".into();
        cases.push(accepted(
            format!("a strange tensor of dtype {dtype:?} and of any shape"),
            "",
            &model,
        ));
    }
    let long = "n".repeat(1 << 20);
    for name in [
        "",
        " ",
        "querry",
        "query ",
        "query\0",
        "q\u{1b}[2J",
        "\u{202e}yek",
        "ключ",
        "🦀",
        "a/b",
        "__metadata",
        "%s%n",
        long.as_str(),
    ] {
        cases.push(accepted(
            format!("a strange name {:?}", &name[..name.len().min(40)]),
            "",
            &good().zeros(name, "F32", &[1]),
        ));
    }
    let mut escaped = good();
    escaped.entries[0].name = r#""qu\u0065ry""#.into();
    cases.push(accepted("a known name with an escape", "--backward", &escaped));
    let mut ones = good().zeros("strange", "F32", &[1]);
    ones.entries[4].shape = format!("[{}]", vec!["1"; 100_000].join(","));
    cases.push(accepted("a shape of 100000 ones", "", &ones));
    cases.push(accepted("a number without axes", "", &good().zeros("strange", "F64", &[])));
    cases.push(accepted("nothing in it", "", &good().zeros("strange", "F64", &[3, 0, 5])));
    let text = good().text();
    for (rule, text) in [
        ("spaces after the header", format!("{text}{}", " ".repeat(64))),
        ("spaces before the header", format!("  \n\t{text}")),
        ("more fields", text.replace("\"dtype\"", "\"later\":[{}],\"dtype\"")),
        ("metadata", text.replacen('{', r#"{"__metadata__":{"format":"pt","":"\u001b[2J"},"#, 1)),
        ("metadata last", format!("{},\"__metadata__\":{{}}}}", text.strip_suffix('}').unwrap())),
    ] {
        cases.push(Case::attend(
            rule,
            "--backward",
            with_header(text.as_bytes(), &good().data),
            Expected::Accepted,
        ));
    }
    // an odd number of bytes before the other tensors
    let unaligned =
        SHAPES.iter().fold(Model::default().zeros("a", "U8", &[3]), |model, (name, shape)| {
            model.zeros(name, "F32", shape)
        });
    cases.push(accepted("tensors that are not aligned", "--backward", &unaligned));
    // entries in another order than their data
    let mut reversed = good();
    reversed.entries.reverse();
    cases.push(accepted("entries in reverse", "--backward", &reversed));
    for bits in [0x7fc0_0000u32, 0x7f80_0000, 0xff80_0000, 0xffc0_0001] {
        let bias = bits.to_le_bytes().repeat(36);
        cases.push(accepted(
            format!("a bias of {bits:x}"),
            "--backward",
            &good().tensor("bias", "F32", &[1, 1, 6, 6], bias.clone()),
        ));
        cases.push(accepted(
            format!("queries of {bits:x}"),
            "",
            &good().without("query").tensor(
                "query",
                "F32",
                &[1, 6, 4, 8],
                bits.to_le_bytes().repeat(192),
            ),
        ));
    }
    cases.push(accepted(
        "no queries",
        "--ranks 3",
        &good().without("dout").replaced("query", "F32", &[1, 0, 4, 8]),
    ));
    let empty = good().without("dout").replaced("key", "F32", &[1, 0, 2, 8]).replaced(
        "value",
        "F32",
        &[1, 0, 2, 8],
    );
    cases.push(accepted("no keys", "--ranks 3", &empty));
    cases
}

/// Files that end at, or near, every boundary of the structure.
fn truncated() -> Vec<Case> {
    let model = full();
    let bytes = model.bytes();
    let data = bytes.len() - model.data.len();
    let mut cuts: Vec<usize> =
        vec![0, 1, 7, 8, 9, 8 + (data - 8) / 3, 8 + (data - 8) / 2, data - 1, data];
    for entry in &model.entries {
        let (begin, end) = model.extent(entry);
        cuts.extend([begin, begin + 1, (begin + end) / 2, end - 1].map(|at| data + at));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let case = |cut: usize| {
        Case::attend(format!("cut at {cut}"), FULL, bytes[..cut].to_vec(), words(&["is truncated"]))
    };
    let mut cases: Vec<Case> = cuts.into_iter().map(case).collect();
    for more in [1, 7, 8, 4096] {
        let mut longer = bytes.clone();
        longer.resize(bytes.len() + more, 0);
        cases.push(Case::attend(
            format!("{more} bytes more"),
            FULL,
            longer,
            words(&[&format!("has {more} bytes after its last tensor")]),
        ));
    }
    cases
}

/// Files with a wrong header length.
fn lengths() -> Vec<Case> {
    let bytes = good().bytes();
    let right = good().text().len() as u64;
    let wrong = [
        0,
        1,
        2,
        right / 2,
        right - 1,
        right + 1,
        right + 8,
        right + 100,
        bytes.len() as u64 - 8,
        bytes.len() as u64,
        1 << 20,
        1 << 31,
        1 << 32,
        1 << 63,
    ];
    wrong
        .into_iter()
        .chain([
            100_000_000,
            100_000_001,
            u64::MAX,
            u64::MAX - 7,
            right << 8,
            right << 56,
            right.swap_bytes(),
        ])
        .map(|length| {
            let mut bytes = bytes.clone();
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            Case::attend(
                format!("a header of {length} bytes"),
                "",
                bytes,
                words(&["malformed safetensors header|truncated|is not a safetensors file"]),
            )
        })
        .collect()
}

/// Headers that are not a JSON object of tensors.
fn texts() -> Vec<Case> {
    let text = good().text();
    let deep = [("[", 100_000), ("{\"a\":", 100_000), ("[{\"a\":", 20_000)];
    let mut texts: Vec<Vec<u8>> = [
        "",
        " ",
        "not json",
        "[]",
        "null",
        "true",
        "3",
        "\"query\"",
        "{",
        "}",
        "{]",
        "{}x",
        "{},{}",
        "{\"query\"",
        "{\"query\":",
        "{\"query\":{}",
        "{query:{}}",
        "{'query':{}}",
        "{\"query\":{},}",
        "{,}",
        "// {}",
        "/* */{}",
        "\u{feff}{}",
        "NaN",
        "{\"query\":NaN}",
        "{\"\\ud800\":{}}",
        "{\"\\x41\":{}}",
        "{\"a\nb\":{}}",
        "\0",
        "{}\0",
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    texts.extend(deep.iter().map(|(text, count)| text.repeat(*count).into_bytes()));
    texts.extend(
        deep.iter()
            .map(|(text, count)| format!("{{\"query\":{}", text.repeat(*count)).into_bytes()),
    );
    for bad in
        [&[0xff][..], &[0xc0, 0x80], &[0xed, 0xa0, 0x80], &[0xf8, 0x88, 0x80, 0x80, 0x80], &[0xc3]]
    {
        texts.push([b"{\"", bad, b"\":{}}"].concat());
        texts.push([bad, b"{}"].concat());
    }
    for (from, to) in [
        (":", ";"),
        ("{\"dtype\"", "\"dtype\""),
        (",", ""),
        (",", ",,"),
        ("\"", ""),
        ("[", "("),
        ("}", ""),
    ] {
        texts.push(text.replacen(from, to, 1).into_bytes());
    }
    let case = |text: Vec<u8>| {
        let shown = String::from_utf8_lossy(&text[..text.len().min(30)]).into_owned();
        Case::attend(
            format!("header {shown:?}"),
            "",
            with_header(&text, &good().data),
            words(&["malformed safetensors header"]),
        )
    };
    let mut cases: Vec<Case> = texts.into_iter().map(case).collect();
    cases.push(Case::attend("no tensors", "", with_header(b"{}", b""), words(&["query"])));
    cases.push(Case::attend(
        "no tensors, and data",
        "",
        with_header(b"{}", &[0; 9]),
        words(&["9 bytes after"]),
    ));
    cases
}

/// Tensors with a missing, duplicate or invalid field.
fn fields() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (name, _)) in SHAPES.iter().enumerate() {
        for value in VALUES {
            type Field = (&'static str, fn(&mut Entry) -> &mut String);
            let fields: [Field; 3] = [
                ("dtype", |entry| &mut entry.dtype),
                ("shape", |entry| &mut entry.shape),
                ("data_offsets", |entry| &mut entry.offsets),
            ];
            for (field, of) in fields {
                let mut model = good();
                value.clone_into(of(&mut model.entries[index]));
                cases.push(refused(
                    format!("{field} of {name} is {value}"),
                    &model,
                    &[name, field],
                ));
            }
        }
        for value in ["[]", "[0]", "[0,1,2]", "[0,1,2,3]", "\"0,1\""] {
            let mut model = good();
            model.entries[index].offsets = value.into();
            cases.push(refused(
                format!("data_offsets of {name} are {value}"),
                &model,
                &[name, "data_offsets"],
            ));
        }
        let text = good().text();
        let own = good().entries[index].clone();
        let whole = format!(
            "\"dtype\":{},\"shape\":{},\"data_offsets\":{}",
            own.dtype, own.shape, own.offsets
        );
        assert!(text.contains(&whole));
        let raw = |rule: String, text: String, groups: &[&str]| {
            Case::attend(
                rule,
                "--backward",
                with_header(text.as_bytes(), &good().data),
                words(groups),
            )
        };
        for (field, part) in [
            ("dtype", format!("\"dtype\":{},", own.dtype)),
            ("shape", format!("\"shape\":{},", own.shape)),
            ("data_offsets", format!(",\"data_offsets\":{}", own.offsets)),
        ] {
            let fewer = text.replacen(&whole, &whole.replacen(&part, "", 1), 1);
            cases.push(raw(
                format!("{name} has no {field}"),
                fewer,
                &[name, &format!("missing field `{field}`")],
            ));
            let twice = text.replacen(&whole, &format!("{whole},{}", part.trim_matches(',')), 1);
            cases.push(raw(
                format!("{name} has two {field}"),
                twice,
                &[name, &format!("duplicate field `{field}`")],
            ));
        }
        for value in ["null", "3", "\"F32\"", "[]", "true"] {
            let other = text.replacen(&format!("{{{whole}}}"), value, 1);
            cases.push(raw(
                format!("{name} is {value}"),
                other,
                &[name, "expected an object with dtype, shape and data_offsets"],
            ));
        }
        let array = format!("[{},{},{}]", own.dtype, own.shape, own.offsets);
        cases.push(raw(
            format!("{name} is an array of its fields"),
            text.replacen(&format!("{{{whole}}}"), &array, 1),
            &[name, "expected an object"],
        ));
    }
    cases
}

/// Missing, duplicate and misspelled names.
fn names() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, _) in SHAPES {
        cases.push(refused(format!("no {name}"), &good().without(name), &[name, "no such tensor"]));
        for other in [
            name.to_uppercase(),
            format!("{name}s"),
            format!(" {name}"),
            format!("{name}\0"),
            format!("{name}\u{200b}"),
        ] {
            let mut model = good();
            let index = model.index(name);
            model.entries[index].name = serde_json::to_string(&other).unwrap();
            cases.push(refused(format!("{other:?} for {name}"), &model, &[name, "no such tensor"]));
        }
        for again in
            [format!("\"{name}\""), format!("\"\\u{:04x}{}\"", name.as_bytes()[0], &name[1..])]
        {
            let mut model = good().zeros("again", "F32", &[0]);
            model.entries[4].name = again;
            cases.push(refused(format!("two {name}"), &model, &[name, "two tensors named"]));
        }
        // the second of an unknown dtype
        let mut model = good().zeros("again", "F32", &[0]);
        model.entries[4].name = format!("\"{name}\"");
        model.entries[4].dtype = "\"F8_E4M3\"".into();
        cases.push(refused(
            format!("two {name}, one of a strange dtype"),
            &model,
            &[name, "two tensors named"],
        ));
    }
    cases
}

/// Metadata that is not a map of strings.
fn metadata() -> Vec<Case> {
    let values = [
        "null",
        "3",
        "\"pt\"",
        "true",
        "[]",
        "[[\"a\",\"b\"]]",
        r#"{"a":1}"#,
        r#"{"a":null}"#,
        r#"{"a":{}}"#,
        r#"{"a":["b"]}"#,
        r#"{"a":"b","c":false}"#,
    ];
    let mut cases = Vec::new();
    for value in values {
        let model = Model { before: format!("\"__metadata__\":{value},"), ..good() };
        cases.push(refused(format!("metadata {value}"), &model, &["__metadata__"]));
    }
    let twice = Model { before: r#""__metadata__":{},"__metadata__":{},"#.into(), ..good() };
    cases.push(refused("metadata twice".into(), &twice, &["__metadata__"]));
    cases
}

/// Tensors that overlap, leave gaps, or exceed the file.
fn offsets() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (name, _)) in SHAPES.iter().enumerate() {
        let (begin, end) = good().extent(&good().entries[index]);
        let mut with = |rule: &str, offsets: String, groups: &[&str]| {
            let mut model = good();
            model.entries[index].offsets = offsets;
            cases.push(refused(format!("{name} {rule}"), &model, groups));
        };
        with("is reversed", format!("[{end},{begin}]"), &[name, &format!("{end}..{begin}")]);
        with("is shorter than its shape", format!("[{begin},{}]", end - 4), &[name, "shape"]);
        with(
            "is longer than its shape",
            format!("[{begin},{}]", end + 4),
            &[name, "shape|truncated"],
        );
        with("is empty", format!("[{begin},{begin}]"), &[name, "shape"]);
        with("ends nowhere", format!("[{begin},18446744073709551615]"), &[name, "truncated"]);
        with(
            "begins nowhere",
            "[18446744073709551615,18446744073709551615]".into(),
            &[name, "truncated"],
        );
        with(
            "is at the end of numbers",
            format!("[{},18446744073709551615]", u64::MAX - (end - begin) as u64),
            &[name, "truncated"],
        );
        for far in [1usize << 20, 1 << 40, 1 << 62] {
            with("is far away", format!("[{},{}]", begin + far, end + far), &[name, "truncated"]);
        }
        for by in [1, 4, 96] {
            with(
                &format!("is {by} bytes late"),
                format!("[{},{}]", begin + by, end + by),
                &[ANY, "gap|truncated|overlap"],
            );
            if begin >= by {
                with(
                    &format!("is {by} bytes early"),
                    format!("[{},{}]", begin - by, end - by),
                    &[ANY, "gap|overlap"],
                );
            }
        }
        // the bytes of another tensor
        for (other, (other_name, shape)) in SHAPES.iter().enumerate() {
            if other != index && SHAPES[index].1 == *shape {
                let (begin, end) = good().extent(&good().entries[other]);
                with(
                    &format!("is where {other_name} is"),
                    format!("[{begin},{end}]"),
                    &[ANY, "gap|overlap"],
                );
            }
        }
        // a gap of 8 bytes
        let mut model = good();
        for later in index..4 {
            let (begin, end) = model.extent(&model.entries[later]);
            model.entries[later].offsets = format!("[{},{}]", begin + 8, end + 8);
        }
        model.data.extend([0; 8]);
        cases.push(refused(format!("a gap before {name}"), &model, &[name, "gap"]));
    }
    // unknown tensors
    for (rule, offsets, word) in [
        ("overlaps", "[0,4]", "overlap"),
        ("leaves a gap", "[3080,3084]", "gap"),
        ("is reversed", "[4,0]", "4..0"),
    ] {
        for dtype in ["F32", "F8_E4M3"] {
            let mut model = good().zeros("strange", "F32", &[1]);
            model.entries[4].offsets = offsets.into();
            model.entries[4].dtype = format!("\"{dtype}\"");
            cases.push(refused(
                format!("a strange {dtype} {rule}"),
                &model,
                &[
                    if word == "overlap" { "strange|query" } else { "strange" },
                    &format!("{word}|truncated"),
                ],
            ));
        }
    }
    cases
}

/// Shapes that do not match the bytes, or overflow.
fn shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (name, shape)) in SHAPES.iter().enumerate() {
        let [b, s, h, d] = *shape;
        for wrong in [
            "[4294967296,4294967296,4294967296,4294967296]".to_owned(),
            format!("[{b},{s},{h},9223372036854775808]"),
            format!("[{b},18446744073709551615,{h},{d}]"),
            format!("[{b},{s},{h},{d},18446744073709551615]"),
            // whose bytes overflow 64 bits to the right number
            format!("[{b},{s},{h},{}]", (1u64 << 62) + d as u64),
            format!("[4611686018427387904,4,{b},{s},{h},{d}]"),
            format!("[0,18446744073709551615,{h},{d}]"),
            "[18446744073709551615,0,18446744073709551615,4]".to_owned(),
            format!("[{b},{s},{h}]"),
            format!("[{}]", b * s * h * d + 1),
            "[]".to_owned(),
            format!("[{}]", vec!["1"; 100_000].join(",")),
            format!("[{}]", vec!["2"; 100_000].join(",")),
        ] {
            let mut model = good();
            model.entries[index].shape = wrong.clone();
            cases.push(refused(
                format!("{name} of shape {}", &wrong[..wrong.len().min(60)]),
                &model,
                &[name, "shape"],
            ));
        }
        // other axes for the same bytes
        for wrong in [
            vec![b * s * h * d],
            vec![s, h, d],
            vec![b, s, h * d],
            vec![b, s, h, d, 1],
            vec![1, b, s, h, d],
            vec![b, s, h, d / 2, 2],
        ] {
            let mut model = good();
            model.entries[index].shape = format!("{wrong:?}");
            cases.push(refused(format!("{name} of shape {wrong:?}"), &model, &[name, "shape"]));
        }
        // no elements, with a huge length
        for zero in 0..4 {
            for huge in 0..4 {
                let mut lens = [2u64, 2, 2, 4];
                lens[huge] = 1 << 40;
                lens[zero] = 0;
                let mut model = good().replaced(name, "F32", &[0]);
                let last = model.entries.len() - 1;
                model.entries[last].shape = format!("{lens:?}");
                if zero != huge {
                    cases.push(refused(format!("{name} of shape {lens:?}"), &model, &[ANY]));
                }
            }
        }
    }
    cases
}

/// Inconsistent tensors.
fn relations() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, shape) in SHAPES {
        for axis in 0..4 {
            for len in [0, 1, shape[axis].saturating_sub(1), shape[axis] + 1, 2 * shape[axis], 513]
            {
                let mut other = shape;
                other[axis] = len;
                if other != shape {
                    let model = good().replaced(name, "F32", &other);
                    cases.push(refused(format!("{name} of shape {other:?}"), &model, &[ANY]));
                }
            }
        }
    }
    let none = good()
        .without("dout")
        .replaced("query", "F32", &[0, 6, 4, 8])
        .replaced("key", "F32", &[0, 6, 2, 8])
        .replaced("value", "F32", &[0, 6, 2, 8]);
    cases.push(Case::attend("no batch rows", "", none.bytes(), words(&["query: batch"])));
    // optional tensors, one at a time, with a wrong length or number of axes
    let flags = |name: &str| {
        if name == "softmax_aux" { "--backward --sinks per-head" } else { "--backward" }
    };
    for (name, dtype, shape) in [
        ("dlse", "F32", vec![1, 4, 6]),
        ("bias", "F32", vec![1, 4, 6, 6]),
        ("attention_mask", "U8", vec![1, 4, 6, 6]),
        ("q_segment_ids", "I32", vec![1, 6]),
        ("kv_segment_ids", "I32", vec![1, 6]),
        ("q_positions", "I64", vec![1, 6]),
        ("kv_positions", "I64", vec![1, 6]),
        ("softmax_aux", "F32", vec![4, 2]),
    ] {
        for axis in 0..shape.len() {
            for len in [0, 2, 3, 5, 7] {
                // any number of sinks but 0 is valid
                let free = name == "softmax_aux" && axis == 1 && len > 0;
                let mut other = shape.clone();
                other[axis] = len;
                if other != shape && !free {
                    let model = good().zeros(name, dtype, &other);
                    cases.push(Case::attend(
                        format!("{name} of shape {other:?}"),
                        flags(name),
                        model.bytes(),
                        words(&[name]),
                    ));
                }
            }
        }
        for other in [
            vec![],
            vec![1],
            [vec![1], shape.clone()].concat(),
            [shape.clone(), vec![1]].concat(),
            shape[1..].to_vec(),
        ] {
            // one sink per head may have the shape [heads]
            if name != "softmax_aux" || other.len() != 1 || other[0] != 4 {
                let model = good().zeros(name, dtype, &other);
                cases.push(Case::attend(
                    format!("{name} of shape {other:?}"),
                    flags(name),
                    model.bytes(),
                    words(&[name]),
                ));
            }
        }
    }
    cases
}

const INTEGERS: [&str; 9] = ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"];

/// Invalid dtypes of tensors.
fn dtypes() -> Vec<Case> {
    let mut cases = Vec::new();
    let strange =
        ["F8_E4M3", "F8_E5M2", "F4", "C64", "float32", "f32", "", "I4", "F32 ", "\u{1b}[2J"];
    let model = full();
    for entry in &model.entries {
        let name: String = serde_json::from_str(&entry.name).unwrap();
        let shape: Vec<usize> = serde_json::from_str(&entry.shape).unwrap();
        let own: String = serde_json::from_str(&entry.dtype).unwrap();
        let rest = model.without(&name);
        // floats are accepted in any width, and never integers for floats
        let others: &[&str] =
            if own.starts_with('F') { &INTEGERS } else { &["F16", "BF16", "F32", "F64"] };
        for dtype in others {
            let other = rest.clone().zeros(&name, dtype, &shape);
            cases.push(Case::attend(
                format!("{name} of {dtype}"),
                FULL,
                other.bytes(),
                words(&[&name, dtype]),
            ));
        }
        for dtype in strange {
            let mut other = model.clone();
            let index = other.index(&name);
            other.entries[index].dtype = serde_json::to_string(dtype).unwrap();
            cases.push(Case::attend(
                format!("{name} of {dtype:?}"),
                FULL,
                other.bytes(),
                words(&[&name, "dtype", "want one of"]),
            ));
        }
        // a dtype of another width for the same bytes
        let wider = if width(&own) == 8 { "I32" } else { "I64" };
        let mut other = model.clone();
        let index = other.index(&name);
        other.entries[index].dtype = format!("\"{wider}\"");
        cases.push(Case::attend(
            format!("{name} of the bytes of {own} as {wider}"),
            FULL,
            other.bytes(),
            words(&[&name, "shape"]),
        ));
    }
    // key and value must have the dtype of query
    for name in ["key", "value"] {
        for dtype in ["F16", "BF16", "F64"] {
            let other = good().replaced(name, dtype, &[1, 6, 2, 8]);
            cases.push(refused(format!("{name} of {dtype}"), &other, &[name, dtype]));
        }
    }
    cases
}

/// Invalid ids, positions and packed lengths.
fn integers() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["q_segment_ids", "kv_segment_ids"] {
        for number in [1i64 << 31, -(1 << 31) - 1, i64::MAX, i64::MIN] {
            let mut ids = [0; 6];
            ids[3] = number;
            let model = good().numbers("q_segment_ids", "I64", &[1, 6], &[0; 6]).numbers(
                "kv_segment_ids",
                "I64",
                &[1, 6],
                &[0; 6],
            );
            let model = model.without(name).numbers(name, "I64", &[1, 6], &ids);
            cases.push(refused(format!("{name} of {number}"), &model, &[name, "32 bits"]));
        }
    }
    for (name, other) in [("q_positions", "kv_positions"), ("kv_positions", "q_positions")] {
        for number in [i64::MIN, i64::MAX, i64::MIN + 1] {
            let model = good().numbers(other, "I64", &[1, 6], &[0; 6]).numbers(
                name,
                "I64",
                &[1, 6],
                &[number; 6],
            );
            cases.push(refused(format!("{name} of {number}"), &model, &[name]));
        }
        let model = good().tensor(name, "U64", &[1, 6], u64::MAX.to_le_bytes().repeat(6)).numbers(
            other,
            "I64",
            &[1, 6],
            &[0; 6],
        );
        cases.push(refused(format!("{name} of 2^64 - 1"), &model, &[name, "63"]));
    }
    for name in ["cum_seqlens_q", "cum_seqlens_k"] {
        let other = if name == "cum_seqlens_q" { "cum_seqlens_k" } else { "cum_seqlens_q" };
        for (rule, numbers) in [
            ("not from 0", vec![1, 6]),
            ("negative", vec![-1, 6]),
            ("descending", vec![0, 5, 4]),
            ("descending below 0", vec![0, -1, 6]),
            ("beyond the rows", vec![0, 7]),
            ("far beyond the rows", vec![0, i64::MAX]),
            ("of no sequence", vec![]),
        ] {
            for alone in [true, false] {
                let own = good().numbers(name, "I64", &[numbers.len()], &numbers);
                let mut right = vec![0; numbers.len().max(1)];
                *right.last_mut().unwrap() = if numbers.len() > 1 { 6 } else { 0 };
                let model =
                    if alone { own } else { own.numbers(other, "I64", &[right.len()], &right) };
                cases.push(refused(format!("{name} {rule}, alone: {alone}"), &model, &[name]));
            }
        }
        let two = good().numbers(name, "I64", &[2, 2], &[0, 3, 3, 6]);
        cases.push(refused(format!("{name} of two axes"), &two, &[name, "sequences"]));
        cases.push(refused(
            format!("{name} of no axes"),
            &good().numbers(name, "I64", &[], &[0]),
            &[name, "sequences"],
        ));
        let lengths =
            good().numbers(name, "I64", &[2], &[0, 6]).numbers(other, "I64", &[3], &[0, 3, 6]);
        cases.push(refused(
            format!("{name} of fewer sequences"),
            &lengths,
            &["cum_seqlens_k|cum_seqlens_q"],
        ));
        let floats = good().zeros(name, "F32", &[2]);
        cases.push(refused(format!("{name} of floats"), &floats, &[name, "F32"]));
    }
    cases
}

/// Sink logits that do not match the flags.
fn sinks() -> Vec<Case> {
    let sinks = |shape: &[usize]| good().zeros("softmax_aux", "F32", shape);
    [
        (vec![4], ""),
        (vec![1], ""),
        (vec![0], "--sinks shared"),
        (vec![0], "--sinks per-head"),
        (vec![4, 0], "--sinks per-head"),
        (vec![3], "--sinks per-head"),
        (vec![2, 2], "--sinks shared"),
        (vec![3, 1], "--sinks per-head"),
        (vec![1, 4], "--sinks per-head"),
        (vec![], "--sinks shared"),
        (vec![], ""),
        (vec![1, 4, 1], "--sinks per-head"),
    ]
    .into_iter()
    .map(|(shape, flags)| {
        Case::attend(
            format!("sinks of {shape:?} with {flags:?}"),
            flags,
            sinks(&shape).bytes(),
            words(&["softmax_aux"]),
        )
    })
    .chain(["--sinks shared", "--sinks per-head"].map(|flags| {
        Case::attend(
            format!("no sinks with {flags}"),
            flags,
            good().bytes(),
            words(&["softmax_aux", "no such tensor"]),
        )
    }))
    .collect()
}

/// Inputs that are not regular files.
fn other_files() -> Vec<Case> {
    let link = |to: &str| Content::Link(to.into());
    [
        (Some(Content::Folder), "directory"),
        (Some(Content::Pipe), "a pipe"),
        (Some(Content::Socket), "a socket"),
        (Some(link("/dev/null")), "a device"),
        (Some(link("/dev/zero")), "a device"),
        (Some(link("nowhere")), "No such file"),
        (Some(link("in.safetensors")), "symbolic links"),
        (Some(link(".")), "directory"),
        (Some(Content::File(Vec::new())), "truncated"),
        (None, "No such file"),
    ]
    .into_iter()
    .map(|(content, word)| {
        let mut case =
            Case::attend(format!("a file that is {content:?}"), "", Vec::new(), words(&[word]));
        case.files =
            content.into_iter().map(|content| ("in.safetensors".into(), content)).collect();
        case
    })
    .collect()
}

/// Headers with a few bytes changed, removed or repeated.
fn random() -> Vec<Case> {
    let mut rng = Rng::new(20_261_122);
    let (model, text) = (full(), full().text().into_bytes());
    (0..200)
        .map(|number| {
            let mut text = text.clone();
            for _ in 0..=rng.below(3) {
                let at = rng.below(text.len());
                match number % 4 {
                    0 => text[at] = rng.next().to_le_bytes()[0],
                    1 => text[at] ^= 1 << rng.below(8),
                    2 => drop(text.drain(at..(at + 1 + rng.below(12)).min(text.len()))),
                    _ => {
                        let piece = text[at..(at + 1 + rng.below(12)).min(text.len())].to_vec();
                        let to = rng.below(text.len());
                        drop(text.splice(to..to, piece));
                    }
                }
            }
            Case::attend(
                format!("random {number}"),
                FULL,
                with_header(&text, &model.data),
                Expected::Either,
            )
        })
        .collect()
}
