//! The figures of a machine as lines of text.

use std::fmt;

use annulus_core::{Link, Machine, TokenRate};

use crate::report;

/// Displays a line for each link, rate and the memory.
pub(super) struct Summary<'a>(pub(super) &'a Machine);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { ranks_per_node, inside_node, between_nodes, node_bandwidth, .. } = self.0;
        let Machine { message_overhead, overlap, merge_bandwidth, .. } = self.0;
        let Machine { rates, memory, .. } = self.0;
        let links = [("inside nodes", inside_node), ("between nodes", between_nodes)];
        for (name, link) in links {
            let Some(Link { latency, bandwidth, is_full_duplex }) = link else { continue };
            let duplex = if *is_full_duplex { "full" } else { "half" };
            let [latency, bandwidth] = [latency * 1e6, bandwidth / 1e9];
            writeln!(f, "{name:<14} {latency:.1} µs, {bandwidth:.2} GB/s, {duplex} duplex")?;
        }
        if let Some(bandwidth) = node_bandwidth {
            writeln!(f, "{:<14} {:.2} GB/s of all its ranks", "of a node", bandwidth / 1e9)?;
        }
        if *message_overhead > 0.0 {
            writeln!(
                f,
                "{:<14} {:.2} ns per byte of messages",
                "overhead",
                message_overhead * 1e9
            )?;
        }
        if *overlap < 1.0 {
            let percent = overlap * 100.0;
            writeln!(f, "{:<14} {percent:.0} % of the bandwidth under tiles", "overlap")?;
        }
        if let Some(bandwidth) = merge_bandwidth {
            writeln!(f, "{:<14} {:.2} GB/s of partial results", "merge", bandwidth / 1e9)?;
        }
        for rate in rates {
            let name = format!("{} dim {}", rate.dtype, rate.head_dim);
            let [forward, backward] = [rate.forward / 1e9, rate.backward / 1e9];
            writeln!(f, "{name:<14} {forward:.1} GFLOP/s forward, {backward:.1} backward")?;
            if let Some(TokenRate { bandwidth, further_heads }) = rate.token {
                let [bandwidth, further] = [bandwidth / 1e9, further_heads / 1e9];
                let of_further = format!("{further:.1} GFLOP/s of further query heads");
                writeln!(f, "  token        {bandwidth:.2} GB/s of a KV cache, {of_further}")?;
            }
        }
        let ranks = if *ranks_per_node == 1 { "rank" } else { "ranks" };
        write!(
            f,
            "{:<14} {} per rank, {ranks_per_node} {ranks} per node",
            "memory",
            report::bytes(*memory)
        )
    }
}
