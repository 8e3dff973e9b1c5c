//! Mistakes at level plain and on tensor cores (`mma.sync`).

use std::{ops::Range, time::Duration};

use annulus_conformance::{Case, Draw, Masks, Setting, suite};
use annulus_core::{DType, Dims, Spec};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;

use super::{Check, DEADLOCK, Edit, Mistake, Of, Planted, Table};
use crate::{
    common::staged,
    decode,
    support::{next_device, planted_on},
};

const TILE: &str = "tile.cuh";
const STREAM: &str = "chunk_stream.cuh";
const FORWARD_KERNEL: &str = "forward_matrix.cuh";
const PROBS: &str = "forward_probs.cuh";
const WARPS: &str = "forward_matrix.cuh";
const DQ: &str = "backward_queries_matrix.cuh";
const DKV: &str = "backward_keys_matrix.cuh";
const MERGE_KERNEL: &str = "merge_splits.cuh";

/// Orders of threads in which a mistake may show: mistakes that are races do not fail in every one.
pub(super) const ORDERS: Range<u64> = 0..16;

/// A causal case of several tiles.
pub(super) fn causal(dtype: DType, [head_dim, value_dim]: [usize; 2]) -> Case {
    let dims =
        Dims { batch: 1, q_len: 70, kv_len: 70, q_heads: 2, kv_heads: 1, head_dim, value_dim };
    let masks = Masks { causal: true, ..Masks::default() };
    Case::new("planted", Spec::new(dims, DType::F64), masks, &mut Draw::new(5)).in_dtype(dtype)
}

/// More than one slice of dims, and rows that can be copied 16 bytes at a time.
const FEW_DIMS: [usize; 2] = [40, 48];

/// A case of `rows` rows (queries × heads of a KV head) and `kv_len` keys.
fn rows(rows: usize, kv_len: usize, [head_dim, value_dim]: [usize; 2]) -> Case {
    let q_len = rows / 4;
    let dims = Dims { batch: 1, q_len, kv_len, q_heads: 4, kv_heads: 1, head_dim, value_dim };
    Case::new("rows", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(5))
        .in_dtype(DType::F16)
}

/// A case of few rows.
fn few_rows(dims: [usize; 2]) -> Case {
    rows(8, 523, dims)
}

/// A case of few rows that shows a mistake.
pub(super) fn few_rows_of(of: Of) -> (Case, Setting) {
    match of {
        Of::FewPairs => {
            let causal = Masks { causal: true, ..Masks::default() };
            (rows(8, 70, FEW_DIMS).masked(causal), Setting::ALONE)
        }
        Of::State => (few_rows(FEW_DIMS), Setting::new(4, Layout::Contiguous)),
        // three tiles: the last values are in a stage that the results of the warps replace
        _ => (rows(8, 190, [104, 120]), Setting::ALONE),
    }
}

/// Verdict on a case on one device.
fn verdict(case: &Case, planted: Planted) -> Result<(), String> {
    verdict_on(case, &Setting::ALONE, planted)
}

/// Verdict on a case on one device, which all ranks share.
fn verdict_on(case: &Case, setting: &Setting, planted: Planted) -> Result<(), String> {
    let ordinal = next_device();
    let subject = staged("one emulated gpu", Duration::ZERO, move || planted_on(ordinal, planted));
    let verdict = suite::answer(&subject, case, setting).map(drop);
    if emulator::deadlocks(ordinal) > 0 { Err(DEADLOCK.to_owned()) } else { verdict }
}

/// Level plain.
pub(super) static PLAIN: Table = Table {
    checks: &[Check {
        name: "f64",
        sign: |mistake| Some(mistake.sign),
        verdict: |_, planted| verdict(&causal(DType::F64, FEW_DIMS), planted),
        seeds: ORDERS,
    }],
    mistakes: mistakes! {
        FewPairs: "no barrier between loads of operands and their product", "out[" =>
            TILE: "coord.first_key, a.keys, from, dim);
        «barrier();»" => "";
        FewPairs: "no barrier between loads of values and their product", "out[" =>
            TILE: "barrier_any(non_finite && !is_full)" => "non_finite && !is_full";
        FewPairs: "mask off by one", "out[" =>
            TILE: "(«line >> key & 1»)" => "(line << 1 | 1) >> key & 1";
        // it ends, because a launch in which every thread waits for another one fails
        FewPairs: "a barrier that only some threads reach", DEADLOCK =>
            TILE: "    }
    «barrier();»
}" => "if (thread_index() == 77) return; barrier();";
    },
};

const fn of_stages(mistake: &Mistake) -> Option<&'static str> {
    if matches!(mistake.of, Of::Stages) { Some(mistake.sign) } else { None }
}

/// Forward on tensor cores.
pub(super) static FORWARD: Table = Table {
    checks: &[
        Check {
            name: "four stages",
            sign: |mistake| Some(mistake.sign),
            verdict: |_, planted| verdict(&causal(DType::F16, FEW_DIMS), planted),
            seeds: ORDERS,
        },
        Check {
            name: "few rows, eight stages",
            sign: of_stages,
            verdict: |_, planted| verdict(&few_rows(FEW_DIMS), planted),
            seeds: ORDERS,
        },
    ],
    mistakes: mistakes! {
        Stages: "no barrier between the wait for a stage and its use", "out[" =>
            STREAM: "barrier_any(mine)" => "pass == FORWARD ? mine : barrier_any(mine)";
        Stages: "a wait one stage late", "out[" =>
            STREAM: "cp_async_wait<depth - 2>();" =>
                "cp_async_wait<depth - 2 + (pass == FORWARD)>();";
        Stages: "queries that belong to a later group of copies", "out[" =>
            FORWARD_KERNEL: "if (tiles.more())
        load_query_rows<Shape>(queries_of_tile,
                               operand_of(a.q, b, first_head, a.queries, a.head_dim), first_query,
                               a);
    stream.begin(a, memory.stages, tiles);" =>
                "stream.begin(a, memory.stages, tiles);
                 if (tiles.more())
                     load_query_rows<Shape>(queries_of_tile,
                                            operand_of(a.q, b, first_head, a.queries, a.head_dim),
                                            first_query, a);";
        FewPairs: "mask off by one", "out[" =>
            PROBS: "(«line & existing»)" => "(line << 1 | 1) & existing";
    },
};

/// Of few rows, whose warps divide the keys of a tile.
pub(super) static DECODE: Table = Table {
    checks: &[Check {
        name: "few rows",
        sign: |mistake| Some(mistake.sign),
        verdict: |of, planted| {
            let (case, setting) = few_rows_of(of);
            verdict_on(&case, &setting, planted)
        },
        seeds: ORDERS,
    }],
    mistakes: mistakes! {
        FewPairs: "the tile mask of the first warp's keys", "out[" =>
            FORWARD_KERNEL: "coord.first_key += «lane.first_column»" => "0";
        Stages: "results of a warp that replace values in use", "out[" =>
            WARPS: "«barrier();»
    if (warps == 2" => "";
        Stages: "results that are read before they are written", "out[" =>
            WARPS: "«barrier();»
    if (warp > 0) return" => "";
        State: "the state of the pass in every warp", "out[" =>
            FORWARD_KERNEL: "starts_empty(a) || «lane.first_column > 0»" => "false";
    },
};

/// Backward on tensor cores. A wrong gradient implies a correct output, which is checked first.
pub(super) static BACKWARD: Table = Table {
    checks: &[Check {
        name: "backward",
        sign: |mistake| Some(mistake.sign),
        verdict: |_, planted| verdict(&causal(DType::Bf16, FEW_DIMS), planted),
        seeds: ORDERS,
    }],
    mistakes: mistakes! {
        Stages: "dQ: no barrier between the wait for a stage and its use", "dq[" =>
            STREAM: "barrier_any(mine)" => "pass == QUERIES ? mine : barrier_any(mine)";
        Stages: "dK, dV: no barrier between the wait for a stage and its use", "dk[" =>
            STREAM: "barrier_any(mine)" => "pass == KEYS ? mine : barrier_any(mine)";
        Stages: "dQ: a wait one stage late", "dq[" =>
            STREAM: "cp_async_wait<depth - 2>();" =>
                "cp_async_wait<depth - 2 + (pass == QUERIES)>();";
        Stages: "dK, dV: a wait one stage late", "dk[" =>
            STREAM: "cp_async_wait<depth - 2>();" => "cp_async_wait<depth - 2 + (pass == KEYS)>();";
        Stages: "dQ: left rows that belong to a later group of copies", "dq[" =>
            DQ: "rows.load(memory, b, h, first_query, lane, a);
    stream.begin(a, memory.stages, tiles);" =>
                "stream.begin(a, memory.stages, tiles);
                 rows.load(memory, b, h, first_query, lane, a);";
        Stages: "dK, dV: left rows that belong to a later group of copies", "dk[" =>
            DKV: "if (tiles.more()) rows.load(memory, b, kv_head, first_key, lane, a);
    stream.begin(a, memory.stages, tiles);" =>
                "stream.begin(a, memory.stages, tiles);
                 if (tiles.more()) rows.load(memory, b, kv_head, first_key, lane, a);";
        // the warps of dV pass S to those of dK through shared memory, and all read the statistics
        // of the tile's queries there
        Stages: "dK, dV: scores that are not ordered by a barrier", "dk[" =>
            DKV: "barrier_any(!is_fused(own.base))" => "!is_fused(own.base)";
        Stages: "dK, dV: statistics that are not ordered by a barrier", "dk[" =>
            DKV: "if (thread_index() < TILE)
            own = fused_statistics(
                load_query_statistics(a, b, coord.h, coord.first_query + thread_index()));" =>
                "if (thread_index() < TILE) {
                     own = fused_statistics(load_query_statistics(
                         a, b, coord.h, coord.first_query + thread_index()));
                     write_statistics(memory, own);
                 }";
        FewPairs: "dQ: mask off by one", "dq[" =>
            DQ: "mask_row(a, coord, query, QUERIES_ROWS)" =>
                "mask_row(a, coord, query, QUERIES_ROWS) << 1 | 1";
        FewPairs: "dK, dV: mask off by one", "dk[" =>
            DKV: "mask_row(a, coord, query + c)" => "mask_row(a, coord, query + c) << 1 | 1";
    },
};

/// The merge of ranges of keys.
pub(super) static MERGE: Table = Table {
    checks: &[Check {
        name: "decoding",
        sign: |mistake| Some(mistake.sign),
        verdict: |_, planted| verdict(&decode::bare(), planted),
        seeds: ORDERS,
    }],
    mistakes: mistakes! {
        Stages: "no barrier after the maxima of the warps", "out[" =>
            MERGE_KERNEL: "of_warps[warp] = max;
    «barrier();»" => "";
        Stages: "no barrier after the factors of the ranges", "out[" =>
            MERGE_KERNEL: "= ties;
    }
    «barrier();»" => "";
        Stages: "no barrier after the terms of the warps", "out[" =>
            MERGE_KERNEL: "= acc[c];
    «barrier();»" => "";
    },
};
