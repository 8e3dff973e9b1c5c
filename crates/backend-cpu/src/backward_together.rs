//! dq, dk, dv and dbias of one block of keys in one go: logits and their gradients are made once.
//!
//! ```text
//! for each task (batch row, kv head, some keys):
//!     for some tiles of these keys, for each tile of 64 queries that see some of them, and each query head of the kv head, and each of the tiles of keys:
//!         S, dP, dS and weights as in `backward_keys`      dVᵀ += dOᵀ·weights      dKᵀ += Qᵀ·dS      dQ += dS·K      dbias += dS
//! ```
//! Five products where the two passes, each for itself, take seven. dq, dk and dv have the terms of those passes in their order (dq: keys ascend, 64 to a
//! chain; dk and dv: queries descend), so the bits are the same.
//!
//! Each thread takes whole (batch row, kv head) pairs as long as there is one for every thread. The keys of the other pairs are cut, and all threads work at
//! one pair, its queries' sums shared: they take turns at each tile of queries ([`crate::backward_turns`]). Late queries come first, for then, under a
//! causal mask, a task of late keys, which is short, has nothing to wait for: it begins where earlier ones have been, and ends early.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use annulus_core::{Block, Host, HostBuffer, Inputs, Result, Saved, Spec, Tick};

use crate::{
    aligned::Aligned,
    backward_keys::{KeyPass, Task, attend_block},
    backward_turns::{Turn, Turns},
    bias_gradient::BiasGradient,
    forward::Acc,
    geometry::Geometry,
    input::{Input, device},
    isa::Path,
    pack::padded,
    real::Real,
    scratch::Scratch,
    sight::TILE,
    team::{Pulse, Team},
    whole_tile::OfTile,
    workspace::{Order, QueryBlock, State, Summed},
};

/// Tasks that each thread gets at least where pairs are cut, if there are as many tiles of keys: one long and one short under a causal mask.
const TASKS: usize = 2;

/// Adds what a block of keys gives to dq and to the gradient of the bias, and writes what this rank's queries give to dk and dv.
pub(crate) fn attend_backward<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    saved: &Saved<'_, Host>,
    block: &Block<'_, Host>,
    fresh: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    state.sum_in(Order::Rows)?;
    attend_block::<E>(team, state, inputs, saved, block, fresh, true, tick)
}

impl<A: Real> State<A> {
    /// Decides how dq lies in memory during a backward pass, once.
    pub(crate) fn sum_in(&mut self, order: Order) -> Result<()> {
        match self.order.replace(order) {
            Some(before) if before != order => Err(device("a backward pass is attended to in one way from its beginning to its end")),
            _ => Ok(()),
        }
    }
}

/// How the pairs (batch row, kv head) are made into tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Pairs that are a task each.
    whole: usize,
    /// All pairs.
    pairs: usize,
    /// Keys of the block.
    len: usize,
    /// Tasks of each other pair: tiles of keys that lie side by side, as many in one as in another, or one more in the first ones.
    tasks: usize,
    /// Whether pairs share elements of the bias's gradient.
    chained: bool,
}

impl Cut {
    /// For a block of `len` keys.
    pub(crate) fn new(spec: &Spec, geometry: &Geometry, threads: usize, len: usize) -> Self {
        let pairs = spec.dims.batch * spec.dims.kv_heads;
        let [batches, heads, _, bias_keys] = spec.bias.unwrap_or([0; 4]);
        let chained = batches == 1 && spec.dims.batch > 1 || heads == 1 && spec.dims.kv_heads > 1;
        let whole = if chained { 0 } else { pairs / threads * threads };
        let mut tasks = len.div_ceil(geometry.keys_together());
        // a sum over heads and keys has its terms in the order of the tasks: these must not depend on the number of threads
        let fixed = heads == 1 && bias_keys == 1;
        if !fixed && threads > 1 && pairs > whole {
            // as many for each thread, where tasks are of one length; where they get shorter, the first and the last make up for each other
            let rest = pairs - whole;
            let even = (1..=threads).find(|count| (rest * count).is_multiple_of(threads)).unwrap_or(1);
            tasks = tasks.max((TASKS * threads).div_ceil(rest)).next_multiple_of(even);
        }
        Self { whole, pairs, len, tasks: tasks.min(len.div_ceil(TILE)), chained }
    }

    /// The tasks: number, pair, and keys.
    fn tasks(self) -> impl Iterator<Item = (usize, usize, Range<usize>)> + Send {
        let Self { whole, pairs, len, tasks, .. } = self;
        let cut = move |pair| (0..tasks).map(move |task| (pair, self.first_key(task)..self.first_key(task + 1)));
        let tasks = (0..whole).map(move |pair| (pair, 0..len)).chain((whole..pairs).flat_map(cut));
        tasks.enumerate().map(|(task, (pair, keys))| (task, pair, keys))
    }

    /// Where a task of a pair that is cut begins.
    fn first_key(self, task: usize) -> usize {
        let tiles = self.len.div_ceil(TILE);
        self.len.min((task * (tiles / self.tasks) + task.min(tiles % self.tasks)) * TILE)
    }

    /// The number of the first task of a pair that is cut.
    const fn first_task(self, pair: usize) -> usize {
        self.whole + (pair - self.whole) * self.tasks
    }
}

/// Where the sums of queries are, for all threads.
pub(crate) struct QueryGradients<'a, A> {
    path: Path,
    /// Elements of a row of dq.
    width: usize,
    /// Query heads of a key head.
    group: usize,
    /// Batch rows and key heads.
    planes: (usize, usize),
    blocks: &'a [QueryBlock<A>],
    /// What these blocks have in sums: a row of memory each.
    sums: &'a [Mutex<Aligned<A>>],
    /// See [`State::places`].
    places: &'a [usize],
    /// Rows of every block but that of the last queries.
    q_rows: usize,
    pub(crate) bias: Option<&'a BiasGradient<A>>,
    cut: Cut,
}

/// What a task adds to the sums of queries.
pub(crate) struct Adding<'a, A> {
    pub(crate) to: &'a QueryGradients<'a, A>,
    turn: Turn<'a>,
    pair: usize,
}

/// All tasks; `records` are gradient records.
pub(crate) fn add_together<E: Input<Accumulator: Summed>>(
    pass: &KeyPass<'_, E>,
    team: &Team,
    scratch: &mut [Scratch<Acc<E>>],
    records: &mut [Acc<E>],
    memory: Memory<'_, Acc<E>>,
    tick: Tick<'_>,
) {
    let Memory { blocks, lent, places, q_rows, bias, turns, cut } = memory;
    // threads share the sums behind locks, and each block gets its own back
    blocks.iter_mut().zip(&mut *lent).for_each(|(block, lent)| std::mem::swap(&mut block.sums, own(lent)));
    let to = &QueryGradients {
        path: pass.geometry.path,
        width: pass.geometry.query_width(),
        group: pass.geometry.dims.group(),
        planes: (pass.geometry.dims.batch, pass.geometry.dims.kv_heads),
        blocks,
        sums: lent,
        places,
        q_rows,
        bias,
        cut,
    };
    let chain = |pair| if cut.chained { 0 } else { pair };
    let tasks = cut.tasks().inspect(|&(task, pair, _)| turns.hand_out(task, chain(pair)));
    // tasks write different elements of the same records: they take turns
    let records = Mutex::new(records);
    team.run(scratch, tasks, Some(tick), |scratch, (task, pair, keys), pulse| {
        let adding = Adding { to, turn: turns.turn(task, chain(pair)), pair };
        let (batch, kv_head) = (pair / to.planes.1, pair % to.planes.1);
        for first in keys.clone().step_by(pass.k_rows) {
            let task = Task { batch, kv_head, keys: first..keys.end.min(first + pass.k_rows) };
            scratch.rows_key.fill(pass.geometry.path, &pass.k, batch, kv_head, task.keys.clone());
            pass.sum(scratch, &task, Some(&adding), pulse);
            if pulse.stopped() || !adding.end(pass, scratch, &task, pulse) {
                return;
            }
            pass.write(scratch, &task, &mut lock(&records));
        }
    });
    blocks.iter_mut().zip(lent).for_each(|(block, lent)| std::mem::swap(&mut block.sums, own(lent)));
}

/// Memory of a workspace for [`add_together`].
pub(crate) struct Memory<'a, A> {
    pub(crate) blocks: &'a mut [QueryBlock<A>],
    /// One for each block.
    pub(crate) lent: &'a mut [Mutex<Aligned<A>>],
    pub(crate) places: &'a [usize],
    pub(crate) q_rows: usize,
    pub(crate) bias: Option<&'a BiasGradient<A>>,
    pub(crate) turns: &'a Turns,
    pub(crate) cut: Cut,
}

/// A thread that panics ends the pass: what it left is never read.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same where nobody else has it.
pub(crate) fn own<T>(shared: &mut Mutex<T>) -> &mut T {
    shared.get_mut().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Real> Adding<'_, A> {
    /// Waits for this task's turn at a place; false if all are to stop.
    pub(crate) fn reach(&self, place: usize, pulse: &mut Pulse<'_>) -> bool {
        self.turn.reach(place, pulse)
    }

    /// dQ += dS·K for a tile of queries of one head and the tile of keys that begins at key `first_key` of the task.
    pub(crate) fn add(&self, scratch: &Scratch<A>, head: usize, task: &Task, first_key: usize, queries: &Range<usize>) {
        let to = self.to;
        let Scratch { rows_key, whole_tile, .. } = scratch;
        let keys = first_key..task.keys.len().min(first_key + TILE);
        let mut first = queries.start;
        // a tile may lie across blocks: all of them begin at whole register tiles
        while first < queries.end {
            let index = to.places[(first / to.q_rows * to.planes.0 + task.batch) * to.planes.1 + task.kv_head];
            let block = &to.blocks[index];
            let end = block.rows.end.min(queries.end);
            let rows = padded(end - first);
            let at = block.lane(head % to.group, first - block.rows.start);
            let into = &mut lock(&to.sums[index])[at * to.width..(at + rows) * to.width];
            let of = OfTile { first_row: first - queries.start, panel: rows_key, keys: keys.clone(), into, width: to.width };
            whole_tile.add(to.path, of);
            first = end;
        }
    }

    /// After the last tile of a task: others may go on, and what was summed along all queries is added to the gradient of the bias; false if all are
    /// to stop.
    fn end<E: Input<Accumulator = A>>(&self, pass: &KeyPass<'_, E>, scratch: &Scratch<A>, task: &Task, pulse: &mut Pulse<'_>) -> bool {
        self.turn.pass(usize::MAX);
        let Some(bias) = self.to.bias.filter(|bias| bias.over_queries()) else { return true };
        // the same element may be another pair's, or that of other keys of this one
        let first = match (bias.over_keys(), self.to.cut.chained) {
            (false, false) => None,
            (false, true) => Some(self.to.cut.first_task(self.pair)),
            (true, _) => Some(self.turn.task()),
        };
        if first.is_some_and(|first| !self.turn.wait_for_end(first, pulse)) {
            return false;
        }
        bias.add_sums(scratch, (task.batch, task.kv_head), &pass.visibility.keys.rows()[task.keys.clone()]);
        true
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{DType, Dims};

    use super::*;
    use crate::isa::Isa;

    #[test]
    fn tasks_cover_all_keys_once_and_evenly() {
        let path = Path::new(Isa::Portable).unwrap();
        for (pairs, threads, len) in [(1, 2, 2048), (1, 7, 2048), (3, 2, 1000), (3, 4, 777), (5, 1, 130), (8, 3, 64), (2, 3, 1), (1, 2, 0)]
        {
            let spec = Spec::new(Dims::new(1, len, pairs, 64), DType::F32);
            let geometry = Geometry::new::<f32>(&spec, path);
            let cut = Cut::new(&spec, &geometry, threads, len);
            let mut ends = vec![0; pairs];
            let mut tiles = vec![0; threads];
            for (number, (task, pair, keys)) in cut.tasks().enumerate() {
                assert_eq!((number, ends[pair]), (task, keys.start), "{pairs} pairs");
                assert!(pair < cut.whole || keys.len() <= geometry.keys_together() && !keys.is_empty());
                ends[pair] = keys.end;
                // whoever has least to do takes the next
                if let Some(least) = tiles.iter_mut().min() {
                    *least += keys.len().div_ceil(TILE);
                }
            }
            assert!(ends.iter().all(|&end| end == len), "{ends:?}");
            let (all, most) = (tiles.iter().sum::<usize>(), tiles.iter().max().copied().unwrap());
            assert!(most <= all.div_ceil(threads) + 1, "{pairs} pairs, {threads} threads: {tiles:?}");
        }
    }

    #[test]
    fn what_all_heads_and_keys_share_is_cut_alike_for_any_number_of_threads() {
        let path = Path::new(Isa::Portable).unwrap();
        let spec = Spec { bias: Some([1, 1, 900, 1]), ..Spec::new(Dims::new(1, 900, 2, 64), DType::F32) };
        let geometry = Geometry::new::<f32>(&spec, path);
        let [one, many] = [1, 7].map(|threads| Cut::new(&spec, &geometry, threads, 900));
        assert!(one == many && one.chained && one.whole == 0);
    }
}
