//! Golden cases in element types of two bytes, at every level. Their expected arrays are for f32
//! and f64; the oracle, which gives these arrays (`facade.rs` of the suite), computes those of the
//! rounded inputs. `annulus check --backend wgpu` runs the cases in f32.

use annulus_conformance::{Judge, Setting, Subject, golden, wgpu::WgpuRing};
use annulus_core::{DType, Layout};
use annulus_wgpu::Level;

use super::{adapter, gpu_at};

/// Requires that every `step`-th case is right at this level, on one rank or three.
fn hold(level: Level, dtypes: &[DType], step: usize) {
    let Some(folder) = golden::folder().expect("a readable setting") else { return };
    let Some(gpu) = gpu_at(level) else { return };
    let ring = WgpuRing::new(gpu);
    let settings = [Setting::ALONE, Setting::new(3, Layout::Zigzag)];
    let mut wrong = Vec::new();
    let mut count = 0;
    for (number, golden) in
        golden::read(&folder).expect("golden cases").iter().enumerate().step_by(step)
    {
        let dtype = dtypes[count % dtypes.len()];
        let case = golden.case.in_dtype(dtype);
        let judge = Judge::new(&case).expect("a truth");
        let answer = ring.run(&case, &settings[number % 2], 1);
        let judged = answer.map_err(|error| error.to_string()).and_then(|all| judge.check(&all[0]));
        wrong.extend(judged.err().map(|why| format!("{}: {why}", case.name)));
        count += 1;
    }
    assert!(count >= 15, "only {count} cases");
    assert!(wrong.is_empty(), "{}:\n{}", level.name(), wrong.join("\n"));
}

#[test]
fn golden_cases_hold_in_two_bytes() {
    let Some(adapter) = adapter() else { return };
    for &level in adapter.levels.iter().filter(|&&level| level != Level::Matrix) {
        hold(level, &[DType::F16, DType::Bf16], 7);
    }
}

#[test]
fn the_matrix_level_holds_for_golden_cases() {
    let Some(adapter) = adapter() else { return };
    // without: `the_matrix_level_holds_if_the_adapter_has_it`
    if adapter.levels.contains(&Level::Matrix) {
        hold(Level::Matrix, &[DType::F16], 1);
    }
}
