//! Submissions of a device: their order, the parts in the queue, and the proof that kernels ran.
//!
//! wgpu ignores the status of a Metal command buffer, so one that the system ends early looks
//! complete. The last kernel of each batch therefore adds 1 to a counter on the device (kernel:
//! `step.wgsl`; Metal runs the kernels of a pass in order). Every download includes the counter,
//! and is an error unless it equals the number of batches submitted before.
//!
//! Idle staging buffers of one device.
//!
//! Work per submission, from measured throughput, and detection of a device that hangs.
//!
//! Operating systems end a submission that takes longer than about 2 s (amdgpu and Windows: the
//! device is lost; Metal: the submission ends as if it had succeeded). So the workgroups of a tile
//! kernel are divided into parts of about [`TARGET`] each. Workgroups share no outputs, so the
//! division changes no bit of a result and may depend on timings.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::Result;
use wgpu::{BufferUsages, Device};

use crate::{adapter::lock, errors::with_error_scopes, kernels::KernelVariant};

/// Submissions of a device, shared by all its handles.
#[derive(Debug)]
pub(crate) struct Submissions {
    order: Mutex<QueueOrder>,
    /// Number of the latest submission known to be complete.
    completed: Arc<AtomicU64>,
    pacer: Mutex<Pacer>,
    /// Number of kernel batches that ran.
    pub(crate) counter: wgpu::Buffer,
}

/// Numbers of submissions, in the order of the queue.
#[derive(Debug, Default)]
struct QueueOrder {
    submissions: u64,
    /// Submissions that count themselves.
    batches: u32,
}

/// Place of a submission in the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Receipt {
    pub(crate) submission: u64,
    /// Batches up to this submission.
    pub(crate) batches: u32,
}

impl Submissions {
    /// Creates the counter. No part will have more than `most_work` FLOPs.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`], [`annulus_core::Error::Device`].
    pub(crate) fn new(device: &Device, most_work: Option<u64>) -> Result<Self> {
        let descriptor = wgpu::BufferDescriptor {
            label: Some("counter"),
            size: 4,
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        };
        // wgpu initializes it to 0
        let (counter, errors) = with_error_scopes(device, || device.create_buffer(&descriptor));
        errors.into_error().map_or(Ok(()), Err)?;
        Ok(Self {
            order: Mutex::default(),
            completed: Arc::default(),
            pacer: Mutex::new(Pacer::new(most_work, Instant::now())),
            counter,
        })
    }

    /// Numbers a submission that `send` passes to the queue, with a function to call when it is
    /// complete. `counts`: its last kernel counts it.
    ///
    /// # Errors
    /// Those of `send`; the submission then has no number.
    pub(crate) fn submit(
        &self,
        counts: bool,
        send: impl FnOnce(Box<dyn FnOnce() + Send>) -> Result<()>,
    ) -> Result<Receipt> {
        let mut order = lock(&self.order);
        let submission = order.submissions + 1;
        let completed = Arc::clone(&self.completed);
        send(Box::new(move || {
            completed.fetch_max(submission, Ordering::Release);
        }))?;
        order.submissions = submission;
        order.batches = order.batches.wrapping_add(u32::from(counts));
        Ok(Receipt { submission, batches: order.batches })
    }

    /// Returns the number of the latest submission known to be complete.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// Records a submission as a part of a tile kernel of `work` FLOPs.
    pub(crate) fn add_part(&self, receipt: Receipt, variant: KernelVariant, work: u64) {
        lock(&self.pacer).add(receipt.submission, variant, work, Instant::now());
    }

    /// Returns the bound of the next part of a kernel in FLOPs.
    pub(crate) fn part_budget(&self, variant: KernelVariant) -> u64 {
        lock(&self.pacer).budget(variant)
    }

    /// True if another part of a tile kernel may be submitted.
    pub(crate) fn has_room(&self) -> bool {
        lock(&self.pacer).has_room()
    }

    /// Records a poll of the device.
    pub(crate) fn note_poll(&self) {
        // read before the lock, so that the latest poll recorded is not later than this one
        let completed = self.completed();
        lock(&self.pacer).poll(completed, Instant::now());
    }

    /// Number of parts in the queue.
    #[cfg(test)]
    pub(crate) fn queued_parts(&self) -> usize {
        lock(&self.pacer).queued()
    }

    /// Number of batches submitted.
    #[cfg(test)]
    pub(crate) fn batches(&self) -> u32 {
        lock(&self.order).batches
    }

    /// Counts a batch that never runs, as one that the system ends early.
    #[cfg(test)]
    pub(crate) fn lose_a_batch(&self) {
        lock(&self.order).batches += 1;
    }
}

/// Upper bound of the buffers of a pool: a few plans at a time, each with a few in the queue.
pub(crate) const MAX_IDLE: usize = 8;

/// Pools of one device, and the bytes that went through them.
#[derive(Debug, Default)]
pub(crate) struct StagingPools {
    /// Mapped for writing.
    pub(crate) uploads: Arc<Mutex<Vec<wgpu::Buffer>>>,
    /// Unmapped.
    pub(crate) downloads: Mutex<Vec<wgpu::Buffer>>,
    /// Bytes of upload buffers that queued work has not read.
    pub(crate) uploading: Arc<AtomicU64>,
    pub(crate) bytes_to_device: AtomicU64,
    pub(crate) bytes_to_host: AtomicU64,
    pub(crate) mask_bytes: AtomicU64,
}

/// Removes the smallest buffer of a pool that holds `bytes`.
pub(crate) fn take_fitting(pool: &mut Vec<wgpu::Buffer>, bytes: u64) -> Option<wgpu::Buffer> {
    let fitting = pool.iter().enumerate().filter(|(_, buffer)| buffer.size() >= bytes);
    let index = fitting.min_by_key(|(_, buffer)| buffer.size()).map(|(index, _)| index)?;
    Some(pool.swap_remove(index))
}

/// Returns a buffer to its pool. Drops the smallest one if there are too many, because large ones
/// take longest to create.
pub(crate) fn keep(pool: &mut Vec<wgpu::Buffer>, buffer: wgpu::Buffer) {
    pool.push(buffer);
    if pool.len() > MAX_IDLE {
        let sizes = pool.iter().map(wgpu::Buffer::size).enumerate();
        if let Some((smallest, _)) = sizes.min_by_key(|&(_, size)| size) {
            pool.swap_remove(smallest);
        }
    }
}

/// Time that a part should take: a twentieth of the shortest watchdog, so that a part may take
/// several times as long as measured before, and long beside the cost of a submission (below 0.1
/// ms).
const TARGET: Duration = Duration::from_millis(100);

/// Work of the first part of a kernel in FLOPs: 0.1 s at 10 GFLOP/s, which every GPU exceeds even
/// with spilled registers.
const FIRST_WORK: u64 = 1 << 30;

/// Least budget. A device that computes slower than 160 MFLOP/s waits for something else.
const LEAST_WORK: u64 = 1 << 24;

/// Largest budget, far above any device's work in [`TARGET`].
const MOST_WORK: u64 = 1 << 50;

/// Upper bound of the parts in the queue: the next one must be there when one ends, and each holds
/// a staging buffer.
pub(crate) const MAX_QUEUED: usize = 4;

/// A part of a tile kernel in the queue.
#[derive(Debug)]
struct QueuedPart {
    /// Number of its submission.
    submission: u64,
    variant: KernelVariant,
    /// FLOPs.
    work: u64,
    submitted: Instant,
}

/// Parts in the queue of a device, and the budget of each kernel.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Upper bound of every budget, if any.
    most_work: Option<u64>,
    budgets: HashMap<KernelVariant, u64>,
    queued: VecDeque<QueuedPart>,
    /// Time of the latest poll.
    polled: Instant,
    /// Time before which the latest completed part had not ended.
    latest_end: Instant,
}

impl Pacer {
    /// Starts with no part; no budget will exceed `most_work`.
    pub(crate) fn new(most_work: Option<u64>, now: Instant) -> Self {
        Self {
            most_work,
            budgets: HashMap::new(),
            queued: VecDeque::new(),
            polled: now,
            latest_end: now,
        }
    }

    /// Returns the bound of the next part of a kernel in FLOPs.
    pub(crate) fn budget(&self, variant: KernelVariant) -> u64 {
        let budget = self.budgets.get(&variant).copied().unwrap_or(FIRST_WORK);
        self.most_work.map_or(budget, |most| budget.min(most))
    }

    /// True if another part may be submitted.
    pub(crate) fn has_room(&self) -> bool {
        self.queued.len() < MAX_QUEUED
    }

    /// Number of parts in the queue.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Records the submission of a part.
    pub(crate) fn add(&mut self, submission: u64, variant: KernelVariant, work: u64, now: Instant) {
        self.queued.push_back(QueuedPart { submission, variant, work, submitted: now });
    }

    /// Removes the parts that a poll at `now` reports as completed, up to submission `completed`,
    /// and adapts the budgets of their kernels.
    ///
    /// A part ended after the poll before, so the time measured is an upper bound of the time taken
    /// however seldom the host polls, and the budget is not too large for it.
    pub(crate) fn poll(&mut self, completed: u64, now: Instant) {
        let earlier = std::mem::replace(&mut self.polled, now);
        let count = self.queued.iter().take_while(|part| part.submission <= completed).count();
        let Some(first) = self.queued.front().filter(|_| count > 0) else { return };
        let begin = self.latest_end.max(first.submitted);
        let mean = now.saturating_duration_since(begin) / count as u32;
        self.latest_end = earlier;
        for part in self.queued.drain(..count) {
            let budget = self.budgets.entry(part.variant).or_insert(FIRST_WORK);
            *budget = adapted(*budget, part.work, mean);
        }
    }
}

/// Returns the budget after a part of `work` FLOPs that took `time`: reduced at once if it took
/// too long, doubled at most if it was short.
fn adapted(budget: u64, work: u64, time: Duration) -> u64 {
    let factor = TARGET.as_secs_f64() / time.as_secs_f64().max(1e-6);
    let scaled = |work: u64, factor: f64| (work as f64 * factor) as u64;
    let adapted = if factor < 1.0 {
        budget.min(scaled(work, factor))
    } else if work >= budget / 2 {
        scaled(budget, factor.min(2.0))
    } else {
        budget
    };
    adapted.clamp(LEAST_WORK, MOST_WORK)
}

/// Time without a completed submission. The time of all queued work has no bound, but that of one
/// submission does.
#[derive(Debug)]
pub(crate) struct QueueSilence {
    completed: u64,
    since: Instant,
}

impl QueueSilence {
    /// Starts at `now`, with `completed` submissions so far.
    pub(crate) const fn new(completed: u64, now: Instant) -> Self {
        Self { completed, since: now }
    }

    /// True if no submission has completed for longer than `patience`.
    pub(crate) fn exceeds(&mut self, patience: Duration, completed: u64, now: Instant) -> bool {
        if completed != self.completed {
            *self = Self::new(completed, now);
        }
        now.saturating_duration_since(self.since) > patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: KernelVariant = KernelVariant::Sinks;

    /// Device that computes `rate` FLOPs per second, one part after the other, polled every `poll`.
    fn simulate(rate: f64, poll: Duration, parts: usize) -> (Pacer, Vec<(u64, Duration)>) {
        let start = Instant::now();
        let mut pacer = Pacer::new(None, start);
        let mut ends: VecDeque<(u64, Instant)> = VecDeque::new();
        let mut taken = Vec::new();
        let (mut now, mut free, mut completed, mut submission) = (start, start, 0, 0);
        while taken.len() < parts {
            while pacer.has_room() {
                submission += 1;
                let work = pacer.budget(KERNEL);
                let time = Duration::from_secs_f64(work as f64 / rate);
                taken.push((work, time));
                free = free.max(now) + time;
                ends.push_back((submission, free));
                pacer.add(submission, KERNEL, work, now);
            }
            now += poll;
            while let Some(&(number, _)) = ends.front().filter(|(_, end)| *end <= now) {
                completed = number;
                ends.pop_front();
            }
            pacer.poll(completed, now);
        }
        (pacer, taken)
    }

    #[test]
    fn parts_become_as_long_as_intended_and_never_long_enough_for_a_watchdog() {
        // from a tenth of the rate of a slow integrated GPU to beyond the fastest
        for rate in [5e9, 1e11, 1e13, 5e14] {
            // from sharp measurements to a host that prepares work for longer than a part takes
            for poll in [100, 3_000, 250_000].map(Duration::from_micros) {
                let (_, taken) = simulate(rate, poll, 60);
                let longest = taken.iter().map(|(_, time)| *time).max().unwrap();
                assert!(longest <= 3 * TARGET, "{rate}, {poll:?}: {longest:?}");
                let (_, last) = taken[taken.len() - 1];
                let least = if poll < TARGET { TARGET / 4 } else { TARGET / 100 };
                assert!(last >= least, "{rate}, {poll:?}: {last:?} at the end");
            }
        }
    }

    #[test]
    fn a_slower_device_gets_less_work_at_once() {
        let (mut pacer, _) = simulate(1e13, Duration::from_millis(1), 60);
        let before = pacer.budget(KERNEL);
        let now = pacer.polled;
        while !pacer.queued.is_empty() {
            pacer.poll(u64::MAX, now);
        }
        pacer.latest_end = now;
        pacer.add(u64::MAX, KERNEL, before, now);
        pacer.poll(u64::MAX, now + 10 * TARGET);
        assert!(pacer.budget(KERNEL) <= before / 9, "{} after {before}", pacer.budget(KERNEL));
        // other kernels have budgets of their own
        assert_eq!(pacer.budget(KernelVariant::BiasRows), FIRST_WORK);
    }

    #[test]
    fn a_part_that_ended_long_before_a_poll_does_not_shorten_the_next_one() {
        let start = Instant::now();
        let mut pacer = Pacer::new(None, start);
        pacer.add(1, KERNEL, FIRST_WORK, start);
        pacer.add(2, KERNEL, FIRST_WORK, start);
        // the host is busy for three targets; the first part took a tenth of one, and the second
        // all the time since
        pacer.poll(1, start + 3 * TARGET);
        pacer.poll(2, start + 3 * TARGET + TARGET / 10);
        // by the time since the poll between them, its work would be doubled
        assert!(pacer.budget(KERNEL) <= FIRST_WORK / 3, "{}", pacer.budget(KERNEL));
    }

    #[test]
    fn a_part_of_less_work_than_estimated_does_not_make_the_next_one_too_long() {
        let now = Instant::now();
        let mut pacer = Pacer::new(None, now);
        // its estimate is 50 times too large
        pacer.add(1, KERNEL, FIRST_WORK, now);
        pacer.poll(1, now + TARGET / 50);
        assert_eq!(pacer.budget(KERNEL), 2 * FIRST_WORK);
    }

    #[test]
    fn small_problems_do_not_reduce_the_budget() {
        let now = Instant::now();
        let mut pacer = Pacer::new(None, now);
        for n in 1..100 {
            let at = now + n * Duration::from_millis(1);
            pacer.add(u64::from(n), KERNEL, 1000, at);
            pacer.poll(u64::from(n), at + Duration::from_micros(500));
        }
        assert_eq!(pacer.budget(KERNEL), FIRST_WORK);
    }

    #[test]
    fn few_parts_are_queued() {
        let now = Instant::now();
        let mut pacer = Pacer::new(Some(7), now);
        assert_eq!(pacer.budget(KERNEL), 7);
        for number in 1..=MAX_QUEUED as u64 {
            assert!(pacer.has_room());
            pacer.add(number, KERNEL, 1, now);
        }
        assert!(!pacer.has_room());
        pacer.poll(0, now);
        assert!(!pacer.has_room());
        pacer.poll(1, now);
        assert!(pacer.has_room());
    }

    #[test]
    fn only_silence_ends_the_patience() {
        let start = Instant::now();
        let patience = Duration::from_secs(60);
        let mut silence = QueueSilence::new(3, start);
        let mut now = start;
        // an hour of work, of which something completes every 50 s
        for completed in 4..76 {
            now += Duration::from_secs(50);
            assert!(!silence.exceeds(patience, completed, now));
        }
        assert!(!silence.exceeds(patience, 75, now + Duration::from_secs(60)));
        assert!(silence.exceeds(patience, 75, now + Duration::from_secs(61)));
    }
}
