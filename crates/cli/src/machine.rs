//! The machine file: figures of a machine as JSON, in seconds, bytes and FLOP per second.

use std::path::Path;

use annulus_core::{ComputeRate, DType, Error, Link, Machine, Result};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::{
    arguments::values::DTypeName,
    failure::{io, of_file},
    file::{Object, read_text},
    message,
};

/// Version of the format.
const VERSION: u64 = 1;

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
    memory: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFields {
    latency: f64,
    bandwidth: f64,
    full_duplex: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RateFields {
    dtype: DTypeName,
    head_dim: usize,
    forward: f64,
    backward: f64,
}

/// Deserializes a field that may be null and may not be missing.
fn required<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<T>, D::Error> {
    Option::deserialize(deserializer)
}

/// Reads a machine file.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read, is no JSON, or has an unknown, missing or malformed
/// field; [`Error::InvalidArgument`] of a wrong version or number. All name file and field.
pub(crate) fn read(path: &Path) -> Result<Machine> {
    let text = read_text(path)?;
    let wrong = |what: String| io(path, format!("is not a machine: {what}"));
    // another version may have other fields
    let whole: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    match whole.get("version") {
        Some(version) if version.as_u64() != Some(VERSION) => {
            return Err(of_file(path, "version", version, VERSION));
        }
        _ => {}
    }
    let mut json = serde_json::Deserializer::from_str(&text);
    let fields: std::result::Result<Object<MachineFields>, _> =
        serde_path_to_error::deserialize(&mut json);
    let Object(fields) = fields.map_err(|error| wrong(message::of_json(&error)))?;
    let machine = Machine::from(fields);
    let of_field = |error| match error {
        Error::InvalidArgument { argument, got, want } => of_file(path, &argument, got, want),
        other => other,
    };
    machine.check().map_err(of_field)?;
    Ok(machine)
}

/// Formats a machine as the content of a file.
pub(crate) fn format(machine: &Machine) -> String {
    // cannot fail: all numbers of a machine are finite and all keys are strings
    let text = serde_json::to_string_pretty(&MachineFields::from(machine));
    text.map(|text| text + "\n").unwrap_or_default()
}

impl From<MachineFields> for Machine {
    fn from(fields: MachineFields) -> Self {
        let link = |LinkFields { latency, bandwidth, full_duplex }| Link {
            latency,
            bandwidth,
            is_full_duplex: full_duplex,
        };
        let rate = |RateFields { dtype, head_dim, forward, backward }| ComputeRate {
            dtype: dtype.into(),
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
        let link = |Link { latency, bandwidth, is_full_duplex }| LinkFields {
            latency,
            bandwidth,
            full_duplex: is_full_duplex,
        };
        let rate = |&ComputeRate { dtype, head_dim, forward, backward }: &ComputeRate| RateFields {
            dtype: match dtype {
                DType::F64 => DTypeName::F64,
                DType::F32 => DTypeName::F32,
                DType::Bf16 => DTypeName::Bf16,
                DType::F16 => DTypeName::F16,
            },
            head_dim,
            forward,
            backward,
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
    fn a_machine_is_read_back() {
        let link = Link { latency: 1.5e-6, bandwidth: 1.25e10, is_full_duplex: false };
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
            between_nodes: Some(Link { is_full_duplex: true, latency: 1e-5, ..link }),
            node_bandwidth: Some(2.5e10),
            ..one_node.clone()
        };
        for machine in [one_node, nodes] {
            let fields = serde_json::from_str::<MachineFields>(&format(&machine)).unwrap();
            assert_eq!(Machine::from(fields), machine);
        }
    }
}
