//! Mistakes in both passes on warpgroups.

use annulus_conformance::{Case, Subject};

use super::{Check, DEFAULT_ORDER, Edit, FAILED, Mistake, Of, Planted, Table};
use crate::{
    packing::{full_tiles, mostly_empty, passes, stairs},
    support::on_warpgroups,
    warpgroup::{TWO_PANELS, case, verdict},
    warpgroup_backward,
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
            sign: |mistake| Some(mistake.sign),
            verdict: |of, planted| stages(of, &on_warpgroups(Some(planted)), [40, 48], 190),
            seeds: DEFAULT_ORDER,
        },
        Check {
            name: "128 dims: 176 keys",
            sign: |mistake| Some(mistake.sign),
            verdict: |of, planted| stages(of, &on_warpgroups(Some(planted)), TWO_PANELS, 120),
            seeds: DEFAULT_ORDER,
        },
    ],
    mistakes: mistakes! {
        Stages: "the producer takes a full stage for an empty one", FAILED =>
            PIPELINE: "state.parity() ^ 1" => "state.parity()";
        Stages: "a stage is released before it is read", "out[" =>
            FORWARD: "scheduler_wait(at.group);" =>
                "scheduler_wait(at.group);
                     consumer_release(memory.v_empty, v_state, at.lane);",
            FORWARD: "fence_operand(scores);
        «consumer_release(memory.v_empty, v_state, at.lane);»" => "";
        Stages: "a stage is never released", FAILED =>
            PIPELINE: "if (lane == 0) mbarrier_arrive(empty + state.stage());" => "";
        Stages: "V is used, and its stage released, before it is loaded", FAILED =>
            FORWARD: "«consumer_wait(memory.v_full, v_state);»
        issue_pv(o, probs, values);" => "";
        Stages: "expect_tx with too few bytes", FAILED =>
            PIPELINE: "mbarrier_arrive_expect_tx(full + state.stage(), «KV_TILE * 2»);" =>
                "KV_TILE";
        Stages: "wgmma without commit", FAILED =>
            PIPELINE: "descriptor_advance(kv, x / 64 * KV_PANEL + x % 64), x > 0);
    «wgmma_commit();»" => "";
        Stages: "accumulators read while wgmma writes them", "out[" =>
            PIPELINE: "wgmma_wait<1>();" => "";
        Stages: "wgmma without fence", FAILED =>
            PIPELINE: "kv = uniform_descriptor(kv);
    «wgmma_fence();»" => "",
            PIPELINE: "«wgmma_fence();»
    UNROLL for (u32 y" => "";
        Stages: "O rescaled while wgmma accumulates", "out[" =>
            FORWARD: AWAIT_PV_IN_LOOP => "rescale_o(o, softmax); await_pv(o, probs);",
            FORWARD: "k_state.advance();
        «rescale_o(o, softmax);»" => "";
        Stages: "no proxy fence after stores to shared memory", FAILED =>
            PIPELINE: "swizzled_offset(Q_ROWS, row, x), words[c]);
        }
    }
    «fence_proxy_async();»" => "";
        FewPairs: "mask off by one", "out[" =>
            TILE: "return left < 64 ? line & ((1ull << left) - 1) : line;" =>
                "line = line << 1 | 1; return left < 64 ? line & ((1ull << left) - 1) : line;";
        Stages: "a turn that is never passed on", FAILED =>
            PIPELINE: "named_arrive(SCHEDULER_BARRIER(consumer), SCHEDULER_THREADS);" => "";
        Stages: "P overwritten while P·V reads it", FAILED =>
            FORWARD: AWAIT_PV_IN_LOOP => "narrow_p(probs, scores); await_pv(o, probs);";
        Stages: "P written without pinning its registers", FAILED =>
            PIPELINE: "fence_operand(probs);" => "";
        Stages: "O rescaled only if all maxima have changed", "out[" =>
            FORWARD: "!warp_any(changed)" => "warp_any(!changed)";
    },
};

/// The wait for P·V of a tile that is not the last one.
const AWAIT_PV_IN_LOOP: &str = "«await_pv(o, probs);»
        // the next P is rounded from S";

/// One block computes all tiles of a case.
fn scheduled(of: Of, planted: Planted) -> Result<(), String> {
    let case: Case = match of {
        Of::MostlyEmpty => mostly_empty(),
        Of::Full => full_tiles(),
        _ => stairs(),
    };
    let (_, launched) = passes(&case, Some(planted), 1)?;
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
    mistakes: mistakes! {
        Stairs: "the wrong phase of a work slot", FAILED =>
            SCHEDULING: "mbarrier_wait(memory.work_full + slot.stage(), «slot.parity()»);" =>
                "slot.parity() ^ 1";
        MostlyEmpty: "a work slot is written before it is read", "out[" =>
            SCHEDULING: "mbarrier_wait(memory.work_empty + slot.stage(), slot.parity() ^ 1);" => "";
        Stairs: "a counter that is not reset", "out[" =>
            SCHEDULING: "if (fetched + 1 == a.tiles) *counter = 0;" => "";
        Stairs: "a pipeline that starts anew", FAILED =>
            SCHEDULING: "tiles.begin(all, work.b, work.first_head, work.list);" =>
                "tiles.begin(all, work.b, work.first_head, work.list); state = {0};",
            FORWARD: "tiles.begin(all, work.b, work.first_head, work.list);" =>
                "tiles.begin(all, work.b, work.first_head, work.list); k_state = {0};";
        Stairs: "a last stage of V that is not released", FAILED =>
            FORWARD: "await_pv(o, probs);
    «consumer_release(memory.v_empty, v_state, at.lane);»" => "";
        // a warp runs ahead of the others to its outputs only if V is there, and if no barrier of a
        // partial tile is in its way
        early Full: "outputs over Q in use", FAILED =>
            OUTPUTS: "have been waited for
    «named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);»" => "";
        Stairs: "outputs without a proxy fence", FAILED =>
            OUTPUTS: "fence_proxy_async();" => "";
        Stairs: "outputs stored before all are written", FAILED =>
            OUTPUTS: "fence_proxy_async();
    «named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);»" => "";
        Stairs: "Q over outputs in use", FAILED =>
            FORWARD: "has read its outputs
    «if (at.thread == 0) bulk_wait_read<0>();»" => "";
        Stairs: "a store that is not waited for", FAILED =>
            FORWARD: "ends with the block
    «if (at.thread == 0) bulk_wait_read<0>();»" => "";
    },
};

const BACKWARD_PIPELINE: &str = "backward_warpgroup.cuh";
const DQ: &str = "backward_queries_warpgroup.cuh";
const DKV: &str = "backward_keys_warpgroup.cuh";

pub(super) static BACKWARD: Table = Table {
    checks: &[Check {
        name: "backward on warpgroups",
        sign: |mistake| Some(mistake.sign),
        verdict: warpgroup_backward::verdict,
        seeds: DEFAULT_ORDER,
    }],
    mistakes: mistakes! {
        Stages: "the producer takes a full stage for an empty one", FAILED =>
            BACKWARD_PIPELINE: "at.parity() ^ 1" => "at.parity()";
        Stages: "a stage is released before its last product is waited for", FAILED =>
            DQ: "issue_nn<Storage>(dq, dx, keys);" =>
                "issue_nn<Storage>(dq, dx, keys);
                         consumer_release(memory, stage, at);",
            DQ: "consumer_release(memory, stage, at);" => "",
            DKV: "issue_nn<Storage>(dk, dx, queries);" =>
                "issue_nn<Storage>(dk, dx, queries);
                         consumer_release(memory, stage, at);",
            DKV: "consumer_release(memory, stage, at);" => "";
        Stages: "a stage is never released", FAILED =>
            BACKWARD_PIPELINE: "if (at.lane == 0) mbarrier_arrive(memory.empty + stage);" => "";
        Stages: "a stage is used before it is loaded", FAILED =>
            BACKWARD_PIPELINE: "mbarrier_wait(memory.full + at.stage(), at.parity());" => "";
        Stages: "expect_tx without the second operand", FAILED =>
            BACKWARD_PIPELINE: "u32 bytes = «2 * operand_bytes»;" => "operand_bytes";
        Stages: "expect_tx without the row statistics", FAILED =>
            BACKWARD_PIPELINE: "if (statistics) bytes += sizeof memory.statistics[0];" => "";
        Stages: "wgmma without commit", FAILED =>
            BACKWARD_PIPELINE: "Storage::panel + x % 64), x > 0);
    «wgmma_commit();»" => "";
        Stages: "S read while wgmma writes it", FAILED =>
            BACKWARD_PIPELINE: "«wgmma_wait<0>();»
    fence_operand(scores);" => "";
        Stages: "dQ pass: dP read while wgmma writes it", FAILED =>
            DQ: "«wgmma_wait<0>();»
        fence_operand(dprobs);" => "";
        Stages: "dK/dV pass: dP read while wgmma writes it", FAILED =>
            DKV: "wgmma_wait<1>();" => "";
        Stages: "wgmma without fence", FAILED =>
            BACKWARD_PIPELINE: "OperandLow(k_major_descriptor(streamed));
    «wgmma_fence();»" => "";
        Stages: "own rows stored without a proxy fence", FAILED =>
            PIPELINE: "swizzled_offset(Q_ROWS, row, x), words[c]);
        }
    }
    «fence_proxy_async();»" => "";
        // own rows are stored before the copies of the first stage complete, unless these complete
        // early
        early Stages: "own rows read before all threads have stored them", FAILED =>
            BACKWARD_PIPELINE: "named_barrier(WARPGROUP_BARRIER(at.group), WARPGROUP);" => "";
        Stages: "dQ pass: dX without pinning its registers", FAILED =>
            DQ: "fence_operand(dx);" => "";
        Stages: "dK/dV pass: dX without pinning its registers", FAILED =>
            DKV: "fence_operand(dx);" => "";
        Stages: "dK/dV pass: P without pinning its registers", FAILED =>
            DKV: "fence_operand(p);" => "";
        FewPairs: "dQ pass: mask off by one", "dq[" =>
            DQ: "u64 line = «backward_mask_row(a, coord, at.row + 8 * r, word)»;" =>
                "backward_mask_row(a, coord, at.row + 8 * r, word) << 1 | 1";
        FewPairs: "dK/dV pass: mask off by one", "dk[" =>
            DKV: "backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0)" =>
                "backward_mask_row(a, coord, first + 8 * n_tile + at.column + c, 0) << 1 | 1";
        MaskedNan: "masked pairs times elements that are not finite", "dq[" =>
            DQ: "coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(keys, Storage::elements, at))" => "true",
            DKV: "coord.is_full ||
            !named_barrier_any(WARPGROUP_BARRIER(at.group), WARPGROUP,
                               part_non_finite(queries, Storage::elements, at) ||
                                   part_non_finite(douts, Storage::elements, at))" => "true";
    },
};
