//! The halo: the rows that each rank receives from each owner, of key lists or of a neighbourhood,
//! as numbers and as a picture in characters.

use std::{path::Path, sync::Arc};

use annulus::Attention;
use annulus_core::{Batch, KeyLists, Result, RowSet, Runs, Spec};
use annulus_plan::{Choice, NeedsIndex, RingShards, Strategy, needed_rows};
use serde::Serialize;

use super::PlanFlags;
use crate::{
    failure::Outcome,
    input::Input,
    report::{bytes, counted, grouped},
    say,
};

/// Characters of a line of the picture.
const WIDTH: usize = 64;

/// The most ranks that the picture shows.
const MOST_RANKS: usize = 64;

/// Figures of a ring with key lists: each rank receives the distinct remote rows of its lists.
#[derive(Debug, Serialize)]
pub(super) struct Lists {
    ranks: usize,
    layout: &'static str,
    q_len: usize,
    kv_len: usize,
    /// Listed pairs, each counted once for the heads that share it.
    pairs: usize,
    /// Payload bytes of a forward pass of all ranks.
    forward_bytes: u64,
    /// Payload bytes of a backward pass in one pass; null of a plan that is forward only.
    backward_bytes: Option<u64>,
    per_rank: Vec<RankFigures>,
    #[serde(skip)]
    halo: Halo,
}

/// Figures of one rank.
#[derive(Debug, Serialize)]
struct RankFigures {
    rank: usize,
    q_rows: u64,
    kv_rows: u64,
    /// Listed pairs of its queries.
    pairs: usize,
    /// Ranks that it receives rows from.
    peers: usize,
    /// `[ranks]`: distinct rows that it receives from each owner.
    rows_from: Vec<u64>,
    rows_received: u64,
    rows_sent: u64,
}

impl Lists {
    /// Plans the lists of the input file at `path`.
    pub(super) fn new(flags: &PlanFlags, path: &Path) -> Outcome<Self> {
        let input = Input::open(path)?;
        let planned = Self::of(flags, &input);
        Ok(planned.map_err(|error| input.named(error))?)
    }

    fn of(flags: &PlanFlags, input: &Input) -> Result<Self> {
        let lists = input.whole_key_lists()?.ok_or_else(|| {
            let want = "a tensor of this name, with --lists";
            annulus_core::Error::invalid("key_list_offsets", "nothing", want)
        })?;
        let attention = flags.mask.apply(Attention::new()).dtype(flags.dtype);
        let spec = attention.spec(input.dims)?;
        let ranks = flags.ranks;
        let Choice { layout, .. } =
            flags.layout.choice(&spec, ranks, flags.placement(None).as_ref())?;
        let whole = input.coordinates()?;
        let shards = RingShards::of_batch(&spec.dims, spec.alignment, &layout, ranks, &whole)?;
        let of_ranks = (0..ranks).map(|rank| rank_needs(&spec, &whole, &lists, &shards, rank));
        let of_ranks = of_ranks.collect::<Result<Vec<_>>>()?;
        let halo =
            Halo::new(&shards, spec.dims.kv_len, |user, owner| of_ranks[user].1[owner].clone());
        let rows_of = |user: usize, owner: usize| of_ranks[user].1[owner].count();
        let figures = |rank: usize| RankFigures {
            rank,
            q_rows: shards.q[rank].rows.len(),
            kv_rows: shards.kv[rank].rows.len(),
            pairs: of_ranks[rank].0,
            peers: (0..ranks).filter(|&owner| rows_of(rank, owner) > 0).count(),
            rows_from: (0..ranks).map(|owner| rows_of(rank, owner)).collect(),
            rows_received: (0..ranks).map(|owner| rows_of(rank, owner)).sum(),
            rows_sent: (0..ranks).map(|user| rows_of(user, rank)).sum(),
        };
        let per_rank: Vec<RankFigures> = (0..ranks).map(figures).collect();
        let rows: u64 = per_rank.iter().map(|rank| rank.rows_received).sum();
        let forward_bytes = rows * spec.kv_row_layout().bytes();
        let gradients = rows * spec.gradient_row_layout().bytes();
        Ok(Self {
            ranks,
            layout: layout.name(),
            q_len: spec.dims.q_len,
            kv_len: spec.dims.kv_len,
            pairs: lists.len(),
            forward_bytes,
            backward_bytes: (!flags.forward_only).then_some(forward_bytes + gradients),
            per_rank,
            halo,
        })
    }

    /// Prints the figures.
    pub(super) fn print(&self) {
        let ranks = counted(self.ranks as u64, "rank", "ranks");
        let [q_len, kv_len] = [self.q_len, self.kv_len].map(|len| grouped(len as u64));
        let pairs = grouped(self.pairs as u64);
        say!("key lists of {pairs} pairs, {q_len} × {kv_len}, {ranks}, {}", self.layout);
        let rows: u64 = self.per_rank.iter().map(|rank| rank.rows_received).sum();
        let distinct = counted(rows, "distinct remote row", "distinct remote rows");
        say!(
            "forward   {} sent: {distinct}, from owner to user (direct)",
            bytes(self.forward_bytes)
        );
        if let Some(backward) = self.backward_bytes {
            let gradients = "the same, and one partial gradient of each row";
            say!("backward  {} sent: {gradients}", bytes(backward));
        }
        say!("");
        say!(
            "{:>5} {:>9} {:>9} {:>12} {:>6} {:>10} {:>10}",
            "rank",
            "queries",
            "keys",
            "pairs",
            "peers",
            "received",
            "sent"
        );
        for of in self.per_rank.iter().take(MOST_RANKS) {
            let [q, kv, received, sent] =
                [of.q_rows, of.kv_rows, of.rows_received, of.rows_sent].map(grouped);
            let pairs = grouped(of.pairs as u64);
            say!(
                "{:>5} {q:>9} {kv:>9} {pairs:>12} {:>6} {received:>10} {sent:>10}",
                of.rank,
                of.peers
            );
        }
        self.halo.print();
    }
}

/// Returns the listed pairs of a rank, and the rows of each owner that they need.
fn rank_needs(
    spec: &Spec,
    whole: &Batch,
    lists: &KeyLists,
    shards: &RingShards,
    rank: usize,
) -> Result<(usize, Vec<RowSet>)> {
    let rows = |runs: &Runs| runs.iter().map(i64::cast_unsigned).collect::<Vec<u64>>();
    let q_rows = rows(&shards.q[rank].rows);
    let own = lists.select_queries(&q_rows)?;
    let pairs = own.len();
    let coordinates = whole.select_coordinates(&q_rows, &rows(&shards.kv[rank].rows))?;
    let batch = Batch { key_lists: Some(Arc::new(own)), ..coordinates };
    Ok((pairs, needed_rows(spec, &batch, shards, rank, |_, _| Ok(()))?))
}

/// Keys that each rank owns and receives.
#[derive(Debug)]
pub(super) struct Halo {
    /// `[ranks][keys]` characters: `#` own, `+` received, `.` neither.
    lines: Vec<Vec<u8>>,
    /// Rank whose keys are shown on a grid, and the columns of the grid.
    of_grid: Option<(usize, usize)>,
}

impl Halo {
    /// Draws the halo of a neighbourhood in a ring: with `--rank`, of a grid of two axes that fits
    /// a screen, that of the rank on the grid. `None` for other masks.
    pub(super) fn of_neighborhood(
        flags: &PlanFlags,
        spec: &Spec,
        batch: &Batch,
    ) -> Result<Option<Self>> {
        let PlanFlags { ranks, rank, strategy, .. } = *flags;
        let Some(grid) = flags.mask.neighborhood.as_ref().filter(|_| strategy == Strategy::Ring)
        else {
            return Ok(None);
        };
        let Choice { layout, .. } =
            flags.layout.choice(spec, ranks, flags.placement(None).as_ref())?;
        let shards = RingShards::of_batch(&spec.dims, spec.alignment, &layout, ranks, batch)?;
        let (heads, batch_rows) = (spec.dims.q_heads, spec.dims.batch);
        let mask = spec.mask.as_ref();
        let needs = NeedsIndex::of_queries(mask, heads, batch_rows, &shards, &mut || ());
        let halo = Self::new(&shards, spec.dims.kv_len, |user, owner| needs.rows(user, owner));
        let of_grid = match &grid.axes[..] {
            [_, columns] if columns.len <= 128 => {
                rank.map(|rank| (rank, annulus_core::index(columns.len)))
            }
            _ => None,
        };
        Ok(Some(Self { of_grid, ..halo }))
    }

    /// Draws the rows that each user needs of each owner, as local rows of the owner.
    pub(super) fn new(
        shards: &RingShards,
        kv_len: usize,
        needed: impl Fn(usize, usize) -> RowSet,
    ) -> Self {
        let row_numbers = |owner: usize| -> Vec<usize> {
            let rows = shards.kv[owner].rows.iter();
            rows.map(|row| annulus_core::index(row.cast_unsigned())).collect()
        };
        let owned: Vec<Vec<usize>> = (0..shards.kv.len()).map(row_numbers).collect();
        let line = |user: usize| {
            let mut line = vec![b'.'; kv_len];
            for (owner, rows) in owned.iter().enumerate().filter(|(owner, _)| *owner != user) {
                let needed = needed(user, owner);
                needed.iter().for_each(|row| line[rows[annulus_core::index(row)]] = b'+');
            }
            owned[user].iter().for_each(|&row| line[row] = b'#');
            line
        };
        let lines = (0..owned.len().min(MOST_RANKS)).map(line).collect();
        Self { lines, of_grid: None }
    }

    /// Prints a line for each rank, or the rows of a grid.
    pub(super) fn print(&self) {
        let kv_len = self.lines.first().map_or(0, Vec::len);
        say!("");
        let grid =
            self.of_grid.and_then(|(rank, columns)| Some((rank, columns, self.lines.get(rank)?)));
        if let Some((rank, columns, line)) = grid {
            say!("keys of rank {rank} on the grid: # own, + received, . neither");
            line.chunks(columns.max(1)).for_each(|row| say!("  {}", String::from_utf8_lossy(row)));
            return;
        }
        let per_mark = kv_len.div_ceil(WIDTH).max(1);
        let keys = counted(per_mark as u64, "key", "keys");
        say!("keys of each rank: # own, + received, . neither; {keys} a mark");
        for (rank, line) in self.lines.iter().enumerate() {
            let of_keys = |keys: &[u8]| {
                let marks = [b'#', b'+'];
                marks.into_iter().find(|mark| keys.contains(mark)).map_or('.', char::from)
            };
            let marks: String = line.chunks(per_mark).map(of_keys).collect();
            say!("{rank:>5} {marks}");
        }
    }
}
