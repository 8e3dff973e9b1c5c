//! The machine file: figures of a machine as JSON, in seconds, bytes and FLOP per second.
//!
//! The command, the C interface and the Python package read it with this crate, so that they accept
//! the same files and give the same errors. `docs/machine.md` in the repository defines the fields.
#![forbid(unsafe_code)]

use std::{fs, path::Path};

use annulus_core::{DType, Error, Result};
use annulus_plan::{ComputeRate, Link, Machine};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Version of the format.
const VERSION: u64 = 1;

/// The largest file, in bytes. A file of this size has 100,000 rates.
const MOST_BYTES: u64 = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineFields {
    version: u64,
    ranks_per_node: usize,
    #[serde(deserialize_with = "required")]
    inside_node: Option<LinkFields>,
    #[serde(deserialize_with = "required")]
    between_nodes: Option<LinkFields>,
    #[serde(deserialize_with = "required")]
    node_bandwidth: Option<f64>,
    rates: Vec<RateFields>,
    #[serde(deserialize_with = "whole")]
    memory: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFields {
    latency: f64,
    bandwidth: f64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RateFields {
    dtype: DTypeName,
    head_dim: usize,
    forward: f64,
    backward: f64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DTypeName {
    F64,
    F32,
    Bf16,
    F16,
}

/// Deserializes a field that may be null and may not be missing.
fn required<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<T>, D::Error> {
    Option::deserialize(deserializer)
}

/// Deserializes a whole number, which may be written with a fraction of 0 or an exponent.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<u64, D::Error> {
    /// 2⁶⁴, the first float that is too large.
    const END: f64 = 18_446_744_073_709_551_616.0;
    let got = Value::deserialize(deserializer)?;
    let of_float = |number: f64| {
        let is_whole = number.fract() == 0.0 && (0.0..END).contains(&number);
        is_whole.then_some(number as u64)
    };
    let number = got.as_u64().or_else(|| got.as_f64().and_then(of_float));
    number.ok_or_else(|| {
        let want = "want a whole number from 1 to 18446744073709551615";
        serde::de::Error::custom(format!("got {got}, {want}"))
    })
}

/// Reads a machine file.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read or is no regular file; those of [`parse`].
///
/// # Examples
/// ```
/// let missing = annulus_machine_file::read("none.json".as_ref()).unwrap_err();
/// assert!(missing.to_string().starts_with("none.json: "));
/// ```
pub fn read(path: &Path) -> Result<Machine> {
    let name = visible(&path.to_string_lossy());
    let io = |what: String| Error::Io { path: name.clone(), what };
    // opening a pipe waits, and opening a device may have effects
    let found = fs::metadata(path).map_err(|error| io(error.to_string()))?;
    if !found.is_file() {
        return Err(io("want a regular file".to_owned()));
    }
    if found.len() > MOST_BYTES {
        let what = format!("has {} bytes, want text of at most {MOST_BYTES} bytes", found.len());
        return Err(io(what));
    }
    let bytes = fs::read(path).map_err(|error| io(error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        io(format!("is not UTF-8 text: byte {}", error.utf8_error().valid_up_to()))
    })?;
    parse(&text, &name)
}

/// Parses the text of a machine file. Errors call it `name`.
///
/// # Errors
/// [`Error::Io`] if the text is no JSON, or has an unknown, missing or malformed field;
/// [`Error::InvalidArgument`] of a wrong version or number. All name file and field.
///
/// # Examples
/// ```
/// let text = r#"{ "version": 1, "ranks_per_node": 1, "inside_node": null,
///     "between_nodes": { "latency": 5e-6, "bandwidth": 1.25e10 },
///     "node_bandwidth": 1.25e10, "memory": 68719476736,
///     "rates": [{ "dtype": "f32", "head_dim": 64, "forward": 1e12, "backward": 8e11 }] }"#;
/// let machine = annulus_machine_file::parse(text, "machine")?;
/// assert_eq!(machine.node_bandwidth, Some(1.25e10));
/// let wrong = annulus_machine_file::parse(&text.replace("64,", "0,"), "machine").unwrap_err();
/// assert_eq!(wrong.to_string(), "machine: rates[0].head_dim: got 0, want at least 1");
/// # Ok::<(), annulus_core::Error>(())
/// ```
pub fn parse(text: &str, name: &str) -> Result<Machine> {
    let wrong = |what: &str| {
        let what = format!("is not a machine: {}", visible(what));
        Error::Io { path: name.to_owned(), what }
    };
    // another version may have other fields
    let whole: Value = serde_json::from_str(text).map_err(|error| wrong(&error.to_string()))?;
    // serde also accepts an array of the fields
    let Value::Object(whole) = whole else { return Err(wrong("want a JSON object")) };
    match whole.get("version") {
        Some(version) if version.as_u64() != Some(VERSION) => {
            return Err(Error::invalid(format!("{name}: version"), version, VERSION));
        }
        _ => {}
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let fields: std::result::Result<MachineFields, _> = serde_path_to_error::deserialize(&mut json);
    let fields = fields.map_err(|error| match error.path().to_string() {
        // the path of the whole text
        path if path == "." => wrong(&error.inner().to_string()),
        path => wrong(&format!("{path}: {}", error.inner())),
    })?;
    let machine = Machine::from(fields);
    machine.check().map_err(|error| match error {
        Error::InvalidArgument { argument, got, want } => {
            Error::invalid(format!("{name}: {argument}"), got, want)
        }
        other => other,
    })?;
    Ok(machine)
}

/// Formats a machine as the content of a file.
pub fn format(machine: &Machine) -> String {
    // cannot fail: all numbers of a machine are finite and all keys are strings
    let text = serde_json::to_string_pretty(&MachineFields::from(machine));
    text.map(|text| text + "\n").unwrap_or_default()
}

/// Returns a text with its control characters escaped: an error is one line.
fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    shown
}

impl From<MachineFields> for Machine {
    fn from(fields: MachineFields) -> Self {
        let link = |LinkFields { latency, bandwidth }| Link { latency, bandwidth };
        let rate = |RateFields { dtype, head_dim, forward, backward }| ComputeRate {
            dtype: match dtype {
                DTypeName::F64 => DType::F64,
                DTypeName::F32 => DType::F32,
                DTypeName::Bf16 => DType::Bf16,
                DTypeName::F16 => DType::F16,
            },
            head_dim,
            forward,
            backward,
        };
        Self {
            ranks_per_node: fields.ranks_per_node,
            inside_node: fields.inside_node.map(link),
            between_nodes: fields.between_nodes.map(link),
            node_bandwidth: fields.node_bandwidth,
            rates: fields.rates.into_iter().map(rate).collect(),
            memory: fields.memory,
        }
    }
}

impl From<&Machine> for MachineFields {
    fn from(machine: &Machine) -> Self {
        let link = |Link { latency, bandwidth }| LinkFields { latency, bandwidth };
        let rate = |rate: &ComputeRate| RateFields {
            dtype: match rate.dtype {
                DType::F64 => DTypeName::F64,
                DType::F32 => DTypeName::F32,
                DType::Bf16 => DTypeName::Bf16,
                DType::F16 => DTypeName::F16,
            },
            head_dim: rate.head_dim,
            forward: rate.forward,
            backward: rate.backward,
        };
        Self {
            version: VERSION,
            ranks_per_node: machine.ranks_per_node,
            inside_node: machine.inside_node.map(link),
            between_nodes: machine.between_nodes.map(link),
            node_bandwidth: machine.node_bandwidth,
            rates: machine.rates.iter().map(rate).collect(),
            memory: machine.memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_and_no_object_is_refused_in_one_line() {
        let refused = |text: &str| parse(text, "machine").unwrap_err().to_string();
        assert_eq!(refused("[1]"), "machine: is not a machine: want a JSON object");
        assert_eq!(refused(r#"{"version": 2}"#), "machine: version: got 2, want 1");
        let unknown = refused("{\"version\": 1, \"a\\u001b[2J\": 3}");
        assert!(unknown.contains(r"unknown field `a\u{1b}[2J`"), "{unknown}");
        assert!(!unknown.contains(char::is_control), "{unknown:?}");
        let folder = read(Path::new("/")).unwrap_err();
        assert_eq!(folder.to_string(), "/: want a regular file");
    }

    #[test]
    fn a_machine_is_read_back() {
        let link = Link { latency: 1.5e-6, bandwidth: 1.25e10 };
        let rate =
            ComputeRate { dtype: DType::Bf16, head_dim: 128, forward: 1.5e14, backward: 1e14 };
        let one_node = Machine {
            ranks_per_node: 2,
            inside_node: Some(link),
            between_nodes: None,
            node_bandwidth: None,
            rates: vec![rate, ComputeRate { dtype: DType::F16, forward: 1e14, ..rate }],
            memory: 64 << 30,
        };
        let nodes = Machine {
            between_nodes: Some(Link { latency: 1e-5, ..link }),
            node_bandwidth: Some(2.5e10),
            ..one_node.clone()
        };
        for machine in [&one_node, &nodes] {
            assert_eq!(parse(&format(machine), "machine").as_ref(), Ok(machine));
        }
        // figures that earlier versions measured
        let link = "\"latency\": 1.5e-6,";
        for earlier in ["\"full_duplex\": true,", "\"overlap\": 0.5,"] {
            let text = format(&one_node).replace(link, &format!("{link} {earlier}"));
            let refused = parse(&text, "machine").unwrap_err().to_string();
            assert!(
                refused.contains("inside_node.") && refused.contains("unknown field"),
                "{refused}"
            );
        }
        let memory = |written: &str| {
            let written = format!("\"memory\": {written}");
            parse(&format(&nodes).replace("\"memory\": 68719476736", &written), "machine")
        };
        for (written, want) in
            [("4e10", 40_000_000_000), ("1.5e3", 1500), ("68719476736.0", 64 << 30)]
        {
            assert_eq!(memory(written).map(|machine| machine.memory), Ok(want), "{written}");
        }
        assert_eq!(memory("18446744073709551615").map(|machine| machine.memory), Ok(u64::MAX));
        for wrong in ["1.5", "-4e10", "18446744073709551616", "null"] {
            let refused = memory(wrong).unwrap_err().to_string();
            assert!(refused.starts_with("machine: is not a machine: memory: got "), "{refused}");
            let want = ", want a whole number from 1 to 18446744073709551615";
            assert!(refused.contains(want) && !refused.contains('\n'), "{refused}");
        }
        assert!(memory("0.0").unwrap_err().to_string().contains("memory: got 0, want at least 1"));
    }
}
