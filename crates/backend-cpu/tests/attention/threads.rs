//! What must not show: the number of threads, what was computed before, how tensors lie in memory.

use annulus_core::{DType, Layout};
use annulus_cpu::{Cpu, Isa};

use crate::support::{Case, Outcome};

#[test]
fn the_number_of_threads_changes_no_bit() {
    for (seed, dtype) in (400..412).zip([DType::F32, DType::Bf16, DType::F64].into_iter().cycle()) {
        let case = Case::any(seed, dtype);
        let run = |threads| case.run(&Cpu::new(threads).unwrap(), &Layout::Contiguous, 1).unwrap();
        let alone: Outcome = run(1);
        for threads in [2, 3, 7] {
            assert!(run(threads).bits() == alone.bits(), "seed {seed}, {threads} threads");
        }
    }
}

#[test]
fn many_tasks_of_a_long_sequence_change_no_bit() {
    // long enough for several tasks a thread, of several strips each
    let dims = annulus_core::Dims { q_len: 900, kv_len: 700, ..annulus_core::Dims::new(1, 0, 2, 16) };
    let mut spec = annulus_core::Spec::new(dims, DType::F32);
    spec.mask = std::sync::Arc::new(annulus_core::mask::Causal { offset: 40 });
    // with a bias, dq, and dk with dv, are summed in two passes; without, and with few threads, in one
    for bias in [Some([1, 1, 1, 700]), None] {
        let case = Case::new(annulus_core::Spec { bias, ..spec.clone() }, &mut crate::support::Random(77));
        let run = |threads, ranks| case.run(&Cpu::new(threads).unwrap(), &Layout::Zigzag, ranks).unwrap();
        for ranks in [1, 2] {
            let alone = run(1, ranks);
            alone.assert_close(&case.oracle(), 2e-5, "900 × 700");
            for threads in [2, 3, 7] {
                assert!(run(threads, ranks).bits() == alone.bits(), "{threads} threads");
            }
        }
    }
}

#[test]
fn both_gradients_together_or_apart_are_the_same_bits() {
    for (seed, dtype) in (430..460).zip([DType::F32, DType::Bf16, DType::F64].into_iter().cycle()) {
        let mut case = Case::any(seed, dtype);
        case.spec.backward = annulus_core::BackwardMode::OnePass;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let cpu = Cpu::new(1).unwrap().with_isa(isa).unwrap();
            let run = |together| case.run_backward(&cpu, &Layout::Contiguous, 2, together).unwrap();
            assert!(run(true).bits() == run(false).bits(), "seed {seed}, {isa}");
        }
    }
}
