//! dk and dv of one block of keys.
//!
//! ```text
//! for each task (batch row, kv head, some keys):
//!     for each tile of 64 queries that see some of them, and each query head of the kv head:
//!         for each strip of keys:
//!             S = Q·Kᵀ, made logits      dP = dO·Vᵀ      dS and weights from both      dVᵀ += dOᵀ·weights      dKᵀ += Qᵀ·dS
//! ```
//! The mirror of `backward_queries`: keys lie in lanes, queries are the rows. Each task owns the gradients of its keys, so these are not
//! summed across threads; the order of the sums is that of the queries, from late ones to early ones.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use annulus_core::{
    BiasOrder, Block, Element, Error, Host, HostBuffer, Inputs, Local, QueryTile, Record, Result, Saved, Spec, Tick, Visibility,
};

use crate::{
    ahead::Lines,
    backward_queries::{Operands, apply_slope, differentiate},
    backward_together::{Adding, Cut, Memory, add_together},
    forward::{Acc, keys_and_values},
    geometry::{Geometry, Strip},
    input::{Input, Source, array, elements_mut},
    logits::{Logits, Site},
    pack::{each_lane, fill_lanes},
    pairs::pair_rows,
    products::column_products,
    real::Real,
    records::{QueryRecord, bytes_mut},
    scratch::{RowStatistics, Scratch},
    sight::{Lanes, TILE},
    statistics::Statistics,
    team::{Pulse, Team},
    workspace::{Seen, State, Summed},
};

/// What this rank's queries give to the gradients of a block's keys, written into `fresh`.
pub(crate) fn attend_keys<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    saved: &Saved<'_, Host>,
    block: &Block<'_, Host>,
    fresh: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    attend_block::<E>(team, state, inputs, saved, block, fresh, false, tick)
}

/// The same; and dq and the gradient of the bias as well, if `together`.
#[expect(clippy::too_many_arguments, reason = "a call of the seam and a choice")]
pub(crate) fn attend_block<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    saved: &Saved<'_, Host>,
    block: &Block<'_, Host>,
    fresh: &mut HostBuffer,
    together: bool,
    tick: Tick<'_>,
) -> Result<()> {
    let State { local, geometry, q_rows, k_rows, blocks, lent, places, scratch, statistics, bias_gradient, turns, seen, in_place, .. } =
        state;
    let whole_tiles = geometry.of_whole_tiles();
    let (geometry, k_rows) = if together { (&whole_tiles, whole_tiles.keys_together()) } else { (&*geometry, *k_rows) };
    let spec = &*local.spec;
    let (k, v): (Source<'_, E>, Source<'_, E>) = keys_and_values(local, inputs, block, *in_place)?;
    let attention_mask = local.attention_mask.as_deref();
    let (queries, keys) = (&*local.queries, block.rows);
    let visibility = Visibility { mask: &*spec.mask, attention_mask, queries, keys };
    let bias = inputs.bias.map(|bias| array("bias", bias)).transpose()?;
    let gradient_record = spec.gradient_record();
    let sums = elements_mut::<Acc<E>>(bytes_mut(fresh)?, keys.len(), &gradient_record)?;
    seen.refill(team, scratch, &visibility, spec);
    let pass = KeyPass {
        geometry,
        k_rows,
        visibility,
        seen,
        logits: Logits { spec, path: geometry.path, queries, keys, bias },
        k,
        v,
        q: Source::tensor(array("q", inputs.q)?),
        dout: Source::tensor(array("dout", saved.dout)?),
        statistics: KnownOfQueries::Here(statistics),
        gradient_record,
        add: false,
    };
    if together {
        let cut = Cut::new(spec, geometry, team.threads(), keys.len());
        let memory = Memory { blocks, lent, places, q_rows: *q_rows, bias: bias_gradient.as_ref(), turns, cut };
        add_together(&pass, team, scratch, sums, memory, tick);
    } else {
        pass.run(team, scratch, sums, tick);
    }
    Ok(())
}

/// What travelling queries give to the gradients of this rank's own keys, added to `home`.
pub(crate) fn attend_keys_home<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    block: &Block<'_, Host>,
    home: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let State { local, geometry, k_rows, scratch, seen, .. } = state;
    let spec = &*local.spec;
    let at_home = block.rows.rows() == local.queries.rows();
    refuse_what_did_not_travel(local, at_home)?;
    let record = spec.query_record();
    let bytes = block.buffer.bytes();
    let source = |field| Source::<E>::records(bytes, block.rows.len(), &record, field);
    let attention_mask = local.attention_mask.as_deref();
    let (queries, keys) = (block.rows, &*local.keys);
    let visibility = Visibility { mask: &*spec.mask, attention_mask, queries, keys };
    let bias = inputs.bias.map(|bias| array("bias", bias)).transpose()?;
    let gradient_record = spec.gradient_record();
    let sums = elements_mut::<Acc<E>>(bytes_mut(home)?, keys.len(), &gradient_record)?;
    seen.refill(team, scratch, &visibility, spec);
    let pass = KeyPass {
        geometry,
        k_rows: *k_rows,
        visibility,
        seen,
        logits: Logits { spec, path: geometry.path, queries, keys, bias },
        k: Source::tensor(array("k", inputs.k)?),
        v: Source::tensor(array("v", inputs.v)?),
        q: source(0)?,
        dout: source(1)?,
        statistics: KnownOfQueries::Travelled { bytes, record: QueryRecord::of(spec) },
        gradient_record,
        add: true,
    };
    pass.run(team, scratch, sums, tick);
    Ok(())
}

/// A rank has the lines of a dense mask or a full bias for its own queries only.
fn refuse_what_did_not_travel(local: &Local, at_home: bool) -> Result<()> {
    let by = "the second pass of a two-pass backward on the cpu, for queries of other ranks";
    if at_home {
        return Ok(());
    }
    if local.attention_mask.is_some() {
        return Err(Error::unsupported("attention_mask", by));
    }
    match local.spec.bias {
        Some([_, _, queries, _]) if queries != 1 => Err(Error::unsupported("a bias that differs between queries", by)),
        _ => Ok(()),
    }
}

impl Seen {
    /// Works out what each tile of queries sees, once for all tasks.
    fn refill<A: Real>(&mut self, team: &Team, scratch: &mut [Scratch<A>], visibility: &Visibility<'_>, spec: &Spec) {
        self.hulls.refill(visibility, spec.dims.batch, spec.dims.q_heads, TILE);
        self.batches = if visibility.per_batch() { spec.dims.batch } else { 1 };
        self.heads = if visibility.per_head() { spec.dims.q_heads } else { 1 };
        let len = visibility.queries.len();
        self.per_head = len.div_ceil(TILE);
        let count = self.batches * self.heads * self.per_head;
        if self.tiles.len() < count {
            self.tiles.resize_with(count, QueryTile::default);
        }
        let places = (0..self.batches).flat_map(|b| (0..self.heads).map(move |h| (b, h)));
        let rows = (0..len).step_by(TILE).map(|first| first..len.min(first + TILE));
        let all = places.flat_map(|place| rows.clone().map(move |rows| (place, rows)));
        team.run(scratch, all.zip(&mut self.tiles), None, |_, (((batch, head), rows), tile), _| {
            visibility.query_tile(batch, head, rows, tile);
        });
    }

    /// What the queries `first ..` see.
    fn tile(&self, batch: usize, head: usize, first: usize) -> &QueryTile {
        let batch = if self.batches == 1 { 0 } else { batch };
        let head = if self.heads == 1 { 0 } else { head };
        &self.tiles[(batch * self.heads + head) * self.per_head + first / TILE]
    }
}

/// Row statistics, here or in records.
enum KnownOfQueries<'a, A> {
    Here(&'a Statistics<A>),
    Travelled { bytes: &'a [u8], record: QueryRecord },
}

impl<A: Real> KnownOfQueries<'_, A> {
    fn load(&self, line: usize, rows: Range<usize>, into: &mut RowStatistics<A>) {
        match self {
            Self::Here(statistics) => statistics.load(line, rows, into),
            Self::Travelled { bytes, record } => {
                rows.enumerate().for_each(|(place, row)| into.set(place, record.statistics(bytes, row, line)));
            }
        }
    }
}

/// What all tasks of a pass over keys read.
pub(crate) struct KeyPass<'a, E: Input> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) k_rows: usize,
    pub(crate) visibility: Visibility<'a>,
    seen: &'a Seen,
    logits: Logits<'a, Acc<E>>,
    pub(crate) k: Source<'a, E>,
    v: Source<'a, E>,
    q: Source<'a, E>,
    dout: Source<'a, E>,
    statistics: KnownOfQueries<'a, Acc<E>>,
    gradient_record: Record,
    /// Whether results are added or written.
    add: bool,
}

/// A task.
pub(crate) struct Task {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
}

impl<E: Input<Accumulator: Summed>> KeyPass<'_, E> {
    fn run(&self, team: &Team, scratch: &mut [Scratch<Acc<E>>], sums: &mut [Acc<E>], tick: Tick<'_>) {
        let (batch, kv_heads) = (self.geometry.dims.batch, self.geometry.dims.kv_heads);
        let len = self.visibility.keys.len();
        // long causal tasks, those of early keys, first
        let tasks = (0..len).step_by(self.k_rows).flat_map(move |first| {
            let keys = first..len.min(first + self.k_rows);
            (0..batch * kv_heads).map(move |plane| Task { batch: plane / kv_heads, kv_head: plane % kv_heads, keys: keys.clone() })
        });
        // tasks write different elements of the same records: they take turns, once each
        let sums = Mutex::new(sums);
        team.run(scratch, tasks, Some(tick), |scratch, task, pulse| {
            self.sum(scratch, &task, None, pulse);
            self.write(scratch, &task, &mut sums.lock().unwrap_or_else(PoisonError::into_inner));
        });
    }

    /// Sums the gradients of a task's keys, in strips; and what they give to those of the queries, if wanted.
    pub(crate) fn sum(&self, scratch: &mut Scratch<Acc<E>>, task: &Task, adding: Option<&Adding<'_, Acc<E>>>, pulse: &mut Pulse<'_>) {
        scratch.filled.fill(false);
        scratch.sums_head.fill(Acc::<E>::ZERO);
        scratch.sums_value.fill(Acc::<E>::ZERO);
        scratch.sums_bias.fill(Acc::<E>::ZERO);
        let tiles = self.visibility.queries.len().div_ceil(TILE);
        for (turn, heads) in self.alike(task.kv_head).enumerate() {
            for queries in self.seen.hulls.query_tiles(task.batch, heads.start, self.visibility.keys, task.keys.clone()).rev() {
                let place = (turn + 1) * tiles - 1 - queries.start / TILE;
                if pulse.stopped() || adding.is_some_and(|adding| !adding.reach(place, pulse)) {
                    return;
                }
                let lines = 2 * TILE + self.geometry.head_rows() + self.geometry.value_rows();
                scratch.ahead.spread(self.geometry.strips(task.keys.len()).len(), lines);
                for head in heads.clone() {
                    // mostly the next
                    let next = queries.start.saturating_sub(TILE)..queries.start;
                    scratch.ahead.rows = if head + 1 < heads.end { queries.clone() } else { next };
                    let of_head = if head + 1 < heads.end { head + 1 } else { heads.start };
                    self.sum_queries(scratch, task, (head, of_head), &queries, adding);
                }
            }
        }
    }

    /// Heads of the group that see alike, together; or one by one.
    fn alike(&self, kv_head: usize) -> impl Iterator<Item = Range<usize>> + use<E> {
        let heads = self.geometry.heads(kv_head);
        let step = if self.visibility.per_head() { 1 } else { heads.len() };
        heads.clone().step_by(step).map(move |first| first..first + step)
    }

    /// One tile of queries of one head, for all strips of keys; with the head whose queries are asked for meanwhile.
    fn sum_queries(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        task: &Task,
        (head, head_ahead): (usize, usize),
        queries: &Range<usize>,
        adding: Option<&Adding<'_, Acc<E>>>,
    ) {
        let path = self.geometry.path;
        let tile = self.seen.tile(task.batch, head, queries.start);
        let mut filled = false;
        // of the whole tile that the strip belongs to
        let mut begun = None;
        for (index, strip) in self.geometry.strips(task.keys.len()).enumerate() {
            let whole = strip.rows.start / TILE * TILE;
            if let (Some(adding), Some(before)) = (adding, begun.take_if(|before| *before != whole)) {
                adding.add(scratch, head, task, before, queries);
            }
            let keys = task.keys.start + strip.rows.start..task.keys.start + strip.rows.end;
            let Scratch { sight, bits, .. } = scratch;
            if !sight.look(Lanes::Keys, &self.visibility, tile, keys.clone(), bits) {
                continue;
            }
            if !std::mem::replace(&mut filled, true) {
                scratch.rows_head.fill(path, &self.q, task.batch, head, queries.clone());
                scratch.rows_value.fill(path, &self.dout, task.batch, head, queries.clone());
                let line = task.batch * self.geometry.dims.q_heads + head;
                self.statistics.load(line, queries.clone(), &mut scratch.statistics);
            }
            let Strip { vectors, width, .. } = strip;
            let (batch, queries) = (task.batch, queries.clone());
            let site = Site { batch, head, queries, keys, lanes: Lanes::Keys, strip: index, vectors, width };
            if adding.is_some() && begun.replace(whole).is_none() {
                scratch.whole_tile.clear();
            }
            self.sum_tile(scratch, task, (&site, head_ahead), adding.map(|adding| (adding, strip.rows.start)));
        }
        if let (Some(adding), Some(before)) = (adding, begun) {
            adding.add(scratch, head, task, before, queries);
        }
    }

    /// One tile; for what is added to sums of queries, with the number of its first key in the task.
    fn sum_tile(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        task: &Task,
        (site, head_ahead): (&Site, usize),
        adding: Option<(&Adding<'_, Acc<E>>, usize)>,
    ) {
        let geometry = self.geometry;
        let (head_dim, value_dim) = (geometry.depth(geometry.dims.head_dim), geometry.depth(geometry.dims.value_dim));
        let Scratch { rows_head, rows_value, lanes_head, lanes_value, sums_head, sums_value, tiles, statistics, .. } = scratch;
        let Scratch { sight, filled, whole_tile, sums_bias, ahead, .. } = scratch;
        let of_k = &mut lanes_head[geometry.lanes_of(site, head_dim)];
        let of_v = &mut lanes_value[geometry.lanes_of(site, value_dim)];
        if !std::mem::replace(&mut filled[site.strip], true) {
            fill_lanes(geometry.path, &self.k, (site.batch, task.kv_head), site.keys.clone(), site.width, of_k, geometry.pairs);
            fill_lanes(geometry.path, &self.v, (site.batch, task.kv_head), site.keys.clone(), site.width, of_v, geometry.pairs);
        }
        let operands = Operands { s: (rows_head, of_k), dp: (rows_value, of_v) };
        let [q, dout] = [&self.q, &self.dout].map(|source| Lines::of(source.plane(task.batch, head_ahead)));
        let mut asking = ahead.asking([q, dout], Lines::default());
        differentiate(&self.logits, site, sight, operands, statistics, tiles, &mut asking);
        let span = site.span(sight.rows());
        // a bias before the soft cap goes through it
        let before = self.logits.spec.bias_order == BiasOrder::BeforeSoftCap;
        if before {
            apply_slope(&self.logits, site, &span, tiles);
        }
        if let Some((adding, key)) = adding
            && let Some(bias) = adding.to.bias
        {
            let key_rows = &self.visibility.keys.rows()[site.keys.clone()];
            bias.add(site, task.kv_head, sight.rows(), &tiles.s, key_rows, (sums_bias, key));
        }
        if !before {
            apply_slope(&self.logits, site, &span, tiles);
        }
        if let Some((_, key)) = adding {
            whole_tile.take(geometry.path, site, sight, key % TILE, &tiles.s);
        }
        if geometry.pairs {
            pair_rows(geometry.path, site.vectors, sight.rows(), &mut tiles.dp);
            pair_rows(geometry.path, site.vectors, sight.rows(), &mut tiles.s);
        }
        let of_dv = &mut sums_value[geometry.lanes_of(site, geometry.value_rows())];
        column_products((geometry.path, site.vectors), sight, rows_value, &tiles.dp[span.clone()], of_dv, None, &mut asking);
        let of_dk = &mut sums_head[geometry.lanes_of(site, geometry.head_rows())];
        column_products((geometry.path, site.vectors), sight, rows_head, &tiles.s[span], of_dk, None, &mut asking);
    }

    /// Writes a task's sums into its places of the gradient records.
    pub(crate) fn write(&self, scratch: &Scratch<Acc<E>>, task: &Task, records: &mut [Acc<E>]) {
        let spec = self.logits.spec;
        let record = &self.gradient_record;
        let size = size_of::<Acc<E>>() as u64;
        let at = |bytes: u64| annulus_core::index(bytes / size);
        let (len, scale) = (at(record.bytes()), Acc::<E>::from_f64(spec.scale));
        let fields = [
            (0, spec.dims.head_dim, self.geometry.head_rows(), &scratch.sums_head, scale),
            (1, spec.dims.value_dim, self.geometry.value_rows(), &scratch.sums_value, Acc::<E>::ONE),
        ];
        for (field, dim, rows, sums, scale) in fields {
            let first = at(record.offset(field, task.batch, task.kv_head));
            for strip in self.geometry.strips(task.keys.len()) {
                let sums = &sums[strip.rows.start * rows..][..strip.width * rows];
                each_lane(self.geometry.path, sums, strip.width, strip.rows.len(), dim, |lane, place, sums| {
                    let key = task.keys.start + strip.rows.start + lane;
                    let into = &mut records[key * len + first + place..][..sums.len()];
                    for (into, &sum) in into.iter_mut().zip(sums) {
                        let sum = scale * sum;
                        *into = if self.add { *into + sum } else { sum };
                    }
                });
            }
        }
    }
}
