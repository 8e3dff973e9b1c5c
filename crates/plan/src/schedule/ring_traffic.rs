//! Rows that every rank sends, summed over the messages of all ranks, and the route that sends the
//! fewest.
//!
//! The messages are derived block after block, so that memory is O(ranks); the time is O(ranks²).

use std::ops::Range;

use annulus_core::{Channel, Error, Result, RowLayout, RowSet};

use crate::{
    NeedsIndex,
    needs::{BatchNeeds, KeyIndex},
    schedule::{BlockPath, RankSchedule, Route, Schedule, Sent},
};

/// Rows that every rank sends in a forward and in a one-pass backward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingTraffic {
    /// Rows sent by the rank of each ring index.
    pub of_rank: Vec<Traffic>,
    /// Number of steps in which some rank sends a block, at most ranks − 1.
    pub hops: usize,
}

impl RingTraffic {
    /// The most ranks over which messages are summed: in less than a second for these.
    pub const MOST_RANKS: usize = 1024;

    /// Sums the messages of [`Schedule::build`](super::Schedule::build) with gradients. Calls
    /// `tick` after each owner.
    pub fn of(needs: &NeedsIndex<'_>, route: Route, tick: &mut dyn FnMut()) -> Self {
        let mut of_rank = vec![Traffic::default(); needs.ranks()];
        let mut is_hop = vec![false; needs.ranks()];
        Self::for_each_message(needs, route, true, tick, |sent| {
            of_rank[sent.from].add(sent.channel, sent.rows);
            is_hop[sent.step] |= sent.channel == Channel::Kv;
        });
        Self { of_rank, hops: is_hop.into_iter().filter(|&is_hop| is_hop).count() }
    }

    /// Calls `found` with every message of [`RingTraffic::of`], those of gradients if `gradients`.
    pub(crate) fn for_each_message(
        needs: &NeedsIndex<'_>,
        route: Route,
        gradients: bool,
        tick: &mut dyn FnMut(),
        mut found: impl FnMut(Sent<'_>),
    ) {
        let ranks = needs.ranks();
        for owner in 0..ranks {
            let path = BlockPath::new(ranks, route, owner, |user| needs.rows(user, owner));
            path.for_each_message(gradients, &mut found);
            tick();
        }
    }

    /// Checks that messages are summed over at most [`RingTraffic::MOST_RANKS`] ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `ranks`.
    pub fn check_ranks(ranks: usize) -> Result<()> {
        if ranks <= Self::MOST_RANKS {
            return Ok(());
        }
        let want = format!(
            "at most {} for sums over all ranks and for the choice of a strategy",
            Self::MOST_RANKS
        );
        Err(Error::invalid("ranks", ranks, want))
    }

    /// Returns the rows that all ranks send.
    pub fn total(&self) -> Traffic {
        self.of_rank.iter().copied().sum()
    }

    /// Returns the rows that ranks need of other ranks, each counted once for every rank that needs
    /// it. These are the block rows of [`Route::Direct`], and the fewest of any route.
    pub fn rows_read(needs: &NeedsIndex<'_>, tick: &mut dyn FnMut()) -> u128 {
        direct_rows(needs, u128::MAX, tick)
    }
}

impl Route {
    /// Returns the relay or the rails in the other direction; the direct route, and once per node,
    /// are their own.
    pub const fn opposite(self) -> Self {
        match self {
            Self::RelayUp => Self::RelayDown,
            Self::RelayDown => Self::RelayUp,
            Self::Direct | Self::OncePerNode { .. } => self,
            Self::RailsUp { node_ranks } => Self::RailsDown { node_ranks },
            Self::RailsDown { node_ranks } => Self::RailsUp { node_ranks },
        }
    }

    /// Returns the route on which all ranks together send the fewest block rows, and their number;
    /// `None` if all routes send more than `limit`. Of equal routes it is the first of
    /// [`Route::ALL`].
    pub(super) fn cheapest(
        needs: &NeedsIndex<'_>,
        limit: u128,
        tick: &mut dyn FnMut(),
    ) -> Option<(Self, u128)> {
        // no route sends fewer rows than the direct one
        let least = direct_rows(needs, limit, tick);
        (least <= limit).then(|| (Self::sending(needs, Some(least), tick), least))
    }

    /// Returns the route of [`Route::cheapest`]. `least` are the block rows of the direct route, if
    /// they are known.
    pub(super) fn sending(
        needs: &NeedsIndex<'_>,
        least: Option<u128>,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let mut relays = Self::ALL.into_iter().filter(|route| route.is_relay());
        let relay = if let Some(part) = needs.only_part() {
            let keys = part.keys();
            relays.find(|route| !relay_sends_more(part, &keys, *route))
        } else {
            let least = least.unwrap_or_else(|| direct_rows(needs, u128::MAX, tick));
            let mut sent = |route| RingTraffic::of(needs, route, tick).total().block_rows;
            relays.find(|&route| sent(route) <= least)
        };
        relay.unwrap_or(Self::Direct)
    }
}

/// Returns true if a relay sends more rows than the direct route: if some rank needs a row that the
/// rank before it on the relay neither needs nor owns.
fn relay_sends_more(part: &BatchNeeds, keys: &KeyIndex, route: Route) -> bool {
    let ranks = part.users.len();
    (0..ranks).any(|user| needs_more(part, keys, user, route.owner(user, 1 % ranks, ranks)))
}

/// Returns true if `user` needs a row that `before` neither needs nor owns, nor owns it itself.
fn needs_more(part: &BatchNeeds, keys: &KeyIndex, user: usize, before: usize) -> bool {
    let rest = part.needed_by_one(user, before);
    let all =
        |(segment, range): &(usize, Range<i64>)| keys.count(*segment, std::slice::from_ref(range));
    let own = part.owned_within(user, &rest);
    let of_before = if before == user { 0 } else { part.owned_within(before, &rest) };
    rest.iter().map(all).sum::<u64>() > own + of_before
}

/// Returns the block rows that all ranks send on the direct route; some number above `limit` if
/// they are more.
fn direct_rows(needs: &NeedsIndex<'_>, limit: u128, tick: &mut dyn FnMut()) -> u128 {
    let Some(part) = needs.only_part() else {
        return RingTraffic::of(needs, Route::Direct, tick).total().block_rows;
    };
    let keys = part.keys();
    let mut rows = 0;
    for (user, intervals) in part.users.iter().enumerate() {
        if rows > limit {
            break;
        }
        let all = intervals
            .iter()
            .map(|(segment, range)| u128::from(keys.count(*segment, std::slice::from_ref(range))));
        rows += all.sum::<u128>() - u128::from(part.owned_within(user, intervals));
        tick();
    }
    rows
}

/// Ring steps of which the rows are counted for an estimate: they take some tens of milliseconds.
const ESTIMATED_STEPS: usize = 1 << 16;

/// Estimates the block rows that all ranks send: from those that ranks at about equal distances
/// receive, of up to 256 ranks from all.
pub(super) fn estimated_block_rows(
    needs: &NeedsIndex<'_>,
    route: Route,
    tick: &mut dyn FnMut(),
) -> u128 {
    let ranks = needs.ranks();
    let sampled = (ESTIMATED_STEPS / ranks.max(1)).max(4).min(ranks);
    let distance = ranks / sampled.max(1);
    let mut rows = 0u128;
    for index in 0..sampled {
        // one of each stretch of ranks, at another place in each: a distance of whole nodes would
        // find the same place in all nodes
        let place = ((2 * index + 1) * distance / (2 * sampled) + index) % distance;
        let rank = index * ranks / sampled + place;
        let schedule = RankSchedule::derive(needs, route, false, rank, tick);
        let received = schedule.steps.iter().skip(1).map(|step| u128::from(step.rows.count()));
        rows += received.sum::<u128>();
    }
    rows * ranks as u128 / sampled.max(1) as u128
}

/// Rows sent; a row counts once for every message that carries it. The counts have 128 bits,
/// because 2⁵⁹ rows exceed 2⁶⁴ on a ring of 64 ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Rows of blocks ([`Channel::Kv`]).
    pub block_rows: u128,
    /// Rows of partial gradients, sent to the next rank ([`Channel::PartialGrad`]).
    pub partial_gradient_rows: u128,
    /// Rows of final gradients, sent to the owner ([`Channel::FinalGrad`]).
    pub final_gradient_rows: u128,
}

impl Traffic {
    /// Returns the rows that all ranks send on the full ring, which passes every block over all
    /// ranks.
    ///
    /// (ranks − 1)·Σ held rows of blocks, and as many of gradients: each dK/dV accumulator starts
    /// on the rank after its owner and reaches the owner with its last hop, so there is no separate
    /// message to the owner.
    pub fn full_ring(held: &[u64], gradients: bool) -> Self {
        let held_rows: u128 = held.iter().copied().map(u128::from).sum();
        let rows = (held.len() as u128).saturating_sub(1) * held_rows;
        Self {
            block_rows: rows,
            partial_gradient_rows: if gradients { rows } else { 0 },
            final_gradient_rows: 0,
        }
    }

    /// Adds the rows of a message.
    pub(super) fn add(&mut self, channel: Channel, rows: &RowSet) {
        *match channel {
            Channel::Kv => &mut self.block_rows,
            Channel::PartialGrad => &mut self.partial_gradient_rows,
            Channel::FinalGrad => &mut self.final_gradient_rows,
        } += u128::from(rows.count());
    }

    /// Returns the rows of partial and final gradients.
    pub const fn gradient_rows(&self) -> u128 {
        self.partial_gradient_rows + self.final_gradient_rows
    }

    /// Returns the payload bytes, for blocks with the row layout `block` and gradients with
    /// `gradient`.
    pub fn bytes(&self, block: &RowLayout, gradient: &RowLayout) -> u128 {
        self.block_rows * u128::from(block.bytes())
            + self.gradient_rows() * u128::from(gradient.bytes())
    }
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.block_rows += other.block_rows;
        self.partial_gradient_rows += other.partial_gradient_rows;
        self.final_gradient_rows += other.final_gradient_rows;
    }
}

impl std::iter::Sum for Traffic {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        let mut total = Self::default();
        all.for_each(|traffic| total += traffic);
        total
    }
}

impl Schedule {
    /// Returns the rows that `rank` sends; none if it is outside the ring.
    pub fn sent_by(&self, rank: usize) -> Traffic {
        let mut traffic = Traffic::default();
        for step in self.steps.get(rank).into_iter().flatten() {
            for message in step.before.sends.iter().chain(&step.after.sends) {
                traffic.add(message.channel, &message.rows);
            }
        }
        traffic
    }

    /// Returns the rows that all ranks send.
    pub fn sent(&self) -> Traffic {
        (0..self.steps.len()).map(|rank| self.sent_by(rank)).sum()
    }
}
