//! Rows and bytes that a schedule sends, computed from the schedule alone. The bytes that a
//! transport measures must be equal to them.

use super::Schedule;
use annulus_core::{Channel, RowLayout, RowSet};

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
