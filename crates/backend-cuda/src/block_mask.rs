//! Block-sparse mask of the queries of one rank and one block of keys, in device memory.
//!
//! [`BlockSparseMask`] classifies the tiles on the host: empty tiles are not listed, consecutive
//! full tiles form one run, a partial tile has a bitmask per query row. Kernels therefore contain
//! no mask logic, and a new mask needs no new kernel. The result is cached, because the same blocks
//! arrive in every pass.
//!
//! Lists of consecutive full tiles are short, whatever the number of keys. What grows with the rows
//! is therefore copied only for the kernels that read it: row numbers for a bias tensor and
//! dropout, positions for ALiBi, lists by key tile for backward passes. The numbers of keys are
//! shared by block masks ([`KeyNumbers`]). So a token over a long KV cache copies no more to the
//! device than one over a short cache.
//!
//! Numbers of key rows in device memory: row numbers for a bias tensor and dropout, positions for
//! ALiBi.
//!
//! The keys of a KV cache get a few rows more with every call. A list that is the beginning of one
//! in device memory shares its memory, and one that continues it copies only its new numbers.

use std::sync::Arc;

use annulus_core::{
    BitmaskPolicy, BlockSparseMask, CsrTiles, Error, RangeLists, RankShard, Result, Rows, TileRun,
    Tiling,
};
use annulus_device_cuda::{CudaBuffer, Stream};

use crate::{
    arguments::{
        AttentionArguments, BlockMaskAddresses, KEY_POSITIONS_PER_BATCH, QUERY_POSITIONS_PER_BATCH,
    },
    forward_tiles::{self, RangeLimits},
};

/// Visible tiles by query tile and by key tile, and per-row numbers of queries that kernels need,
/// in one device buffer; those of keys.
#[derive(Debug)]
pub(crate) struct BlockMask {
    /// Holds the memory of all addresses but those of keys.
    _buffer: CudaBuffer,
    /// Lists by query tile and by key tile; without [`MaskForm::by_keys`] no kernel reads the
    /// latter.
    lists: [BlockMaskAddresses; 2],
    /// As those by query tile, with a list for each range of keys of a tile: see
    /// [`crate::forward_tiles`].
    by_ranges: BlockMaskAddresses,
    /// Address of the numbers of these lists in the order in which they are computed.
    order: u64,
    query_rows: u64,
    query_positions: u64,
    /// Without a bias tensor and dropout no kernel reads these.
    key_rows: Option<Arc<CudaBuffer>>,
    /// Likewise without ALiBi.
    key_positions: Option<Arc<CudaBuffer>>,
    queries: u32,
    keys: u32,
    flags: u32,
}

/// Form of the lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MaskForm {
    /// Queries and keys of a tile.
    pub(crate) tile: [usize; 2],
    /// Limits of ranges of keys.
    pub(crate) limits: RangeLimits,
    /// True if there are lists by key tile, for backward passes.
    pub(crate) by_keys: bool,
}

/// Block masks of the blocks that this rank has attended to.
#[derive(Debug, Default)]
pub(crate) struct BlockMaskCache {
    entries: Vec<CachedMask>,
    key_numbers: KeyNumbers,
}

#[derive(Debug)]
struct CachedMask {
    queries: Rows,
    keys: Rows,
    form: MaskForm,
    block_mask: Arc<BlockMask>,
}

/// Entries kept: enough for a ring of 128 ranks whose forward and backward tiles differ. Beyond it
/// the oldest entry is dropped.
const CAPACITY: usize = 256;

impl BlockMaskCache {
    /// Drops all entries, because positions, ids or masks have changed. Numbers of keys are found
    /// by their values, so those of the last batch stay.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.key_numbers.drop_unused();
    }

    /// Returns the block mask with lists of this form, building it on first use.
    pub(crate) fn of(
        &mut self,
        shard: &RankShard,
        queries: &Rows,
        keys: &Rows,
        form: MaskForm,
        stream: &Stream,
    ) -> Result<Arc<BlockMask>> {
        let is_wanted = |entry: &&CachedMask| {
            entry.form == form && entry.queries == *queries && entry.keys == *keys
        };
        if let Some(entry) = self.entries.iter().find(is_wanted) {
            return Ok(Arc::clone(&entry.block_mask));
        }
        let numbers = &mut self.key_numbers;
        let block_mask = BlockMask::new(shard, queries, keys, form, numbers, stream)?;
        let block_mask = Arc::new(block_mask);
        if self.entries.len() >= CAPACITY {
            self.entries.remove(0);
        }
        self.entries.push(CachedMask {
            queries: queries.clone(),
            keys: keys.clone(),
            form,
            block_mask: Arc::clone(&block_mask),
        });
        Ok(block_mask)
    }
}

impl BlockMask {
    fn new(
        shard: &RankShard,
        queries: &Rows,
        keys: &Rows,
        form: MaskForm,
        key_numbers: &mut KeyNumbers,
        stream: &Stream,
    ) -> Result<Self> {
        let spec = &shard.spec;
        let dims = &spec.dims;
        let visibility = shard.visibility(queries, keys);
        let per_batch = visibility.per_batch();
        let per_head = visibility.per_head();
        let planes_of = |per: bool, all: usize| if per { all } else { 1 };
        let tiling = Tiling {
            batches: 0..planes_of(per_batch, dims.batch),
            heads: 0..planes_of(per_head, dims.q_heads),
            queries: 0..queries.len(),
            keys: 0..keys.len(),
            tile: form.tile,
            bitmasks: BitmaskPolicy::Partial,
        };
        let mut block_sparse = BlockSparseMask::default();
        block_sparse.refill(&visibility, &tiling)?;
        let mut upload = MaskUpload::default();
        let by_query = block_sparse.by_queries();
        let by_queries = upload.csr(by_query.starts(), by_query.runs());
        let mut lists = CsrTiles::default();
        if form.by_keys {
            block_sparse.by_keys(&mut lists)?;
        }
        let by_keys = upload.csr(lists.starts(), lists.runs());
        let [query_tiles, key_tiles] = tiling.tiles();
        let by_query_tile: Vec<&[TileRun]> =
            (0..tiling.planes() * query_tiles).map(|list| by_query.list(list)).collect();
        let ranges = forward_tiles::ranges(&by_query_tile, form.limits);
        let (by_ranges, order) = if ranges > 1 {
            let RangeLists { starts, runs } = RangeLists::of(by_query_tile, ranges);
            let order = longest_first(&starts, &runs, query_tiles * ranges);
            (upload.csr(&starts, &runs), order)
        } else {
            (by_queries, longest_first(by_query.starts(), by_query.runs(), query_tiles))
        };
        let order = upload.u32s(order.into_iter());
        let bits = upload.u64s(block_sparse.bits().iter().copied());
        let has_row_numbers = spec.bias.is_some() || spec.dropout.is_some();
        let row_numbers = |rows: &Rows| has_row_numbers.then(|| rows.rows().to_vec());
        let positions = |rows: &Rows| {
            let planes = planes_of(rows.per_batch(), dims.batch);
            let of = |batch| rows.positions(batch).iter().map(|at| at.cast_unsigned());
            spec.bias_function.is_some().then(|| (0..planes).flat_map(of).collect::<Vec<u64>>())
        };
        let mut of_queries =
            |numbers: Option<Vec<u64>>| upload.u64s(numbers.unwrap_or_default().into_iter());
        let query_rows = of_queries(row_numbers(queries));
        let query_positions = of_queries(positions(queries));
        let mut of_keys = |numbers: Option<Vec<u64>>| {
            numbers.map(|numbers| key_numbers.of(numbers, stream)).transpose()
        };
        let key_rows = of_keys(row_numbers(keys))?;
        let key_positions = of_keys(positions(keys))?;
        let flag_of = |rows: &Rows, flag: u32| if rows.per_batch() { flag } else { 0 };
        let flags =
            flag_of(queries, QUERY_POSITIONS_PER_BATCH) | flag_of(keys, KEY_POSITIONS_PER_BATCH);
        let buffer = CudaBuffer::filled(stream, &upload.0)?;
        let at = buffer.address();
        // at most `forward_tiles::MAX_RANGES`
        let splits = ranges as u32;
        let addresses = |[starts, runs]: [u64; 2], tiles: usize, splits: u32| {
            Ok(BlockMaskAddresses {
                starts: at + starts,
                runs: at + runs,
                bits: at + bits,
                lists: to_u32(tiles)? * splits,
                per_batch: per_batch.into(),
                per_head: per_head.into(),
                splits,
            })
        };
        let lists = [addresses(by_queries, query_tiles, 1)?, addresses(by_keys, key_tiles, 1)?];
        Ok(Self {
            lists,
            by_ranges: addresses(by_ranges, query_tiles, splits)?,
            order: at + order,
            query_rows: at + query_rows,
            query_positions: at + query_positions,
            _buffer: buffer,
            key_rows,
            key_positions,
            queries: to_u32(queries.len())?,
            keys: to_u32(keys.len())?,
            flags,
        })
    }

    /// Numbers of query tiles and key tiles.
    pub(crate) const fn tiles(&self) -> [u32; 2] {
        let [by_queries, by_keys] = &self.lists;
        [by_queries.lists, by_keys.lists]
    }

    /// True if there are no query rows or no key rows. False does not imply a visible pair.
    pub(crate) const fn is_empty(&self) -> bool {
        self.queries == 0 || self.keys == 0
    }

    /// Sets the mask fields of the arguments, with the lists by query tile or by key tile.
    pub(crate) fn write_to(&self, arguments: &mut AttentionArguments, by_keys: bool) {
        self.write_lists_to(arguments, self.lists[usize::from(by_keys)]);
    }

    /// Sets the mask fields of the arguments, with the lists by query tile and range of keys.
    /// Returns the number of ranges per tile, 1 if keys are not divided.
    pub(crate) fn write_ranges_to(&self, arguments: &mut AttentionArguments) -> usize {
        self.write_lists_to(arguments, self.by_ranges);
        self.by_ranges.splits as usize
    }

    /// Address of the order in which the lists by query tile and range of keys are computed: for
    /// each plane the numbers of its lists, that of most key tiles first.
    pub(crate) const fn order(&self) -> u64 {
        self.order
    }

    fn write_lists_to(&self, arguments: &mut AttentionArguments, lists: BlockMaskAddresses) {
        arguments.block_mask = lists;
        arguments.query_rows = self.query_rows;
        arguments.query_positions = self.query_positions;
        let of_keys =
            |numbers: &Option<Arc<CudaBuffer>>| numbers.as_ref().map_or(0, |list| list.address());
        arguments.key_rows = of_keys(&self.key_rows);
        arguments.key_positions = of_keys(&self.key_positions);
        arguments.queries = self.queries;
        arguments.keys = self.keys;
        arguments.flags |= self.flags;
    }
}

/// Numbers the lists of each plane by their tiles, most first; lists of equally many in their
/// order.
fn longest_first(starts: &[u32], runs: &[TileRun], lists: usize) -> Vec<u32> {
    let tiles = |bounds: &[u32]| -> u64 {
        let of_list = bounds[0] as usize..bounds[1] as usize;
        runs[of_list].iter().map(|run| u64::from(run.count)).sum()
    };
    let tiles: Vec<u64> = starts.windows(2).map(tiles).collect();
    let order_of_plane = |tiles: &[u64]| {
        let mut order: Vec<u32> = (0..).take(tiles.len()).collect();
        order.sort_by_key(|&list| std::cmp::Reverse(tiles[list as usize]));
        order
    };
    tiles.chunks(lists.max(1)).flat_map(order_of_plane).collect()
}

/// Bytes of the device buffer; every part starts at a multiple of 8.
#[derive(Default)]
struct MaskUpload(Vec<u8>);

impl MaskUpload {
    fn part<const N: usize>(&mut self, words: impl Iterator<Item = [u8; N]>) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        let start = self.0.len() as u64;
        words.for_each(|word| self.0.extend_from_slice(&word));
        start
    }

    fn u64s(&mut self, values: impl Iterator<Item = u64>) -> u64 {
        self.part(values.map(u64::to_ne_bytes))
    }

    fn u32s(&mut self, values: impl Iterator<Item = u32>) -> u64 {
        self.part(values.map(u32::to_ne_bytes))
    }

    /// Appends lists; returns the offsets of their starts and runs.
    fn csr(&mut self, starts: &[u32], runs: &[TileRun]) -> [u64; 2] {
        let starts = self.u32s(starts.iter().copied());
        [starts, self.u32s(runs.iter().flat_map(|run| [run.first, run.count, run.bitmask]))]
    }
}

/// Converts a count to u32.
pub(crate) fn to_u32(count: usize) -> Result<u32> {
    // u32::MAX is FULL_TILE
    let converted = u32::try_from(count).ok().filter(|&count| count < u32::MAX);
    converted.ok_or_else(|| {
        Error::unsupported(format!("a list of {count} rows or tiles on one rank"), "cuda")
    })
}

/// Converts the lengths of a tensor.
pub(crate) fn lengths(shape: [usize; 4]) -> Result<[u32; 4]> {
    let [batch, rows, heads, dim] = shape.map(to_u32);
    Ok([batch?, rows?, heads?, dim?])
}

/// Lists in device memory, the one that was used last at the end.
#[derive(Debug, Default)]
pub(crate) struct KeyNumbers {
    lists: Vec<List>,
}

#[derive(Debug)]
struct List {
    /// Numbers in the buffer, which may have room for more.
    numbers: Vec<u64>,
    buffer: Arc<CudaBuffer>,
    /// True if it was used since the last [`KeyNumbers::drop_unused`].
    is_used: bool,
}

/// Lists kept: row numbers and positions of as many blocks as [`crate::block_mask`] keeps. Beyond
/// it the list that was not used for longest is dropped.
const MAX_LISTS: usize = 512;

const NUMBER_BYTES: usize = size_of::<u64>();

impl KeyNumbers {
    /// Drops the lists that were not used since the last call, as those of earlier batches.
    pub(crate) fn drop_unused(&mut self) {
        self.lists.retain_mut(|list| std::mem::take(&mut list.is_used));
    }

    /// Returns memory that begins with these numbers.
    pub(crate) fn of(&mut self, numbers: Vec<u64>, stream: &Stream) -> Result<Arc<CudaBuffer>> {
        let is_same = |list: &List| {
            let common = list.numbers.len().min(numbers.len());
            common > 0 && list.numbers[..common] == numbers[..common]
        };
        let mut list = match self.lists.iter().position(is_same) {
            Some(found) => self.lists.remove(found).continued(numbers, stream)?,
            None => List::new(numbers, stream)?,
        };
        list.is_used = true;
        let buffer = Arc::clone(&list.buffer);
        if self.lists.len() >= MAX_LISTS {
            self.lists.remove(0);
        }
        self.lists.push(list);
        Ok(buffer)
    }
}

impl List {
    /// Copies a list to new memory, which has room for more numbers: a growing list is copied as a
    /// whole only when it has grown to a power of two.
    fn new(numbers: Vec<u64>, stream: &Stream) -> Result<Self> {
        let capacity = (numbers.len() + 1).next_power_of_two();
        let buffer = CudaBuffer::new(stream.device(), (capacity * NUMBER_BYTES) as u64)?;
        // SAFETY: the buffer is new and has at least as many bytes.
        unsafe { stream.copy_to_device(buffer.address(), &bytes(&numbers))? };
        Ok(Self { numbers, buffer: Arc::new(buffer), is_used: true })
    }

    /// Copies those of `numbers` that are not there. They begin as this list does.
    fn continued(mut self, numbers: Vec<u64>, stream: &Stream) -> Result<Self> {
        let present = self.numbers.len();
        let Some(new) = numbers.get(present..) else { return Ok(self) };
        if (numbers.len() * NUMBER_BYTES) as u64 > self.buffer.len() {
            return Self::new(numbers, stream);
        }
        let to = self.buffer.address() + (present * NUMBER_BYTES) as u64;
        // SAFETY: these bytes are in the buffer, and behind all that kernels read so far.
        unsafe { stream.copy_to_device(to, &bytes(new))? };
        self.numbers = numbers;
        Ok(self)
    }
}

fn bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_most_tiles_come_first_in_each_plane() {
        let run = |count| TileRun { first: 0, count, bitmask: TileRun::FULL };
        // two planes of three lists: 1, 5 and 3 tiles; 2, none and 2
        let runs = [1, 4, 1, 3, 2, 2].map(run);
        let starts = [0, 1, 3, 4, 5, 5, 6];
        assert_eq!(longest_first(&starts, &runs, 3), [1, 2, 0, 0, 2, 1]);
        assert_eq!(longest_first(&[0], &[], 0), [0; 0]);
    }
}
