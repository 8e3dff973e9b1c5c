//! `annulus measure`: measures links, compute rates of passes and tokens, and memory, and writes
//! the machine file.

mod links;
mod rates;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use annulus_comm::Descriptor;
use annulus_core::{DType, Error, Fingerprint};
use annulus_plan::{Link, Machine};
use clap::Args;
use half::{bf16, f16};

use crate::{
    arguments::values::{dim, dtype, ranks, silence, threads},
    backend::{BackendChoice, DeviceFlags},
    failure::Outcome,
    file::TextDocument,
    job::Job,
    memory, message, report, say,
};
use links::Links;

const EXAMPLES: &str = "\
The file has the version of its format, ranks_per_node, the links inside_node and between_nodes
(latency in s, bandwidth in bytes/s that one rank sends while it receives as many), node_bandwidth
in bytes/s of all ranks of a node, rates in FLOP/s of one rank, and memory in bytes of one
rank. A link that the ranks do not have is null. docs/machine.md describes how each figure is measured.

Examples:
  annulus measure --out machine.json
  annulus measure --dtype f32,bf16 --ds 64,128 --ranks 4
  mpirun -n 8 annulus measure --threads 4 --out machine.json
  annulus plan --causal --q-len 131072 --ranks 64 --machine machine.json --strategy auto";

/// Measures links, compute rates and memory of the ranks and writes a machine file, with
/// which `plan` predicts times
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MeasureFlags {
    /// File to write. Default: standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Element types
    #[arg(long, value_parser = dtype(), default_value = "f32", value_delimiter = ',')]
    dtype: Vec<DType>,
    /// Head dims, 1 to 1024
    #[arg(long, value_name = "D,D,...", default_value = "64", value_delimiter = ',',
        value_parser = dim)]
    ds: Vec<usize>,
    #[command(flatten)]
    device: DeviceFlags,
    /// Ranks, 1 to 128. Default: 2. Under MPI always the number of processes
    #[arg(long, value_name = "N", value_parser = ranks)]
    ranks: Option<usize>,
    /// Threads per rank, 1 to 1024; all ranks together at most 128 per core. Default: the cores
    /// divided by the ranks
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Deadline: fail after S seconds without a message or heartbeat of a peer
    #[arg(long, value_name = "S", default_value = "120", value_parser = silence,
        allow_hyphen_values = true)]
    deadline: Duration,
}

impl MeasureFlags {}

/// Runs `annulus measure`.
pub(crate) fn run(flags: &MeasureFlags) -> Outcome {
    flags.device.run_job("measure", flags.deadline, |job, backend| measure(flags, job, &backend))
}

fn measure(flags: &MeasureFlags, job: &mut Job, backend: &BackendChoice) -> Outcome {
    job.set_ranks(flags.ranks, 2)?;
    let threads = job.threads(flags.threads)?;
    // the processes must measure the same figures; only rank 0 writes the file
    let all = format!("{:?}", (&flags.dtype, &flags.ds, flags.device.backend, flags.deadline));
    let command_line = Fingerprint::new().bytes(all.as_bytes()).finish();
    job.require_same(Descriptor::new().field_as("command line", command_line, "another one"))?;
    let path = flags.out.as_deref().unwrap_or(Path::new("/dev/stdout"));
    let document = job.is_leader().then(|| TextDocument::create(path)).transpose();
    let document = job.agree(document)?;

    let endpoints = job.endpoints()?;
    let links =
        job.run_phase(endpoints, |_, endpoint| Links::measure(endpoint.of_host(), flags.deadline))?;
    // equal on all ranks
    let links = links.into_iter().next().ok_or_else(|| Error::internal("no rank has measured"))?;
    let mut all_rates = Vec::new();
    for (index, &dtype) in flags.dtype.iter().enumerate() {
        for (number, &head_dim) in flags.ds.iter().enumerate() {
            // what is named twice is measured once
            if flags.dtype[..index].contains(&dtype) || flags.ds[..number].contains(&head_dim) {
                continue;
            }
            let rate = match dtype {
                DType::F64 => rates::measure::<f64>(job, backend, threads, head_dim),
                DType::F32 => rates::measure::<f32>(job, backend, threads, head_dim),
                DType::Bf16 => rates::measure::<bf16>(job, backend, threads, head_dim),
                DType::F16 => rates::measure::<f16>(job, backend, threads, head_dim),
            }?;
            all_rates.push(rate);
        }
    }
    let Links { ranks_per_node, inside_node, between_nodes, node_bandwidth } = links;
    let memory = memory_of_rank(job, ranks_per_node)?;
    let machine = Machine {
        ranks_per_node,
        inside_node,
        between_nodes,
        node_bandwidth,
        rates: all_rates,
        memory,
    };
    job.agree(machine.check())?;
    let written = document.map_or(Ok(()), |document| {
        document.finish(annulus_machine_file::format(&machine).as_bytes())
    });
    job.agree(written)?;
    if let Some(path) = flags.out.as_ref().filter(|_| job.is_leader()) {
        print(&machine);
        say!("wrote {}", message::path(path));
    }
    Ok(())
}

/// Prints a line for each link, rate and the memory.
fn print(machine: &Machine) {
    let Machine { ranks_per_node, inside_node, between_nodes, node_bandwidth, .. } = machine;
    for (name, link) in [("inside nodes", inside_node), ("between nodes", between_nodes)] {
        let Some(Link { latency, bandwidth }) = link else { continue };
        say!("{name:<14} {:.1} µs, {:.2} GB/s", latency * 1e6, bandwidth / 1e9);
    }
    if let Some(bandwidth) = node_bandwidth {
        say!("{:<14} {:.2} GB/s of all its ranks", "of a node", bandwidth / 1e9);
    }
    for rate in &machine.rates {
        let name = format!("{} dim {}", rate.dtype, rate.head_dim);
        let [forward, backward] = [rate.forward / 1e9, rate.backward / 1e9];
        say!("{name:<14} {forward:.1} GFLOP/s forward, {backward:.1} backward");
    }
    let ranks = if *ranks_per_node == 1 { "rank" } else { "ranks" };
    let memory = report::bytes(machine.memory);
    say!("{:<14} {memory} per rank, {ranks_per_node} {ranks} per node", "memory");
}

/// Returns the least memory of a node, divided by its ranks.
fn memory_of_rank(job: &mut Job, ranks_per_node: usize) -> Outcome<u64> {
    let node = memory::most_bytes().unwrap_or(u64::MAX);
    let least = job.all_gather_values(&node)?.into_iter().min().unwrap_or(node);
    Ok(least / ranks_per_node.max(1) as u64)
}

/// Returns the median of some numbers; 0 if there are none.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_number() {
        assert_eq!(median(vec![]), 0.0);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![9.0, 1.0]), 9.0);
    }
}
