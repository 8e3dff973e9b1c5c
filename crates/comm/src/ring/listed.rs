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
//!
//! In a two-pass backward a rank sends its queries to the owners of their keys, which compute dK
//! and dV. The message to an owner then also has these queries, their keys among the owner's rows, and
//! the bias of these pairs: each listed pair is told once. The gradient of the bias is not sent: the
//! rank of the query computes it with dQ.

use std::{ops::Range, sync::Arc, time::Instant};

use annulus_core::{
    Backend, Batch, Channel, Error, HostBuffer, KeyLists, MessageHeader, ReceivedLists, Result,
    RowSet, Runs, index, memory,
};
use annulus_plan::{RankNeeds, RingShards, Route, needed_rows};

use super::{
    Ring,
    in_flight::InFlight,
    plan::{Agreed, ListedNeeds},
    program::MessageGroup,
    step_events::{Observer, PassKind},
};
use crate::{agreement::all_gather, delegate::HostMessages};

const WHAT: &str = "rows that key_lists need";

/// Refuses key lists in a ring that cannot send exactly the rows that they need.
pub(super) fn check(agreed: &Agreed, batch: &Batch, ranks: usize) -> Result<()> {
    match agreed.given_route.filter(|_| batch.key_lists.is_some() && ranks > 1) {
        Some(route) if route != Route::Direct => Err(Error::unsupported(
            "key_lists",
            format!("route {}: they need direct", route.name()),
        )),
        _ => Ok(()),
    }
}

/// Pairs of this rank's queries with the keys of one owner.
#[derive(Clone, Default)]
pub(super) struct OwnerPairs {
    /// The owner's local rows that form a visible pair with a query of this rank.
    keys: RowSet,
    /// This rank's local queries of these pairs, in a two-pass backward.
    queries: RowSet,
    /// Their keys among the owner's rows.
    lists: KeyLists,
}

/// Computes the pairs with each owner, by ring index; none with its own rows.
pub(super) fn pairs_by_owner(
    agreed: &Agreed,
    batch: &Batch,
    shards: &RingShards,
    ring_index: usize,
) -> Result<Vec<OwnerPairs>> {
    let ranks = shards.kv.len();
    let mut of_owners = vec![OwnerPairs::default(); ranks];
    let sends_queries = agreed.sends_queries(ranks);
    let queries = index(shards.q[ring_index].rows.len());
    let needed = needed_rows(&agreed.spec, batch, shards, ring_index, |owner, found| {
        let Some(lists) = batch.key_lists.as_deref().filter(|_| sends_queries) else {
            return Ok(());
        };
        let of_owner = &mut of_owners[owner];
        let mut attends = memory::filled(WHAT, queries, false)?;
        found.pairs.mark_queries(&mut attends);
        let rows = (0u64..).zip(attends).filter(|(_, attends)| *attends);
        of_owner.queries = rows.map(|(row, _)| row..row + 1).collect();
        let rows: Vec<u64> = of_owner.queries.iter().collect();
        // row numbers of a shard need not ascend
        let mut owned = memory::zeroed::<u64>(WHAT, agreed.spec.dims.kv_len.div_ceil(64))?;
        found.keys.rows().iter().for_each(|&row| owned[index(row / 64)] |= 1 << (row % 64));
        let is_owned = |key: u32| owned[key as usize / 64] >> (key % 64) & 1 != 0;
        of_owner.lists = lists.restrict(&rows, is_owned)?;
        Ok(())
    })?;
    of_owners.iter_mut().zip(needed).for_each(|(of_owner, keys)| of_owner.keys = keys);
    Ok(of_owners)
}

impl<B: Backend> Ring<B> {
    /// Tells each owner the rows that this rank needs of it, and learns which of its own others
    /// need. `pairs` of `lists` are by ring index.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// Those of the transport.
    pub(super) fn exchange_needs(
        &mut self,
        pairs: &[OwnerPairs],
        lists: &KeyLists,
    ) -> Result<ListedNeeds> {
        let Self { ranks, ring_index, .. } = *self;
        let held = [&self.plan.shards.q, &self.plan.shards.kv]
            .map(|shards| shards.iter().map(|shard| shard.rows.len()).collect::<Vec<_>>());
        let [q_held, kv_held] = &held;
        let none = || vec![(RowSet::new(), false); ranks];
        let mut keys = RankNeeds {
            rank: ring_index,
            held: kv_held[ring_index],
            needed: pairs.iter().map(|pairs| pairs.keys.clone()).collect(),
            asked: none(),
        };
        let mut queries = RankNeeds {
            rank: ring_index,
            held: q_held[ring_index],
            needed: vec![RowSet::new(); ranks],
            asked: none(),
        };
        if ranks == 1 {
            return Ok(ListedNeeds { keys, queries, received: None });
        }
        let mut packed = Vec::new();
        let mut told = Vec::new();
        let is_told = pairs.iter().enumerate().filter(|(_, pairs)| !pairs.keys.is_empty());
        for (owner, pairs) in is_told {
            let start = packed.len() as u64;
            encode(pairs, keys.last_owner() == Some(owner), &mut packed);
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
        let own = ring_index as u64;
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
        let sends_queries = self.agreed.sends_queries(ranks);
        let tile = self.agreed.query_tile();
        let mut received = Vec::new();
        for (header, arrived) in in_flight.wait_all()? {
            let peer = order.ring_index(header.peer);
            let like = sends_queries.then_some(lists);
            let message = decode(arrived.buffer.bytes(), [kv_held[ring_index], q_held[peer]], like);
            let (pairs, is_last) = message.ok_or_else(|| Error::Comm {
                peer: header.peer,
                step: 0,
                what: "the rows that it needs are malformed".into(),
            })?;
            keys.asked[peer] = (pairs.keys, is_last);
            queries.needed[peer] = whole_tiles(&pairs.queries, tile, q_held[peer]);
            if sends_queries {
                let rows = &self.plan.shards.q[peer].rows;
                let numbers = selected(rows, &pairs.queries);
                received.push((numbers, pairs.lists));
            }
        }
        for (user, pairs) in pairs.iter().enumerate().filter(|(_, pairs)| !pairs.keys.is_empty()) {
            let sends =
                |sender: usize| told_bytes(&directories[order.rank(sender)], user as u64).is_some();
            let is_last = RankNeeds::last_owner_of(user, ranks, sends) == Some(ring_index);
            let rows = whole_tiles(&pairs.queries, tile, q_held[ring_index]);
            queries.asked[user] = (rows, is_last);
        }
        let received = if sends_queries {
            let [batches, groups, _] = lists.shape();
            Some(Arc::new(ReceivedLists::merge([batches, groups], &received)?))
        } else {
            None
        };
        Ok(ListedNeeds { keys, queries, received })
    }
}

/// Extends local rows to whole tiles of `tile` rows.
fn whole_tiles(rows: &RowSet, tile: u64, held: u64) -> RowSet {
    let whole =
        |range: &Range<u64>| range.start / tile * tile..range.end.next_multiple_of(tile).min(held);
    rows.ranges().iter().map(whole).collect()
}

/// Returns the row numbers of local rows.
fn selected(rows: &Runs, local: &RowSet) -> Vec<u64> {
    let numbered = rows.iter().zip(0u64..);
    let wanted = numbered.filter(|(_, at)| local.contains(*at));
    wanted.map(|(row, _)| row.cast_unsigned()).collect()
}

/// Returns the bytes that a rank tells the owner `own`, from its directory.
fn told_bytes(directory: &[u8], own: u64) -> Option<u64> {
    let entries = directory.as_chunks::<8>().0.as_chunks::<2>().0;
    let mut entries = entries.iter().map(|entry| entry.map(u64::from_le_bytes));
    entries.find(|[owner, _]| *owner == own).map(|[_, bytes]| bytes)
}

/// Appends what the owner of the keys of `pairs` is told: whether their block is the last one of
/// this rank, both sets of rows, the number of keys of each list, the keys, and their bias.
fn encode(pairs: &OwnerPairs, is_last: bool, into: &mut Vec<u8>) {
    let mut number = |number: u64| into.extend(number.to_le_bytes());
    number(u64::from(is_last));
    for rows in [&pairs.keys, &pairs.queries] {
        number(rows.ranges().len() as u64);
        rows.ranges().iter().flat_map(|range| [range.start, range.end]).for_each(&mut number);
    }
    pairs.lists.counts().for_each(&mut number);
    into.extend(pairs.lists.keys().iter().flat_map(|key| key.to_le_bytes()));
    let bias = pairs.lists.bias().into_iter().flatten();
    into.extend(bias.flat_map(|number| number.to_le_bytes()));
}

/// Decodes [`encode`] for the owner of `held[0]` keys, from a rank of `held[1]` queries. The lists,
/// if there are any, have batch rows and groups as `like` does, and a bias if it does.
fn decode(bytes: &[u8], held: [u64; 2], like: Option<&KeyLists>) -> Option<(OwnerPairs, bool)> {
    let mut rest = bytes;
    let mut number = || -> Option<u64> {
        let (number, after) = rest.split_first_chunk::<8>()?;
        rest = after;
        Some(u64::from_le_bytes(*number))
    };
    let is_last = number()? != 0;
    let mut sets = [RowSet::new(), RowSet::new()];
    for (set, held) in sets.iter_mut().zip(held) {
        let mut ranges = Vec::new();
        for _ in 0..number()? {
            let [start, end] = [number()?, number()?];
            if start >= end || end > held {
                return None;
            }
            ranges.push(start..end);
        }
        *set = ranges.into_iter().collect();
    }
    let [keys, queries] = sets;
    let Some(like) = like else {
        return rest.is_empty().then_some((OwnerPairs { keys, ..OwnerPairs::default() }, is_last));
    };
    let [batches, groups, _] = like.shape();
    let mut offsets = vec![0];
    for _ in 0..(batches * groups) as u64 * queries.count() {
        offsets.push(offsets.last()? + number()?);
    }
    let pairs = usize::try_from(*offsets.last()?).ok()?;
    let (listed, rest) = rest.split_at_checked(pairs.checked_mul(4)?)?;
    let listed = listed.as_chunks::<4>().0.iter().map(|key| u32::from_le_bytes(*key)).collect();
    let lists = KeyLists::by_group([batches, groups], offsets, listed).ok()?;
    let (bias, odd) = rest.as_chunks::<8>();
    let lists = if like.bias().is_some() {
        lists.with_bias(bias.iter().map(|number| f64::from_le_bytes(*number)).collect()).ok()?
    } else {
        lists
    };
    let is_whole = odd.is_empty() && bias.len() == lists.bias().map_or(0, <[f64]>::len);
    is_whole.then_some((OwnerPairs { keys, queries, lists }, is_last))
}
