//! Mistakes in the backward pass on warpgroups.

use super::{
    Check, DEADLOCK, DEFAULT_ORDER, FAILED, OTHER_BITS, Of, Table, also_fused, early, edit, mistake,
};
use crate::{fused_backward, warpgroup_backward};

const PIPELINE: &str = "warpgroup.cuh";
const SHARED: &str = "backward_warpgroup.cuh";
const DQ: &str = "backward_queries_warpgroup.cuh";
const KEY_ROWS: &str = "backward_key_rows.cuh";
const DKV: &str = "backward_keys_warpgroup.cuh";
const ORDER: &str = "backward_dq_order.cuh";
const FUSED_KERNEL: &str = "backward_fused_warpgroup.cuh";

/// Orders of threads and blocks: some hide a mistake of the fused kernel.
const ORDERS: std::ops::Range<u64> = 40..46;

/// The split kernels, and what the fused kernel shares with them.
pub(super) static BACKWARD: Table = Table {
    checks: &[
        Check {
            name: "split kernels",
            sign: |mistake| Some(mistake.sign),
            verdict: warpgroup_backward::verdict,
            seeds: DEFAULT_ORDER,
        },
        Check {
            name: "fused kernel",
            sign: |mistake| mistake.fused_sign,
            verdict: |_, planted| fused_backward::verdict(planted),
            seeds: ORDERS,
        },
    ],
    mistakes: &[
        also_fused(
            DEADLOCK,
            mistake(
                Of::Stages,
                "the producer takes a full stage for an empty one",
                FAILED,
                &[edit(SHARED, "at.parity() ^ 1", "at.parity()")],
            ),
        ),
        also_fused(
            FAILED,
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
                    edit(
                        FUSED_KERNEL,
                        "issue_nn<Storage>(dk, dx, queries);",
                        "issue_nn<Storage>(dk, dx, queries);
                         consumer_release(operands, stage, lane_again(at));",
                    ),
                    edit(FUSED_KERNEL, "consumer_release(operands, stage, lane_again(at));", ""),
                ],
            ),
        ),
        also_fused(
            DEADLOCK,
            mistake(
                Of::Stages,
                "a stage is never released",
                FAILED,
                &[edit(SHARED, "if (at.lane == 0) mbarrier_arrive(memory.empty + stage);", "")],
            ),
        ),
        also_fused(
            FAILED,
            mistake(
                Of::Stages,
                "a stage is used before it is loaded",
                FAILED,
                &[edit(SHARED, "mbarrier_wait(memory.full + at.stage(), at.parity());", "")],
            ),
        ),
        also_fused(
            DEADLOCK,
            mistake(
                Of::Stages,
                "expect_tx without the second operand",
                FAILED,
                &[edit(SHARED, "u32 bytes = «2 * operand_bytes»;", "operand_bytes")],
            ),
        ),
        also_fused(
            DEADLOCK,
            mistake(
                Of::Stages,
                "expect_tx without the row statistics",
                FAILED,
                &[edit(SHARED, "if (statistics) bytes += sizeof memory.statistics[0];", "")],
            ),
        ),
        also_fused(
            FAILED,
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
        ),
        also_fused(
            FAILED,
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
        also_fused(
            FAILED,
            mistake(
                Of::Stages,
                "dK/dV pass: dP read while wgmma writes it",
                FAILED,
                &[
                    edit(DKV, "wgmma_wait<1>();", ""),
                    edit(FUSED_KERNEL, "wgmma_wait<DV_BEFORE_DX ? 1 : 0>();", ""),
                ],
            ),
        ),
        also_fused(
            FAILED,
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
        ),
        also_fused(
            FAILED,
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
        also_fused(
            FAILED,
            mistake(
                Of::Stages,
                "dK/dV pass: dX without pinning its registers",
                FAILED,
                &[
                    edit(DKV, "fence_operand(dx);", ""),
                    edit(FUSED_KERNEL, "fence_operand(dx);", ""),
                ],
            ),
        ),
        also_fused(
            FAILED,
            mistake(
                Of::Stages,
                "dK/dV pass: P without pinning its registers",
                FAILED,
                &[edit(DKV, "fence_operand(p);", ""), edit(FUSED_KERNEL, "fence_operand(p);", "")],
            ),
        ),
        also_fused(
            "dq[",
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
                KEY_ROWS,
                "backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0)",
                "backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0) << 1 | 1",
            )],
        ),
        also_fused(
            "dq[",
            mistake(
                Of::Stages,
                "row statistics of another stage",
                "dk[",
                &[edit(SHARED, "return memory.statistics[«stage»];", "0")],
            ),
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
                edit(
                    FUSED_KERNEL,
                    "coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(recomputed(at.group)), WARPGROUP,
                               part_non_finite(queries, Storage::elements, here) ||
                                   part_non_finite(douts, Storage::elements, here))",
                    "true",
                ),
                edit(FUSED_KERNEL, "coord.is_full || !keys_non_finite", "true"),
            ],
        ),
    ],
};

/// The fused kernel only.
pub(super) static FUSED: Table = Table {
    checks: &[Check {
        name: "fused kernel",
        sign: |mistake| Some(mistake.sign),
        verdict: |_, planted| fused_backward::verdict(planted),
        seeds: ORDERS,
    }],
    mistakes: &[
        mistake(
            Of::Stages,
            "dX stored without a proxy fence",
            FAILED,
            &[edit(
                FUSED_KERNEL,
                "* PANEL_DIMS * 2, pair);
        }
    «fence_proxy_async();»",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "dX read before the other consumer has stored it",
            FAILED,
            &[edit(
                FUSED_KERNEL,
                "«consumer_barrier();»
        if (!keys_finite) zero_own_keys",
                "",
            )],
        ),
        // late copies keep a consumer from running ahead of the other
        early(mistake(
            Of::Stages,
            "dX overwritten while the other consumer's product reads it",
            FAILED,
            &[edit(FUSED_KERNEL, "memory.dx[«state.tile % 2»]", "0")],
        )),
        mistake(
            Of::Stages,
            "dQ read while wgmma writes it",
            FAILED,
            &[edit(FUSED_KERNEL, "wgmma_wait<1>();", "")],
        ),
        mistake(
            Of::Stages,
            "dQ tile without a proxy fence",
            FAILED,
            &[edit(
                FUSED_KERNEL,
                "scale * dq[e], scale * dq[e + 1]);
    «fence_proxy_async();»",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "dQ tile declared full before it is stored",
            "dq[",
            &[
                edit(
                    FUSED_KERNEL,
                    DQ_IS_FREE,
                    "mbarrier_wait(&memory.dq_empty, number % 2 ^ 1);
                     if (at.lane == 0) mbarrier_arrive(memory.dq_full + number % DQ_WRITERS);",
                ),
                edit(
                    FUSED_KERNEL,
                    "if (at.lane != 0) return;
    «mbarrier_arrive(memory.dq_full + number % DQ_WRITERS);»",
                    "",
                ),
            ],
        ),
        mistake(
            Of::Stages,
            "dQ tile stored while the one before is being added",
            "dq[",
            &[edit(FUSED_KERNEL, DQ_IS_FREE, "")],
        ),
        mistake(
            Of::Stages,
            "dQ tile declared free while it is being added",
            FAILED,
            &[edit(FUSED_KERNEL, "bulk_wait_read<0>();", "")],
        ),
        mistake(
            Of::Stages,
            "a dQ writer that has no further tile is not told",
            DEADLOCK,
            &[edit(
                FUSED_KERNEL,
                "if («is_last»)
        for",
                "false",
            )],
        ),
        mistake(
            Of::Stages,
            "a dQ writer adds the tile of another number",
            DEADLOCK,
            &[edit(FUSED_KERNEL, "if (tile.number != number) break;", "")],
        ),
        mistake(
            Of::Stages,
            "dQ tiles have one entry",
            DEADLOCK,
            &[
                edit(FUSED_KERNEL, "memory.dq_tiles[«number % DQ_TILES»]", "0"),
                edit(FUSED_KERNEL, "memory.dq_tiles[«state.tile % DQ_TILES»]", "0"),
            ],
        ),
        mistake(
            Of::Stages,
            "blocks add in the order of their arrival",
            OTHER_BITS,
            &[edit(FUSED_KERNEL, "if (lane == 0) semaphore_wait(semaphore, turn.rank);", "")],
        ),
        mistake(
            Of::Stages,
            "turn passed on before the additions are complete",
            FAILED,
            &[
                edit(FUSED_KERNEL, "bulk_wait();", ""),
                edit(FUSED_KERNEL, BEFORE_TURN_FENCE, ""),
                edit(FUSED_KERNEL, BEFORE_TURN_BARRIER, ""),
                edit(
                    FUSED_KERNEL,
                    PASS_TURN,
                    "if (lane == 0) semaphore_set(semaphore, next);
                                               bulk_wait();",
                ),
            ],
        ),
        mistake(
            Of::Stages,
            "turn passed on when the additions of one lane are complete",
            FAILED,
            &[edit(FUSED_KERNEL, BEFORE_TURN_BARRIER, "")],
        ),
        mistake(
            Of::Stages,
            "turn never passed on",
            DEADLOCK,
            &[edit(FUSED_KERNEL, PASS_TURN, "(void)next;")],
        ),
        mistake(
            Of::Stages,
            "semaphores of the launch before",
            DEADLOCK,
            &[edit(FUSED_KERNEL, "turn.is_last ? 0 : turn.rank + 1", "turn.rank + 1")],
        ),
        mistake(
            Of::Stages,
            "bulk operations not ordered after the turn",
            FAILED,
            &[edit(
                FUSED_KERNEL,
                "warp_barrier();
        «fence_proxy_async_global();»
        NOT_UNROLLED",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "turn not ordered after bulk operations",
            FAILED,
            &[edit(FUSED_KERNEL, BEFORE_TURN_FENCE, "")],
        ),
        mistake(
            Of::Stages,
            "the ticket of the first block twice",
            DEADLOCK,
            &[edit(ORDER, "ticket + 1 == a.order.key_tiles", "ticket + 2 == a.order.key_tiles")],
        ),
        mistake(
            Of::Stages,
            "keys by the number of the block",
            DEADLOCK,
            &[edit(FUSED_KERNEL, "memory.ticket = «take_ticket(a)»;", "block_x()")],
        ),
    ],
};

const DQ_IS_FREE: &str = "mbarrier_wait(&memory.dq_empty, number % 2 ^ 1);";
/// Between the additions of a turn and the next turn.
const BEFORE_TURN_FENCE: &str = "bulk_wait();
        «fence_proxy_async_global();»";
const BEFORE_TURN_BARRIER: &str = "fence_proxy_async_global();
        «warp_barrier();»
        const u32 next";
const PASS_TURN: &str = "if (lane == 0) semaphore_set(semaphore, next);";
