//! Vectors copied from one layout into another, in windows that fit a binding.

use annulus_core::{Result, index};

use crate::{
    device::Gpu,
    kernels::{Copying, Storage, Variant, numbers::CopyNumbers},
    launch::{Arena, Bound, Job, Stretch},
};

/// How `[batch, row, head, element]` lies in a buffer: the place of the first element, and distances, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Layout {
    pub(crate) base: u64,
    pub(crate) batch: u64,
    pub(crate) row: u64,
    pub(crate) head: u64,
}

impl Layout {
    /// A dense tensor `[batch, rows, heads, dim]`.
    pub(crate) const fn dense(rows: usize, heads: usize, dim: usize) -> Self {
        let row = heads as u64 * dim as u64;
        Self { base: 0, batch: rows as u64 * row, row, head: dim as u64 }
    }

    /// Field `field` of records, counted in units of `bytes` bytes.
    pub(crate) fn records(record: &annulus_core::Record, field: usize, bytes: u64) -> Self {
        let annulus_core::Field { heads, dim, dtype } = record.fields()[field];
        let scale = dtype.bytes() as u64 / bytes;
        Self {
            base: record.offset(field, 0, 0) / bytes,
            batch: heads as u64 * dim as u64 * scale,
            row: record.bytes() / bytes,
            head: dim as u64 * scale,
        }
    }

    /// The stretch that the window `batches` × `rows` × `heads` × `dim` lies in, and the same layout within it (the base to be added).
    pub(crate) fn stretch(self, window: &Window, heads: u64, dim: u64, bytes: u64) -> Stretch {
        let [batches, rows] = [window.batches.1, window.rows.1];
        let first = self.base + window.batches.0 * self.batch + window.rows.0 * self.row;
        let last = |count: u64, distance: u64| count.saturating_sub(1) * distance;
        Stretch { first, count: last(batches, self.batch) + last(rows, self.row) + last(heads, self.head) + dim, bytes }
    }
}

/// Batch rows and rows, each (first, count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) batches: (u64, u64),
    pub(crate) rows: (u64, u64),
}

impl Window {
    /// Cuts everything into windows that `fits` accepts: one for all, else one for each batch row, else fewer rows at a time.
    pub(crate) fn cut(batches: u64, rows: u64, fits: impl Fn(&Self) -> bool) -> Vec<Self> {
        let whole = Self { batches: (0, batches), rows: (0, rows) };
        if batches == 0 || rows == 0 {
            return Vec::new();
        }
        if fits(&whole) {
            return vec![whole];
        }
        let mut step = rows;
        while step > 1 && !fits(&Self { batches: (0, 1), rows: (0, step) }) {
            step = step.div_ceil(2);
        }
        let starts = (0..rows).step_by(index(step));
        (0..batches)
            .flat_map(|batch| starts.clone().map(move |row| Self { batches: (batch, 1), rows: (row, step.min(rows - row)) }))
            .collect()
    }
}

/// One side of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side<'a> {
    pub(crate) buffer: &'a wgpu::Buffer,
    pub(crate) layout: Layout,
    /// Bytes of an element.
    pub(crate) bytes: u64,
}

/// What is copied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy<'a> {
    pub(crate) from: Side<'a>,
    pub(crate) into: Side<'a>,
    pub(crate) batches: u64,
    pub(crate) rows: u64,
    pub(crate) heads: u64,
    pub(crate) dim: u64,
    pub(crate) copying: Copying,
    pub(crate) factor: f32,
    /// Statistics of the rows, `[batch, row, head, 4]`, whose first number is a row's factor.
    pub(crate) factors: Option<Side<'a>>,
}

impl Copy<'_> {
    /// Adds the kernels to a job.
    pub(crate) fn launch(&self, gpu: &Gpu, job: &mut Job<'_>) -> Result<()> {
        let Copy { from, into, heads, dim, .. } = *self;
        let stretches = |window: &Window| {
            let of = |side: Side<'_>, dim| side.layout.stretch(window, heads, dim, side.bytes);
            (of(from, dim), of(into, dim), self.factors.map(|side| (side, of(side, 4))))
        };
        let fits = |window: &Window| {
            let (from, into, factors) = stretches(window);
            [Some(from), Some(into), factors.map(|(_, stretch)| stretch)]
                .into_iter()
                .flatten()
                .all(|stretch| Stretch::bound_bytes(stretch.count, stretch.bytes, gpu.alignment()) <= gpu.most_binding())
        };
        for window in Window::cut(self.batches, self.rows, fits) {
            let (of_from, of_into, of_factors) = stretches(&window);
            let (from_bound, from_base) = of_from.bind(gpu, from.buffer)?;
            let (into_bound, into_base) = of_into.bind(gpu, into.buffer)?;
            let mut bindings = vec![from_bound, into_bound];
            let (mut factors_base, mut factors) = (0, Layout::default());
            if let Some((side, stretch)) = of_factors {
                let (bound, base) = stretch.bind(gpu, side.buffer)?;
                bindings.push(bound);
                (factors_base, factors) = (base, side.layout);
            }
            // two neighbours of 2 bytes are one word where everything is even
            let even = |number: u64| number.is_multiple_of(2);
            let pairs = into.bytes == 2
                && even(dim)
                && even(u64::from(into_base))
                && [into.layout.batch, into.layout.row, into.layout.head].into_iter().all(even);
            let dim = if pairs { dim / 2 } else { dim };
            let count = window.batches.1 * window.rows.1 * heads * dim;
            job.launch(Variant::Copy(self.copying), count.div_ceil(64), bindings, |grid_width| CopyNumbers {
                count: count as u32,
                grid_width,
                rows: window.rows.1 as u32,
                heads: heads as u32,
                dim: dim as u32,
                pairs: u32::from(pairs),
                from_base,
                from_row: from.layout.row as u32,
                from_batch: from.layout.batch as u32,
                from_head: from.layout.head as u32,
                into_base,
                into_row: into.layout.row as u32,
                into_batch: into.layout.batch as u32,
                into_head: into.layout.head as u32,
                factors_base,
                factors_row: factors.row as u32,
                factors_batch: factors.batch as u32,
                factors_head: factors.head as u32,
                factor: self.factor,
            })?;
        }
        Ok(())
    }
}

/// A stretch of elements copied from one place to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Line {
    pub(crate) from: u64,
    pub(crate) into: u64,
    pub(crate) count: u64,
}

/// A line in stretches that fit a binding, each as one row of vectors of one element.
pub(crate) fn launch_line(
    gpu: &Gpu,
    job: &mut Job<'_>,
    from: &wgpu::Buffer,
    into: &wgpu::Buffer,
    line: Line,
    bytes: u64,
    copying: Copying,
) -> Result<()> {
    let layout = |base| Layout { base, batch: 0, row: 1, head: 0 };
    let copy = Copy {
        from: Side { buffer: from, layout: layout(line.from), bytes },
        into: Side { buffer: into, layout: layout(line.into), bytes },
        batches: 1,
        rows: line.count,
        heads: 1,
        dim: 1,
        copying,
        factor: 1.0,
        factors: None,
    };
    copy.launch(gpu, job)
}

/// Copies lines of elements of 2 bytes, which may share words at their ends.
pub(crate) fn copy_raw(gpu: &Gpu, arena: &mut Arena, from: &wgpu::Buffer, into: &wgpu::Buffer, lines: &[Line]) -> Result<()> {
    let mut job = Job::new(gpu, arena);
    for &line in lines {
        launch_line(gpu, &mut job, from, into, line, 2, Copying::Raw { half: true })?;
    }
    job.submit()
}

/// A copy of whole tensors into elements of the same or another type, by the type of the target.
pub(crate) const fn rounding(storage: Storage, by_row: bool) -> Copying {
    if by_row { Copying::ByRow(storage) } else { Copying::Rounded(storage) }
}

/// A whole buffer that kernels over rows bind as it is.
pub(crate) fn bind_whole(buffer: Option<&wgpu::Buffer>) -> Bound {
    buffer.map_or(Bound::Nothing, Bound::whole)
}
