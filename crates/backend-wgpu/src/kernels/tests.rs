use naga::{
    front::wgsl,
    valid::{Capabilities, ValidationFlags, Validator},
};

use super::*;

/// Every kernel that any plan can ask for.
fn all_variants() -> Vec<Variant> {
    let mut all = vec![Variant::Sinks, Variant::BiasRows];
    all.extend([Matrices::Eight, Matrices::Sixteen].map(Variant::MatrixProbe));
    all.extend([true, false].map(|normalize| Variant::FinishRows { normalize }));
    all.extend([Copying::Raw { half: false }, Copying::Raw { half: true }, Copying::Added].map(Variant::Copy));
    for storage in [Storage::F32, Storage::F16, Storage::Bf16] {
        all.push(Variant::RowStatistics(storage));
        all.extend([Copying::Rounded(storage), Copying::ByRow(storage)].map(Variant::Copy));
        for (head_groups, value_groups) in [1, 2, 4, 8].into_iter().flat_map(|head| [1, 2, 4, 8].map(|value| (head, value))) {
            for general in [false, true] {
                let of_matrices = [Matrices::Eight, Matrices::Sixteen].map(|matrices| (Level::Subgroup, Some(matrices)));
                let with = [(Level::Plain, None), (Level::Subgroup, None)].into_iter().chain(of_matrices);
                for (level, matrices) in with.filter(|(_, matrices)| matrices.is_none() || storage == Storage::F16) {
                    let variant = TileVariant { storage, head_groups, value_groups, general, level, matrices };
                    all.extend([Variant::Forward(variant), Variant::BackwardQueries(variant)]);
                    all.extend([false, true].map(|travelling| Variant::BackwardKeys(variant, travelling)));
                    if general {
                        all.extend([BiasAxes::Pairs, BiasAxes::Queries, BiasAxes::Keys].map(|axes| Variant::BackwardBias(variant, axes)));
                    }
                }
            }
        }
    }
    all
}

#[test]
fn every_variant_is_valid() {
    // texts that are the same are examined once
    let mut texts = std::collections::HashSet::new();
    for variant in all_variants() {
        let Source { wgsl, bindings, .. } = variant.source();
        assert!(bindings.len() <= 8, "{variant:?} has more bindings than every device allows");
        if !texts.insert(wgsl.clone()) {
            continue;
        }
        let module = wgsl::parse_str(&wgsl).unwrap_or_else(|error| panic!("{variant:?}: {}", error.emit_to_string(&wgsl)));
        let mut capabilities = Capabilities::SUBGROUP | Capabilities::SUBGROUP_BARRIER;
        if wgsl.starts_with("enable") {
            capabilities |= Capabilities::SHADER_FLOAT16 | Capabilities::COOPERATIVE_MATRIX;
        }
        let mut validator = Validator::new(ValidationFlags::all(), capabilities);
        validator.validate(&module).unwrap_or_else(|error| panic!("{variant:?}: {}", error.emit_to_string(&wgsl)));
        let shared: u32 = module
            .global_variables
            .iter()
            .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
            .map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()))
            .sum();
        assert!(shared <= 16 << 10, "{variant:?} wants {shared} bytes of workgroup memory");
    }
    assert!(texts.len() > 100, "{} texts", texts.len());
}
