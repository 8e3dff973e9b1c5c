//! Code of the kernels that this adapter does not execute, because it depends on the device:
//! matrices of subgroups that are smaller than the device's largest, and products of 32 × 32 bits
//! without 64-bit integers. A changed text executes it, and must give the same bits.

use annulus::{Dims, Spec};
use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject, wgpu::WgpuRing};
use annulus_core::{DType, Dropout};
use annulus_wgpu::{Gpu, KernelEdit, Level, RegisterTile, wgpu::Features};

use super::{adapter, gpu_at, gpu_with};

const KERNELS: [&str; 3] = ["forward", "backward_queries", "backward_keys"];

/// A case of partial and full tiles, of heads that are not packed, and of dims that are no
/// multiples of 32.
fn case(dropout: Option<Dropout>, dtype: DType) -> Case {
    let dims = Dims { kv_heads: 1, value_dim: 28, ..Dims::new(1, 75, 2, 36) };
    let spec = Spec { dropout, ..Spec::new(dims, DType::F64) };
    let causal = Masks { causal: true, ..Masks::default() };
    Case::new("a text that is not chosen", spec, causal, &mut Draw::new(4)).in_dtype(dtype)
}

fn run(gpu: &Gpu, case: &Case) -> Answer {
    let answers = WgpuRing::new(gpu.clone()).run(case, &Setting::ALONE, 1);
    answers.unwrap_or_else(|error| panic!("{}: {error}", case.name)).remove(0)
}

/// Returns the answer of a device, which must be right.
fn right_answer(gpu: &Gpu, case: &Case) -> Answer {
    let answer = run(gpu, case);
    let judge = Judge::new(case).expect("a truth");
    judge.check(&answer).unwrap_or_else(|wrong| panic!("{wrong}"));
    answer
}

/// Requires the same bits as `want` with one kernel changed, for each of them.
fn changes_no_bit(gpu: &Gpu, case: &Case, want: &Answer, from: &'static str, to: &'static str) {
    for kernel in KERNELS {
        let edited = gpu.edited(KernelEdit { kernel, from, to }).expect("the same device");
        let same = run(&edited, case).same_bits(want);
        same.unwrap_or_else(|why| panic!("{kernel}, {from}: {why}"));
    }
}

#[test]
fn the_matrix_level_holds_for_subgroups_smaller_than_the_largest() {
    let Some(adapter) = adapter() else { return };
    // without: `the_matrix_level_holds_if_the_adapter_has_it`
    if adapter.levels.contains(&Level::Matrix) {
        let Some(gpu) = gpu_at(Level::Matrix) else { return };
        let case = case(None, DType::F16);
        let want = right_answer(&gpu, &case);
        // lavapipe has one size: without the path for others
        let of_any_size = gpu.with_smaller_subgroups().expect("the same device");
        let same = run(&of_any_size, &case).same_bits(&want);
        same.unwrap_or_else(|why| panic!("the path of the largest subgroups: {why}"));
        let from = "let matrices_are_owned = matrix_rounds ==";
        let to = "let matrices_are_owned = 64u + matrix_rounds ==";
        changes_no_bit(&of_any_size, &case, &want, from, to);
    }
}

#[test]
fn dropout_is_the_same_without_64_bit_integers_and_for_keys_of_several_blocks() {
    let Some(adapter) = adapter() else { return };
    // register tiles of two rows have the other text
    let Some(gpu) = gpu_with(adapter.chosen, Some(RegisterTile::FourRows)) else { return };
    if !gpu.device().features().contains(Features::SHADER_INT64) {
        eprintln!("NOT RUN: no 64-bit integers, so no other text");
        return;
    }
    let case = case(Some(Dropout { probability: 0.3, seed: 7 }), DType::F32);
    let want = right_answer(&gpu, &case);
    changes_no_bit(&gpu, &case, &want, "= wide_product(", "= product_by_halves(");
    changes_no_bit(&gpu, &case, &want, "if (are_one_block) {", "if (false) {");
}
