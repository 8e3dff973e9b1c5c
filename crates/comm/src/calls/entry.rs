//! Entry of a collective call: the agreement of all ranks on it, which waits for late ranks.
//!
//! An entry that ends at the arrival deadline has changed nothing, but the other ranks have this
//! rank's contribution to its all-gather, or will get it. So the all-gather is kept, and continued
//! by the next call:
//!
//! | the entry that ended | the next call |
//! |---|---|
//! | of a call | is the same call again |
//! | of a call that this rank refused | finishes that entry, then enters itself |

use annulus_core::{Error, Result, Space, Transport};

use crate::agreement::{self, Descriptor};

/// Numbers of the all-gathers of a plan, and its entry that ended at the arrival deadline.
pub(crate) struct Entries {
    next_round: u64,
    pending: Option<PendingEntry>,
}

/// An entry that ended at the arrival deadline.
struct PendingEntry {
    round: u64,
    /// Contribution of this rank.
    contribution: Vec<u8>,
    /// True if this rank refused the call.
    is_refusal: bool,
}

impl Entries {
    /// Starts with all-gather `next_round`.
    pub(crate) const fn new(next_round: u64) -> Self {
        Self { next_round, pending: None }
    }

    /// Returns the number of the next all-gather.
    pub(crate) const fn round(&mut self) -> u64 {
        self.next_round += 1;
        self.next_round - 1
    }

    /// Agrees with all ranks on a call, which this rank makes with `local` or refuses. Returns the
    /// largest value of each [`Descriptor::largest`] field.
    pub(crate) fn enter<S: Space>(
        &mut self,
        transport: &mut dyn Transport<S>,
        local: &Result<Descriptor>,
    ) -> Result<Vec<u64>> {
        let contribution = agreement::contribution(local);
        if let Some(refusal) = self.pending.take_if(|entry| entry.is_refusal) {
            self.finish(transport, refusal)?;
        }
        let entry = match self.pending.take() {
            Some(pending) if pending.contribution == contribution => pending,
            Some(pending) => {
                self.pending = Some(pending);
                let want = "the one that ended at the arrival deadline, again";
                return Err(local
                    .as_ref()
                    .err()
                    .cloned()
                    .unwrap_or_else(|| Error::invalid("call", "another call", want)));
            }
            None => {
                let round = self.round();
                transport.start_entry(round, &contribution)?;
                PendingEntry { round, contribution, is_refusal: local.is_err() }
            }
        };
        let rank = transport.rank();
        let gathered = self.finish(transport, entry);
        agreement::conclude(rank, local, gathered)
    }

    /// Finishes the all-gather of an entry, or keeps it if it ends at the arrival deadline.
    fn finish<S: Space>(
        &mut self,
        transport: &mut dyn Transport<S>,
        entry: PendingEntry,
    ) -> Result<Vec<Vec<u8>>> {
        let gathered = agreement::finish_all_gather(transport, entry.round);
        if matches!(gathered, Err(Error::ArrivalTimeout { .. })) {
            self.pending = Some(entry);
        }
        gathered
    }
}
