//! Programs: the kernel files that each variant is compiled from.

use std::borrow::Cow;

use annulus_core::Result;
use annulus_device_cuda::{Compiler, Image, ImageKind, KernelProgram};

use crate::variant::{Family, Variant};

/// File name and text.
type Header = (&'static str, &'static str);

/// Headers of all programs.
const HEADERS: [Header; 7] = [
    ("primitives.cuh", include_str!("../kernels/primitives.cuh")),
    ("primitives_host.h", include_str!("../kernels/primitives_host.h")),
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("arguments.cuh", include_str!("../kernels/arguments.cuh")),
    ("dropout.cuh", include_str!("../kernels/dropout.cuh")),
    ("tile.cuh", include_str!("../kernels/tile.cuh")),
    ("forward_state.cuh", include_str!("../kernels/forward_state.cuh")),
];

/// Further headers of [`Family::General`].
const GENERAL_HEADERS: [Header; 15] = [
    ("gradient.cuh", include_str!("../kernels/gradient.cuh")),
    ("backward_pair.cuh", include_str!("../kernels/backward_pair.cuh")),
    ("forward.cuh", include_str!("../kernels/forward.cuh")),
    ("chunk_stream.cuh", include_str!("../kernels/chunk_stream.cuh")),
    ("row_tiles.cuh", include_str!("../kernels/row_tiles.cuh")),
    ("forward_probs.cuh", include_str!("../kernels/forward_probs.cuh")),
    ("forward_matrix.cuh", include_str!("../kernels/forward_matrix.cuh")),
    ("merge_splits.cuh", include_str!("../kernels/merge_splits.cuh")),
    ("backward_matrix.cuh", include_str!("../kernels/backward_matrix.cuh")),
    ("backward_queries_matrix.cuh", include_str!("../kernels/backward_queries_matrix.cuh")),
    ("backward_keys_matrix.cuh", include_str!("../kernels/backward_keys_matrix.cuh")),
    ("backward.cuh", include_str!("../kernels/backward.cuh")),
    ("bias_gradient.cuh", include_str!("../kernels/bias_gradient.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("records.cuh", include_str!("../kernels/records.cuh")),
];

/// Further headers of [`Family::Warpgroup`] and [`Family::WarpgroupBackward`].
const WARPGROUP_HEADERS: [Header; 4] = [
    ("warpgroup_primitives.cuh", include_str!("../kernels/warpgroup_primitives.cuh")),
    ("warpgroup_host.h", include_str!("../kernels/warpgroup_host.h")),
    ("wgmma_host.h", include_str!("../kernels/wgmma_host.h")),
    ("warpgroup.cuh", include_str!("../kernels/warpgroup.cuh")),
];

/// Further headers of [`Family::Warpgroup`].
const WARPGROUP_FORWARD_HEADERS: [Header; 4] = [
    ("warpgroup_tile.cuh", include_str!("../kernels/warpgroup_tile.cuh")),
    ("forward_scheduler.cuh", include_str!("../kernels/forward_scheduler.cuh")),
    ("forward_outputs.cuh", include_str!("../kernels/forward_outputs.cuh")),
    ("forward_warpgroup.cuh", include_str!("../kernels/forward_warpgroup.cuh")),
];

/// Further headers of [`Family::WarpgroupBackward`].
const WARPGROUP_BACKWARD_HEADERS: [Header; 4] = [
    ("backward_pair.cuh", include_str!("../kernels/backward_pair.cuh")),
    ("backward_warpgroup.cuh", include_str!("../kernels/backward_warpgroup.cuh")),
    ("backward_queries_warpgroup.cuh", include_str!("../kernels/backward_queries_warpgroup.cuh")),
    ("backward_keys_warpgroup.cuh", include_str!("../kernels/backward_keys_warpgroup.cuh")),
];

/// Changes the text of a kernel file, given its name and its text, by which tests plant mistakes
/// ([`crate::Cuda::edited`]).
#[doc(hidden)]
pub type SourceEdit = fn(file: &str, text: &str) -> Result<String>;

/// Compiles a variant for a [target](Compiler::target), with the texts of its files as they are or
/// as `edit` changes them.
///
/// # Errors
/// [`annulus_core::Error::Device`] with the compiler's log; those of `edit`.
pub fn compile(
    compiler: &Compiler,
    variant: Variant,
    edit: Option<SourceEdit>,
    kind: ImageKind,
    target: &str,
) -> Result<Image> {
    let (main, headers): (Header, Vec<Header>) = match variant.family {
        Family::General => (
            ("kernels.cu", include_str!("../kernels/kernels.cu")),
            [&HEADERS[..], &GENERAL_HEADERS].concat(),
        ),
        Family::Warpgroup | Family::WarpgroupEpilogue => (
            ("warpgroup.cu", include_str!("../kernels/warpgroup.cu")),
            [&HEADERS[..], &WARPGROUP_HEADERS, &WARPGROUP_FORWARD_HEADERS].concat(),
        ),
        Family::WarpgroupBackward => (
            ("backward_warpgroup.cu", include_str!("../kernels/backward_warpgroup.cu")),
            [&HEADERS[..], &WARPGROUP_HEADERS, &WARPGROUP_BACKWARD_HEADERS].concat(),
        ),
    };
    let edited = |&(name, text): &Header| match edit {
        Some(edit) => edit(name, text).map(Cow::Owned),
        None => Ok(Cow::Borrowed(text)),
    };
    let source = edited(&main)?;
    let texts = headers.iter().map(edited).collect::<Result<Vec<Cow<'_, str>>>>()?;
    // the cache key covers all headers passed: only those that the program includes are
    let headers: Vec<(&str, &str)> =
        headers.iter().zip(&texts).map(|((name, _), text)| (*name, text.as_ref())).collect();
    let program = KernelProgram { name: main.0, source: &source, headers: &headers };
    compiler.compile(&program, &variant.options(), kind, target)
}
