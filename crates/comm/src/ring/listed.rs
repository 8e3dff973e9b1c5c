//! Exchange of needs: with key lists no rank knows the rows that others need, so each tells each
//! owner.
//!
//! ```text
//! needed(owner) = rows of the owner with a visible pair in the lists of this rank
//! all-gather    of every rank: its owners and the bytes of what it tells them    O(neighbours)
//! messages      of every rank to each of its owners: the rows
//! asked(user)   = rows of this rank that the user has told
//! ```
//! Blocks then take the direct route, with exactly these rows: a rank receives each distinct remote
//! row that it needs once, and sends one partial gradient for it.

use std::{sync::Arc, time::Instant};

use annulus_core::{
    Backend, Batch, Channel, Error, HostBuffer, ListedKeys, ListedPairs, MessageHeader, Result,
    RowSet, Rows, Runs, Spec, Visibility, memory,
};
use annulus_plan::{RankNeeds, RingShards, Route};

use super::{
    Ring,
    in_flight::InFlight,
    plan::Agreed,
    program::MessageGroup,
    step_events::{Observer, PassKind},
};
use crate::{agreement::all_gather, delegate::HostMessages};

/// Refuses key lists in a ring that cannot send exactly the rows that they need.
pub(super) fn check(agreed: &Agreed, batch: &Batch, ranks: usize) -> Result<()> {
    let Some(lists) = &batch.key_lists else { return Ok(()) };
    if lists.bias().is_some() && agreed.second_derivatives {
        return Err(Error::unsupported("key_list_bias", "second derivatives"));
    }
    if ranks == 1 {
        return Ok(());
    }
    if agreed.spec.leaf_rows.is_some() {
        let what = "key_lists in the reproducible order (reproducible) over several ranks";
        return Err(Error::unsupported(what, "the ring"));
    }
    match agreed.given_route {
        Some(route) if route != Route::Direct => Err(Error::unsupported(
            "key_lists",
            format!("route {}: they need direct", route.name()),
        )),
        _ => Ok(()),
    }
}

/// Computes the rows of each owner, by ring index, that form a visible pair with a query of this
/// rank. Its own rows are left out.
pub(super) fn needed_rows(
    spec: &Spec,
    batch: &Batch,
    shards: &RingShards,
    ring_index: usize,
) -> Result<Vec<RowSet>> {
    const WHAT: &str = "rows that key_lists need";
    let ranks = shards.kv.len();
    let mut needed = vec![RowSet::new(); ranks];
    let Some(lists) = batch.key_lists.as_deref().filter(|_| ranks > 1) else {
        return Ok(needed);
    };
    let mut listed = memory::zeroed::<u64>(WHAT, spec.dims.kv_len.div_ceil(64))?;
    for &key in lists.keys() {
        listed[key as usize / 64] |= 1 << (key % 64);
    }
    let mut queries = Rows::default();
    let own = &shards.q[ring_index];
    own.expand(&RowSet::all(own.rows.len()), &mut queries)?;
    let mut keys = Rows::default();
    let mut pairs = ListedPairs::default();
    let owners = shards.kv.iter().enumerate().filter(|(owner, _)| *owner != ring_index);
    for (owner, shard) in owners {
        let of_owner = marked_rows(&shard.rows, &listed);
        if of_owner.is_empty() {
            continue;
        }
        shard.expand(&of_owner, &mut keys)?;
        let visibility = Visibility {
            mask: spec.mask.as_ref(),
            attention_mask: batch.attention_mask.as_ref(),
            key_lists: Some(ListedKeys { lists, q_heads: spec.dims.q_heads }),
            queries: &queries,
            keys: &keys,
        };
        pairs.refill(&visibility, spec.dims.batch)?;
        let mut visible = memory::filled(WHAT, keys.len(), false)?;
        pairs.all_keys().iter().for_each(|&key| visible[key as usize] = true);
        let rows = of_owner.iter().zip(visible).filter(|(_, visible)| *visible);
        needed[owner] = rows.map(|(row, _)| row..row + 1).collect();
    }
    Ok(needed)
}

/// Returns the local rows whose row numbers are marked.
fn marked_rows(rows: &Runs, marks: &[u64]) -> RowSet {
    let is_marked = |row: i64| {
        let row = row.cast_unsigned();
        marks.get(annulus_core::index(row / 64)).is_some_and(|word| word >> (row % 64) & 1 != 0)
    };
    let marked = rows.iter().zip(0u64..).filter(|(row, _)| is_marked(*row));
    marked.map(|(_, local)| local..local + 1).collect()
}

impl<B: Backend> Ring<B> {
    /// Tells each owner the rows that this rank needs of it, and learns which of its own others
    /// need. `held` is the number of its own rows.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// Those of the transport.
    pub(super) fn exchange_needs(&mut self, held: u64, needed: Vec<RowSet>) -> Result<RankNeeds> {
        let ranks = self.ranks;
        let asked = vec![(RowSet::new(), false); ranks];
        let mut needs = RankNeeds { rank: self.ring_index, held, needed, asked };
        if ranks == 1 {
            return Ok(needs);
        }
        let last = needs.last_owner();
        let mut packed = Vec::new();
        let mut told = Vec::new();
        for (owner, rows) in needs.needed.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let start = packed.len() as u64;
            encode(rows, last == Some(owner), &mut packed);
            told.push((owner, start..packed.len() as u64));
        }
        let numbers =
            told.iter().flat_map(|(owner, bytes)| [*owner as u64, bytes.end - bytes.start]);
        let directory: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
        let round = self.calls.entries.round();
        let directories = all_gather(self.transport.as_mut(), round, &directory)?;

        let order = &self.agreed.order;
        let header = |peer, bytes| MessageHeader {
            peer,
            channel: Channel::Kv,
            tag: 0,
            step: 0,
            ranges: Arc::from([bytes]),
            agreed: None,
        };
        let sends = told.into_iter().map(|(owner, bytes)| header(order.rank(owner), bytes));
        let own = self.ring_index as u64;
        let receives = directories.iter().enumerate().filter(|(peer, _)| *peer != self.rank);
        let receives = receives.filter_map(|(peer, directory)| {
            Some(header(peer, 0..told_bytes(directory, own).filter(|&bytes| bytes > 0)?))
        });
        let messages = MessageGroup { sends: sends.collect(), receives: receives.collect() };
        let mut source = HostBuffer::zeroed(packed.len() as u64)?;
        source.bytes_mut().unwrap_or_default().copy_from_slice(&packed);

        let first_tag = self.calls.take_tags(1);
        // no events: an update is no pass
        let observer = Observer::of_messages(None, self.rank, PassKind::Forward, Instant::now());
        let mut transport = HostMessages::new(self.transport.as_mut());
        let mut in_flight = InFlight::new(&mut transport, first_tag, None, observer);
        let receive = |header: &MessageHeader| HostBuffer::zeroed(header.bytes());
        in_flight.post(&messages, Some(&(source, ())), receive)?;
        for (header, arrived) in in_flight.wait_all()? {
            let asked = decode(arrived.buffer.bytes(), held).ok_or_else(|| Error::Comm {
                peer: header.peer,
                step: 0,
                what: "the rows that it needs are malformed".into(),
            })?;
            needs.asked[order.ring_index(header.peer)] = asked;
        }
        Ok(needs)
    }
}

/// Returns the bytes that a rank tells the owner `own`, from its directory.
fn told_bytes(directory: &[u8], own: u64) -> Option<u64> {
    let entries = directory.as_chunks::<8>().0.as_chunks::<2>().0;
    let mut entries = entries.iter().map(|entry| entry.map(u64::from_le_bytes));
    entries.find(|[owner, _]| *owner == own).map(|[_, bytes]| bytes)
}

/// Appends whether the block is the last one of its receiver, and the ranges of the rows.
fn encode(rows: &RowSet, is_last: bool, into: &mut Vec<u8>) {
    into.extend(u64::from(is_last).to_le_bytes());
    for range in rows.ranges() {
        into.extend(range.start.to_le_bytes());
        into.extend(range.end.to_le_bytes());
    }
}

/// Decodes [`encode`], of rows below `held`.
fn decode(bytes: &[u8], held: u64) -> Option<(RowSet, bool)> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    let (&is_last, ranges) = numbers.split_first()?;
    let (ranges, odd) = ranges.as_chunks::<2>();
    let ranges = ranges.iter().map(|range| range.map(u64::from_le_bytes));
    let rows: RowSet = ranges.clone().map(|[start, end]| start..end).collect();
    let fits = ranges.into_iter().all(|[start, end]| start < end && end <= held);
    let is_whole = rest.is_empty() && odd.is_empty() && fits;
    is_whole.then_some((rows, u64::from_le_bytes(is_last) != 0))
}
