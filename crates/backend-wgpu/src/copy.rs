//! Copies of vectors between layouts, split into windows that fit a binding.

use annulus_core::{Result, index};

use crate::{
    device::Gpu,
    kernels::{
        CopyMode, KernelVariant,
        params::{CopyParams, Strided},
    },
    launch::{Arena, BoundResource, Commands, ElementRange},
};

/// Layout of `[batch, row, head, element]` in a buffer: offset of the first element, and strides,
/// in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ElementStrides {
    pub(crate) base: u64,
    pub(crate) batch: u64,
    pub(crate) row: u64,
    pub(crate) head: u64,
}

impl ElementStrides {
    /// Layout of a dense tensor `[batch, rows, heads, dim]`.
    pub(crate) const fn dense(rows: usize, heads: usize, dim: usize) -> Self {
        let row = heads as u64 * dim as u64;
        Self { base: 0, batch: rows as u64 * row, row, head: dim as u64 }
    }

    /// Layout of field `field` of records, in units of `bytes` bytes.
    pub(crate) fn records(record: &annulus_core::RowLayout, field: usize, bytes: u64) -> Self {
        let annulus_core::RowField { heads, dim, dtype, .. } = record.fields()[field];
        let scale = dtype.bytes() as u64 / bytes;
        Self {
            base: record.offset(field, 0, 0) / bytes,
            batch: heads as u64 * dim as u64 * scale,
            row: record.bytes() / bytes,
            head: dim as u64 * scale,
        }
    }

    /// Returns the layout as a kernel reads it, in a binding in which it begins at element `base`.
    pub(crate) const fn at(self, base: u32) -> Strided {
        let Self { batch, row, head, .. } = self;
        Strided { base, row: row as u32, batch: batch as u32, head: head as u32 }
    }

    /// Returns the range of elements that contains the window `batches` × `rows` × `heads` × `dim`.
    pub(crate) fn element_range(
        self,
        window: &RowWindow,
        heads: u64,
        dim: u64,
        bytes: u64,
    ) -> ElementRange {
        let [batches, rows] = [window.batches.1, window.rows.1];
        let first = self.base + window.batches.0 * self.batch + window.rows.0 * self.row;
        let last = |count: u64, distance: u64| count.saturating_sub(1) * distance;
        ElementRange {
            first,
            count: last(batches, self.batch) + last(rows, self.row) + last(heads, self.head) + dim,
            bytes,
        }
    }
}

/// Batch rows and rows, each as (first, count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowWindow {
    pub(crate) batches: (u64, u64),
    pub(crate) rows: (u64, u64),
}

impl RowWindow {
    /// Splits a tensor into windows that `fits` accepts: the whole, else one batch row each, else
    /// fewer rows each.
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
            .flat_map(|batch| {
                starts
                    .clone()
                    .map(move |row| Self { batches: (batch, 1), rows: (row, step.min(rows - row)) })
            })
            .collect()
    }
}

/// Source or target of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopySide<'a> {
    pub(crate) buffer: &'a wgpu::Buffer,
    pub(crate) layout: ElementStrides,
    /// Bytes per element.
    pub(crate) bytes: u64,
}

impl<'a> CopySide<'a> {
    /// A dense tensor `[batch, rows, heads, dim]`.
    pub(crate) const fn dense(
        buffer: &'a wgpu::Buffer,
        [rows, heads, dim]: [usize; 3],
        bytes: u64,
    ) -> Self {
        Self { buffer, layout: ElementStrides::dense(rows, heads, dim), bytes }
    }

    /// Field `field` of records.
    pub(crate) fn records(
        buffer: &'a wgpu::Buffer,
        record: &annulus_core::RowLayout,
        field: usize,
        bytes: u64,
    ) -> Self {
        Self { buffer, layout: ElementStrides::records(record, field, bytes), bytes }
    }

    /// The side from row `first` on.
    fn at_row(self, first: u64) -> Self {
        let base = self.layout.base + first * self.layout.row;
        Self { layout: ElementStrides { base, ..self.layout }, ..self }
    }
}

/// A strided copy into a tensor or a part of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy<'a> {
    pub(crate) into: CopySide<'a>,
    /// Batch rows, rows, heads, elements of a vector.
    pub(crate) shape: [usize; 4],
    pub(crate) mode: CopyMode,
    pub(crate) factor: f32,
    /// Row statistics `[batch, row, head, 4]`, whose first element is the factor of a row.
    pub(crate) factors: Option<CopySide<'a>>,
}

impl<'a> Copy<'a> {
    /// A copy without factors.
    pub(crate) const fn new(into: CopySide<'a>, shape: [usize; 4], mode: CopyMode) -> Self {
        Self { into, shape, mode, factor: 1.0, factors: None }
    }

    /// The part of the copy from row `first` on.
    pub(crate) fn of_rows(self, first: usize, rows: usize) -> Self {
        let [batches, _, heads, dim] = self.shape;
        let after = |side: CopySide<'a>| side.at_row(first as u64);
        let (into, factors) = (after(self.into), self.factors.map(after));
        Self { into, factors, shape: [batches, rows, heads, dim], ..self }
    }

    /// Records the launches.
    pub(crate) fn launch(
        &self,
        from: CopySide<'_>,
        gpu: &Gpu,
        commands: &mut Commands<'_>,
    ) -> Result<()> {
        let Copy { into, shape, .. } = *self;
        let [batches, rows, heads, dim] = shape.map(|count| count as u64);
        let element_ranges = |window: &RowWindow| {
            let of =
                |side: CopySide<'_>, dim| side.layout.element_range(window, heads, dim, side.bytes);
            (of(from, dim), of(into, dim), self.factors.map(|side| (side, of(side, 4))))
        };
        let fits = |window: &RowWindow| {
            let (from, into, factors) = element_ranges(window);
            let factors = factors.map(|(_, range)| range);
            [from, into].into_iter().chain(factors).all(|range| range.fits(gpu))
        };
        for window in RowWindow::cut(batches, rows, fits) {
            let (of_from, of_into, of_factors) = element_ranges(&window);
            let (from_bound, from_base) = of_from.bind(gpu, from.buffer)?;
            let (into_bound, into_base) = of_into.bind(gpu, into.buffer)?;
            let mut bindings = vec![from_bound, into_bound];
            let mut factors = Strided::default();
            if let Some((side, element_range)) = of_factors {
                let (bound, base) = element_range.bind(gpu, side.buffer)?;
                bindings.push(bound);
                factors = side.layout.at(base);
            }
            // two neighbouring 2-byte elements form one word if all offsets are even
            let even = |number: u64| number.is_multiple_of(2);
            let pairs = into.bytes == 2
                && even(dim)
                && even(u64::from(into_base))
                && [into.layout.batch, into.layout.row, into.layout.head].into_iter().all(even);
            let dim = if pairs { dim / 2 } else { dim };
            let count = window.batches.1 * window.rows.1 * heads * dim;
            commands.launch(
                KernelVariant::Copy(self.mode),
                count.div_ceil(64),
                bindings,
                |grid_width| CopyParams {
                    count: count as u32,
                    grid_width,
                    rows: window.rows.1 as u32,
                    heads: heads as u32,
                    dim: dim as u32,
                    pairs: u32::from(pairs),
                    from: from.layout.at(from_base),
                    into: into.layout.at(into_base),
                    factors,
                    factor: self.factor,
                },
            )?;
        }
        Ok(())
    }
}

/// A contiguous range of elements to copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearCopy {
    pub(crate) from: u64,
    pub(crate) into: u64,
    pub(crate) count: u64,
}

/// Records a contiguous copy, split into windows that fit a binding: one row per element.
pub(crate) fn launch_linear(
    gpu: &Gpu,
    commands: &mut Commands<'_>,
    from: &wgpu::Buffer,
    into: &wgpu::Buffer,
    linear: LinearCopy,
    bytes: u64,
    mode: CopyMode,
) -> Result<()> {
    let layout = |base| ElementStrides { base, batch: 0, row: 1, head: 0 };
    let from = CopySide { buffer: from, layout: layout(linear.from), bytes };
    let into = CopySide { buffer: into, layout: layout(linear.into), bytes };
    Copy::new(into, [1, index(linear.count), 1, 1], mode).launch(from, gpu, commands)
}

/// Copies ranges of 2-byte elements, which may share words at their ends.
pub(crate) fn copy_raw(
    gpu: &Gpu,
    arena: &mut Arena,
    from: &wgpu::Buffer,
    into: &wgpu::Buffer,
    lines: &[LinearCopy],
) -> Result<()> {
    let mut commands = Commands::new(gpu, arena);
    for &linear in lines {
        launch_linear(gpu, &mut commands, from, into, linear, 2, CopyMode::Raw { half: true })?;
    }
    commands.submit().map(drop)
}

/// Binds a whole buffer, or the placeholder.
pub(crate) fn bind_whole(buffer: Option<&wgpu::Buffer>) -> BoundResource {
    buffer.map_or(BoundResource::Unused, BoundResource::whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_more_than_two_to_the_32_elements_are_located_in_64_bits() {
        let (rows, heads, dim) = (1 << 21, 32, 128);
        let layout = ElementStrides::dense(rows, heads, dim);
        let row = (heads * dim) as u64;
        let of = |window: &RowWindow| layout.element_range(window, heads as u64, dim as u64, 2);
        let fits = |window: &RowWindow| of(window).count <= 1 << 30;
        let windows = RowWindow::cut(2, rows as u64, fits);
        let mut ends = vec![0];
        for window in &windows {
            let ElementRange { first, count, .. } = of(window);
            assert_eq!(count, row * window.rows.1, "{window:?}");
            assert_eq!(ends.last(), Some(&first), "{window:?}");
            ends.push(first + count);
        }
        assert_eq!(ends.last(), Some(&(1 << 34)));
    }
}
