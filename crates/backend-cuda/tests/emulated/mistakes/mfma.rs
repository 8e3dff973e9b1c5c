//! Mistakes in the forward pass on matrix cores of AMD GPUs.

use std::time::Duration;

use annulus_conformance::{Case, Setting, suite};
use annulus_core::DType;
use annulus_cuda_emulator as emulator;

use super::{
    Check, DEADLOCK, Edit, Mistake, Of, Planted, Table,
    general::{ORDERS, causal},
};
use crate::{common::staged, hip, support::next_device};

const MFMA: &str = "matrix_amd.cuh";
const ROW_TILES: &str = "row_tiles.cuh";
const PROBS: &str = "forward_probs.cuh";

/// Verdict on a case on one device, whose matrix instructions flush subnormal numbers.
fn verdict(case: &Case, planted: Planted) -> Result<(), String> {
    let ordinal = next_device();
    let open = move || hip::planted_on::<0x90a>(ordinal, planted);
    let subject = staged("one emulated gpu", Duration::ZERO, open);
    let verdict = suite::answer(&subject, case, &Setting::ALONE).map(drop);
    if emulator::deadlocks(ordinal) > 0 { Err(DEADLOCK.to_owned()) } else { verdict }
}

pub(super) static FORWARD: Table = Table {
    checks: &[
        Check {
            name: "f16, 128 dims",
            sign: |mistake| Some(mistake.sign),
            verdict: |_, planted| verdict(&causal(DType::F16, [104, 120]), planted),
            seeds: ORDERS,
        },
        Check {
            name: "bf16, 256 dims: two chunks of an operand",
            sign: |mistake| {
                if matches!(mistake.of, Of::Panels) { Some(mistake.sign) } else { None }
            },
            verdict: |_, planted| verdict(&causal(DType::Bf16, [136, 200]), planted),
            seeds: ORDERS,
        },
    ],
    mistakes: mistakes! {
        Panels: "the other half of the lanes in K", "out[" =>
            MFMA: "«16 * c + 8 * half»)" => "16 * c + 8 * (half ^ 1)";
        Panels: "the other half of the lanes in V", "out[" =>
            MFMA: "«4 * y + 2 * part + half»" => "4 * y + 2 * part + (half ^ 1)";
        Panels: "the wrong bytes of a pair of keys", "out[" =>
            MFMA: "«first >> 16 | (second & 0xffff0000u)»" => "first >> 16 | second << 16";
        Panels: "no barrier between the stores of a stage and its use", "out[" =>
            MFMA: "consumed_phase == 1);
        «barrier();»" => "";
        FewPairs: "a stage that is the one in use", "out[" =>
            MFMA: "(«one_chunk ? consumed_phase : consumed») * stage_elements" => "0";
        Panels: "a maximum of half of the keys", "out[" =>
            ROW_TILES: "«larger_score(mine, shuffle_xor(mine, 32))»" => "mine";
        Panels: "a sum of half of the keys", "out[" =>
            ROW_TILES: "«mine + shuffle_xor(mine, 32)»" => "mine";
        Panels: "a lane that is missing in a shuffle", DEADLOCK =>
            ROW_TILES: "«larger_score(mine, shuffle_xor(mine, 32))»" =>
                "thread_index() == 77 ? mine : larger_score(mine, shuffle_xor(mine, 32))";
        Panels: "a mask of other columns", "out[" =>
            PROBS: "(coord.first_key - first + «lane.column»)" => "lane.column / 2";
        FewPairs: "probabilities that are not scaled", "lse" =>
            PROBS: "return «exponent + 10.0f»;" => "exponent";
    },
};
