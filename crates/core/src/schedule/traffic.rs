//! What a schedule sends, counted before anything is sent: measured bytes must equal these.

use super::{Route, Schedule, build::Way};
use crate::{Channel, Needs, Record};

/// Rows sent, counted anew by every message that carries them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Rows of blocks.
    pub block_rows: u64,
    /// Rows of gradients on their way to the next rank that adds to them.
    pub travel_rows: u64,
    /// Rows of gradients on their way home.
    pub home_rows: u64,
}

impl Traffic {
    /// What all ranks together send around the full, untrimmed ring.
    ///
    /// (ranks − 1)·Σ held rows of blocks, and as many of gradients, whose homecoming that ring does not need
    pub fn full_ring(held: &[u64], gradients: bool) -> Self {
        let rows = (held.len() as u64).saturating_sub(1) * held.iter().sum::<u64>();
        Self { block_rows: rows, travel_rows: if gradients { rows } else { 0 }, home_rows: 0 }
    }

    /// Rows of gradients on either channel.
    pub const fn gradient_rows(&self) -> u64 {
        self.travel_rows + self.home_rows
    }

    /// Payload bytes, if a block's row is one `block` and a gradient's one `gradient`.
    pub fn bytes(&self, block: &Record, gradient: &Record) -> u64 {
        self.block_rows * block.bytes() + self.gradient_rows() * gradient.bytes()
    }
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.block_rows += other.block_rows;
        self.travel_rows += other.travel_rows;
        self.home_rows += other.home_rows;
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
    /// What `rank` sends; nothing if there is no such rank.
    pub fn sent_by(&self, rank: usize) -> Traffic {
        let mut traffic = Traffic::default();
        for message in self.steps.get(rank).into_iter().flatten().flat_map(|step| step.before.sends.iter().chain(&step.after.sends)) {
            *match message.channel {
                Channel::Block => &mut traffic.block_rows,
                Channel::Travel => &mut traffic.travel_rows,
                Channel::Home => &mut traffic.home_rows,
            } += message.rows.count();
        }
        traffic
    }

    /// What all ranks send.
    pub fn sent(&self) -> Traffic {
        (0..self.steps.len()).map(|rank| self.sent_by(rank)).sum()
    }

    /// Rows of blocks that all ranks send.
    pub fn block_rows_sent(&self) -> u64 {
        self.sent().block_rows
    }

    /// Rows of gradients that all ranks send, travelling or on their way home.
    pub fn gradient_rows_sent(&self) -> u64 {
        self.sent().gradient_rows()
    }

    /// Steps in which any rank sends a block: ranks − 1 at most.
    pub fn hops(&self) -> usize {
        (0..self.steps.len())
            .filter(|&t| self.steps.iter().any(|steps| steps.get(t).is_some_and(|step| !step.before.sends.is_empty())))
            .count()
    }
}

impl Route {
    /// The route on which all ranks together send the fewest block rows, and how many; the first of [`Route::ALL`] where several do.
    pub fn cheapest(needs: &Needs) -> (Self, u64) {
        let rows = |route| (0..needs.held.len()).map(|owner| Way::new(needs, route, owner).block_rows()).sum();
        let [first, others @ ..] = Self::ALL;
        others.into_iter().fold((first, rows(first)), |least, route| {
            let candidate = (route, rows(route));
            if candidate.1 < least.1 { candidate } else { least }
        })
    }
}
