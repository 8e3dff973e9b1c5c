//! Measures the balanced layout of packed documents: its balance, the rows that it sends, and the
//! time of the solver relative to the pass that it serves.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin balanced -- gflops=45 seed=7
//! ```
//!
//! Prints one JSON line per distribution of lengths and number of ranks, for `rows` rows (default:
//! 2²⁰) of 32 heads of dim 128. `gflops` is the rate of a rank, from which the time of a forward
//! and a backward pass is predicted; `seed` draws the lengths (default: 7), and `draws` is the
//! number of seeds from it on (default: 1). `mean` is the mean length of documents in rows; in `one
//! long` only the short ones count (default: the distribution's own mean). `ranks` are the numbers
//! of ranks, separated by commas (default: 8,16,64). `mask` is `causal` (the default) or `full`,
//! both within documents. Figures, with t = tiles of 64 × 64 with a visible pair:
//!
//! | field | figure |
//! |---|---|
//! | `tiles_of_one_rank` | t on one rank with all rows / t of all ranks |
//! | `tiles_over_contiguous` | t of all ranks / t of contiguous shards |
//! | `tiles_max_over_mean` | t of the busiest rank / mean of the ranks |
//! | `sent`, `sent_max_rank` | rows sent by all ranks, and by the rank with the most |
//! | `sent_bound` | fewest rows that any balanced layout sends (`document_deal.rs` in core) |
//!
//! `ring-documents` measures the rate of packed passes.

use std::{collections::HashMap, time::Instant};

use annulus::{Attention, Dims, Layout, Result};
use annulus_bench::{
    Parameters, cpu_seconds,
    distributions::{distributions, packed},
    median,
};
use annulus_core::Side;
use annulus_plan::{Choice, NeedsIndex, RingShards, RingTraffic, Work};

const HEADS: usize = 32;
const DIM: usize = 128;
/// Operations per visible pair and element of a head: 2 products forward, 5 backward.
const FLOPS: f64 = 2.0 * 7.0;

fn main() -> Result<()> {
    let names = ["gflops", "rows", "seed", "mean", "draws", "ranks", "mask"];
    let given = Parameters::parse(std::env::args().skip(1), &names)?;
    let rate = 1e9 * given.number("gflops", 45.0)?;
    let rows = given.number("rows", 1 << 20)?;
    let seed = given.number("seed", 7)?;
    let draws = given.number("draws", 1)?;
    let mean = given.get("mean").map(|_| given.number("mean", 0.0)).transpose()?;
    let ranks = given.numbers("ranks", "8,16,64")?;
    let causal = given.named("mask", "causal", ["causal", "full"], |mask| mask)? == ["causal"];
    for seed in seed..seed + draws {
        for (name, lens) in distributions(rows, seed, mean) {
            for &ranks in &ranks {
                solver(name, &lens, ranks, rate, causal)?;
            }
        }
    }
    Ok(())
}

/// Visible pairs of one head.
fn pairs_of(lens: &[usize], causal: bool) -> f64 {
    let of = |len: f64| if causal { len * (len + 1.0) / 2.0 } else { len * len };
    lens.iter().map(|&len| of(len as f64)).sum()
}

/// Returns the fewest rows that a layout sends in which no rank has more than 1.02 times the mean
/// of the pairs: each key to all but one of the ranks that have a query which attends to it.
fn fewest_sent(lens: &[usize], ranks: usize, causal: bool) -> f64 {
    let most = 1.02 * pairs_of(lens, causal) / ranks as f64;
    let receivers = |len: usize, key: usize| {
        let before = if causal { pairs_of(&[key], true) } else { 0.0 };
        ((pairs_of(&[len], causal) - before) / most).ceil() - 1.0
    };
    lens.iter().flat_map(|&len| (0..len).map(move |key| receivers(len, key))).sum()
}

/// Measures the solver against the time of a pass at `rate` operations per second of each rank.
fn solver(name: &str, lens: &[usize], ranks: usize, rate: f64, causal: bool) -> Result<()> {
    let rows = lens.iter().sum();
    let dims = Dims::new(1, rows, HEADS, DIM);
    let spec = Attention::new().causal(causal).spec(dims)?;
    let documents = packed(lens);
    let mut seconds = Vec::new();
    let mut chosen = Choice::balanced(&spec, &documents, ranks)?;
    for _ in 0..3 {
        let begin = cpu_seconds();
        let wall = Instant::now();
        chosen = Choice::balanced(&spec, &documents, ranks)?;
        // the clock of CPU time may have a coarser unit than the solver takes
        let cpu = cpu_seconds() - begin;
        seconds.push(if cpu > 0.0 { cpu } else { wall.elapsed().as_secs_f64() });
    }
    let seconds = median(seconds);
    let Choice { layout, route, .. } = chosen;
    let shards = RingShards::of_batch(&dims, spec.alignment, &layout, ranks, &documents)?;
    let work = Work::of(&*spec.mask, dims.q_heads, 1, &shards).max_over_mean();
    let most = (0..ranks).map(|rank| layout.shard(Side::Q, rows, rank, ranks).len()).max();
    let balance = most.unwrap_or_default() as f64 * ranks as f64 / rows as f64;
    let tick = &mut || ();
    let needs = NeedsIndex::of_queries(&*spec.mask, dims.q_heads, 1, &shards, tick);
    let traffic = RingTraffic::of(&needs, route, tick);
    let sent = traffic.total().block_rows;
    let most_sent = traffic.of_rank.iter().map(|of| of.block_rows).max().unwrap_or_default();
    let redundancy = sent as f64 / RingTraffic::rows_read(&needs, tick).max(1) as f64;
    let pass = FLOPS * (HEADS * DIM) as f64 * pairs_of(lens, causal) / (rate * ranks as f64);
    let tiles = |layout: &Layout, ranks| Tiles::new(lens, layout, ranks).count(causal);
    let of_ranks = tiles(&layout, ranks) as f64;
    let by_rank = Tiles::new(lens, &layout, ranks).count_by_rank(causal);
    let slowest =
        by_rank.iter().max().copied().unwrap_or_default() as f64 * ranks as f64 / of_ranks;
    let filled = tiles(&Layout::Contiguous, 1) as f64 / of_ranks;
    let over_contiguous = of_ranks / tiles(&Layout::Contiguous, ranks) as f64;
    let mask = if causal { "causal" } else { "full" };
    println!(
        "{{\"what\":\"balanced\",\"documents\":\"{name}\",\"mask\":\"{mask}\",\"count\":{},\
         \"rows\":{rows},\"ranks\":{ranks},\"runs\":{},\"work_max_over_mean\":{work:.4},\
         \"rows_max_over_mean\":{balance:.4},\"redundancy\":{redundancy:.3},\"sent\":{sent},\
         \"sent_max_rank\":{most_sent},\"sent_bound\":{:.0},\"tiles_of_one_rank\":{filled:.4},\
         \"tiles_over_contiguous\":{over_contiguous:.4},\
         \"tiles_max_over_mean\":{slowest:.4},\
         \"seconds\":{seconds:.7},\"pass_seconds\":{pass:.6},\"share\":{:.6}}}",
        lens.len(),
        shards.q.iter().map(|shard| shard.rows.runs().len()).sum::<usize>(),
        fewest_sent(lens, ranks, causal),
        seconds / pass
    );
    Ok(())
}

/// Rows of a tile: those of the CPU kernels.
const ROWS: usize = 64;

/// Rows of one document in one tile.
struct Part {
    rank: usize,
    tile: usize,
    document: usize,
    first: usize,
    last: usize,
}

/// The tiles of all ranks, each of [`ROWS`] local rows.
struct Tiles {
    parts: Vec<Part>,
}

impl Tiles {
    /// Divides the rows of each rank, in local order, into tiles. `lens` has the lengths of the
    /// documents.
    fn new(lens: &[usize], layout: &Layout, ranks: usize) -> Self {
        let mut starts = vec![0];
        lens.iter().for_each(|len| starts.push(starts[starts.len() - 1] + len));
        let rows = starts[lens.len()];
        let mut parts: Vec<Part> = Vec::new();
        let mut begin = 0;
        for rank in 0..ranks {
            let shard = layout.shard(Side::Q, rows, rank, ranks);
            for (index, row) in shard.iter().enumerate() {
                let row = row.unsigned_abs() as usize;
                let document = starts.partition_point(|&start| start <= row) - 1;
                let (tile, position) = (begin + index / ROWS, row - starts[document]);
                match parts.last_mut() {
                    Some(last) if last.tile == tile && last.document == document => {
                        last.first = last.first.min(position);
                        last.last = last.last.max(position);
                    }
                    _ => parts.push(Part { rank, tile, document, first: position, last: position }),
                }
            }
            begin += (shard.len() as usize).div_ceil(ROWS);
        }
        Self { parts }
    }

    /// Counts the pairs of a tile of queries and a tile of keys with a visible pair.
    fn count(&self, causal: bool) -> u64 {
        self.count_by_rank(causal).iter().sum()
    }

    /// Counts the pairs of a tile of queries of each rank and a tile of keys with a visible pair.
    fn count_by_rank(&self, causal: bool) -> Vec<u64> {
        let mut of_documents: HashMap<usize, Vec<&Part>> = HashMap::new();
        for part in &self.parts {
            of_documents.entry(part.document).or_default().push(part);
        }
        let mut counted_for = vec![usize::MAX; self.parts.last().map_or(0, |last| last.tile + 1)];
        let mut counts = vec![0; self.parts.last().map_or(0, |last| last.rank + 1)];
        for queries in &self.parts {
            for keys in &of_documents[&queries.document] {
                let is_visible = !causal || keys.first <= queries.last;
                if is_visible && counted_for[keys.tile] != queries.tile {
                    counted_for[keys.tile] = queries.tile;
                    counts[queries.rank] += 1;
                }
            }
        }
        counts
    }
}
