//! Mistakes in the passes on matrix cores of AMD GPUs.

use std::time::Duration;

use annulus_conformance::{Case, Setting, Subject, suite};
use annulus_core::DType;
use annulus_cuda_emulator as emulator;

use super::{
    Check, DEADLOCK, DEFAULT_ORDER, Edit, Mistake, Of, Planted, Table,
    general::{self, ORDERS, causal, few_rows_of},
};
use crate::{
    common::staged,
    hip::{self, small_probabilities_count},
    support::next_device,
};

const MFMA: &str = "matrix_amd.cuh";
const ROW_TILES: &str = "row_tiles.cuh";
const PROBS: &str = "forward_probs.cuh";
const DKV: &str = "backward_keys_matrix.cuh";

/// Verdict of `check` on one device, whose matrix instructions flush subnormal numbers.
fn checked(
    planted: Planted,
    check: impl Fn(&dyn Subject) -> Result<(), String>,
) -> Result<(), String> {
    let ordinal = next_device();
    let open = move || hip::planted_on::<0x90a>(ordinal, planted);
    let verdict = check(&staged("one emulated gpu", Duration::ZERO, open));
    if emulator::deadlocks(ordinal) > 0 { Err(DEADLOCK.to_owned()) } else { verdict }
}

/// Verdict on a case: see [`checked`].
fn verdict(case: &Case, planted: Planted) -> Result<(), String> {
    checked(planted, |subject| suite::answer(subject, case, &Setting::ALONE).map(drop))
}

/// Of few rows, whose waves divide the keys of a tile: the same text as on tensor cores.
pub(super) static DECODE: Table = Table {
    checks: &[Check {
        name: "few rows",
        sign: |mistake| Some(mistake.sign),
        verdict: |of, planted| {
            let (case, setting) = few_rows_of(of);
            checked(planted, |subject| suite::answer(subject, &case, &setting).map(drop))
        },
        seeds: ORDERS,
    }],
    mistakes: general::DECODE.mistakes,
};

pub(super) static FORWARD: Table = Table {
    checks: &[Check {
        name: "f16, 128 dims",
        sign: |mistake| Some(mistake.sign),
        verdict: |_, planted| verdict(&causal(DType::F16, [104, 120]), planted),
        seeds: ORDERS,
    }],
    mistakes: mistakes! {
        Stages: "no barrier between the stores of a stage and its use", "out[" =>
            MFMA: "on_the_way.store(stage);
        «barrier();»" => "";
        FewPairs: "a stage that is the one in use", "out[" =>
            MFMA: "(«stage_of_phase ? consumed_phase : consumed») * stage_elements" => "0";
        Stages: "a lane that is missing in a shuffle", DEADLOCK =>
            ROW_TILES: "«larger_score(mine, shuffle_xor(mine, 32))»" =>
                "thread_index() == 77 ? mine : larger_score(mine, shuffle_xor(mine, 32))";
        FewPairs: "probabilities that are not scaled", "lse" =>
            PROBS: "return «exponent + 10.0f»;" => "exponent";
    },
};

/// Mistakes in the kernels of dQ, and of dK and dV.
pub(super) static BACKWARD: Table = Table {
    checks: &[
        Check {
            name: "f16, 128 dims",
            sign: |mistake| {
                if matches!(mistake.of, Of::State) { None } else { Some(mistake.sign) }
            },
            verdict: |_, planted| verdict(&causal(DType::F16, [104, 120]), planted),
            seeds: ORDERS,
        },
        Check {
            name: "f16, small probabilities",
            sign: |mistake| {
                if matches!(mistake.of, Of::State) { Some(mistake.sign) } else { None }
            },
            verdict: |_, planted| checked(planted, small_probabilities_count),
            seeds: DEFAULT_ORDER,
        },
    ],
    mistakes: mistakes! {
        Stages: "dK, dV: scores that are not ordered by a barrier", "d" =>
            MFMA: "METHOD void transpose(const Attention& a) {
        «barrier();»" => "";
        Stages: "dK, dV: rows that replace columns in use", "d" =>
            MFMA: "// all threads have consumed the part before
        «barrier();»" => "";
        Stages: "dK, dV: no barrier between the stores of rows and their use", "d" =>
            MFMA: "on_the_way.store(own_stage());
        «barrier();»" => "";
        Stages: "dK, dV: no barrier between the stores of columns and their use", "d" =>
            DKV: "#ifdef ANNULUS_AMD
            «barrier();»" => "";
        Stages: "sums that keep an old scale", "d" =>
            MFMA: "acc[panel][0][n][e] *= «factor»" => "1.0f";
        State: "rows beyond the end that are read", "d" =>
            MFMA: "const bool inside = «row() + r < left_rows» &&" => "true";
        State: "gradients that are not scaled: those of small probabilities are flushed", "d" =>
            MFMA: "const float scale = «float_of((268 - exponent) << 23)»;" => "1.0f",
            MFMA: "inverse() const { return «float_of((exponent - 14) << 23)»; }" => "1.0f",
            MFMA: "acc[panel][0][n][e] *= «factor»" => "1.0f";
    },
};
