//! Mistakes in the backward pass on warpgroups.

use super::{Check, DEFAULT_ORDER, FAILED, Of, Table, early, edit, mistake};
use crate::warpgroup_backward;

const PIPELINE: &str = "warpgroup.cuh";
const SHARED: &str = "backward_warpgroup.cuh";
const DQ: &str = "backward_queries_warpgroup.cuh";
const DKV: &str = "backward_keys_warpgroup.cuh";

pub(super) static BACKWARD: Table = Table {
    checks: &[Check {
        name: "backward on warpgroups",
        sign: |mistake| Some(mistake.sign),
        verdict: warpgroup_backward::verdict,
        seeds: DEFAULT_ORDER,
    }],
    mistakes: &[
        mistake(
            Of::Stages,
            "the producer takes a full stage for an empty one",
            FAILED,
            &[edit(SHARED, "at.parity() ^ 1", "at.parity()")],
        ),
        mistake(
            Of::Stages,
            "a stage is released before its last product is waited for",
            FAILED,
            &[
                edit(
                    DQ,
                    "issue_nn<Storage>(dq, dx, keys);",
                    "issue_nn<Storage>(dq, dx, keys);
                         consumer_release(memory, stage, at);",
                ),
                edit(DQ, "consumer_release(memory, stage, at);", ""),
                edit(
                    DKV,
                    "issue_nn<Storage>(dk, dx, queries);",
                    "issue_nn<Storage>(dk, dx, queries);
                         consumer_release(memory, stage, at);",
                ),
                edit(DKV, "consumer_release(memory, stage, at);", ""),
            ],
        ),
        mistake(
            Of::Stages,
            "a stage is never released",
            FAILED,
            &[edit(SHARED, "if (at.lane == 0) mbarrier_arrive(memory.empty + stage);", "")],
        ),
        mistake(
            Of::Stages,
            "a stage is used before it is loaded",
            FAILED,
            &[edit(SHARED, "mbarrier_wait(memory.full + at.stage(), at.parity());", "")],
        ),
        mistake(
            Of::Stages,
            "expect_tx without the second operand",
            FAILED,
            &[edit(SHARED, "u32 bytes = «2 * operand_bytes»;", "operand_bytes")],
        ),
        mistake(
            Of::Stages,
            "expect_tx without the row statistics",
            FAILED,
            &[edit(SHARED, "if (statistics) bytes += sizeof memory.statistics[0];", "")],
        ),
        mistake(
            Of::Stages,
            "wgmma without commit",
            FAILED,
            &[edit(
                SHARED,
                "Storage::panel + x % 64), x > 0);
    «wgmma_commit();»",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "S read while wgmma writes it",
            FAILED,
            &[edit(
                SHARED,
                "«wgmma_wait<0>();»
    fence_operand(scores);",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "dQ pass: dP read while wgmma writes it",
            FAILED,
            &[edit(
                DQ,
                "«wgmma_wait<0>();»
        fence_operand(dprobs);",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "dK/dV pass: dP read while wgmma writes it",
            FAILED,
            &[edit(DKV, "wgmma_wait<1>();", "")],
        ),
        mistake(
            Of::Stages,
            "wgmma without fence",
            FAILED,
            &[edit(
                SHARED,
                "OperandLow(k_major_descriptor(streamed));
    «wgmma_fence();»",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "own rows stored without a proxy fence",
            FAILED,
            &[edit(
                PIPELINE,
                "swizzled_offset(Q_ROWS, row, x), words[c]);
        }
    }
    «fence_proxy_async();»",
                "",
            )],
        ),
        // own rows are stored before the copies of the first stage complete, unless these complete
        // early
        early(mistake(
            Of::Stages,
            "own rows read before all threads have stored them",
            FAILED,
            &[edit(SHARED, "named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);", "")],
        )),
        mistake(
            Of::Stages,
            "dQ pass: dX without pinning its registers",
            FAILED,
            &[edit(DQ, "fence_operand(dx);", "")],
        ),
        mistake(
            Of::Stages,
            "dK/dV pass: dX without pinning its registers",
            FAILED,
            &[edit(DKV, "fence_operand(dx);", "")],
        ),
        mistake(
            Of::Stages,
            "dK/dV pass: P without pinning its registers",
            FAILED,
            &[edit(DKV, "fence_operand(p);", "")],
        ),
        mistake(
            Of::Stages,
            "descriptor advanced too little along dims",
            "dq[",
            &[edit(
                SHARED,
                "x / 64 * Storage::panel + x % 64",
                "x / 64 * Storage::panel + x % 64 / 2",
            )],
        ),
        mistake(
            Of::Stages,
            "wrong distance between panels",
            "dq[",
            &[edit(
                SHARED,
                "mn_major_descriptor(streamed, «Storage::panel»)",
                "Storage::panel / 2",
            )],
        ),
        mistake(
            Of::FewPairs,
            "dQ pass: mask off by one",
            "dq[",
            &[edit(
                DQ,
                "u64 line = «backward_mask_row(a, coord, at.row + 8 * r, word)»;",
                "backward_mask_row(a, coord, at.row + 8 * r, word) << 1 | 1",
            )],
        ),
        mistake(
            Of::FewPairs,
            "dK/dV pass: mask off by one",
            "dk[",
            &[edit(
                DKV,
                "backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0)",
                "backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0) << 1 | 1",
            )],
        ),
        mistake(
            Of::Stages,
            "row statistics of another stage",
            "dk[",
            &[edit(SHARED, "return memory.statistics[«stage»];", "0")],
        ),
        mistake(
            Of::MaskedNan,
            "masked pairs times elements that are not finite",
            "dq[",
            &[
                edit(
                    DQ,
                    "coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(keys, Storage::elements, at))",
                    "true",
                ),
                edit(
                    DKV,
                    "coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(queries, Storage::elements, at) ||
                                   part_non_finite(douts, Storage::elements, at))",
                    "true",
                ),
            ],
        ),
    ],
};
