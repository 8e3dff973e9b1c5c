//! `annulus plan`: the schedule of a ring as figures and as a picture, without running it.

mod figures;
mod halo;
mod picture;
mod program;
mod ring;
mod strategies;
mod table;

use std::path::{Path, PathBuf};

use annulus::Attention;
use annulus_core::{Backend, Batch, DType, Dims, Error, Placement, Result, Spec};
use annulus_cpu::Cpu;
use annulus_plan::{Choice, Machine, RingTraffic, Strategy, StrategyTraffic, TrafficOptions};
use clap::Args;
use serde::Serialize;

use crate::{
    arguments::{
        mask::MaskFlags,
        names,
        values::{
            self, LayoutName, ShapeFlags, count as from_one, dtype, layout, planned_ranks,
            strategy, whole,
        },
    },
    failure::Outcome,
    file, say,
};
use figures::Figures;
use picture::DrawnRing;
use program::OneRank;
use ring::PlannedRing;
use strategies::Strategies;

const EXAMPLES: &str = "Examples:
  annulus plan --causal --q-len 65536 --ranks 8
  annulus plan --causal --window 4095,0 --q-len 1000000 --ranks 16 --svg ring.svg --json ring.json
  annulus plan --causal --q-len 131072 --ranks 64 --heads 32 --kv-heads 8 --dtype bf16 --json -
  annulus plan --causal --q-len 67108864 --ranks 65536 --rank 17
  annulus plan --causal --q-len 131072 --ranks 64 --heads 32 --machine machine.json --strategy auto
  annulus plan --causal --documents 512,2048,1000,4632 --ranks 4 --layout balanced
  annulus plan --neighborhood 24x32:5x5:edge=clip --q-len 768 --layout boxes:24x32 --ranks 4 --rank 0
  annulus plan --lists in.safetensors --ranks 4 --layout contiguous";

/// Shows the work of each rank in each step and predicts the bytes sent, without running the ring
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanFlags {
    /// Plan the key lists of this input file, on the direct route: each rank receives the distinct
    /// rows of other ranks that its lists have. The file also has the sizes
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "q_len", "kv_len", "documents", "batch", "heads", "kv_heads", "head_dim", "value_dim",
        "rank", "strategy", "machine", "reproducible", "svg",
    ])]
    lists: Option<PathBuf>,
    /// Queries. Default: the rows of --documents
    #[arg(
        long, value_name = "N", value_parser = whole,
        required_unless_present_any = ["documents", "lists"]
    )]
    q_len: Option<usize>,
    /// Keys. Default: as many as queries
    #[arg(long, value_name = "N", value_parser = whole)]
    kv_len: Option<usize>,
    /// Ranks of the ring, 1 to 65536; more than 1024 only with --rank, for a ring without picture
    /// and predicted times
    #[arg(long, value_name = "P", value_parser = planned_ranks)]
    ranks: usize,
    /// Also show the program of this rank: its ring steps and the messages that it sends. For more
    /// than 1024 ranks only this program is shown
    #[arg(long, value_name = "R", value_parser = whole)]
    rank: Option<usize>,
    /// Assignment of rows to ranks; auto chooses it from the mask, balanced from the mask and
    /// --documents
    #[arg(long, value_name = "NAME", value_parser = layout(), default_value = "auto")]
    layout: LayoutName,
    /// Division of the attention among ranks: ring; heads:H, an all-to-all over heads in groups of
    /// H ranks and a ring over the groups; grid:QxK, Q query parts and K key columns, whose partial
    /// results are merged; grid:HxQxK, heads too; all-gather or once-per-node, a ring on another
    /// route; all-to-all, which is heads:P; pass-q, which is grid:1xP; or auto, the one with the
    /// least predicted time on --machine or, without one, that sends the fewest bytes. Steps and
    /// picture of a grid are those of its ring with the first heads and the first key column. All
    /// strategies are compared; for more than 256 ranks only with
    /// auto, without those that cannot be the best, and a given one is listed alone
    #[arg(long, value_name = "NAME", default_value = "ring", value_parser = strategy)]
    strategy: Strategy,
    /// Predict the time of every strategy on the machine of this file, which `annulus measure`
    /// writes: links, compute rates and memory
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// Ranks of each node, neighbours on the ring: on several nodes blocks may take rails. Default:
    /// those of --machine; without one, all ranks are on one node
    #[arg(long, value_name = "N", value_parser = from_one)]
    node_ranks: Option<usize>,
    /// Plan the reproducible order: layouts divide the rows at leaves, queries are sent in a
    /// backward pass, and the memory of partial results that wait to be merged is shown
    #[arg(long)]
    reproducible: bool,
    /// Plan forward passes only, as for inference: bytes, memory, predicted times and the strategy
    /// that auto chooses are those of a forward pass
    #[arg(long)]
    forward_only: bool,
    #[command(flatten)]
    shape: ShapeFlags,
    /// Element type of queries, keys and values
    #[arg(long, value_parser = dtype(), default_value = "f32")]
    dtype: DType,
    /// Draw tile map, work of each rank and step timeline as SVG. FILE may be a pipe, a device or
    /// /dev/stdout. For more than 128 ranks the map is a sample, and there is no timeline
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the figures as JSON; `-`, /dev/stdout or no FILE for standard output, which replaces
    /// the table. For more than 128 ranks there are no steps; for more than 256 ranks only the
    /// ranks with the least and the most work and bytes
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    mask: MaskFlags,
}

/// Runs `annulus plan`.
pub(crate) fn run(flags: &PlanFlags) -> Outcome {
    let files = [
        ("--svg", &flags.svg),
        ("--json", &flags.json),
        ("--machine", &flags.machine),
        ("--lists", &flags.lists),
    ];
    let files = files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
    names::check_different_files(&files.collect::<Vec<_>>())?;
    if let Some(path) = &flags.lists {
        let lists = halo::Lists::new(flags, path)?;
        return flags.write(&lists, None, || lists.print());
    }
    let dims = flags.dims()?;
    let named = |error| names::of_flags(error, &flags.names());
    let spec = flags.spec(dims).map_err(named)?;
    values::check_documents(&flags.mask.documents, &dims)?;
    figures::check_queries(&spec).map_err(named)?;
    figures::check_rank(flags.rank, flags.ranks).map_err(named)?;
    let machine = flags.machine.as_deref().map(file::read_machine).transpose()?;
    let machine = machine.as_ref();
    let batch = values::packed(&flags.mask.documents);
    let balanced = flags.balanced(&spec, &batch).map_err(named)?;
    if flags.ranks > RingTraffic::MOST_RANKS {
        let one = flags.one_rank(&spec, &batch, balanced).map_err(named)?;
        return flags.write(&one, None, || one.print());
    }
    let (figures, picture) = flags.figures(&spec, &batch, balanced, machine).map_err(named)?;
    let halo = halo::Halo::of_neighborhood(flags, &spec, &batch).map_err(named)?;
    flags.write(&figures.document(), picture, || {
        figures.print();
        halo.iter().for_each(halo::Halo::print);
    })
}

impl PlanFlags {
    fn dims(&self) -> Outcome<Dims> {
        let q_len = match self.q_len {
            Some(len) => len,
            None => values::rows_of_documents(&self.mask.documents)?,
        };
        Ok(self.shape.dims(q_len, self.kv_len))
    }

    /// Flags of arguments that other subcommands set by another flag.
    const fn names(&self) -> [(&'static str, &'static str); 5] {
        let [q_len, kv_len] = match self.q_len {
            Some(_) => ["--q-len", "--kv-len"],
            None => [values::DOCUMENTS; 2],
        };
        let [ranks, rank, svg] = [("ranks", "--ranks"), ("rank", "--rank"), ("svg", "--svg")];
        [ranks, rank, svg, ("q_len", q_len), ("kv_len", kv_len)]
    }

    fn spec(&self, dims: Dims) -> Result<Spec> {
        let attention = self.mask.apply(Attention::new()).reproducible(self.reproducible);
        attention.dtype(self.dtype).spec(dims)
    }

    /// Returns layout and route of the balanced layout, if that is requested.
    fn balanced(&self, spec: &Spec, batch: &Batch) -> Result<Option<Choice>> {
        let is_requested = self.layout == LayoutName::Balanced;
        is_requested.then(|| Choice::balanced(spec, batch, self.ranks)).transpose()
    }

    /// Returns the figures of the requested strategy and, with `--svg`, its picture.
    fn figures(
        &self,
        spec: &Spec,
        batch: &Batch,
        balanced: Option<Choice>,
        machine: Option<&Machine>,
    ) -> Result<(Figures, Option<String>)> {
        let placement = self.placement(machine);
        let balanced_route = balanced.as_ref().map(|of| of.route);
        let fixed = match balanced {
            Some(of) => Some(of.layout),
            None => self.layout.layout(&spec.dims, self.ranks)?,
        };
        let layout = fixed.as_ref();
        let options = TrafficOptions {
            backward: !self.forward_only,
            layout,
            route: None,
            balanced_route,
            placement: placement.as_ref(),
            kv_tile: Cpu::new(1)?.capabilities(spec)?.kv_tile,
            receive_ahead: layout.map_or(1, |layout| layout.receive_ahead().get()),
            batch: Some(batch).filter(|_| !self.mask.documents.is_empty()),
        };
        let strategies = Strategies::new(spec, self.ranks, self.strategy, &options, machine);
        let strategies = strategies.map_err(|error| match error {
            Error::InvalidArgument { argument, got, want }
                if argument == "strategy"
                    && self.strategy == (Strategy::OncePerNode { node_ranks: 0 }) =>
            {
                Error::invalid(argument, got, format!("{want}: --node-ranks or --machine"))
            }
            error => error,
        })?;
        let StrategyTraffic { grid, layout, .. } = strategies.planned();
        let of_member = grid.spec_of(spec, 0);
        let route = strategies.route;
        let layout = layout.of_member(grid, 0);
        let ring =
            PlannedRing::new(&of_member, layout, grid.groups(), route, batch, options.backward)?;
        let of_node = placement.as_ref().map(|_| self.ranks_of_node(machine));
        let of_node = of_node.or(route.node_ranks());
        let figures = Figures::new(self, spec, &strategies, &ring, of_node)?;
        let picture = self
            .svg
            .as_ref()
            .map(|_| picture::draw(spec, &DrawnRing::new(&ring, &figures, batch), &figures));
        Ok((figures, picture))
    }

    /// Returns the ranks of a node.
    fn ranks_of_node(&self, machine: Option<&Machine>) -> usize {
        let of_machine = machine.map(|machine| machine.ranks_per_node);
        self.node_ranks.or(of_machine).unwrap_or(self.ranks).max(1)
    }

    /// Returns the nodes of the ranks, if there are several.
    fn placement(&self, machine: Option<&Machine>) -> Option<Placement> {
        let of_node = self.ranks_of_node(machine);
        let nodes = (0..self.ranks).map(|rank| rank / of_node).collect();
        (of_node < self.ranks).then(|| Placement::new(nodes))
    }

    /// Plans one rank of a ring over whose ranks no figures are summed.
    fn one_rank(&self, spec: &Spec, batch: &Batch, balanced: Option<Choice>) -> Result<OneRank> {
        let most = RingTraffic::MOST_RANKS;
        let refused = |argument, got: &dyn std::fmt::Display, want: String| {
            Err(Error::invalid(argument, got, want))
        };
        let Some(rank) = self.rank else {
            let want = format!("at most {most}, or --rank R for the program of one rank");
            return refused("ranks", &self.ranks, want);
        };
        for (argument, path) in [("svg", &self.svg), ("machine", &self.machine)] {
            if let Some(path) = path {
                return refused(argument, &path.display(), format!("at most {most} ranks"));
            }
        }
        let placement = self.placement(None);
        let choose = || self.layout.choice(spec, self.ranks, placement.as_ref());
        let Choice { layout, route, .. } = balanced.map_or_else(choose, Ok)?;
        let strategy = match self.strategy {
            Strategy::OncePerNode { node_ranks: 0 } if placement.is_some() => {
                Strategy::OncePerNode { node_ranks: self.ranks_of_node(None) }
            }
            given => given,
        };
        let route = match strategy.route().filter(|route| route.fits(self.ranks)) {
            _ if strategy == Strategy::Ring => route,
            Some(route) => route,
            None => {
                let want = format!(
                    "ring, all-gather, or once-per-node with nodes of a divisor of the ranks, for \
                     more than {most} ranks"
                );
                return refused("strategy", &strategy, want);
            }
        };
        let ring = PlannedRing::new(spec, &layout, self.ranks, route, batch, !self.forward_only)?;
        Ok(OneRank::new(&ring, rank, strategy, &layout, self.mask.describe()))
    }

    /// Writes a document and a picture where the flags name files. Prints a table with `print`,
    /// unless one of them is on standard output.
    fn write(
        &self,
        document: &impl Serialize,
        picture: Option<String>,
        print: impl FnOnce(),
    ) -> Outcome {
        // cannot fail: all numbers are finite and all keys are strings
        let json = serde_json::to_string_pretty(document).unwrap_or_default();
        let printed = self.json.as_deref() == Some(Path::new("-"));
        if let Some(path) = self.json.as_deref().filter(|_| !printed) {
            file::write_text(path, &format!("{json}\n"))?;
        }
        if let Some((path, picture)) = self.svg.as_deref().zip(picture) {
            file::write_text(path, &picture)?;
        }
        let mut files = [&self.json, &self.svg].into_iter().flatten();
        if printed {
            say!("{json}");
        } else if !files.any(|path| file::is_standard_output(path)) {
            print();
        }
        Ok(())
    }
}
