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

use annulus_core::{Backend, Error, Result};

use super::Ring;
use crate::agreement::{self, Descriptor};

/// An entry that ended at the arrival deadline.
pub(super) struct PendingEntry {
    round: u64,
    /// Contribution of this rank.
    contribution: Vec<u8>,
    /// True if this rank refused the call.
    is_refusal: bool,
}

impl<B: Backend> Ring<B> {
    /// Agrees with all ranks on a call, which this rank makes with `local` or refuses. Returns the
    /// largest value of each [`Descriptor::largest`] field.
    pub(super) fn enter(&mut self, local: &Result<Descriptor>) -> Result<Vec<u64>> {
        let contribution = agreement::contribution(local);
        if let Some(refusal) = self.pending_entry.take_if(|entry| entry.is_refusal) {
            self.finish_entry(refusal)?;
        }
        let entry = match self.pending_entry.take() {
            Some(pending) if pending.contribution == contribution => pending,
            Some(pending) => {
                self.pending_entry = Some(pending);
                let want = "the one that ended at the arrival deadline, again";
                return Err(local
                    .as_ref()
                    .err()
                    .cloned()
                    .unwrap_or_else(|| Error::invalid("call", "another call", want)));
            }
            None => {
                let round = self.round();
                self.transport.start_entry(round, &contribution)?;
                PendingEntry { round, contribution, is_refusal: local.is_err() }
            }
        };
        let gathered = self.finish_entry(entry);
        agreement::conclude(self.rank, local, gathered)
    }

    /// Finishes the all-gather of an entry, or keeps it if it ends at the arrival deadline.
    fn finish_entry(&mut self, entry: PendingEntry) -> Result<Vec<Vec<u8>>> {
        let gathered = agreement::finish_all_gather(self.transport.as_mut(), entry.round);
        if matches!(gathered, Err(Error::ArrivalTimeout { .. })) {
            self.pending_entry = Some(entry);
        }
        gathered
    }
}
