//! Checks of indices in kernels. Kernels are compiled without them (`Options::check_bounds`), which
//! is right if no index is beyond its array. Results then have the same bits if indices are clamped
//! to the array.
//!
//! wgpu's checks leave out buffers where the device has `robustBufferAccess2`, as lavapipe has, so
//! that tests on Vulkan translate kernels with the checks of buffers themselves. Without them an
//! access of a buffer beyond its end reads 0 and is not written there.
//!
//! Code of the kernels that this adapter does not execute, because it depends on the device:
//! matrices of subgroups that are smaller than the device's largest, and products of 32 × 32 bits
//! without 64-bit integers. A changed text executes it, and must give the same bits.

use annulus::{Dims, Spec};
use annulus_conformance::{Answer, Case, Draw, Masks, Setting, Subject, suite, wgpu::WgpuRing};
use annulus_core::{DType, Dropout, Error, Result};
use annulus_wgpu::{
    Adapter, Gpu, KernelEdit, Level, Options, QueryTileSize, RegisterTile, Translate, Translation,
    wgpu::{
        Features,
        naga::{
            self,
            back::spv,
            proc::{BoundsCheckPolicies, BoundsCheckPolicy as Policy},
            valid::{Capabilities, ValidationFlags, Validator},
        },
    },
};

use crate::{F16, F32, adapter, answer, gpu_at, gpu_with, open, run};

/// Checks of indices in kernels.
#[derive(Debug, Clone, Copy)]
enum Checks {
    /// Those of `Options::check_bounds`, which clamp indices of workgroup memory at least.
    OfTheOption,
    /// Indices of workgroup memory and of buffers are clamped.
    Clamped,
}

/// Kernels of the devices.
#[derive(Debug, Clone, Copy)]
struct Kernels {
    level: Level,
    tile: RegisterTile,
}

/// Two devices, without and with checks of indices in their kernels, as one subject. An answer with
/// other bits than that without checks is an error.
struct IndexChecks {
    unchecked: Gpu,
    checked: Gpu,
    checks: Checks,
    dtypes: Vec<DType>,
}

impl IndexChecks {
    /// Opens the devices; `None` without an adapter.
    fn open(kernels: Kernels, checks: Checks, dtypes: &[DType]) -> Option<Self> {
        let Kernels { level, tile } = kernels;
        let (check_bounds, translate): (bool, Option<Translate>) = match checks {
            Checks::OfTheOption => (true, None),
            Checks::Clamped => (false, Some(clamped)),
        };
        let options = Options {
            level: Some(level),
            register_tile: Some(tile),
            check_bounds,
            translate,
            ..Options::default()
        };
        let checked = open(&options)?;
        Some(Self {
            unchecked: gpu_with(level, Some(tile))?,
            checked,
            checks,
            dtypes: dtypes.to_vec(),
        })
    }

    /// Returns the same devices with a change of both.
    fn with(&self, change: impl Fn(&Gpu) -> Result<Gpu>) -> Result<Self> {
        Ok(Self {
            unchecked: change(&self.unchecked)?,
            checked: change(&self.checked)?,
            checks: self.checks,
            dtypes: self.dtypes.clone(),
        })
    }
}

impl Subject for IndexChecks {
    fn name(&self) -> String {
        let level = self.unchecked.level().name();
        let tile = self.unchecked.register_tile().name();
        format!("wgpu at {level} {tile} with and without checks of indices")
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let run = |gpu: &Gpu| WgpuRing::new(gpu.clone()).run(case, setting, times);
        let answers = run(&self.unchecked)?;
        for (checked, unchecked) in run(&self.checked)?.iter().zip(&answers) {
            checked.same_bits(unchecked).map_err(|why| {
                let checks = self.checks;
                Error::internal(format!("{checks:?}: other bits than without checks: {why}"))
            })?;
        }
        Ok(answers)
    }
}

/// Translates a kernel with all indices clamped.
fn clamped(wgsl: &str) -> std::result::Result<Translation, String> {
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|error| error.to_string())?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(wgsl))?;
    let options = spv::Options {
        lang_version: (1, 4),
        force_loop_bounding: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: Policy::Restrict,
            buffer: Policy::Restrict,
            ..Default::default()
        },
        ..spv::Options::default()
    };
    let spirv =
        spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())?;
    let [entry_point] = &module.entry_points[..] else {
        return Err("a kernel has one entry point".to_owned());
    };
    Ok(Translation { spirv, workgroup_size: entry_point.workgroup_size })
}

/// A case of several tiles. No dim, length or number of tiles is a multiple of a tile's.
fn case(name: &str, change: impl FnOnce(&mut Spec)) -> Case {
    of_dims(name, Dims { q_len: 41, value_dim: 35, ..Dims::new(1, 70, 3, 9) }, change)
}

fn of_dims(name: &str, dims: Dims, change: impl FnOnce(&mut Spec)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    let causal = Masks { causal: true, ..Masks::default() };
    Case::new(name, spec, causal, &mut Draw::new(9))
}

fn all_epilogues(spec: &mut Spec) {
    spec.bias = Some([1, 3, 41, 70]);
    spec.soft_cap = Some(2.0);
    spec.dropout = Some(Dropout { probability: 0.3, seed: 7 });
}

/// Requires the same bits, and right ones, of a case.
fn holds(devices: &IndexChecks, case: &Case, dtypes: &[DType]) {
    for &dtype in dtypes {
        let case = case.in_dtype(dtype);
        suite::answer(devices, &case, &Setting::ALONE).expect("a right answer");
    }
}

/// Opens the devices at [`Level::Plain`] with these checks, or with those of the option on an API
/// that does not take SPIR-V; `None` without an adapter.
fn of_plain(tile: RegisterTile, checks: Checks, dtypes: &[DType]) -> Option<IndexChecks> {
    let checks = if is_vulkan(&adapter()?) { checks } else { Checks::OfTheOption };
    IndexChecks::open(Kernels { level: Level::Plain, tile }, checks, dtypes)
}

/// True if the adapter takes SPIR-V.
fn is_vulkan(adapter: &Adapter) -> bool {
    adapter.api.eq_ignore_ascii_case("vulkan")
}

#[test]
fn checks_of_indices_change_no_bit_of_register_tiles_of_four_rows() {
    let dtypes = &[DType::F32, DType::F16];
    let devices = of_plain(RegisterTile::FourRows, Checks::Clamped, dtypes);
    let Some(devices) = devices else { return };
    // element types differ in loads and stores: those of f32 and f16 are in the cases below
    holds(&devices, &case("simple", |_| {}), &[DType::Bf16]);
    holds(&devices, &case("all epilogues", all_epilogues), dtypes);
    // four elements at once; packed heads and ranges of keys
    let dims = Dims { q_len: 41, value_dim: 36, ..Dims::new(1, 70, 3, 12) };
    holds(&devices, &of_dims("aligned", dims, |_| {}), F32);
    let dims = Dims { q_len: 2, kv_heads: 1, value_dim: 35, ..Dims::new(1, 700, 3, 9) };
    holds(&devices, &of_dims("decode", dims, |_| {}), F32);
}

#[test]
fn checks_of_indices_change_no_bit_of_register_tiles_of_two_rows() {
    let dtypes = &[DType::F32, DType::F16];
    let devices = of_plain(RegisterTile::TwoRows, Checks::OfTheOption, dtypes);
    let Some(devices) = devices else { return };
    holds(&devices, &case("simple", |_| {}), dtypes);
}

#[test]
fn the_matrix_level_gives_the_same_bits_without_checks_of_indices() {
    let Some(adapter) = adapter() else { return };
    // without: `the_matrix_level_holds_if_the_adapter_has_it`
    if adapter.levels.contains(&Level::Matrix) {
        let kernels = Kernels { level: Level::Matrix, tile: RegisterTile::FourRows };
        let devices = IndexChecks::open(kernels, Checks::OfTheOption, F16);
        let Some(devices) = devices else { return };
        // f32 has no matrices, but reductions by shuffles
        holds(&devices, &case("simple", |_| {}), &[DType::F16, DType::F32]);
        holds(&devices, &case("all epilogues", all_epilogues), F16);
        let tall = devices.with(|gpu| gpu.with_query_tile(QueryTileSize::Of64));
        holds(&tall.expect("the same devices"), &case("all epilogues", all_epilogues), F16);
    }
}

/// An index of workgroup memory beyond its array.
const IN_WORKGROUP_MEMORY: KernelEdit = KernelEdit {
    kernel: "forward",
    from: "let b = right[9u * j + tx];",
    to: "let b = right[9u * j + tx + 288u];",
};

/// An index of a buffer beyond it. Where the device has `robustBufferAccess2` it reads 0.
const IN_A_BUFFER: KernelEdit = KernelEdit {
    kernel: "forward",
    from: "q_words[row + min(c + 0u, last)]",
    to: "q_words[row + min(c + 0u, last) + 1000000u]",
};

#[test]
fn an_index_beyond_its_array_is_found() {
    let Some(adapter) = adapter() else { return };
    if !adapter.software || !is_vulkan(&adapter) {
        eprintln!("NOT RUN: {} may read anything beyond an array", adapter.name);
        return;
    }
    let case = case("beyond", |_| {});
    let (four, two) = (RegisterTile::FourRows, RegisterTile::TwoRows);
    for (tile, dtype, checks, edit) in [
        (four, DType::F32, Checks::Clamped, IN_A_BUFFER),
        (two, DType::F16, Checks::OfTheOption, IN_WORKGROUP_MEMORY),
    ] {
        let kernels = Kernels { level: Level::Plain, tile };
        let Some(devices) = IndexChecks::open(kernels, checks, &[dtype]) else { return };
        // without a mistake
        holds(&devices, &case, &[dtype]);
        let devices = devices.with(|gpu| gpu.edited(edit)).expect("the same devices");
        let answer = suite::run(&devices, &case.in_dtype(dtype), &Setting::ALONE);
        let error = answer.err().unwrap_or_default();
        assert!(error.contains("other bits"), "{tile:?} {dtype} {checks:?}: {error}");
    }
}

const KERNELS: [&str; 3] = ["forward", "backward_queries", "backward_keys"];

/// A case of partial and full tiles, of heads that are not packed, and of dims that are no
/// multiples of 32.
fn unexecuted_case(dropout: Option<Dropout>, dtype: DType) -> Case {
    let dims = Dims { kv_heads: 1, value_dim: 28, ..Dims::new(1, 75, 2, 36) };
    let spec = Spec { dropout, ..Spec::new(dims, DType::F64) };
    let causal = Masks { causal: true, ..Masks::default() };
    Case::new("a text that is not chosen", spec, causal, &mut Draw::new(4)).in_dtype(dtype)
}

/// Requires the same bits as `want` with one kernel changed, for each of them.
fn changes_no_bit(gpu: &Gpu, case: &Case, want: &Answer, from: &'static str, to: &'static str) {
    for kernel in KERNELS {
        let edited = gpu.edited(KernelEdit { kernel, from, to }).expect("the same device");
        let same = run(&edited, case, &Setting::ALONE).same_bits(want);
        same.unwrap_or_else(|why| panic!("{kernel}, {from}: {why}"));
    }
}

#[test]
fn the_matrix_level_holds_for_subgroups_smaller_than_the_largest() {
    let Some(adapter) = adapter() else { return };
    // without: `the_matrix_level_holds_if_the_adapter_has_it`
    if adapter.levels.contains(&Level::Matrix) {
        let Some(gpu) = gpu_at(Level::Matrix) else { return };
        let case = unexecuted_case(None, DType::F16);
        let want = answer(&gpu, &case, &Setting::ALONE);
        // lavapipe has one size: without the path for others
        let of_any_size = gpu.with_smaller_subgroups().expect("the same device");
        let same = run(&of_any_size, &case, &Setting::ALONE).same_bits(&want);
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
    let case = unexecuted_case(Some(Dropout { probability: 0.3, seed: 7 }), DType::F32);
    let want = answer(&gpu, &case, &Setting::ALONE);
    changes_no_bit(&gpu, &case, &want, "= wide_product(", "= product_by_halves(");
    changes_no_bit(&gpu, &case, &want, "if (are_one_block) {", "if (false) {");
}
