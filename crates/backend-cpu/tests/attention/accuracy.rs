//! Accuracy: the error against the f64 oracle, compared with the error of another computation. A
//! forced instruction set is the one that runs.

use std::{process::Command, sync::Arc};

use annulus_core::{Backend, DType, Dims, Dropout, Precision, Result, Spec, mask};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;
use annulus_test_cases::{Answer, Draw, plain};
use ndarray::{Array4, Zip};

use crate::{
    self as support, assert_close,
    ranks::{Make, OnRanks, Rank},
};

/// Returns the maximum distance between two tensors.
fn distance(a: &Array4<f64>, b: &Array4<f64>) -> f64 {
    Zip::from(a).and(b).fold(0.0, |most, a, b| {
        let distance = (a - b).abs();
        assert!(distance.is_finite());
        distance.max(most)
    })
}

/// Returns the distances of out, dq, dk and dv.
fn distances(got: &Answer, want: &Answer) -> [f64; 4] {
    let four =
        |answer: &Answer| [&answer.out, &answer.dq, &answer.dk, &answer.dv].map(Clone::clone);
    let (got, want) = (four(got), four(want));
    std::array::from_fn(|i| distance(&got[i], &want[i]))
}

/// Makes backends of one thread and this instruction set.
fn of(isa: Isa) -> impl Fn() -> Result<Cpu> + Sync {
    move || Cpu::new(1)?.with_isa(isa)
}

fn probs_dtype(cpu: &Cpu, spec: &Spec) -> Option<DType> {
    cpu.capabilities(spec).unwrap().probs_dtype
}

#[test]
fn rounded_probs_are_within_twice_the_error_of_plain_bf16() {
    let isas = [Isa::Avx512Bf16, Isa::Amx, Isa::AmxEmulated, Isa::Portable];
    for (number, isa) in (0..8)
        .flat_map(|number| isas.map(|isa| (number, isa)))
        .filter(|(_, isa)| isa.is_available())
    {
        let mut spec = Spec::new(Dims::new(1, 150, 2, 40), DType::Bf16);
        spec.precision = Precision::Default;
        spec.mask = Arc::new(mask::Causal::default());
        // scores up to about 20, or 4
        spec.scale *= if number % 2 == 0 { 4.0 } else { 1.0 };
        spec.soft_cap = (number / 2 % 2 == 1).then_some(5.0);
        spec.dropout = (number / 4 == 1).then_some(Dropout { probability: 0.3, seed: 7 });
        let mut case = support::case(spec, &mut Draw::new(900 + number));
        case.dlse = None;
        let want = support::oracle(&case);
        let got = case.run(&of(isa), &Layout::Contiguous, 2).unwrap();
        let (ours, plain) = (distances(&got, &want), distances(&plain(&case).unwrap(), &want));
        for (ours, plain) in ours.into_iter().zip(plain) {
            assert!(ours <= 2.0 * plain, "case {number}, {isa}: {ours:e}, same dtype {plain:e}");
        }
    }
}

#[test]
fn every_instruction_set_is_about_as_accurate_as_the_portable_one() {
    let small = Dims::new(1, 200, 2, 64);
    // those of DeepSeek's latent attention, and the limit
    let latent = Dims::new(1, 70, 1, 576).value_dim(512);
    let largest = Dims::new(1, 70, 1, Dims::MAX_DIM);
    for (number, (dtype, dims)) in [
        (DType::F32, small),
        (DType::F32, small),
        (DType::F64, small),
        (DType::Bf16, small),
        (DType::F16, small),
        (DType::F16, latent),
        (DType::Bf16, largest),
    ]
    .into_iter()
    .enumerate()
    {
        let mut spec = Spec::new(dims, dtype);
        spec.mask = Arc::new(mask::Causal::default());
        spec.soft_cap = (number == 1).then_some(5.0);
        let case = support::case(spec, &mut Draw::new(950 + number as u64));
        let want = support::oracle(&case);
        let of_isa = |isa| distances(&case.run(&of(isa), &Layout::Contiguous, 1).unwrap(), &want);
        let portable = of_isa(Isa::Portable);
        let isas = [Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx, Isa::AmxEmulated];
        for isa in isas.into_iter().filter(|isa| isa.is_available()) {
            for (ours, portable) in of_isa(isa).into_iter().zip(portable) {
                assert!(ours <= 2.0 * portable, "{dtype}, {isa}: {ours:e}, portable {portable:e}");
            }
        }
    }
}

#[test]
fn probs_are_rounded_only_where_the_spec_allows_it() {
    let spec = |dtype, precision| Spec { precision, ..Spec::new(Dims::new(1, 64, 1, 16), dtype) };
    let cpu = Cpu::new(1).unwrap();
    let free = std::env::var_os(Isa::VARIABLE).is_none();
    for (dtype, precision) in [
        (DType::Bf16, Precision::Highest),
        (DType::Bf16, Precision::High),
        (DType::F32, Precision::Default),
    ] {
        let isa = cpu.isa_for(&spec(dtype, precision)).unwrap();
        assert!(isa == Isa::Amx || Ok(isa) == cpu.isa());
        assert!(!free || probs_dtype(&cpu, &spec(dtype, precision)).is_none());
    }
    let allowed = spec(DType::Bf16, Precision::Default);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let cpu = Cpu::new(1).unwrap().with_isa(isa).unwrap();
        assert_eq!(cpu.isa_for(&allowed), Ok(isa));
        assert_eq!(probs_dtype(&cpu, &allowed), isa.multiplies_pairs().then_some(DType::Bf16));
        assert_eq!(probs_dtype(&cpu, &spec(DType::F16, Precision::Default)), None);
    }
    // the selected instruction set is the one that runs
    let chosen = cpu.isa_for(&allowed).unwrap();
    assert_eq!(probs_dtype(&cpu, &allowed).is_some(), chosen.multiplies_pairs());
    let run = |cpu: &Make<'_>| {
        support::case(allowed.clone(), &mut Draw::new(5)).run(cpu, &Layout::Contiguous, 1).unwrap()
    };
    run(&|| Cpu::new(1)).same_bits(&run(&of(chosen))).unwrap();
    if Isa::Avx512Bf16.is_available() {
        assert!(run(&of(Isa::Avx512Bf16)).same_bits(&run(&of(Isa::Avx512))).is_err());
    }
}

#[test]
fn narrow_scores_are_rounded_as_the_oracle_rounds_them() {
    for (dtype, narrow) in [
        (DType::F32, DType::Bf16),
        (DType::F32, DType::F16),
        (DType::F64, DType::F32),
        (DType::F64, DType::Bf16),
    ] {
        let mut spec = Spec::new(Dims::new(1, 70, 1, 16), dtype);
        spec.logits_dtype = narrow;
        // multiples of 1/16: products are exact in every order, so that rounding them has one
        // result
        let mut case = support::case(spec, &mut Draw::new(9));
        for tensor in [&mut case.q, &mut case.k] {
            tensor.mapv_inplace(|x| (x * 16.0).round() / 16.0);
        }
        let mut exact = case.clone();
        exact.spec.logits_dtype = dtype;
        assert!(narrow == DType::F32 || support::oracle(&exact) != support::oracle(&case));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let got = case.run(&of(isa), &Layout::Contiguous, 2).unwrap();
            assert_close(&got, &support::oracle(&case), 2e-5, &format!("{dtype} {narrow}"));
        }
    }
}

/// Set for the child processes of this test.
const CHILD: &str = "ANNULUS_TEST_OF_FORCED_ISA";

/// Cargo's runner of 64-bit ARM programs on other machines.
const RUNNER: &str = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER";

#[test]
fn the_forced_instruction_set_runs() {
    if let Ok(name) = std::env::var(CHILD) {
        return forced(&name);
    }
    let this = std::env::current_exe().unwrap();
    let run = |variable: &str, child: &str| {
        // an emulated program cannot start another one without the emulator
        let runner = std::env::var(RUNNER).ok().filter(|_| cfg!(target_arch = "aarch64"));
        let mut words = runner.iter().flat_map(|runner| runner.split_whitespace());
        let mut command = match words.next() {
            Some(emulator) => Command::new(emulator),
            None => Command::new(&this),
        };
        if runner.is_some() {
            command.args(words).arg(&this);
        }
        let arguments = ["--exact", "accuracy::the_forced_instruction_set_runs"];
        command.args(arguments).env(Isa::VARIABLE, variable).env(CHILD, child).output().unwrap()
    };
    for isa in Isa::ALL {
        let output = run(isa.name(), isa.name());
        assert!(output.status.success(), "{isa}: {}", String::from_utf8_lossy(&output.stdout));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    }
    // the test detects another instruction set than the expected one
    assert!(!run(Isa::Portable.name(), "another").status.success());
}

/// Checks a process in which `name` is forced.
fn forced(name: &str) {
    let isa = Isa::ALL.into_iter().find(|isa| isa.name() == name).unwrap();
    let cpu = Cpu::new(1).unwrap();
    if !isa.is_available() {
        assert_eq!(cpu.isa().unwrap_err().code(), 2);
        return;
    }
    let case = support::case(Spec::new(Dims::new(1, 100, 2, 24), DType::F32), &mut Draw::new(1));
    let rank = Rank::new(&case).unwrap();
    assert_eq!(cpu.workspace(&rank.shard, annulus_core::Passes::Both).unwrap().isa(), isa);
    let run = |cpu: &Make<'_>| case.run(cpu, &Layout::Contiguous, 1).unwrap();
    let got = run(&|| Cpu::new(1));
    got.same_bits(&run(&of(isa))).unwrap();
    // the portable kernels round every product, the others do not
    assert_eq!(got.same_bits(&run(&of(Isa::Portable))).is_ok(), isa == Isa::Portable);
}
