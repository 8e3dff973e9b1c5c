//! Agreement: a collective call succeeds on all ranks or fails on all ranks.
//!
//! Before a call every rank packs its arguments into a [`Descriptor`], or the error for which it
//! refuses them. After one all-gather all ranks hold the same bytes and derive the same verdict
//! from them, in this order:
//!
//! | contents of the gathered bytes | error |
//! |---|---|
//! | different versions of annulus or of its wire format | [`Error::RankMismatch`], the same on all ranks |
//! | a rank refused its arguments | its own error there, [`Error::Refused`] with the lowest such rank elsewhere |
//! | different fields | [`Error::RankMismatch`] with the first such field and the lowest rank that differs from rank 0 |
//! | malformed bytes | [`Error::Comm`] |
//!
//! After a call [`close`] gathers the status of every rank, and after planning also checks that
//! ranks agree on their messages ([`MessageBalance`]). The transport detects a rank that dies
//! or stays silent meanwhile: see [`threads`](crate::threads).

mod descriptor;

use std::time::Duration;

use annulus_core::{
    AgreedLengths, Error, MessageBalance, Result, Space, Transport, unmatched_pair,
};

pub use self::descriptor::Descriptor;
use self::descriptor::{Combination, EncodedFields, LONGEST_TEXT, decode, encode, take};
use crate::message::cut;

/// Version of everything that ranks send to each other: descriptors, records, tags, rounds.
pub const WIRE_VERSION: u64 = 7;

/// Numbers of a rank in one all-gather of a sum over ranks: a gradient of any size then takes 64
/// KiB per rank, 8 MiB on 128 ranks.
pub(crate) const SUMMANDS_PER_GATHER: usize = 1 << 13;

/// Longest wait in one poll of the transport. Results do not depend on it: deadlines are checked
/// between polls.
const PATIENCE: Duration = Duration::from_millis(20);

/// Gathers the bytes of every rank on every rank. Returns them in the order of ranks.
///
/// # Ordering
/// Collective: every rank of the ring passes the same `round`, which is new. Blocks until all have.
/// # Errors
/// Those of the transport, which also bounds the wait.
pub fn all_gather<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    transport.start_all_gather(round, bytes)?;
    finish_all_gather(transport, round)
}

/// Waits for an all-gather that this rank has started.
pub(crate) fn finish_all_gather<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
) -> Result<Vec<Vec<u8>>> {
    loop {
        if let Some(parts) = transport.try_all_gather(round)? {
            return Ok(parts);
        }
        transport.progress(PATIENCE)?;
    }
}

/// Waits until every rank has called this.
///
/// # Ordering
/// As [`all_gather`].
/// # Errors
/// As [`all_gather`].
pub fn barrier<S: Space>(transport: &mut dyn Transport<S>, round: u64) -> Result<()> {
    all_gather(transport, round, &[]).map(drop)
}

/// Checks that the arguments of all ranks are equal and that none refuses them. Returns the largest
/// value of each [`Descriptor::largest`] field and the sum of each [`Descriptor::sum`] field, in
/// order.
///
/// # Ordering
/// As [`all_gather`].
/// # Errors
/// See the [module](self). A rank that refused returns its own error, except that a difference of
/// versions comes first.
///
/// # Examples
/// ```
/// use annulus_comm::{Descriptor, agree, threads};
/// let ranks = threads::ring(2).into_iter().enumerate().map(|(rank, mut endpoint)| {
///     std::thread::spawn(move || {
///         let mine = Descriptor::new().field("q_len", 128);
///         let mine = mine.field_as("causal", rank as u64, rank == 1);
///         agree(&mut endpoint, 0, Ok(mine)).map_err(|error| error.to_string())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     let error = rank.join().unwrap().unwrap_err();
///     assert_eq!(error, "causal differs between ranks: rank 1 has true, rank 0 has false");
/// }
/// ```
pub fn agree<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    local: Result<Descriptor>,
) -> Result<Vec<u64>> {
    let gathered = all_gather(transport, round, &contribution(&local));
    conclude(transport.rank(), &local, gathered)
}

/// As [`agree`], at the entry of a collective call, which other ranks may make much later.
pub(crate) fn enter<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    local: &Result<Descriptor>,
) -> Result<Vec<u64>> {
    let started = transport.start_entry(round, &contribution(local));
    let gathered = started.and_then(|()| finish_all_gather(transport, round));
    conclude(transport.rank(), local, gathered)
}

/// Derives the result of an agreement from what was gathered. A rank that refused keeps its own
/// error if the all-gather failed.
pub(crate) fn conclude(
    rank: usize,
    local: &Result<Descriptor>,
    gathered: Result<Vec<Vec<u8>>>,
) -> Result<Vec<u64>> {
    match (gathered, local) {
        (Ok(gathered), _) => verdict(rank, local, &gathered),
        (Err(_), Err(own)) => Err(own.clone()),
        (Err(lost), Ok(_)) => Err(lost),
    }
}

/// Ends a collective call: succeeds on all ranks if it succeeded on all of them.
///
/// # Ordering
/// As [`all_gather`].
/// # Errors
/// This rank's own, if it has one. Otherwise, with the lowest rank that failed: [`Error::Aborted`]
/// if its plan is dead, else [`Error::Refused`].
pub fn close<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    local: Result<()>,
) -> Result<()> {
    let status = local.as_ref().map(|()| [].as_slice());
    gather_statuses(transport, round, status).map(drop)
}

/// Ends planning, as [`close`], and checks that each message that a rank sends in a pass has a
/// receive of the same length. `local` is the balance of this rank. `next_round` returns the number
/// of the all-gather that names the ranks whose messages differ.
pub(crate) fn close_plan<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    next_round: impl FnOnce() -> u64,
    local: Result<&MessageBalance>,
) -> Result<AgreedLengths> {
    let own = local.as_ref().map(|balance| balance.sum().to_le_bytes());
    let own = own.as_ref().map(<[u8; 8]>::as_slice).map_err(|error| *error);
    let statuses = gather_statuses(transport, round, own)?;
    let mut total = 0u64;
    for (rank, sum) in statuses.into_iter().enumerate() {
        let sum = sum.try_into().map_err(|_| malformed(rank))?;
        total = total.wrapping_add(u64::from_le_bytes(sum));
    }
    if let Some(agreed) = AgreedLengths::of_total(total) {
        return Ok(agreed);
    }
    let balances = all_gather(transport, next_round(), &local?.encode()).map_err(mid_call)?;
    let [from, to] = unmatched_pair(&balances)
        .ok_or_else(|| Error::internal("messages that differ between no two ranks"))?;
    let what =
        format!("rank {to} expects other messages of rank {from} than rank {from} is to send");
    Err(Error::Comm { peer: from, step: 0, what })
}

/// First byte of the status of a rank whose plan can be used, or is dead.
const REFUSED: u8 = 0;
const DEAD: u8 = 1;
/// First byte of the status of a rank that has succeeded.
const DONE: u8 = 2;

/// Gathers the statuses of all ranks, as [`close`] describes: of a rank that has succeeded `local`,
/// else its error.
fn gather_statuses<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    local: Result<&[u8], &Error>,
) -> Result<Vec<Vec<u8>>> {
    let status = match local {
        Ok(bytes) => [&[DONE], bytes].concat(),
        Err(error) => {
            let kind = if error.is_fatal() { DEAD } else { REFUSED };
            [&[kind], cut(&error.to_string(), LONGEST_TEXT).as_bytes()].concat()
        }
    };
    let gathered = all_gather(transport, round, &status);
    local.map_err(Error::clone)?;
    let mut statuses = gathered.map_err(mid_call)?;
    for (rank, status) in statuses.iter_mut().enumerate() {
        if status.is_empty() {
            return Err(malformed(rank));
        }
        let kind = status.remove(0);
        let what = || String::from_utf8_lossy(status).into_owned();
        match kind {
            DONE => {}
            REFUSED => return Err(Error::Refused { rank, what: what() }),
            _ => return Err(Error::Aborted { rank, what: what() }),
        }
    }
    Ok(statuses)
}

/// Makes an error fatal that occurs within a collective call.
///
/// This rank cannot finish the call, for which the others wait, so the plan is dead whatever the
/// kind of the error.
pub(crate) fn mid_call(error: Error) -> Error {
    if error.is_fatal() {
        return error;
    }
    Error::Device { what: format!("a collective call could not go on: {error}") }
}

/// Returns the version of this build, as a number of the same order.
fn version() -> u64 {
    let part = |text: &str| text.parse::<u64>().unwrap_or(0);
    let major = part(env!("CARGO_PKG_VERSION_MAJOR"));
    let minor = part(env!("CARGO_PKG_VERSION_MINOR"));
    let patch = part(env!("CARGO_PKG_VERSION_PATCH"));
    major << 40 | minor << 20 | patch
}

/// Encodes the contribution of a rank: `[wire version][version]`, in all versions for ever, and in
/// this one what [`encode`] writes.
pub(crate) fn contribution(local: &Result<Descriptor>) -> Vec<u8> {
    let mut bytes = [WIRE_VERSION.to_le_bytes(), version().to_le_bytes()].concat();
    encode(local, &mut bytes);
    bytes
}

fn malformed(peer: usize) -> Error {
    let what = "its part of the agreement is malformed".to_owned();
    Error::Comm { peer, step: 0, what }
}

/// Derives the verdict on the gathered contributions: the same on every rank, except that a rank
/// that refused keeps its own error.
fn verdict(rank: usize, local: &Result<Descriptor>, gathered: &[Vec<u8>]) -> Result<Vec<u64>> {
    let mut bodies: Vec<&[u8]> = gathered.iter().map(Vec::as_slice).collect();
    compare_versions(&mut bodies)?;
    let decode = |(peer, body)| decode(body).ok_or_else(|| malformed(peer));
    let contributions = bodies.into_iter().enumerate().map(decode).collect::<Result<Vec<_>>>()?;
    let mine = local.as_ref().map_err(Error::clone)?;
    let refused = |(rank, arguments): (usize, Result<_, String>)| {
        arguments.map_err(|what| Error::Refused { rank, what })
    };
    let arguments =
        contributions.into_iter().enumerate().map(refused).collect::<Result<Vec<_>>>()?;
    let Some(&rank0) = arguments.first() else { return Err(malformed(rank)) };
    let differs = |fields: &EncodedFields<'_>| fields.names != rank0.names;
    if let Some(rank) = arguments.iter().position(differs) {
        return Err(Error::RankMismatch {
            field: "set of fields".to_owned(),
            rank,
            got: format!("{:016x}", arguments[rank].names),
            rank0: format!("{:016x}", rank0.names),
        });
    }
    compare_fields(mine, &arguments)
}

/// Removes the versions from the front of all contributions and compares them.
fn compare_versions(bodies: &mut [&[u8]]) -> Result<()> {
    let wire_text = |version: u64| version.to_string();
    let version_text = |version: u64| {
        format!("{}.{}.{}", version >> 40, version >> 20 & 0xf_ffff, version & 0xf_ffff)
    };
    let texts: [(&str, &dyn Fn(u64) -> String); 2] =
        [("wire version", &wire_text), ("annulus version", &version_text)];
    for (field, text) in texts {
        let mut values = Vec::with_capacity(bodies.len());
        for (peer, body) in bodies.iter_mut().enumerate() {
            values.push(u64::from_le_bytes(take(body).ok_or_else(|| malformed(peer))?));
        }
        if let Some(rank) = values.iter().position(|&value| value != values[0]) {
            return Err(Error::RankMismatch {
                field: field.to_owned(),
                rank,
                got: text(values[rank]),
                rank0: text(values[0]),
            });
        }
    }
    Ok(())
}

/// Compares the fields of all ranks, whose names are equal. Returns the combined value of each
/// field that may differ.
fn compare_fields(mine: &Descriptor, arguments: &[EncodedFields<'_>]) -> Result<Vec<u64>> {
    let decode = |rank: usize| {
        let fields = arguments[rank].decode(mine.fields.len()).ok_or_else(|| malformed(rank))?;
        Ok((rank, fields))
    };
    let (_, rank0) = decode(0)?;
    // as a rule few ranks differ, so that a call of many ranks costs one comparison of bytes for
    // each
    let differ = (1..arguments.len()).filter(|&rank| arguments[rank] != arguments[0]);
    let others = differ.map(decode).collect::<Result<Vec<_>>>()?;
    let equal = (arguments.len() - others.len()) as u64;
    let mut combined = Vec::new();
    for (index, (field, rank0)) in mine.fields.iter().zip(&rank0).enumerate() {
        let mut others = others.iter().map(|(rank, fields)| (*rank, &fields[index]));
        match field.combination {
            Combination::Equal => {
                if let Some((rank, got)) = others.find(|(_, got)| got.value != rank0.value) {
                    return Err(Error::RankMismatch {
                        field: field.name.to_owned(),
                        rank,
                        got: got.shown(),
                        rank0: rank0.shown(),
                    });
                }
            }
            Combination::Largest => {
                combined.push(others.fold(rank0.value, |largest, (_, got)| largest.max(got.value)));
            }
            Combination::Sum => {
                let of_equal = rank0.value.wrapping_mul(equal);
                combined.push(others.fold(of_equal, |sum, (_, got)| sum.wrapping_add(got.value)));
            }
        }
    }
    Ok(combined)
}

#[cfg(test)]
mod tests {
    use annulus_core::{Channel, Control, MessageHeader};

    use super::*;

    fn descriptor() -> Descriptor {
        (0..60).fold(Descriptor::new(), |descriptor, index| match index % 6 {
            0 => descriptor.field_as("dtype", index, "bf16"),
            1 => descriptor.field_as("window", index, "(128, 0)"),
            _ => descriptor.field("q_len", index << 40),
        })
    }

    #[test]
    fn sixty_fields_fit_into_a_kibibyte() {
        assert!(contribution(&Ok(descriptor())).len() <= 1024);
    }

    #[test]
    fn versions_come_before_everything_else_even_on_a_rank_that_refuses() {
        let refusal = Err(Error::invalid("scale", "NaN", "a finite number"));
        let mut parts = vec![
            contribution(&Ok(descriptor())),
            contribution(&refusal),
            contribution(&Ok(descriptor())),
        ];
        parts[2][8..16].copy_from_slice(&(7u64 << 40 | 8 << 20 | 9).to_le_bytes());
        let rank0 = env!("CARGO_PKG_VERSION").to_owned();
        let versions = Error::RankMismatch {
            field: "annulus version".to_owned(),
            rank: 2,
            got: "7.8.9".to_owned(),
            rank0,
        };
        assert_eq!(verdict(1, &refusal, &parts), Err(versions));
        // behind its number, another wire format may have any content
        parts[1] = 9u64.to_le_bytes().to_vec();
        let format = Error::RankMismatch {
            field: "wire version".to_owned(),
            rank: 1,
            got: "9".to_owned(),
            rank0: WIRE_VERSION.to_string(),
        };
        assert_eq!(verdict(1, &refusal, &parts), Err(format));
    }

    #[test]
    fn of_fields_that_may_differ_the_largest_or_the_sum_is_returned() {
        let of = |tile: u64| {
            let d = descriptor().largest("kv_tile", tile).sum("balance", tile.wrapping_sub(7));
            Ok(d.largest("other", 9 - tile))
        };
        // equal values are added, too
        let parts: Vec<_> = [3, 8, 5, 3].map(|tile| contribution(&of(tile))).into();
        for rank in 0..4 {
            let sum = 0u64.wrapping_sub(4 * 7 - 19);
            assert_eq!(verdict(rank, &of([3, 8, 5, 3][rank]), &parts), Ok(vec![8, sum, 6]));
        }
        assert_eq!(verdict(0, &Ok(descriptor()), &[contribution(&Ok(descriptor()))]), Ok(vec![]));
    }

    #[test]
    fn malformed_contributions_are_errors() {
        let whole = contribution(&Ok(descriptor()));
        for length in 0..whole.len() {
            let result = verdict(0, &Ok(descriptor()), &[whole.clone(), whole[..length].to_vec()]);
            assert!(matches!(result, Err(Error::Comm { peer: 1, .. })), "{length}: {result:?}");
        }
        let mut odd = whole.clone();
        odd[16] = 2;
        assert!(matches!(
            verdict(0, &Ok(descriptor()), &[odd, whole]),
            Err(Error::Comm { peer: 0, .. })
        ));
    }

    /// Runs `plan` on each rank of a ring of threads: the balance that it returns closes a plan.
    fn close_plans(
        ranks: usize,
        balance: impl Fn(usize) -> Result<MessageBalance> + Sync,
    ) -> Vec<Result<AgreedLengths>> {
        let close = |mut endpoint: crate::threads::Threads| {
            let balance = balance(endpoint.rank());
            close_plan(&mut endpoint, 0, || 1, balance.as_ref().map_err(Error::clone))
        };
        std::thread::scope(|scope| {
            let ring = crate::threads::ring(ranks);
            let ranks: Vec<_> =
                ring.into_iter().map(|endpoint| scope.spawn(|| close(endpoint))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn block(peer: usize, bytes: u64) -> MessageHeader {
        let ranges = std::iter::once(0..bytes).collect();
        MessageHeader { peer, channel: Channel::Kv, tag: 3, step: 3, ranges, agreed: None }
    }

    /// Balance of a rank of a ring of three, in which rank 1 sends `bytes` instead of 100 bytes.
    fn balance(rank: usize, bytes: u64) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(rank);
        balance.send(0, &block((rank + 1) % 3, if rank == 1 { bytes } else { 100 }));
        balance.receive(0, &block((rank + 2) % 3, 100));
        balance
    }

    #[test]
    fn plans_with_equal_messages_have_agreed_lengths() {
        let closed = close_plans(3, |rank| Ok(balance(rank, 100)));
        assert!(closed.iter().all(Result::is_ok), "{closed:?}");
    }

    #[test]
    fn the_ranks_whose_messages_differ_are_named_on_all_ranks() {
        let what = "rank 2 expects other messages of rank 1 than rank 1 is to send".to_owned();
        let want = Err(Error::Comm { peer: 1, step: 0, what });
        assert_eq!(close_plans(3, |rank| Ok(balance(rank, 101))), vec![want; 3]);
    }

    #[test]
    fn a_rank_that_cannot_plan_is_named_before_messages_are_compared() {
        let own = Error::out_of_memory("the plan", 7);
        let plan = |rank| if rank == 2 { Err(own.clone()) } else { Ok(balance(rank, 101)) };
        let refused = Err(Error::Refused { rank: 2, what: own.to_string() });
        assert_eq!(close_plans(3, plan), [refused.clone(), refused, Err(own.clone())]);
    }
}
