//! A forced instruction set is the one that runs.

use std::process::Command;

use annulus_core::{Backend, DType, Dims, Spec};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;

use crate::{
    ranks::Rank,
    support::{Case, Random},
};

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
        let arguments = ["--exact", "forced::the_forced_instruction_set_runs"];
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
    let case = Case::new(Spec::new(Dims::new(1, 100, 2, 24), DType::F32), &mut Random(1));
    let rank = Rank::<f32>::new(&case, &Layout::Contiguous, 0, 1).unwrap();
    assert_eq!(cpu.workspace(&rank.shard, annulus_core::Passes::Both).unwrap().isa(), isa);
    let run = |cpu: &Cpu| case.run(cpu, &Layout::Contiguous, 1).unwrap().bits();
    let bits = run(&cpu);
    assert!(bits == run(&Cpu::new(1).unwrap().with_isa(isa).unwrap()));
    // the portable kernels round every product, the others do not
    assert_eq!(
        bits == run(&Cpu::new(1).unwrap().with_isa(Isa::Portable).unwrap()),
        isa == Isa::Portable
    );
}
