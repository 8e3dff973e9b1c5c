//! The backend on the emulated device as HIP: the program of AMD GPUs, in waves of 64.

use std::time::Duration;

use annulus_conformance::{
    Setting,
    suite::{self, Poison, Scale},
};
use annulus_core::{Backend, DType, Dims, Result, Spec};
use annulus_cuda::{
    Cuda, Level,
    device::{Api, Architecture, Compiler, Device, Gpu, Stream},
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;

use crate::{
    common::{staged, verdicts, wide},
    support::{cache, next_device},
};

fn hip() -> Result<Cuda> {
    let device = Device::with_symbols(emulator::hip_symbols(), next_device())?;
    let compiler = Compiler::with_symbols(emulator::hip_compiler_symbols(), Some(cache()))?;
    Ok(Cuda::on(Stream::new(&device)?, compiler))
}

fn subject() -> impl annulus_conformance::Subject {
    staged("emulated hip", Duration::ZERO, hip)
}

verdicts! {
    random_cases_hold_as_hip: suite::random_cases(&subject(), 300..312);
    a_sample_of_the_matrix_holds_as_hip: suite::matrix(&subject(), Scale::OneIn(41));
    a_visible_nan_does_not_depend_on_the_ranks_as_hip: suite::nonfinite_on(
        &subject(),
        Poison::NanAndInfinities,
        DType::F32,
        &[Setting::ALONE, Setting::new(3, Layout::Zigzag)],
    );
    wide_heads_of_f64_hold_as_hip: wide(&subject(), DType::F64, 256, true, true);
    wide_heads_of_bf16_hold_as_hip: wide(&subject(), DType::Bf16, 128, true, false);
}

#[test]
fn amd_gpus_have_level_plain_only() {
    let hip = hip().unwrap();
    assert_eq!(
        hip.to_string(),
        "emulated GPU, gfx942:sramecc+:xnack-, hipRTC 0, HIP 0, level plain"
    );
    let error = hip.clone().at_level(Level::Matrix).unwrap_err();
    assert_eq!(error.to_string(), "hip level matrix is not supported by emulated GPU");
    let spec = Spec::new(Dims::new(1, 8, 2, 64), DType::F16);
    let capabilities = hip.capabilities(&spec).unwrap();
    assert_eq!(capabilities.name, "hip");
    assert!(capabilities.numerics_id.starts_with("hip, hipRTC"), "{}", capabilities.numerics_id);
    // a compiler of the other interface
    let nvrtc = Compiler::with_symbols(emulator::compiler_symbols(), None).unwrap();
    let error = nvrtc.target(&Gpu::Amd("gfx90a".into())).unwrap_err();
    assert_eq!(error.to_string(), "gfx90a is not supported by NVRTC 0.0");
    let hiprtc = Compiler::with_symbols(emulator::hip_compiler_symbols(), None).unwrap();
    let error = hiprtc.target(&Architecture { major: 8, minor: 0 }.into()).unwrap_err();
    assert!(error.to_string().starts_with("compute capability 8.0 is not supported by hipRTC"));
    assert_eq!(hiprtc.api(), Api::Hip);
}
