//! `annulus plan`: what a ring would do, as figures and as a picture, before anything runs.

mod figures;
mod picture;

use std::path::{Path, PathBuf};

use annulus::Attention;
use annulus_core::{Dims, Spec};
use clap::Args;

use crate::{
    arguments::{
        mask::MaskFlags,
        values::{DTypeName, LayoutName, planned_ranks},
    },
    failure::{Failure, Outcome},
    file,
    report::{bytes, count, say},
};
use figures::Figures;

const EXAMPLES: &str = "Examples:
  annulus plan --causal --q-len 65536 --ranks 8
  annulus plan --causal --window 4095,0 --q-len 1000000 --ranks 16 --svg ring.svg --json ring.json
  annulus plan --causal --q-len 131072 --ranks 64 --heads 32 --kv-heads 8 --dtype bf16 --json -";

/// Shows who would attend what when, and predicts the bytes sent, without running anything
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanFlags {
    /// Queries
    #[arg(long, value_name = "N")]
    q_len: usize,
    /// Keys; as many as queries if not said
    #[arg(long, value_name = "N")]
    kv_len: Option<usize>,
    /// Ranks of the ring
    #[arg(long, value_name = "P", value_parser = planned_ranks)]
    ranks: usize,
    /// How rows are dealt to ranks; auto chooses from the mask
    #[arg(long, value_enum, default_value = "auto")]
    layout: LayoutName,
    /// Batch rows
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 8)]
    heads: usize,
    /// Key heads; as many as query heads if not said
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Dim of queries, keys and values
    #[arg(long, value_name = "N", default_value_t = 64)]
    head_dim: usize,
    /// Element type of queries, keys and values
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DTypeName,
    /// Draw the picture: tile map, work of each rank, step timeline
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the figures as JSON; `-` for standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    mask: MaskFlags,
}

/// Runs `annulus plan`.
pub(crate) fn run(flags: &PlanFlags) -> Outcome {
    let spec = flags.spec().map_err(Failure::of_flags)?;
    let figures = Figures::new(&spec, flags.ranks, flags.layout.layout().as_ref(), flags.mask.describe());
    let json = figures.json();
    let to_standard_output = flags.json.as_deref() == Some(Path::new("-"));
    if let Some(path) = flags.json.as_deref().filter(|_| !to_standard_output) {
        file::write_text(path, &json)?;
    }
    if let Some(path) = &flags.svg {
        file::write_text(path, &picture::draw(&spec, &figures))?;
    }
    if to_standard_output {
        say!("{}", json.trim_end());
    } else {
        print(&figures);
    }
    Ok(())
}

impl PlanFlags {
    fn spec(&self) -> annulus_core::Result<Spec> {
        let dims = Dims {
            batch: self.batch,
            q_len: self.q_len,
            kv_len: self.kv_len.unwrap_or(self.q_len),
            q_heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim,
            value_dim: self.head_dim,
        };
        self.mask.apply(Attention::new()).dtype(self.dtype.into()).spec(dims)
    }
}

fn print(figures: &Figures) {
    say!("{}", figures.title());
    say!("{}", figures.hops_in_words());
    say!("forward   {}", figures.forward.in_words());
    say!("backward  {}", figures.backward.in_words());
    say!("work      the busiest rank has {:.3} times the mean", figures.work_max_over_mean);
    say!("");
    say!("{:>5} {:>10} {:>10} {:>16} {:>7} {:>12} {:>12}", "rank", "queries", "keys", "pairs", "share", "sends fwd", "sends bwd");
    for rank in &figures.per_rank {
        say!(
            "{:>5} {:>10} {:>10} {:>16} {:>6.2}x {:>12} {:>12}",
            rank.rank,
            rank.q_rows,
            rank.kv_rows,
            count(rank.pairs as f64),
            rank.work_over_mean,
            bytes(rank.bytes_sent),
            bytes(rank.backward_bytes_sent)
        );
    }
}
