//! Who sees whom between the queries of one rank and one block of keys, by tiles, as kernels read it.
//!
//! [`SeenTiles`] looks at tiles on the host: those without a visible pair are not listed, neighbours of visible pairs only are one run, the others have
//! a bit a key in every query row. So a kernel knows nothing of masks, and a new mask is never a new kernel. What a block's rows say is remembered: the
//! same block comes by in every pass.

use std::sync::Arc;

use annulus_core::{Error, Local, Marked, Result, Rows, SeenTiles, TileLists, Tiling, Visibility};
use annulus_device_cuda::{CudaBuffer, Stream};

use crate::arguments::{Attention, KEY_POSITIONS_PER_BATCH, QUERY_POSITIONS_PER_BATCH, SightAddresses};

/// Tiles by queries and by keys, and what kernels must know of the rows, on the device.
#[derive(Debug)]
pub(crate) struct Sight {
    buffer: CudaBuffer,
    /// Byte offsets.
    by_queries: [u64; 2],
    by_keys: [u64; 2],
    bits: u64,
    query_rows: u64,
    key_rows: u64,
    query_positions: u64,
    key_positions: u64,
    query_tiles: u32,
    key_tiles: u32,
    per_batch: bool,
    per_head: bool,
    queries: u32,
    keys: u32,
    flags: u32,
}

/// Blocks that came by, with what is known of them.
#[derive(Debug, Default)]
pub(crate) struct Sights {
    known: Vec<(Rows, Rows, [usize; 2], Arc<Sight>)>,
}

/// Blocks remembered: those of a ring of this many ranks and both passes.
const MOST: usize = 256;

impl Sights {
    /// Forgets everything: positions, ids or masks have changed.
    pub(crate) fn clear(&mut self) {
        self.known.clear();
    }

    /// What these queries see of these keys, by tiles of so many of both.
    pub(crate) fn of(&mut self, local: &Local, queries: &Rows, keys: &Rows, tile: [usize; 2], stream: &Stream) -> Result<Arc<Sight>> {
        if let Some((.., sight)) = self.known.iter().find(|(q, k, size, _)| q == queries && k == keys && *size == tile) {
            return Ok(Arc::clone(sight));
        }
        let sight = Arc::new(Sight::new(local, queries, keys, tile, stream)?);
        if self.known.len() >= MOST {
            self.known.remove(0);
        }
        self.known.push((queries.clone(), keys.clone(), tile, Arc::clone(&sight)));
        Ok(sight)
    }
}

impl Sight {
    fn new(local: &Local, queries: &Rows, keys: &Rows, tile: [usize; 2], stream: &Stream) -> Result<Self> {
        let dims = &local.spec.dims;
        let visibility = Visibility { mask: local.spec.mask.as_ref(), attention_mask: local.attention_mask.as_deref(), queries, keys };
        let (per_batch, per_head) = (visibility.per_batch(), visibility.per_head());
        let planes_of = |per: bool, all: usize| if per { all } else { 1 };
        let (batches, heads) = (planes_of(per_batch, dims.batch), planes_of(per_head, dims.q_heads));
        let (batches, heads) = (0..batches, 0..heads);
        let tiling = Tiling { batches, heads, queries: 0..queries.len(), keys: 0..keys.len(), tile, marked: Marked::Hiding };
        let (mut seen, mut lists) = (SeenTiles::default(), TileLists::default());
        seen.refill(&visibility, &tiling)?;
        seen.by_keys(&mut lists)?;
        let mut image = Image::default();
        let by_queries = image.lists(seen.by_queries());
        let by_keys = image.lists(&lists);
        let bits = image.words(seen.bits().iter().copied());
        let [query_rows, key_rows] = [queries, keys].map(|rows| image.words(rows.rows().iter().copied()));
        let mut flags = 0;
        let mut positions = |rows: &Rows, flag: u32| {
            let per_batch = rows.per_batch();
            flags |= if per_batch { flag } else { 0 };
            let lists = (0..planes_of(per_batch, dims.batch)).flat_map(|batch| rows.positions(batch).iter().map(|at| at.cast_unsigned()));
            image.words(lists)
        };
        let query_positions = positions(queries, QUERY_POSITIONS_PER_BATCH);
        let key_positions = positions(keys, KEY_POSITIONS_PER_BATCH);
        let buffer = CudaBuffer::new(stream.device(), image.0.len() as u64)?;
        // SAFETY: the buffer is new and as long as the image.
        unsafe { stream.copy_to_device(buffer.address(), &image.0)? };
        let [query_tiles, key_tiles] = tiling.tiles();
        let [query_tiles, key_tiles, queries, keys] =
            [narrow(query_tiles)?, narrow(key_tiles)?, narrow(queries.len())?, narrow(keys.len())?];
        Ok(Self {
            buffer,
            by_queries,
            by_keys,
            bits,
            query_rows,
            key_rows,
            query_positions,
            key_positions,
            query_tiles,
            key_tiles,
            per_batch,
            per_head,
            queries,
            keys,
            flags,
        })
    }

    /// How many tiles of queries and of keys there are.
    pub(crate) const fn tiles(&self) -> [u32; 2] {
        [self.query_tiles, self.key_tiles]
    }

    /// Whether nobody sees anybody cannot be known from here; whether there are rows on both sides can.
    pub(crate) const fn is_empty(&self) -> bool {
        self.queries == 0 || self.keys == 0
    }

    /// Fills in what a kernel that goes through tiles of queries (or of keys) reads.
    pub(crate) fn describe(&self, arguments: &mut Attention, by_keys: bool) {
        let at = |offset: u64| self.buffer.address() + offset;
        let ([starts, runs], tiles) = if by_keys { (self.by_keys, self.key_tiles) } else { (self.by_queries, self.query_tiles) };
        arguments.sight = SightAddresses {
            starts: at(starts),
            runs: at(runs),
            bits: at(self.bits),
            tiles,
            per_batch: self.per_batch.into(),
            per_head: self.per_head.into(),
            reserved: 0,
        };
        arguments.query_rows = at(self.query_rows);
        arguments.key_rows = at(self.key_rows);
        arguments.query_positions = at(self.query_positions);
        arguments.key_positions = at(self.key_positions);
        arguments.queries = self.queries;
        arguments.keys = self.keys;
        arguments.flags |= self.flags;
    }
}

/// Bytes for the device; every part starts at a multiple of 8.
#[derive(Default)]
struct Image(Vec<u8>);

impl Image {
    fn words(&mut self, words: impl Iterator<Item = u64>) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        let start = self.0.len() as u64;
        words.for_each(|word| self.0.extend_from_slice(&word.to_ne_bytes()));
        start
    }

    /// Where each list starts, and the runs.
    fn lists(&mut self, lists: &TileLists) -> [u64; 2] {
        let starts = self.halves(lists.starts().iter().copied());
        [starts, self.halves(lists.runs().iter().flat_map(|run| [run.first, run.count, run.set]))]
    }

    fn halves(&mut self, numbers: impl Iterator<Item = u32>) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        let start = self.0.len() as u64;
        numbers.for_each(|number| self.0.extend_from_slice(&number.to_ne_bytes()));
        start
    }
}

/// A count as kernels have it.
pub(crate) fn narrow(count: usize) -> Result<u32> {
    // the last number means "everything"
    let narrowed = u32::try_from(count).ok().filter(|&count| count < u32::MAX);
    narrowed.ok_or_else(|| Error::unsupported(format!("a list of {count} rows or tiles on one rank"), "cuda"))
}
