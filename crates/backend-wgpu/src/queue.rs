//! The queue of a device: submissions, the waits for them, and the check that their kernels ran
//! (`pacing.rs`).

use std::{
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Result, Tick};
use wgpu::{CommandEncoder, Device};

use crate::{
    device::{Gpu, PATIENCE},
    errors::device_error,
    pacing::{QueueSilence, Receipt},
};

/// Interval between polls of a wait: doubled from the first to the second, a trade-off between
/// latency and load on the host. A poll never blocks, whatever the driver does with a timeout.
const POLLS: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(320));

impl Gpu {
    /// Submits what `encode` records. `counts`: the commands end with the counting kernel.
    pub(crate) fn submit(
        &self,
        counts: bool,
        encode: impl FnOnce(&Device) -> CommandEncoder,
    ) -> Result<Receipt> {
        self.submissions().submit(counts, |done| {
            self.guard(|device, queue| {
                queue.submit([encode(device).finish()]);
                queue.on_submitted_work_done(done);
            })
        })
    }

    /// Waits until another part of a tile kernel may be submitted. Returns `Break` if the tick did.
    pub(crate) fn wait_for_room(&self, tick: Tick<'_>) -> Result<ControlFlow<()>> {
        self.wait_until(|| self.submissions().has_room(), tick)
    }

    /// Waits until `is_done` after a poll. Returns `Break` if the tick did.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if the device fails, or completes no submission for
    /// [`PATIENCE`].
    pub(crate) fn wait_until(
        &self,
        mut is_done: impl FnMut() -> bool,
        tick: Tick<'_>,
    ) -> Result<ControlFlow<()>> {
        let mut silence = self.silence();
        let mut pause = POLLS.0;
        loop {
            self.poll_once()?;
            if is_done() {
                return Ok(ControlFlow::Continue(()));
            }
            if tick().is_break() {
                return Ok(ControlFlow::Break(()));
            }
            self.check_silence(&mut silence)?;
            thread::sleep(pause);
            pause = (2 * pause).min(POLLS.1);
        }
    }

    /// Starts to measure the time without a completed submission.
    pub(crate) fn silence(&self) -> QueueSilence {
        QueueSilence::new(self.submissions().completed(), Instant::now())
    }

    /// Checks that a submission has completed within [`PATIENCE`]. Called after a poll.
    pub(crate) fn check_silence(&self, silence: &mut QueueSilence) -> Result<()> {
        if !silence.exceeds(PATIENCE, self.submissions().completed(), Instant::now()) {
            return Ok(());
        }
        let seconds = PATIENCE.as_secs();
        Err(device_error(format!("{} completed nothing for {seconds} s", self.name())))
    }

    /// Processes completed work without waiting.
    pub(crate) fn poll_once(&self) -> Result<()> {
        self.poll(wgpu::PollType::Poll)?;
        self.submissions().note_poll();
        Ok(())
    }

    /// Checks the counter of a download against the batches submitted before it.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`]: a batch did not run. The device then counts as lost,
    /// because nothing it holds is known to be right.
    pub(crate) fn check_counter(&self, counter: u32, receipt: Receipt) -> Result<()> {
        if counter == receipt.batches {
            return Ok(());
        }
        self.mark_lost(format!(
            "{} completed {counter} of {} batches of kernels and reported no error; the system \
             ends work that takes too long",
            self.name(),
            receipt.batches
        ))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use annulus_core::{
        Backend, Block, DType, Dims, Error, ForwardPass, Inputs, Outputs, Passes, RankShard,
        RowSet, Rows, SinkShape, Spec, Workspace,
    };

    use super::*;
    use crate::{Options, Tensor, Wgpu, pacing::MAX_IDLE, pacing::MAX_QUEUED, staging::pooled};

    /// A device of its own, or `None` if there is none.
    pub(crate) fn gpu(options: &Options) -> Option<Gpu> {
        if Gpu::list().is_empty() {
            let required = std::env::var("ANNULUS_REQUIRE")
                .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
            assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
            eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
            return None;
        }
        Some(Gpu::open(options).unwrap())
    }

    /// Runs a forward pass over `len` equal rows; returns lse. Each row attends to all keys.
    fn forward(gpu: &Gpu, len: usize, tick: Tick<'_>) -> Result<Vec<f32>> {
        forward_with_sinks(gpu, len, 0, tick)
    }

    /// As [`forward`], and to `sinks` sinks of score 0.
    fn forward_with_sinks(gpu: &Gpu, len: usize, sinks: usize, tick: Tick<'_>) -> Result<Vec<f32>> {
        let mut spec = Spec::new(Dims::new(1, len, 2, 8), DType::F32);
        spec.sinks = (sinks > 0).then_some(SinkShape { per_head: false, count: sinks });
        let rows = Arc::new(Rows::counting(len as u64, 0)?);
        let shard = RankShard {
            spec: Arc::new(spec),
            queries: Arc::clone(&rows),
            keys: Arc::clone(&rows),
            attention_mask: None,
            key_lists: None,
            received_lists: None,
            leaves: None,
            most_block_rows: len as u64,
            most_query_rows: len as u64,
        };
        let backend = Wgpu::new(gpu.clone());
        let mut workspace = backend.workspace(&shard, Passes::Forward)?;
        let tensor = || Tensor::zeros(gpu, [1, len, 2, 8], DType::F32);
        let [q, k, v, mut out] = [tensor()?, tensor()?, tensor()?, tensor()?];
        let mut lse = Tensor::zeros(gpu, [1, 2, len, 1], DType::F32)?;
        let mut block = backend.allocate(len as u64 * shard.spec.kv_row_layout().bytes())?;
        let scores = Tensor::zeros(gpu, [1, sinks.max(1), 1, 1], DType::F32)?;
        let sinks = (sinks > 0).then_some(&scores);
        let inputs = Inputs { q: &q, k: &k, v: &v, bias: None, sinks };
        let mut pass = workspace.forward(inputs, &mut *tick)?;
        let ready = pass.local_kv(&mut block, &RowSet::new())?;
        pass.attend(
            &Block { rows: &rows, buffer: &block, ready: &ready, first_local: Some(0) },
            &mut *tick,
        )?;
        pass.finish(&mut Outputs::new(&mut out, &mut lse), tick)?;
        Ok(lse.download::<f32>()?.into_raw_vec_and_offset().0)
    }

    #[test]
    fn a_pass_of_many_parts_queues_few_and_ticks_between_them() {
        let Some(gpu) = gpu(&Options { most_part_flops: Some(1), ..Options::default() }) else {
            return;
        };
        // 10 × 10 pairs of tiles in two heads, one a part
        let parts = 200;
        let (mut ticks, mut most_queued) = (0, 0);
        let lse = forward(&gpu, 320, &mut || {
            ticks += 1;
            most_queued = most_queued.max(gpu.submissions().queued_parts());
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!(lse.iter().all(|lse| (lse - 320_f32.ln()).abs() < 1e-5));
        assert!(ticks >= parts, "{ticks} ticks");
        assert!((1..=MAX_QUEUED).contains(&most_queued), "{most_queued} parts in the queue");
        assert!(gpu.submissions().batches() >= parts);
        // staging memory does not grow with the number of parts
        gpu.synchronize().unwrap();
        assert!(pooled(&gpu).0 <= MAX_IDLE, "{:?}", pooled(&gpu));
    }

    #[test]
    fn a_tick_that_breaks_ends_the_epilogue_between_parts() {
        let (most, sinks) = (1 << 24, 65_536);
        let options = Options { most_part_flops: Some(most), ..Options::default() };
        let Some(gpu) = gpu(&options) else { return };
        let batches = |breaks_after: u32| {
            let before = gpu.submissions().batches();
            let submitted = || gpu.submissions().batches() - before;
            forward_with_sinks(&gpu, 64, sinks, &mut || {
                if submitted() < breaks_after {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            })
            .unwrap();
            submitted()
        };
        let whole = batches(u32::MAX);
        // 64 rows of 2 heads, an exponential of 32 FLOPs for each sink, read twice
        let work = 64 * 2 * 2 * 32 * sinks as u64;
        assert!(u64::from(whole) >= work / most, "{whole} submissions");
        let ended = batches(whole / 2);
        assert!(ended < whole / 2 + 2, "{ended} of {whole} submissions");
    }

    #[test]
    fn a_tick_that_breaks_ends_the_pass_between_parts() {
        let Some(gpu) = gpu(&Options { most_part_flops: Some(1), ..Options::default() }) else {
            return;
        };
        let mut ticks = 0;
        forward(&gpu, 320, &mut || {
            ticks += 1;
            if ticks < 9 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })
        .unwrap();
        // the tick that breaks, and the first one of the epilogue
        assert_eq!(ticks, 10);
    }

    #[test]
    fn a_batch_that_did_not_run_is_an_error_of_every_later_read() {
        let Some(gpu) = gpu(&Options::default()) else { return };
        let tensor = Tensor::zeros(&gpu, [1, 2, 3, 4], DType::F32).unwrap();
        forward(&gpu, 40, &mut || ControlFlow::Continue(())).unwrap();
        gpu.synchronize().unwrap();
        tensor.download::<f32>().unwrap();
        gpu.submissions().lose_a_batch();
        let errors = [
            gpu.synchronize().unwrap_err(),
            tensor.download::<f32>().unwrap_err(),
            forward(&gpu, 40, &mut || ControlFlow::Continue(())).unwrap_err(),
        ];
        for error in errors {
            let named = |what: &str| what.contains("completed") && what.contains("no error");
            assert!(matches!(&error, Error::Device { what } if named(what)), "{error:?}");
        }
    }
}
