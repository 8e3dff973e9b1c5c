//! Rows that every rank sends, computed without the messages of all ranks.
//!
//! ```text
//! relay    a row with its first user in step f and its last user in step l is sent
//!          in steps 0 … l − 1     as a part of a block
//!          in steps f … l − 1     as a part of a partial gradient
//!          in step  l             as a part of a final gradient, by the last user
//! direct   a row is sent by its owner to each user, and its gradient back
//! ```
//! Rails are as a relay, with first and last users by `rails_users.rs`. Once per node is a relay in
//! each node, to which the owner sends the rows (`node_traffic.rs`).
//!
//! f is ranks − l' with the last user's step l' on the relay in the opposite direction. Steps are
//! added to all ranks that they concern with a difference array, so the time is linear in the runs
//! of all shards, but for a logarithm.

use std::ops::Range;

use super::{
    Route, Schedule, Traffic,
    direct_traffic::direct_traffic,
    last_users::UserCells,
    node_traffic::node_traffic,
    rails_users::{End, for_each_user_of_rails},
};
use crate::{
    NeedsIndex,
    needs::{BatchNeeds, KeyIndex},
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
    /// Computes the traffic of [`Schedule::build`] with gradients. Calls `tick` after each owner.
    pub fn of(needs: &NeedsIndex<'_>, route: Route, tick: &mut dyn FnMut()) -> Self {
        match needs.only_part() {
            Some(part) if route.is_simple_relay() => Self::relay(part, route, tick),
            Some(part) => match route {
                Route::Direct => direct_traffic(part, tick),
                Route::OncePerNode { .. } => node_traffic(part, route, tick),
                _ => Self::rails(part, route, tick),
            },
            None => {
                let schedule = Schedule::build(&needs.to_needs(), route, true);
                let of_rank = (0..needs.ranks()).map(|rank| schedule.sent_by(rank)).collect();
                Self { of_rank, hops: schedule.hops() }
            }
        }
    }

    fn rails(part: &BatchNeeds, route: Route, tick: &mut dyn FnMut()) -> Self {
        let ranks = part.users.len();
        let mut blocks = RailsDifferences::new(route, ranks);
        let mut partial = RailsDifferences::new(route, ranks);
        let mut last = RailsDifferences::new(route, ranks);
        let mut hops = 0;
        for_each_user_of_rails(part, route, End::Last, tick, |users| {
            let rows = users.rows.into();
            blocks.add(users.owner, users.step, rows);
            partial.add(users.owner, users.step, rows);
            last.add_one(users.owner, users.step, rows);
            hops = hops.max(users.step);
            true
        });
        for_each_user_of_rails(part, route, End::First, tick, |users| {
            partial.add(users.owner, users.step, -i128::from(users.rows));
            true
        });
        let [blocks, partial, last] = [blocks, partial, last].map(RailsDifferences::sums);
        let of_rank = (0..ranks).map(|rank| Traffic {
            block_rows: blocks[rank],
            partial_gradient_rows: partial[rank],
            final_gradient_rows: last[rank],
        });
        Self { of_rank: of_rank.collect(), hops }
    }

    /// Returns the rows that all ranks send.
    pub fn total(&self) -> Traffic {
        self.of_rank.iter().copied().sum()
    }

    /// Returns the rows that ranks need of other ranks, each counted once for every rank that needs
    /// it. These are the block rows of [`Route::Direct`], and the fewest of any route.
    pub fn rows_read(needs: &NeedsIndex<'_>, tick: &mut dyn FnMut()) -> u128 {
        block_rows(needs, Route::Direct, u128::MAX, tick)
    }

    fn relay(part: &BatchNeeds, route: Route, tick: &mut dyn FnMut()) -> Self {
        let ranks = part.users.len();
        let mut blocks = Differences::new(route, ranks);
        let mut partial = Differences::new(route, ranks);
        let mut last = Differences::new(route, ranks);
        let mut hops = 0;
        let cells = UserCells::new(part);
        cells.for_each_last_user(route, tick, |users| {
            blocks.add(users.owner, 0, users.step, users.rows.into());
            partial.add(users.owner, 0, users.step, users.rows.into());
            last.add(users.owner, users.step, users.step + 1, users.rows.into());
            hops = hops.max(users.step);
            true
        });
        cells.for_each_last_user(route.opposite(), tick, |users| {
            let first = ranks - users.step;
            partial.add(users.owner, 0, first, -i128::from(users.rows));
            true
        });
        let [blocks, partial, last] = [blocks, partial, last].map(Differences::sums);
        let of_rank = (0..ranks).map(|rank| Traffic {
            block_rows: blocks[rank],
            partial_gradient_rows: partial[rank],
            final_gradient_rows: last[rank],
        });
        Self { of_rank: of_rank.collect(), hops }
    }
}

/// A number for each rank, to which numbers are added for ranges of ranks.
struct Differences {
    route: Route,
    /// By number in the direction of the relay: the sum of this and all before is the number.
    changes: Vec<i128>,
}

impl Differences {
    fn new(route: Route, ranks: usize) -> Self {
        Self { route, changes: vec![0; ranks + 1] }
    }

    /// Adds `rows` for the ranks that compute on a block of `owner` in the steps `first..end`, of
    /// which there are at most as many as ranks.
    fn add(&mut self, owner: usize, first: usize, end: usize, rows: i128) {
        let ranks = self.changes.len() - 1;
        let owner = if self.route == Route::RelayDown { ranks - 1 - owner } else { owner };
        let begin = (owner + first) % ranks;
        let end = begin + (end - first);
        self.changes[begin] += rows;
        self.changes[end.min(ranks)] -= rows;
        if end > ranks {
            // the ranks after the last are the first again
            self.changes[0] += rows;
            self.changes[end - ranks] -= rows;
        }
    }

    /// Returns the numbers by ring index.
    fn sums(self) -> Vec<u128> {
        self.signed_sums().into_iter().map(|sum| u128::try_from(sum).unwrap_or(0)).collect()
    }

    /// Returns the numbers by ring index, which are negative where more was subtracted.
    fn signed_sums(self) -> Vec<i128> {
        let mut sum = 0;
        let mut sums: Vec<i128> = self.changes[..self.changes.len() - 1]
            .iter()
            .map(|change| {
                sum += change;
                sum
            })
            .collect();
        if self.route == Route::RelayDown {
            sums.reverse();
        }
        sums
    }
}

/// As [`Differences`], of rails: numbers of whole nodes, and of ranks.
struct RailsDifferences {
    route: Route,
    size: usize,
    /// By node in the direction of the rails.
    of_nodes: Differences,
    of_ranks: Vec<i128>,
}

impl RailsDifferences {
    fn new(route: Route, ranks: usize) -> Self {
        let size = route.period(ranks);
        let along = if route.is_down() { Route::RelayDown } else { Route::RelayUp };
        let of_nodes = Differences::new(along, ranks / size);
        Self { route, size, of_nodes, of_ranks: vec![0; ranks] }
    }

    /// Adds `rows` for the ranks that compute on a block of `owner` in the steps below `end`.
    fn add(&mut self, owner: usize, end: usize, rows: i128) {
        self.of_nodes.add(owner / self.size, 0, end / self.size, rows);
        for step in end / self.size * self.size..end {
            self.add_one(owner, step, rows);
        }
    }

    /// Adds `rows` for the rank that computes on a block of `owner` in step `step`.
    fn add_one(&mut self, owner: usize, step: usize, rows: i128) {
        let user = self.route.user(owner, step, self.of_ranks.len());
        self.of_ranks[user] += rows;
    }

    /// Returns the numbers by ring index.
    fn sums(self) -> Vec<u128> {
        let of_nodes = self.of_nodes.signed_sums();
        let of_ranks = self.of_ranks.iter().enumerate();
        let sum = |(rank, &rows): (usize, &i128)| rows + of_nodes[rank / self.size];
        of_ranks.map(|of| u128::try_from(sum(of)).unwrap_or(0)).collect()
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
        let least = block_rows(needs, Self::Direct, limit, tick);
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
            let least = least.unwrap_or_else(|| block_rows(needs, Self::Direct, u128::MAX, tick));
            relays.find(|route| block_rows(needs, *route, least, tick) <= least)
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
pub(super) fn needs_more(part: &BatchNeeds, keys: &KeyIndex, user: usize, before: usize) -> bool {
    let rest = part.needed_by_one(user, before);
    let all =
        |(segment, range): &(usize, Range<i64>)| keys.count(*segment, std::slice::from_ref(range));
    let own = part.owned_within(user, &rest);
    let of_before = if before == user { 0 } else { part.owned_within(before, &rest) };
    rest.iter().map(all).sum::<u64>() > own + of_before
}

/// Returns the block rows that all ranks send; some number above `limit` if they are more.
pub(super) fn block_rows(
    needs: &NeedsIndex<'_>,
    route: Route,
    limit: u128,
    tick: &mut dyn FnMut(),
) -> u128 {
    let mut rows = 0;
    match needs.only_part() {
        Some(part) if route.is_simple_relay() => {
            UserCells::new(part).for_each_last_user(route, tick, |users| {
                rows += users.step as u128 * u128::from(users.rows);
                rows <= limit
            });
        }
        Some(part) if route == Route::Direct => {
            let keys = part.keys();
            for (user, intervals) in part.users.iter().enumerate() {
                if rows > limit {
                    break;
                }
                let all = intervals.iter().map(|(segment, range)| {
                    u128::from(keys.count(*segment, std::slice::from_ref(range)))
                });
                rows += all.sum::<u128>() - u128::from(part.owned_within(user, intervals));
                tick();
            }
        }
        Some(part) if route.is_relay() => {
            for_each_user_of_rails(part, route, End::Last, tick, |users| {
                rows += users.step as u128 * u128::from(users.rows);
                rows <= limit
            });
        }
        _ => rows = RingTraffic::of(needs, route, tick).total().block_rows,
    }
    rows
}
