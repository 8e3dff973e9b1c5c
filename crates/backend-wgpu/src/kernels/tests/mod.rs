mod banks;

use std::{
    collections::HashSet,
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering},
};

use naga::{
    back::{hlsl, msl, spv},
    front::wgsl,
    valid::{Capabilities, ValidationFlags, Validator},
};

use super::*;

/// Matrices of a device with one subgroup size, and of one whose driver may choose a smaller one.
fn both_matrices() -> [Matrices; 2] {
    [Matrices::new(8, 8), Matrices::new(16, 64).with_smaller_subgroups()]
}

/// A kernel from which others differ.
const SIMPLE: TileVariant = TileVariant {
    storage: Storage::F16,
    unpacks: true,
    aligned: true,
    head_groups: 2,
    value_groups: 2,
    epilogue: Epilogue::Simple,
    has_u64: true,
    decodes: false,
    register_tile: RegisterTile::FourRows,
    level: Level::Plain,
    matrices: None,
    tall: false,
};

/// Lists every kernel that a plan can use.
fn all_variants() -> Vec<KernelVariant> {
    let mut all = vec![
        KernelVariant::Sinks,
        KernelVariant::BiasRows,
        KernelVariant::MergeRanges,
        KernelVariant::Count,
        KernelVariant::SubgroupProbe,
        KernelVariant::UnpackProbe,
    ];
    all.extend(both_matrices().map(KernelVariant::MatrixProbe));
    all.extend(
        [(false, true), (true, true), (true, false)]
            .map(|(with_sums, normalize)| KernelVariant::FinishRows { with_sums, normalize }),
    );
    all.extend(
        [CopyMode::Raw { half: false }, CopyMode::Raw { half: true }, CopyMode::Added]
            .map(KernelVariant::Copy),
    );
    for storage in [Storage::F32, Storage::F16, Storage::Bf16] {
        all.push(KernelVariant::RowStatistics(storage));
        all.extend([CopyMode::Rounded(storage), CopyMode::ByRow(storage)].map(KernelVariant::Copy));
        for (head_groups, value_groups) in
            [1, 2, 4, 8].into_iter().flat_map(|head| [1, 2, 4, 8].map(|value| (head, value)))
        {
            for epilogue in Epilogue::ALL {
                let is_usual = matches!(epilogue, Epilogue::Simple | Epilogue::General);
                if !is_usual && head_groups != value_groups {
                    continue;
                }
                let [four, ..] = RegisterTile::ALL;
                let of_matrices =
                    both_matrices().map(|matrices| (Level::Matrix, Some(matrices), four));
                let with = RegisterTile::ALL
                    .into_iter()
                    .flat_map(|tile| [(Level::Plain, None, tile), (Level::Matrix, None, tile)])
                    .chain(of_matrices);
                for (level, matrices, register_tile) in
                    with.filter(|(_, matrices, _)| matrices.is_none() || storage == Storage::F16)
                {
                    // dims that differ: the extremes
                    let differ = head_groups != value_groups;
                    if register_tile != four && differ && head_groups * value_groups != 8 {
                        continue;
                    }
                    let variant = TileVariant {
                        storage,
                        // each conversion in half of the kernels
                        unpacks: storage == Storage::F16 && epilogue.masks() == (head_groups > 2),
                        aligned: head_groups >= value_groups,
                        head_groups,
                        value_groups,
                        epilogue,
                        // each in half of the kernels
                        has_u64: head_groups < 4,
                        register_tile,
                        level,
                        matrices,
                        ..SIMPLE
                    };
                    if variant.can_be_tall(32 << 10) {
                        all.push(KernelVariant::Forward(TileVariant { tall: true, ..variant }));
                    }
                    all.extend([
                        KernelVariant::Forward(variant),
                        KernelVariant::BackwardQueries(variant),
                    ]);
                    all.push(KernelVariant::Forward(TileVariant { decodes: true, ..variant }));
                    all.extend(
                        [false, true]
                            .map(|from_records| KernelVariant::BackwardKeys(variant, from_records)),
                    );
                    if epilogue.masks() {
                        all.extend(
                            [BiasAxes::Pairs, BiasAxes::Queries, BiasAxes::Keys]
                                .map(|axes| KernelVariant::BackwardBias(variant, axes)),
                        );
                    }
                }
            }
        }
    }
    all
}

/// Translates as wgpu does for Vulkan, for Metal and, without matrices, for DX12.
fn translate(
    module: &naga::Module,
    info: &naga::valid::ModuleInfo,
    matrices: bool,
) -> Result<(), String> {
    let vulkan = spv::Options { lang_version: (1, 4), ..spv::Options::default() };
    let words =
        spv::write_vec(module, info, &vulkan, None).map_err(|error| format!("SPIR-V: {error}"))?;
    assert!(words.len() > 100);
    translate_for_metal(module, info, matrices)?;
    if matrices {
        return Ok(());
    }
    let dx12 = hlsl::Options { shader_model: hlsl::ShaderModel::V6_0, ..hlsl::Options::default() };
    let mut text = String::new();
    let of_pipeline = hlsl::PipelineOptions::default();
    let result = hlsl::Writer::new(&mut text, &dx12, &of_pipeline)
        .write(module, info, None)
        .map_err(|error| format!("HLSL: {error}"))?;
    let names = result
        .entry_point_names
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("HLSL: {error}"))?;
    let threads = [1, 64, 128, 256].map(|count| format!("numthreads({count}, 1, 1)"));
    assert!(names == ["main"] && threads.iter().any(|of| text.contains(of)), "{names:?}");
    Ok(())
}

/// Translates to Metal's language, where cooperative matrices are `simdgroup_half8x8` and
/// `simdgroup_float8x8` (MSL 2.3). naga also writes types of 16 × 16, which Metal lacks: Apple's
/// adapters do not offer that size.
fn translate_for_metal(
    module: &naga::Module,
    info: &naga::valid::ModuleInfo,
    matrices: bool,
) -> Result<(), String> {
    let metal = msl::Options { lang_version: (2, 4), ..msl::Options::default() };
    let (text, _) = msl::write_string(module, info, &metal, &msl::PipelineOptions::default())
        .map_err(|error| format!("MSL: {error}"))?;
    assert!(text.contains("kernel void main_("), "{text}");
    for name in ["simdgroup_half", "simdgroup_float", "simdgroup_multiply_accumulate("] {
        assert_eq!(text.contains(name), matrices, "{name}");
    }
    Ok(())
}

#[test]
fn every_variant_is_valid_and_can_be_translated() {
    // identical texts are checked once
    let mut texts = HashSet::new();
    let mut distinct = Vec::new();
    for variant in all_variants() {
        let Source { wgsl, bindings, .. } = variant.source();
        assert!(bindings.len() <= 8, "{variant:?} has more bindings than every device allows");
        if texts.insert(wgsl.clone()) {
            distinct.push((variant, wgsl));
        }
    }
    assert!(distinct.len() > 100, "{} texts", distinct.len());
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((variant, wgsl)) = distinct.get(next.fetch_add(1, Ordering::Relaxed)) {
            check_text(*variant, wgsl);
        }
    };
    // a panic of a thread is one of the scope
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(work);
        }
    });
}

/// Checks that a kernel's text is valid and can be translated, and its workgroup memory.
fn check_text(variant: KernelVariant, wgsl: &str) {
    let module = wgsl::parse_str(wgsl)
        .unwrap_or_else(|error| panic!("{variant:?}: {}", error.emit_to_string(wgsl)));
    let mut capabilities = Capabilities::SUBGROUP
        | Capabilities::SUBGROUP_BARRIER
        | Capabilities::SHADER_INT64
        | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let matrices = wgsl.starts_with("enable");
    if matrices {
        capabilities |= Capabilities::SHADER_FLOAT16 | Capabilities::COOPERATIVE_MATRIX;
    }
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    let info = validator
        .validate(&module)
        .unwrap_or_else(|error| panic!("{variant:?}: {}", error.emit_to_string(wgsl)));
    translate(&module, &info, matrices).unwrap_or_else(|error| panic!("{variant:?}: {error}"));
    let sizes: Vec<u32> = module
        .global_variables
        .iter()
        .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
        .map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()))
        .collect();
    // matrices are loaded at multiples of 16 bytes, in whichever order variables are placed
    let are_aligned = sizes.iter().all(|bytes| bytes % 16 == 0);
    assert!(are_aligned || !matrices, "{variant:?}: workgroup memory of {sizes:?} bytes");
    let shared: u32 = sizes.iter().sum();
    let tall = match variant {
        KernelVariant::Forward(TileVariant { tall, .. }) => tall,
        _ => false,
    };
    let most = if tall { TallTile::MEMORY_BYTES } else { 16 << 10 };
    assert!(shared as usize <= most, "{variant:?} uses {shared} bytes of workgroup memory");
}

#[test]
fn kernels_have_a_path_for_smaller_subgroups_only_if_a_device_has_them() {
    for matrices in both_matrices() {
        let tile = TileVariant { level: Level::Matrix, matrices: Some(matrices), ..SIMPLE };
        for variant in [KernelVariant::MatrixProbe(matrices), KernelVariant::Forward(tile)] {
            let wgsl = variant.source().wgsl;
            let has_path = wgsl.contains("matrix_rounds") && wgsl.contains("matrices_are_owned");
            assert_eq!(has_path, matrices.has_smaller_subgroups(), "{matrices:?}: {wgsl}");
        }
    }
}
