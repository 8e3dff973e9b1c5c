//! Mistakes in the forward pass on warpgroups.

use annulus_conformance::{Case, Subject};
use annulus_core::DType;

use super::{Check, DEFAULT_ORDER, FAILED, Of, Planted, Table, early, edit, mistake};
use crate::{
    persistent::{self, Launch, full, mostly_empty, packed, stairs},
    support::on_warpgroups,
    warpgroup::{TWO_PANELS, case, verdict},
};

const PIPELINE: &str = "warpgroup.cuh";
const FORWARD: &str = "forward_warpgroup.cuh";
const TILE: &str = "warpgroup_tile.cuh";
const SCHEDULING: &str = "forward_scheduler.cuh";
const OUTPUTS: &str = "forward_outputs.cuh";

/// Many keys, or with [`Of::FewPairs`] few, and `queries` queries.
fn stages(of: Of, subject: &dyn Subject, dims: [usize; 2], queries: usize) -> Result<(), String> {
    verdict(subject, &case(dims, queries, of == Of::FewPairs))
}

/// The pipeline of K and V, products, softmax and masks.
pub(super) static STAGES: Table = Table {
    checks: &[
        Check {
            name: "64 dims: three consumers with queries of their own",
            sign: |mistake| (mistake.of != Of::Panels).then_some(mistake.sign),
            verdict: |of, planted| stages(of, &on_warpgroups(Some(planted)), [40, 48], 190),
            seeds: DEFAULT_ORDER,
        },
        Check {
            name: "128 dims: 176 keys",
            sign: |mistake| Some(mistake.sign),
            verdict: |of, planted| stages(of, &on_warpgroups(Some(planted)), TWO_PANELS, 120),
            seeds: DEFAULT_ORDER,
        },
        Check {
            name: "256 dims: 80 keys, and two products for O",
            sign: |mistake| Some(if mistake.of == Of::QueryRows { "out[" } else { mistake.sign }),
            verdict: |of, planted| stages(of, &on_warpgroups(Some(planted)), [136, 200], 120),
            seeds: DEFAULT_ORDER,
        },
    ],
    mistakes: &[
        mistake(
            Of::Stages,
            "the producer takes a full stage for an empty one",
            FAILED,
            &[edit(PIPELINE, "state.parity() ^ 1", "state.parity()")],
        ),
        mistake(
            Of::Stages,
            "a stage is released before it is read",
            "out[",
            &[
                edit(
                    FORWARD,
                    "scheduler_wait(at.group);",
                    "scheduler_wait(at.group);
                     consumer_release(memory.v_empty, v_state, at.lane);",
                ),
                edit(
                    FORWARD,
                    "fence_operand(scores);
        «consumer_release(memory.v_empty, v_state, at.lane);»",
                    "",
                ),
            ],
        ),
        mistake(
            Of::Stages,
            "a stage is never released",
            FAILED,
            &[edit(PIPELINE, "if (lane == 0) mbarrier_arrive(empty + state.stage());", "")],
        ),
        mistake(
            Of::Stages,
            "V is used, and its stage released, before it is loaded",
            FAILED,
            &[edit(
                FORWARD,
                "«consumer_wait(memory.v_full, v_state);»
        issue_pv(o, probs, values);",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "expect_tx with too few bytes",
            FAILED,
            &[edit(
                PIPELINE,
                "mbarrier_arrive_expect_tx(full + state.stage(), «KV_TILE * 2»);",
                "KV_TILE",
            )],
        ),
        mistake(
            Of::Stages,
            "wgmma without commit",
            FAILED,
            &[edit(
                PIPELINE,
                "descriptor_advance(kv, x / 64 * KV_PANEL + x % 64), x > 0);
    «wgmma_commit();»",
                "",
            )],
        ),
        mistake(
            Of::Stages,
            "accumulators read while wgmma writes them",
            "out[",
            &[edit(PIPELINE, "wgmma_wait<1>();", "")],
        ),
        mistake(
            Of::Stages,
            "wgmma without fence",
            FAILED,
            &[
                edit(
                    PIPELINE,
                    "kv = uniform_descriptor(kv);
    «wgmma_fence();»",
                    "",
                ),
                edit(
                    PIPELINE,
                    "«wgmma_fence();»
    UNROLL for (u32 y",
                    "",
                ),
            ],
        ),
        mistake(
            Of::Stages,
            "O rescaled while wgmma accumulates",
            "out[",
            &[
                edit(FORWARD, AWAIT_PV_IN_LOOP, "rescale_o(o, softmax); await_pv(o, probs);"),
                edit(
                    FORWARD,
                    "k_state.advance();
        «rescale_o(o, softmax);»",
                    "",
                ),
            ],
        ),
        mistake(
            Of::QueryRows,
            "no proxy fence after stores to shared memory",
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
        mistake(
            Of::Stages,
            "wrong swizzle",
            "out[",
            &[edit(
                PIPELINE,
                "store_for_async_proxy(to + «swizzled_offset(Q_ROWS, row, x)», words[c]);",
                "swizzled_offset(Q_ROWS, row, x) ^ row % 2 * 8",
            )],
        ),
        mistake(
            Of::Stages,
            "descriptor advanced too little along dims",
            "out[",
            &[edit(PIPELINE, "x / 64 * KV_PANEL + x % 64", "x / 64 * KV_PANEL + x % 64 / 2")],
        ),
        mistake(
            Of::Panels,
            "wrong distance between panels",
            "out[",
            &[edit(PIPELINE, "mn_major_descriptor(values, «KV_PANEL»)", "KV_PANEL / 2")],
        ),
        mistake(
            Of::FewPairs,
            "mask off by one",
            "out[",
            &[edit(
                TILE,
                "return left < 64 ? line & ((1ull << left) - 1) : line;",
                "line = line << 1 | 1; return left < 64 ? line & ((1ull << left) - 1) : line;",
            )],
        ),
        mistake(
            Of::Stages,
            "a turn that is never passed on",
            FAILED,
            &[edit(PIPELINE, "named_arrive(SCHEDULER_BARRIER(consumer), SCHEDULER_THREADS);", "")],
        ),
        mistake(
            Of::Stages,
            "P overwritten while P·V reads it",
            FAILED,
            &[edit(FORWARD, AWAIT_PV_IN_LOOP, "narrow_p(probs, scores); await_pv(o, probs);")],
        ),
        mistake(
            Of::Stages,
            "P written without pinning its registers",
            FAILED,
            &[edit(PIPELINE, "fence_operand(probs);", "")],
        ),
        mistake(
            Of::Stages,
            "O rescaled only if all maxima have changed",
            "out[",
            &[edit(FORWARD, "!warp_any(changed)", "warp_any(!changed)")],
        ),
    ],
};

/// The wait for P·V of a tile that is not the last one.
const AWAIT_PV_IN_LOOP: &str = "«await_pv(o, probs);»
        // the next P is rounded from S";

/// One block computes all tiles of a case.
fn scheduled(of: Of, planted: Planted) -> Result<(), String> {
    let case: Case = match of {
        Of::Packed => packed(DType::Bf16),
        Of::MostlyEmpty => mostly_empty(),
        Of::Full => full(),
        _ => stairs(),
    };
    let launched = persistent::verdict(&case, Launch::alone(Some(planted)))?;
    if launched == 0 { Err("forward_warpgroup was not launched".into()) } else { Ok(()) }
}

/// The tile scheduler, packed heads, and outputs through shared memory.
pub(super) static SCHEDULER: Table = Table {
    checks: &[Check {
        name: "one block",
        sign: |mistake| Some(mistake.sign),
        verdict: scheduled,
        seeds: DEFAULT_ORDER,
    }],
    mistakes: &[
        mistake(
            Of::Packed,
            "Q of another head",
            "out[",
            &[edit(FORWARD, "own.query, «own.h», 0)", "a.packed_heads > 1 ? own.h ^ 1 : own.h")],
        ),
        mistake(
            Of::Stairs,
            "the wrong phase of a work slot",
            FAILED,
            &[edit(
                SCHEDULING,
                "mbarrier_wait(memory.work_full + slot.stage(), «slot.parity()»);",
                "slot.parity() ^ 1",
            )],
        ),
        mistake(
            Of::MostlyEmpty,
            "a work slot is written before it is read",
            "out[",
            &[edit(
                SCHEDULING,
                "mbarrier_wait(memory.work_empty + slot.stage(), slot.parity() ^ 1);",
                "",
            )],
        ),
        mistake(
            Of::Stairs,
            "a counter that is not reset",
            "out[",
            &[edit(SCHEDULING, "if (fetched + 1 == a.tiles) *counter = 0;", "")],
        ),
        mistake(
            Of::Stairs,
            "a pipeline that starts anew",
            FAILED,
            &[
                edit(
                    SCHEDULING,
                    "tiles.begin(all, work.b, work.first_head, work.list);",
                    "tiles.begin(all, work.b, work.first_head, work.list); state = {0};",
                ),
                edit(
                    FORWARD,
                    "tiles.begin(all, work.b, work.first_head, work.list);",
                    "tiles.begin(all, work.b, work.first_head, work.list); k_state = {0};",
                ),
            ],
        ),
        mistake(
            Of::Stairs,
            "a last stage of V that is not released",
            FAILED,
            &[edit(
                FORWARD,
                "await_pv(o, probs);
    «consumer_release(memory.v_empty, v_state, at.lane);»",
                "",
            )],
        ),
        // a warp runs ahead of the others to its outputs only if V is there, and if no barrier of a
        // partial tile is in its way
        early(mistake(
            Of::Full,
            "outputs over Q in use",
            FAILED,
            &[edit(
                OUTPUTS,
                "have been waited for
    «named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);»",
                "",
            )],
        )),
        mistake(
            Of::Stairs,
            "outputs without a proxy fence",
            FAILED,
            &[edit(OUTPUTS, "fence_proxy_async();", "")],
        ),
        mistake(
            Of::Stairs,
            "outputs stored before all are written",
            FAILED,
            &[edit(
                OUTPUTS,
                "fence_proxy_async();
    «named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);»",
                "",
            )],
        ),
        mistake(
            Of::Stairs,
            "Q over outputs in use",
            FAILED,
            &[edit(
                FORWARD,
                "has read its outputs
    «if (at.thread == 0) bulk_wait_read<0>();»",
                "",
            )],
        ),
        mistake(
            Of::Stairs,
            "a store that is not waited for",
            FAILED,
            &[edit(
                FORWARD,
                "ends with the block
    «if (at.thread == 0) bulk_wait_read<0>();»",
                "",
            )],
        ),
    ],
};
