//! The steps of one rank on the direct route, from the rows that it needs and those that others
//! need of it: without those of two other ranks, which it does not know under key lists.

use annulus_core::{
    Batch, Channel, ListedKeys, ListedPairs, Result, RowSet, Rows, Runs, Spec, Visibility, memory,
};

use super::{Group, Message, RankSchedule, Route, Step};
use crate::{Needs, RingShards};

/// The needs of one rank and those of others of its rows. Lists are indexed by ring index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankNeeds {
    /// Ring index of the rank.
    pub rank: usize,
    /// Number of its own rows.
    pub held: u64,
    /// `needed[owner]`: the owner's local rows that this rank needs; none of its own.
    pub needed: Vec<RowSet>,
    /// `asked[user]`: the rows of this rank that the user needs, and true if their block is the
    /// last one that the user receives.
    pub asked: Vec<(RowSet, bool)>,
}

/// Visible pairs of a rank's queries with the keys of one owner.
#[derive(Debug, Default)]
pub struct OwnerPairs {
    /// The owner's listed keys.
    pub keys: Rows,
    /// The pairs.
    pub pairs: ListedPairs,
}

/// Computes the rows of each owner, by ring index, that form a visible pair with a query of the rank
/// at `rank` in its key lists, which `batch` has. Its own rows are left out. Calls `found` with the
/// pairs of each owner of listed keys.
///
/// # Errors
/// [`annulus_core::Error::OutOfMemory`], and those of `found`.
pub fn needed_rows(
    spec: &Spec,
    batch: &Batch,
    shards: &RingShards,
    rank: usize,
    mut found: impl FnMut(usize, &OwnerPairs) -> Result<()>,
) -> Result<Vec<RowSet>> {
    const WHAT: &str = "rows that key_lists need";
    let ranks = shards.kv.len();
    let mut needed = vec![RowSet::new(); ranks];
    let Some(lists) = batch.key_lists.as_deref().filter(|_| ranks > 1) else { return Ok(needed) };
    let mut listed = memory::zeroed::<u64>(WHAT, spec.dims.kv_len.div_ceil(64))?;
    for &key in lists.keys() {
        listed[key as usize / 64] |= 1 << (key % 64);
    }
    let mut queries = Rows::default();
    let own = &shards.q[rank];
    own.expand(&RowSet::all(own.rows.len()), &mut queries)?;
    let mut of_owner = OwnerPairs::default();
    for (owner, shard) in shards.kv.iter().enumerate().filter(|(owner, _)| *owner != rank) {
        let listed = marked_rows(&shard.rows, &listed);
        if listed.is_empty() {
            continue;
        }
        let OwnerPairs { keys, pairs } = &mut of_owner;
        shard.expand(&listed, keys)?;
        let visibility = Visibility {
            mask: spec.mask.as_ref(),
            attention_mask: batch.attention_mask.as_ref(),
            key_lists: Some(ListedKeys::new(lists, spec.dims.q_heads)),
            queries: &queries,
            keys,
        };
        pairs.refill(&visibility, spec.dims.batch)?;
        let mut visible = memory::filled(WHAT, keys.len(), false)?;
        pairs.all_keys().iter().for_each(|&key| visible[key as usize] = true);
        let rows = listed.iter().zip(visible).filter(|(_, visible)| *visible);
        needed[owner] = rows.map(|(row, _)| row..row + 1).collect();
        found(owner, &of_owner)?;
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

impl RankNeeds {
    /// Returns the owner of the last block that the rank receives on the direct route.
    pub fn last_owner(&self) -> Option<usize> {
        Self::last_owner_of(self.rank, self.needed.len(), |owner| !self.needed[owner].is_empty())
    }

    /// Returns the last of the owners that `user` receives from on the direct route.
    pub fn last_owner_of(
        user: usize,
        ranks: usize,
        receives_from: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let mut owners = (1..ranks).rev().map(|step| Route::Direct.owner(user, step, ranks));
        owners.find(|&owner| receives_from(owner))
    }

    /// Returns the needs of all ranks as far as this one knows them: those between two other ranks
    /// are empty.
    pub fn to_needs(&self) -> Needs {
        let ranks = self.needed.len();
        let mut rows = vec![vec![RowSet::new(); ranks]; ranks];
        for (user, (asked, _)) in self.asked.iter().enumerate() {
            rows[user][self.rank].clone_from(asked);
        }
        rows[self.rank].clone_from(&self.needed);
        rows[self.rank][self.rank] = RowSet::all(self.held);
        let mut held = vec![0; ranks];
        for (owner, held) in held.iter_mut().enumerate() {
            *held = self.needed[owner].ranges().last().map_or(0, |range| range.end);
        }
        held[self.rank] = self.held;
        Needs { held, rows }
    }
}

impl RankSchedule {
    /// Derives the steps of a rank on [`Route::Direct`]; with `gradients` also those of the final
    /// gradients.
    pub fn of_needs(needs: &RankNeeds, gradients: bool) -> Self {
        let RankNeeds { rank, held, needed, asked } = needs;
        let ranks = needed.len();
        let step = |step| Step {
            owner: Route::Direct.owner(*rank, step, ranks),
            rows: if step == 0 { RowSet::all(*held) } else { RowSet::new() },
            before: Group::default(),
            after: Group::default(),
        };
        let mut steps: Vec<Step> = (0..ranks).map(step).collect();
        let mut sends_last_block = vec![false; ranks];
        for step in 1..ranks {
            let owner = steps[step].owner;
            let user = Route::Direct.user(*rank, step, ranks);
            steps[step].rows.clone_from(&needed[owner]);
            let message = |peer, channel, owner, rows: &RowSet| {
                (!rows.is_empty()).then(|| Message { peer, channel, owner, rows: rows.clone() })
            };
            let before = &mut steps[step - 1].before;
            before.receives.extend(message(owner, Channel::Kv, owner, &needed[owner]));
            before.sends.extend(message(user, Channel::Kv, *rank, &asked[user].0));
            sends_last_block[step - 1] = asked[user].1;
            if gradients {
                let after = &mut steps[step].after;
                after.sends.extend(message(owner, Channel::FinalGrad, owner, &needed[owner]));
                after.receives.extend(message(user, Channel::FinalGrad, *rank, &asked[user].0));
            }
        }
        Self { route: Route::Direct, steps, sends_last_block }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Schedule;

    /// The steps of each rank, of needs that all ranks know, are those of the schedule of all ranks.
    #[test]
    fn steps_of_a_rank_are_those_of_the_schedule_of_all_ranks() {
        for ranks in 1..6 {
            let held: Vec<u64> = (0..ranks).map(|rank| 5 + rank as u64).collect();
            let need = |user: usize, owner: usize| -> RowSet {
                let rows = 0..held[owner];
                rows.filter(|row| {
                    user == owner
                        || (row * 7 + user as u64 * 3 + owner as u64) % (ranks as u64) == 1
                })
                .map(|row| row..row + 1)
                .collect()
            };
            let rows = (0..ranks).map(|user| (0..ranks).map(|owner| need(user, owner)).collect());
            let all = Needs { held: held.clone(), rows: rows.collect() };
            let of_rank = |rank: usize| RankNeeds {
                rank,
                held: held[rank],
                needed: (0..ranks)
                    .map(|owner| if owner == rank { RowSet::new() } else { need(rank, owner) })
                    .collect(),
                asked: vec![(RowSet::new(), false); ranks],
            };
            for gradients in [false, true] {
                let schedule = Schedule::build(&all, Route::Direct, gradients);
                for rank in 0..ranks {
                    let mut own = of_rank(rank);
                    for user in (0..ranks).filter(|&user| user != rank) {
                        let is_last = of_rank(user).last_owner() == Some(rank);
                        own.asked[user] = (need(user, rank), is_last);
                    }
                    let derived = RankSchedule::of_needs(&own, gradients);
                    assert_eq!(derived, schedule.of_rank(rank), "rank {rank} of {ranks}");
                }
            }
        }
    }
}
