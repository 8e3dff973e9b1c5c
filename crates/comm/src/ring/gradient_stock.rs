//! Buffers of the gradients of a one-pass backward, each in a place of its own.
//!
//! ```text
//! sums       dK and dV of a block, computed here, until they are sent: sum j in place j % sums
//! arriving   the partial sum that is added to the next of them; after the steps, the tail's sum
//! finals     final gradients that arrive: number j, in the order of the steps, in place j % finals
//! ```
//! The numbers of places and their sizes are those of [`gradient_buffers`].

use annulus_core::{Backend, Channel, GRADIENT_BUFFERS, Result, Space, gradient_buffers};

use super::{pace::Pace, places::Places, program::RankStep};

/// Bytes of the gradients of a pass.
pub(super) struct GradientSizes {
    sums: Vec<u64>,
    arriving: u64,
    finals: Vec<u64>,
    pace: Pace,
}

/// Buffers for the gradients of a pass.
pub(super) struct GradientStock<S: Space> {
    pub(super) sums: Places<S>,
    pub(super) arriving: Places<S>,
    pub(super) finals: Places<S>,
}

impl GradientSizes {
    /// Returns the sizes of the gradients of `steps`, with records of `record_bytes` bytes and
    /// `tail` bytes of the tail of the local block.
    pub(super) fn new(steps: &[RankStep], record_bytes: u64, tail: u64, pace: Pace) -> Self {
        let received = |channel| {
            let messages = steps.iter().flat_map(|step| &step.gradients.receives);
            messages.filter(move |message| message.channel == channel).map(|of| of.bytes())
        };
        let blocks = steps.iter().skip(1).map(|step| step.rows.count());
        Self {
            sums: blocks.filter(|&rows| rows > 0).map(|rows| rows * record_bytes).collect(),
            arriving: received(Channel::PartialGrad).max().unwrap_or(0).max(tail),
            finals: received(Channel::FinalGrad).collect(),
            pace: pace.with_gradients(),
        }
    }

    /// Allocates buffers for the gradients.
    pub(super) fn allocate<B: Backend>(&self, backend: &B) -> Result<GradientStock<B::Space>> {
        let Self { sums, arriving, finals, pace } = self;
        let [sums, finals] = gradient_buffers(sums, finals, pace.ahead, pace.is_unbounded());
        Ok(GradientStock {
            sums: Places::allocate(backend, sums)?,
            arriving: Places::allocate(backend, [*arriving])?,
            finals: Places::allocate(backend, finals)?,
        })
    }
}

impl<S: Space> GradientStock<S> {
    /// Returns a stock without places, of a plan that sends no gradients.
    pub(super) const fn empty() -> Self {
        Self { sums: Places::none(), arriving: Places::none(), finals: Places::none() }
    }

    /// Returns the bytes of all free buffers: of all, between passes.
    pub(super) fn bytes(&self) -> u64 {
        self.sums.bytes() + self.arriving.bytes() + self.finals.bytes()
    }

    /// Returns true if the buffers, which are all free, can hold these gradients as late as those
    /// that [`GradientSizes::allocate`] returns at least can.
    pub(super) fn fits(&self, sizes: &GradientSizes) -> bool {
        let GradientSizes { sums, arriving, finals, pace } = sizes;
        let late = pace.ahead.min(GRADIENT_BUFFERS);
        let fits = |places: &Places<S>, sizes: &[u64], least: usize| {
            places.len() >= sizes.len().min(least) && places.hold(places.len(), sizes)
        };
        fits(&self.sums, sums, late + 1)
            && fits(&self.finals, finals, late)
            && self.arriving.holds(0, *arriving)
    }
}
