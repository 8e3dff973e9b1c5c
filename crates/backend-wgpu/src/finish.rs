//! Epilogues. Forward: adds the sinks, normalizes, rounds once and writes. Backward: rounds once
//! and writes. Kernels: `finish_rows.wgsl`, `copy.wgsl`, `sinks.wgsl`, `bias_rows.wgsl`.
//!
//! Parts of the kernels of sinks, whose work is rows × sinks: each has a range of the workgroups
//! and of the steps that an invocation takes, so that its work and its loops are bounded.

use std::ops::{ControlFlow, Range};

use annulus_core::{Gradients, Outputs, Result, Spec, Tick, ViewMut};

use crate::{
    copy::{Copy, CopySide, LinearCopy, bind_whole, launch_linear},
    device::Gpu,
    kernels::{BiasAxes, CopyMode, KernelVariant, Storage, params::RowParams},
    launch::{BoundResource, Commands},
    memory::{GpuBuffer, Tensor, WgpuSpace, check_tensors},
    pass_context::{
        BackwardBuffers, BackwardContext, ForwardBuffers, ForwardContext, RankKernels, bias_axes,
    },
};

/// Writes out and statistics. Ticks between the parts of the kernel of sinks.
pub(crate) fn write_outputs(
    pass: ForwardContext<'_>,
    outputs: &mut Outputs<ViewMut<'_, WgpuSpace>>,
    tick: Tick<'_>,
) -> Result<()> {
    let ForwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, .. } = kernels;
    let ForwardBuffers { acc, softmax_statistics } = state;
    check_tensors(
        gpu,
        [
            ("out", Some(&*outputs.out)),
            ("lse", Some(&*outputs.lse)),
            ("max", outputs.max.as_deref()),
            ("sum", outputs.sum.as_deref()),
            ("ties", outputs.ties.as_deref()),
        ],
    )?;
    let spec = &shard.spec;
    let dims = shard.spec.dims;
    let rows = shard.queries.len();
    let mut commands = Commands::new(gpu, arena);
    let items = dims.batch * rows * dims.q_heads;
    let mut bindings = vec![
        BoundResource::whole(&softmax_statistics.buffer),
        bind_whole(inputs.sinks.map(|sinks| &sinks.buffer)),
        BoundResource::whole(&outputs.lse.buffer),
    ];
    // in the order of the kernel's bindings
    let statistics = [&outputs.max, &outputs.sum, &outputs.ties];
    bindings
        .extend(statistics.into_iter().flatten().map(|view| BoundResource::whole(&view.buffer)));
    let sinks = spec.sinks;
    let count = sinks.map_or(0, |sinks| sinks.count);
    let with_sums = outputs.max.is_some();
    let variant = KernelVariant::FinishRows { with_sums, normalize: spec.normalize };
    let groups = items.div_ceil(64);
    let mut parts = SinkParts::new(groups, 2 * count, gpu.most_steps(MAX_STEPS), STEP_FLOPS);
    while let Some(part) = parts.next(gpu.submissions().part_budget(variant)) {
        commands.launch(variant, part.groups.len() as u64, bindings.clone(), |grid_width| {
            RowParams {
                count: items.min(64 * part.groups.end) as u32,
                grid_width,
                all_rows: rows as u32,
                heads: dims.q_heads as u32,
                sinks: count as u32,
                sinks_head: sinks.filter(|sinks| sinks.per_head).map_or(0, |_| count as u32),
                group_first: part.groups.start as u32,
                step_first: part.steps.start as u32,
                step_end: part.steps.end as u32,
                ..RowParams::default()
            }
        })?;
        // the last part is submitted with the copy of the outputs
        if !part.is_last {
            if submit_part(gpu, commands, (variant, part.work), tick)?.is_break() {
                return Ok(());
            }
            commands = Commands::new(gpu, arena);
        }
    }
    let storage = results_storage(spec, tile.storage);
    let (heads, dim) = (dims.q_heads, dims.value_dim);
    let into = CopySide::dense(&outputs.out.buffer, [rows, heads, dim], storage.bytes());
    let factors = Some(CopySide::dense(&softmax_statistics.buffer, [rows, heads, 4], 4));
    let mode = CopyMode::ByRow(storage);
    let copy = Copy { factors, ..Copy::new(into, [dims.batch, rows, heads, dim], mode) };
    acc.launch_copy(copy, gpu, &mut commands)?;
    commands.submit().map(drop)
}

/// Submits a part of a kernel of sinks, and its work, once the queue has room for it. Returns
/// `Break` if the tick did.
fn submit_part(
    gpu: &Gpu,
    commands: Commands<'_>,
    (variant, work): (KernelVariant, u64),
    tick: Tick<'_>,
) -> Result<ControlFlow<()>> {
    if tick().is_break() || gpu.wait_for_room(tick)?.is_break() {
        return Ok(ControlFlow::Break(()));
    }
    if let Some(receipt) = commands.submit()? {
        gpu.submissions().add_part(receipt, variant, work);
    }
    Ok(ControlFlow::Continue(()))
}

/// Returns the type of out and dQ: partial results are not rounded.
const fn results_storage(spec: &Spec, of_inputs: Storage) -> Storage {
    if spec.partial { Storage::F32 } else { of_inputs }
}

/// Rounds and writes the gradients. Ticks between the parts of dsinks.
pub(crate) fn write_gradients(
    pass: BackwardContext<'_>,
    dkv: &GpuBuffer,
    into: &Gradients<ViewMut<'_, WgpuSpace>>,
    tick: Tick<'_>,
) -> Result<()> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, .. } = kernels;
    let BackwardBuffers { dq, statistics, bias } = state;
    check_tensors(
        gpu,
        [
            ("dq", Some(&*into.dq)),
            ("dk", Some(&*into.dk)),
            ("dv", Some(&*into.dv)),
            ("dbias", into.dbias.as_deref()),
            ("dsoftmax_aux", into.dsinks.as_deref()),
        ],
    )?;
    let spec = &shard.spec;
    let dims = shard.spec.dims;
    let queries = shard.queries.len();
    let keys = shard.keys.len();
    let mut commands = Commands::new(gpu, arena);
    let storage = results_storage(spec, tile.storage);
    let (heads, dim) = (dims.q_heads, dims.head_dim);
    let dq_into = CopySide::dense(&into.dq.buffer, [queries, heads, dim], storage.bytes());
    let shape = [dims.batch, queries, heads, dim];
    let copy = Copy::new(dq_into, shape, CopyMode::Rounded(storage));
    dq.launch_copy(Copy { factor: spec.scale as f32, ..copy }, gpu, &mut commands)?;
    let record = spec.gradient_row_layout();
    let heads = dims.kv_heads;
    for (field, tensor, dim) in [(0, &into.dk, dims.head_dim), (1, &into.dv, dims.value_dim)] {
        let from = CopySide::records(&dkv.buffer, &record, field, 4);
        let into = CopySide::dense(&tensor.buffer, [keys, heads, dim], tile.storage.bytes());
        Copy::new(into, [dims.batch, keys, heads, dim], CopyMode::Rounded(tile.storage)).launch(
            from,
            gpu,
            &mut commands,
        )?;
    }
    if let (Some(shape), Some(sums), Some(dbias)) = (spec.bias, bias, &into.dbias) {
        write_dbias(gpu, &mut commands, shape, queries, sums, dbias)?;
    }
    commands.submit()?;
    if let (Some(sinks), Some(dsinks)) = (inputs.forward.sinks, &into.dsinks) {
        write_dsinks(kernels, statistics, [sinks, dsinks], tick)?;
    }
    Ok(())
}

/// Writes dbias; sums over the rows of a bias that has neither a query nor a key axis.
fn write_dbias(
    gpu: &Gpu,
    commands: &mut Commands<'_>,
    shape: [usize; 4],
    queries: usize,
    sums: &GpuBuffer,
    dbias: &Tensor,
) -> Result<()> {
    let [batches, heads, of_queries, _] = shape;
    let lines = (batches * heads) as u64;
    if bias_axes(shape) == BiasAxes::Queries && of_queries == 1 {
        let bindings =
            vec![BoundResource::whole(&sums.buffer), BoundResource::whole(&dbias.buffer)];
        let each = rows_of_part(1, gpu.most_steps(MAX_STEPS));
        // the kernel writes zeros if there are no rows
        for first in (0..queries.max(1)).step_by(each) {
            commands.launch(KernelVariant::BiasRows, lines, bindings.clone(), |grid_width| {
                RowParams {
                    count: lines as u32,
                    grid_width,
                    rows: each.min(queries - first) as u32,
                    all_rows: queries as u32,
                    row_first: first as u32,
                    ..RowParams::default()
                }
            })?;
        }
        return Ok(());
    }
    let count = dbias.shape.iter().map(|&len| len as u64).product();
    let linear = LinearCopy { from: 0, into: 0, count };
    let mode = CopyMode::Raw { half: false };
    launch_linear(gpu, commands, &sums.buffer, &dbias.buffer, linear, 4, mode)
}

/// Computes dsinks from the row statistics, in submissions of bounded work. Ranges of rows, and of
/// heads above [`MAX_STEPS`], are constants, because they determine the order of sums.
fn write_dsinks(
    kernels: &mut RankKernels,
    statistics: &GpuBuffer,
    [sinks, dsinks]: [&Tensor; 2],
    tick: Tick<'_>,
) -> Result<()> {
    let RankKernels { gpu, shard, arena, .. } = kernels;
    let spec = &shard.spec;
    let Some(shape) = spec.sinks else { return Ok(()) };
    let dims = &spec.dims;
    let (kinds, heads) = if shape.per_head { (dims.q_heads, 1) } else { (1, dims.q_heads) };
    let count = shape.count * kinds;
    let rows = dims.batch * shard.queries.len();
    let most_steps = gpu.most_steps(MAX_STEPS);
    let each = rows_of_part(heads, most_steps);
    // the kernel writes zeros if there are no rows
    for first in (0..rows.max(1)).step_by(each) {
        let end = rows.min(first + each);
        let rows_each = (end - first).div_ceil(64).max(1);
        let flops = STEP_FLOPS * rows_each as u64;
        let mut parts = SinkParts::new(count, heads, most_steps / rows_each, flops);
        while let Some(part) = parts.next(gpu.submissions().part_budget(KernelVariant::Sinks)) {
            let mut commands = Commands::new(gpu, arena);
            let bindings =
                [&statistics.buffer, &sinks.buffer, &dsinks.buffer].map(BoundResource::whole);
            let params = |grid_width| RowParams {
                count: part.groups.end as u32,
                grid_width,
                rows: (end - first) as u32,
                row_first: first as u32,
                heads: dims.q_heads as u32,
                sinks: shape.count as u32,
                sinks_head: u32::from(shape.per_head),
                normalize: u32::from(spec.normalize),
                group_first: part.groups.start as u32,
                step_first: part.steps.start as u32,
                step_end: part.steps.end as u32,
                ..RowParams::default()
            };
            let groups = part.groups.len() as u64;
            commands.launch(KernelVariant::Sinks, groups, bindings.into(), params)?;
            if submit_part(gpu, commands, (KernelVariant::Sinks, part.work), tick)?.is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Upper bound of the steps of an invocation in a part, each a sink or a row of one head: 16 ms at
/// 1 µs, because a single workgroup waits for its loads. Also far below the 65,535 iterations after
/// which software adapters leave loops. A constant, because it determines the order of the sums of
/// dsinks and of dbias over rows.
const MAX_STEPS: usize = 1 << 14;

/// FLOPs of a step of the 64 invocations of a workgroup: an exponential and a few products each.
const STEP_FLOPS: u64 = 64 * 32;

impl Gpu {
    /// Returns the upper bound of the steps of an invocation of the kernels of sinks and of dbias
    /// over rows: `most`, or fewer by [`Options::most_part_flops`].
    pub(crate) fn most_steps(&self, most: usize) -> usize {
        let of_option = self.chunk_limits().part_work;
        of_option.map_or(most, |work| annulus_core::index(work / STEP_FLOPS).min(most))
    }
}

/// A part: a range of the workgroups does a range of their steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SinkPart {
    pub(crate) groups: Range<usize>,
    pub(crate) steps: Range<usize>,
    /// FLOPs.
    pub(crate) work: u64,
    /// True if no part follows.
    pub(crate) is_last: bool,
}

/// Workgroups and their steps, and how far they are divided into parts.
#[derive(Debug)]
pub(crate) struct SinkParts {
    groups: usize,
    steps: usize,
    /// Upper bound of the steps of a part; at least 1.
    most_steps: usize,
    /// FLOPs of a step of a workgroup.
    flops: u64,
    /// First workgroup and first step of the next part.
    next: (usize, usize),
}

impl SinkParts {
    /// Divides `steps` steps of each of `groups` workgroups; none take one part as well.
    pub(crate) fn new(groups: usize, steps: usize, most_steps: usize, flops: u64) -> Self {
        Self { groups, steps, most_steps: most_steps.max(1), flops, next: (0, 0) }
    }

    /// Returns the next part: as many workgroups as `budget` FLOPs allow, but at least one. All
    /// workgroups have done their earlier steps in earlier parts.
    pub(crate) fn next(&mut self, budget: u64) -> Option<SinkPart> {
        let (group, step) = self.next;
        let is_done = group >= self.groups || (step >= self.steps && step > 0);
        if is_done {
            return None;
        }
        let step_end = self.steps.min(step + self.most_steps);
        // a workgroup without a step reads and writes its rows
        let each = self.flops * ((step_end - step) as u64).max(1);
        let count = usize::try_from(budget / each).unwrap_or(usize::MAX).max(1);
        let group_end = self.groups.min(group.saturating_add(count));
        self.next = match group_end == self.groups {
            true if step_end == self.steps => (self.groups, step_end),
            true => (0, step_end),
            false => (group_end, step),
        };
        Some(SinkPart {
            groups: group..group_end,
            steps: step..step_end,
            work: each * (group_end - group) as u64,
            is_last: self.next.0 == self.groups,
        })
    }
}

/// Returns the rows of a part of a kernel whose invocations, 64 a workgroup, each take `heads`
/// steps a row: as many as `most_steps` allow, but at least one row an invocation.
fn rows_of_part(heads: usize, most_steps: usize) -> usize {
    64 * (most_steps / heads.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All parts of a budget.
    fn parts(mut parts: SinkParts, budget: u64) -> Vec<SinkPart> {
        std::iter::from_fn(|| parts.next(budget)).collect()
    }

    #[test]
    fn parts_of_many_sinks_are_bounded_and_cover_all_steps() {
        // 65,536 sinks: two steps each in the forward epilogue, one workgroup each for dsinks
        for (groups, steps) in [(4096, 2 * 65_536), (65_536, 16_384), (3, 5), (1, 100_000)] {
            for budget in [1, 1 << 24, 1 << 30, u64::MAX] {
                let all = parts(SinkParts::new(groups, steps, MAX_STEPS, STEP_FLOPS), budget);
                let mut done = vec![0; groups];
                for part in &all {
                    assert!(part.work <= budget || part.groups.len() == 1, "{part:?}");
                    // 16 ms at 1 µs a step, a quarter of a software adapter's 65,535 iterations
                    assert!((1..=16_384).contains(&part.steps.len()), "{part:?}");
                    assert_eq!(part.work, 2048 * (part.groups.len() * part.steps.len()) as u64);
                    for group in part.groups.clone() {
                        assert_eq!(done[group], part.steps.start, "{part:?}: in order");
                        done[group] = part.steps.end;
                    }
                }
                assert!(done.iter().all(|&end| end == steps), "{groups} {steps} {budget}");
                let last = all.iter().filter(|part| part.is_last).count();
                assert!(last == 1 && all[all.len() - 1].is_last);
            }
        }
    }

    #[test]
    fn rows_without_sinks_are_finished_and_no_rows_are_not() {
        let all = parts(SinkParts::new(10, 0, MAX_STEPS, STEP_FLOPS), 4 * STEP_FLOPS);
        let groups: Vec<_> = all.iter().map(|part| part.groups.clone()).collect();
        assert_eq!(groups, [0..4, 4..8, 8..10]);
        assert!(all.iter().all(|part| part.steps == (0..0)));
        assert!(parts(SinkParts::new(0, 8, MAX_STEPS, STEP_FLOPS), 1).is_empty());
    }

    #[test]
    fn a_part_has_few_rows_if_heads_are_many() {
        for heads in [1, 3, 32, 128, 16_384, 1 << 20] {
            let rows = rows_of_part(heads, MAX_STEPS);
            assert!(rows >= 64);
            let steps = rows / 64 * heads;
            assert!(steps <= 16_384.max(heads) && 2 * steps > 16_384, "{heads}");
        }
        assert_eq!(rows_of_part(32, 1), 64);
    }
}
