//! `annulus plan`: the schedule of a ring as figures and as a picture, without running it.

mod between_nodes;
mod decode;
mod division;
mod figures;
mod frame;
mod leaves;
mod limits;
mod one_rank;
mod picture;
mod program;
mod rank_figures;
mod rings;
mod step_figures;
mod strategies;

use std::path::{Path, PathBuf};

use annulus::Attention;
use annulus_comm::kv_cache::KvCache;
use annulus_core::{Batch, Dims, Error, Placement, Spec};
use annulus_cpu::Cpu;
use annulus_plan::{
    CacheShards, Choice, Layout, Machine, RingTraffic, Route, Strategy, StrategyTraffic,
};
use clap::Args;

use crate::{
    arguments::{
        documents,
        mask::MaskFlags,
        names,
        values::{
            DTypeName, LayoutName, count as from_one, dim, page_rows, planned_ranks, strategy,
            whole,
        },
    },
    failure::Outcome,
    file, machine,
    report::{bytes, count, grouped},
    stdout::say,
};
use decode::TokenFigures;
use figures::Figures;
use frame::Frame;
use one_rank::OneRank;
use rings::Rings;
use strategies::{Requested, Strategies};

const EXAMPLES: &str = "Examples:
  annulus plan --causal --q-len 65536 --ranks 8
  annulus plan --causal --window 4095,0 --q-len 1000000 --ranks 16 --svg ring.svg --json ring.json
  annulus plan --causal --q-len 131072 --ranks 64 --heads 32 --kv-heads 8 --dtype bf16 --json -
  annulus plan --causal --q-len 67108864 --ranks 65536 --rank 17
  annulus plan --causal --q-len 131072 --ranks 64 --heads 32 --machine machine.json --strategy auto
  annulus plan --causal --documents 512,2048,1000,4632 --ranks 4 --layout balanced
  annulus plan --decode --kv-len 1000000 --ranks 8 --kv-heads 2 --machine machine.json";

/// Shows the work of each rank in each step and predicts the bytes sent, without running the ring
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanFlags {
    /// Queries. Default: the rows of --documents, 1 with --decode
    #[arg(long, value_name = "N", value_parser = whole,
        required_unless_present_any = ["documents", "decode"])]
    q_len: Option<usize>,
    /// Keys, or cached rows with --decode. Default: as many as queries
    #[arg(long, value_name = "N", value_parser = whole)]
    kv_len: Option<usize>,
    /// Ranks of the ring, 1 to 65536; more than 1024 only with --rank, for a ring without picture
    /// and predicted times
    #[arg(long, value_name = "P", value_parser = planned_ranks)]
    ranks: usize,
    /// Plan a token of a KV cache of --kv-len rows, that of the token included: the keys and values
    /// that a rank reads, the bytes that it sends and, with --machine, the time
    #[arg(long, requires = "kv_len", conflicts_with_all = ["q_len", "documents", "rank", "layout",
        "strategy", "reproducible", "forward_only", "svg"])]
    decode: bool,
    /// Rows of a page of the cache, 1 to 2^32. Default: 64
    #[arg(long, value_name = "ROWS", value_parser = page_rows, requires = "decode",
        conflicts_with_all = ["q_len", "documents"])]
    page_rows: Option<usize>,
    /// Also show the program of this rank: its ring steps and the messages that it sends. For more
    /// than 1024 ranks only this program is shown
    #[arg(long, value_name = "R", value_parser = whole)]
    rank: Option<usize>,
    /// Assignment of rows to ranks; auto chooses it from the mask, balanced from the mask and
    /// --documents
    #[arg(long, value_enum, default_value = "auto")]
    layout: LayoutName,
    /// Division of the attention among ranks: ring; heads:H, an all-to-all over heads in groups of
    /// H ranks and a ring over the groups; grid:QxK, Q query parts and K key columns, whose partial
    /// results are merged; grid:HxQxK, heads too; all-gather or once-per-node, a ring on another
    /// route; all-to-all, which is heads:P; pass-q, which is grid:1xP; or auto, the one with the
    /// least predicted time on --machine or, without one, that sends the fewest bytes. Steps of a
    /// grid are those of its ring with the first heads and the first key column; the picture shows
    /// the rings of all key columns. All strategies are compared; for more than 256 ranks only with
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
    /// Batch rows
    #[arg(long, value_name = "N", default_value = "1", value_parser = from_one)]
    batch: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = from_one)]
    heads: usize,
    /// KV heads. Default: as many as query heads
    #[arg(long, value_name = "N", value_parser = from_one)]
    kv_heads: Option<usize>,
    /// Dim of queries and keys, 1 to 512
    #[arg(long, value_name = "N", default_value = "64", value_parser = dim)]
    head_dim: usize,
    /// Dim of values, 1 to 512. Default: that of queries
    #[arg(long, value_name = "N", value_parser = dim)]
    value_dim: Option<usize>,
    /// Element type of queries, keys and values
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DTypeName,
    /// Draw tile map, work of each rank and step timeline as SVG. FILE may be a pipe, a device or
    /// /dev/stdout. For more than 128 ranks the map is a sample, and the timeline shows groups of
    /// ranks; for more than 256 ranks there is no timeline
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the figures as JSON; `-`, /dev/stdout or no FILE for standard output, which replaces
    /// the table. For more than 128 ranks the steps are sums over ranks; for more than 256 ranks
    /// there are no steps, and only the ranks with the least and the most work and bytes
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    mask: MaskFlags,
}

/// Rows of a page of a KV cache by default.
const PAGE_ROWS: u64 = KvCache::<Cpu>::PAGE_ROWS;

/// Runs `annulus plan`.
pub(crate) fn run(flags: &PlanFlags) -> Outcome {
    names::check_different_files(&flags.paths())?;
    let dims = flags.dims()?;
    let named = |error| names::of_flags(error, flags.names());
    let spec = flags.spec(dims).map_err(named)?;
    documents::check(&flags.mask.documents, &dims)?;
    figures::check_queries(&spec).map_err(named)?;
    let machine = flags.machine.as_deref().map(machine::read).transpose()?;
    if flags.decode {
        return flags.token(&spec, machine.as_ref())?.map_err(named);
    }
    let balanced = flags.balanced(&spec).map_err(named)?;
    let balanced = balanced.as_ref();
    if flags.ranks > RingTraffic::MOST_RANKS {
        let one = flags.one_rank(&spec, balanced).map_err(named)?;
        return flags.write(&one);
    }
    let strategies = flags.strategies(&spec, balanced, machine.as_ref()).map_err(named)?;
    let (of_ring, planned) =
        flags.ring(&spec, &strategies, balanced, machine.as_ref()).map_err(named)?;
    let ring = Figures::new(&of_ring, planned).map_err(named)?;
    let picture = flags
        .svg
        .as_ref()
        .map(|path| Ok((path, flags.picture(&spec, &ring, &strategies)?)))
        .transpose()
        .map_err(named)?;
    let figures = ring.of_all_heads(&spec, flags.rank, &strategies);
    let printed = flags.json.as_deref() == Some(Path::new("-"));
    // a document on standard output replaces the table
    let to_standard_output = printed
        || [&flags.json, &flags.svg]
            .into_iter()
            .flatten()
            .any(|path| file::is_standard_output(path));
    if let Some(path) = flags.json.as_deref().filter(|_| !printed) {
        file::write_text(path, &figures.json())?;
    }
    if let Some((path, picture)) = picture {
        file::write_text(path, &picture)?;
    }
    if printed {
        say!("{}", figures.json().trim_end());
    } else if !to_standard_output {
        print(&figures);
    }
    Ok(())
}

/// Ring whose figures are computed.
struct Planned {
    /// The strategy, not [`Strategy::Auto`].
    strategy: Strategy,
    ranks: usize,
    /// True if a backward pass is planned too.
    backward: bool,
    layout: Layout,
    route: Route,
    /// Ranks of a node, if there are several nodes.
    node_ranks: Option<usize>,
    /// Packed documents, or the default batch.
    batch: Batch,
    /// The mask in words.
    mask: String,
    /// Rank whose program is shown.
    rank: Option<usize>,
}

impl PlanFlags {
    fn dims(&self) -> Outcome<Dims> {
        let q_len = match self.q_len {
            Some(len) => len,
            None if self.decode => 1,
            None => documents::rows(&self.mask.documents)?,
        };
        Ok(Dims {
            batch: self.batch,
            q_len,
            kv_len: self.kv_len.unwrap_or(q_len),
            q_heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim,
            value_dim: self.value_dim.unwrap_or(self.head_dim),
        })
    }

    /// Flags of arguments that other subcommands set by another flag.
    const fn names(&self) -> names::Others {
        if self.q_len.is_some() {
            &[
                ("ranks", "--ranks"),
                ("rank", "--rank"),
                ("strategy", "--strategy"),
                ("machine", "--machine"),
                ("svg", "--svg"),
            ]
        } else {
            &[
                ("ranks", "--ranks"),
                ("rank", "--rank"),
                ("strategy", "--strategy"),
                ("machine", "--machine"),
                ("svg", "--svg"),
                ("q_len", documents::FLAG),
                ("kv_len", documents::FLAG),
            ]
        }
    }

    fn spec(&self, dims: Dims) -> annulus_core::Result<Spec> {
        let attention = self.mask.apply(Attention::new()).reproducible(self.reproducible);
        attention.dtype(self.dtype.into()).spec(dims)
    }

    /// Prints or writes the figures of a token.
    fn token(&self, spec: &Spec, machine: Option<&Machine>) -> Outcome<annulus_core::Result<()>> {
        let placement = self.placement(machine);
        let page_rows = self.page_rows.map_or(PAGE_ROWS, |rows| rows as u64);
        let shards = CacheShards { ranks: self.ranks, page_rows, placement: placement.as_ref() };
        let figures = match TokenFigures::new(spec, &shards, self.mask.describe(), machine) {
            Ok(figures) => figures,
            Err(error) => return Ok(Err(error)),
        };
        match self.json.as_deref() {
            Some(path) if path == Path::new("-") => say!("{}", figures.json().trim_end()),
            Some(path) => {
                file::write_text(path, &figures.json())?;
                if !file::is_standard_output(path) {
                    figures.print();
                }
            }
            None => figures.print(),
        }
        Ok(Ok(()))
    }

    /// Returns layout and route of the balanced layout, if that is requested.
    fn balanced(&self, spec: &Spec) -> annulus_core::Result<Option<Choice>> {
        let batch = documents::batch(&self.mask.documents);
        let is_requested = self.layout == LayoutName::Balanced;
        is_requested.then(|| Choice::balanced(spec, &batch, self.ranks)).transpose()
    }

    /// Compares the strategies.
    fn strategies(
        &self,
        spec: &Spec,
        balanced: Option<&Choice>,
        machine: Option<&Machine>,
    ) -> annulus_core::Result<Strategies> {
        let batch = documents::batch(&self.mask.documents);
        let placement = self.placement(machine);
        let fixed = balanced.map(|of| of.layout.clone()).or_else(|| self.layout.layout());
        let requested = Requested {
            strategy: self.strategy,
            backward: !self.forward_only,
            layout: fixed.as_ref(),
            balanced_route: balanced.map(|of| of.route),
            documents: Some(&batch).filter(|_| !self.mask.documents.is_empty()),
            placement: placement.as_ref(),
            machine,
        };
        Strategies::new(spec, self.ranks, &requested).map_err(|error| match error {
            Error::InvalidArgument { argument, got, want }
                if argument == "strategy"
                    && self.strategy == (Strategy::OncePerNode { node_ranks: 0 }) =>
            {
                Error::invalid(argument, got, format!("{want}: --node-ranks or --machine"))
            }
            error => error,
        })
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
    fn one_rank(&self, spec: &Spec, balanced: Option<&Choice>) -> annulus_core::Result<OneRank> {
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
        let of_node = placement.as_ref().map(|_| self.ranks_of_node(None));
        let choice = match balanced {
            Some(choice) => choice.clone(),
            None => self.layout.choice(spec, self.ranks, placement.as_ref()),
        };
        let strategy = match (self.strategy, of_node) {
            (Strategy::OncePerNode { node_ranks: 0 }, Some(node_ranks)) => {
                Strategy::OncePerNode { node_ranks }
            }
            (given, _) => given,
        };
        let given = strategy.route().filter(|route| route.fits(self.ranks));
        let route = match strategy {
            Strategy::Ring => choice.route,
            _ => match given {
                Some(route) => route,
                None => {
                    let want = format!(
                        "ring, all-gather, or once-per-node with nodes of a divisor of the ranks, \
                         for more than {most} ranks"
                    );
                    return refused("strategy", &strategy, want);
                }
            },
        };
        let planned = Planned {
            strategy,
            ranks: self.ranks,
            backward: !self.forward_only,
            layout: choice.layout,
            route,
            node_ranks: of_node,
            batch: documents::batch(&self.mask.documents),
            mask: self.mask.describe(),
            rank: self.rank,
        };
        OneRank::new(spec, planned, rank)
    }

    /// Writes or prints the program of one rank.
    fn write(&self, one: &OneRank) -> Outcome {
        match self.json.as_deref() {
            Some(path) if path == Path::new("-") => say!("{}", one.json().trim_end()),
            Some(path) => {
                file::write_text(path, &one.json())?;
                if !file::is_standard_output(path) {
                    one.print();
                }
            }
            None => one.print(),
        }
        Ok(())
    }

    /// Returns the ring whose steps are shown: of a grid that of the first member of each group.
    fn ring(
        &self,
        spec: &Spec,
        strategies: &Strategies,
        balanced: Option<&Choice>,
        machine: Option<&Machine>,
    ) -> annulus_core::Result<(Spec, Planned)> {
        let batch = documents::batch(&self.mask.documents);
        let mask = self.mask.describe();
        let backward = !self.forward_only;
        let Some((StrategyTraffic { grid, layout, .. }, figures)) = strategies.grid() else {
            let placement = self.placement(machine);
            let choice = match balanced {
                Some(choice) => choice.clone(),
                None => self.layout.choice(spec, self.ranks, placement.as_ref()),
            };
            let Choice { layout, route, .. } = choice;
            let Self { ranks, rank, .. } = *self;
            let route = strategies.route().unwrap_or(route);
            let node_ranks = placement.map(|_| self.ranks_of_node(machine)).or(route.node_ranks());
            let strategy = strategies.chosen().unwrap_or(Strategy::Ring);
            let planned =
                Planned { strategy, ranks, backward, layout, route, node_ranks, batch, mask, rank };
            return Ok((spec.clone(), planned));
        };
        figures::check_rank(self.rank, self.ranks)?;
        let of_member = grid.spec_of(spec, 0);
        let ranks = grid.groups();
        let layout = layout.of_member(grid, 0).clone();
        let route = figures.routes[0];
        let rank = self.rank.map(|rank| grid.group(rank));
        let strategy = Strategy::Ring;
        let node_ranks = None;
        let planned =
            Planned { strategy, ranks, backward, layout, route, node_ranks, batch, mask, rank };
        Ok((of_member, planned))
    }

    /// Draws the plan. `ring` is that of the first heads and the first key column.
    fn picture(
        &self,
        spec: &Spec,
        ring: &Figures,
        strategies: &Strategies,
    ) -> annulus_core::Result<String> {
        let batch = documents::batch(&self.mask.documents);
        let rings = Rings::new(spec, &batch, ring, strategies)?;
        Ok(picture::draw(spec, &rings, &Frame::new(spec, ring, strategies)))
    }

    /// Paths that flags name.
    pub(crate) fn paths(&self) -> Vec<(&'static str, &Path)> {
        let named = [("--svg", &self.svg), ("--json", &self.json), ("--machine", &self.machine)];
        named.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?))).collect()
    }
}

fn print(figures: &Figures) {
    say!("{}", figures.title());
    say!("{}", figures.hops_in_words());
    say!("strategy  {}", figures.strategy_in_words());
    for parts in figures.passes_in_words() {
        say!("          {}", parts.join("; "));
    }
    say!("forward   {}", figures.forward.in_words());
    if let Some(backward) = figures.backward {
        say!("backward  {}", backward.in_words());
    }
    if let Some(between) = figures.between_nodes {
        say!("nodes     {}", between.in_words());
    }
    if let Some(leaves) = &figures.leaves {
        for (line, words) in leaves.in_words().iter().enumerate() {
            say!("{:<9} {words}", if line == 0 { "leaves" } else { "" });
        }
    }
    say!("work      the busiest rank has {:.3} times the mean", figures.work_max_over_mean);
    say!("rows      {}", figures.rows_in_words());
    if figures.schedule_checked {
        let gradients = figures.backward.map(|_| "; each gradient reaches its owner once");
        let gradients = gradients.unwrap_or_default();
        say!("checked   each row arrives once where it is needed{gradients}");
    }
    say!("");
    if figures.per_rank.len() < figures.ranks {
        say!("ranks with the least and the most of each figure");
    }
    print_ranks(figures);
    let is_predicted = figures.strategies.iter().any(|of| of.time_predicted.is_some());
    if figures.strategies.len() > 1 || is_predicted {
        say!("");
        say!("strategies; * is the one above");
        let chosen = &figures.strategy;
        figures.strategies.iter().for_each(|strategy| say!("{}", strategy.in_words(chosen)));
    }
    if let Some(program) = &figures.program {
        program.print();
    }
}

/// Prints the figures of the ranks as a table.
fn print_ranks(figures: &Figures) {
    let sends_bwd = figures.backward.map(|_| format!(" {:>12}", "sends bwd"));
    say!(
        "{:>5} {:>13} {:>13} {:>16} {:>7} {:>12}{}",
        "rank",
        "queries",
        "keys",
        "pairs",
        "share",
        "sends fwd",
        sends_bwd.unwrap_or_default()
    );
    for rank in &figures.per_rank {
        let backward = rank.backward_bytes_sent.map(|sent| format!(" {:>12}", bytes(sent)));
        say!(
            "{:>5} {:>13} {:>13} {:>16} {:>6.2}x {:>12}{}",
            rank.rank,
            grouped(rank.q_rows),
            grouped(rank.kv_rows),
            count(rank.pairs as f64),
            rank.work_over_mean,
            bytes(rank.bytes_sent),
            backward.unwrap_or_default()
        );
    }
}
