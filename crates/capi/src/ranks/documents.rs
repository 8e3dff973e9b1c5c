//! Packed documents over ranks of the C interface: a rank asks for its rows before there is a plan,
//! loads them alone, and both passes give what one rank computes; the strategy is chosen for the
//! documents.

use annulus::{Batch, Division, LocalRing, Runtime};

use super::*;

/// First rows of four documents, and the end of the last. On contiguous shards of 2 and 4 ranks no
/// document is divided.
const STARTS: [i64; 5] = [0, 10, 20, 30, DIMS.q_len as i64];

/// Calls `with` with a batch of the packed documents of `starts`.
fn packed(starts: &[i64], with: impl FnOnce(*const annulus_batch)) {
    let dims = [starts.len() as i64, 1, 1, 1];
    let data = starts.as_ptr().cast_mut().cast();
    let starts = annulus_tensor { data, dtype: ANNULUS_I64, dims, strides: [1, 0, 0, 0] };
    // SAFETY: pointers may be null
    let mut batch: annulus_batch = unsafe { std::mem::zeroed() };
    batch.struct_size = size_of::<annulus_batch>() as u64;
    batch.cum_seqlens_q = &raw const starts;
    with(&raw const batch);
}

/// Returns the description of an attention whose strategy is chosen: causal, with the heads of
/// [`DIMS`], or full, with as many query and KV heads as given.
fn described(layout: i32, full_heads: Option<i64>) -> *mut annulus_attention {
    // SAFETY: numbers may be 0
    let mut options: annulus_options = unsafe { std::mem::zeroed() };
    let mut attention = ptr::null_mut();
    // SAFETY: all pointers are to locals
    unsafe {
        ok(annulus_options_init(&raw mut options, size_of::<annulus_options>() as u64));
        options.batch = 1;
        [options.kv_heads, options.q_heads] = full_heads.map_or([1, 2], |heads| [heads; 2]);
        [options.q_len, options.kv_len] = [DIMS.q_len as i64; 2];
        [options.head_dim, options.value_dim] = [4; 2];
        (options.causal, options.layout) = (full_heads.is_none().into(), layout);
        options.strategy = ANNULUS_STRATEGY_AUTO;
        ok(annulus_attention_create(&raw const options, &raw mut attention));
    }
    attention
}

/// Returns the rows that a description assigns to a rank.
fn rows_before_plan(attention: *const annulus_attention, ranks: i64, rank: i64) -> Vec<i64> {
    let (mut rows, mut count) = (vec![0; DIMS.q_len], 0);
    let room = rows.len() as i64;
    // SAFETY: as many numbers as said
    unsafe {
        let first = rows.as_mut_ptr();
        ok(annulus_attention_q_rows(attention, ranks, rank, first, room, &raw mut count));
    }
    rows.truncate(count as usize);
    rows
}

/// Runs both passes of one rank over the documents of [`STARTS`].
fn run(endpoint: Threads, ranks: usize, layout: i32) -> Share {
    let attention = described(layout, None);
    let rank = endpoint.rank() as i64;
    let ranks = ranks as i64;
    let mut plan = ptr::null_mut();
    // SAFETY: the batch lives through the calls
    packed(&STARTS, |batch| unsafe {
        if layout == ANNULUS_LAYOUT_BALANCED {
            ok(annulus_attention_set_balanced_layout(attention, ranks, batch));
        } else {
            ok(annulus_attention_set_documents(attention, batch));
        }
    });
    let own = (layout != ANNULUS_LAYOUT_AUTO).then(|| rows_before_plan(attention, ranks, rank));
    // SAFETY: pointers to locals, and a batch that lives through the call
    unsafe {
        ok(plan_over(attention, endpoint, &mut plan));
        packed(&STARTS, |batch| ok(annulus_plan_update(plan, batch)));
    }
    assert!(own.is_none_or(|own| own == rows(plan)), "layout {layout}");
    let (status, share) = passes(plan, false);
    ok(status);
    ok(annulus_plan_destroy(plan));
    ok(annulus_attention_destroy(attention));
    share
}

/// Returns out, dq, dk and dv of one rank with all rows.
fn on_one_rank() -> [Array4<f32>; 4] {
    let all: Vec<i64> = (0..DIMS.q_len as i64).collect();
    let [q, k, v, dout] = [(1, 2), (2, 1), (3, 1), (4, 2)].map(|(salt, heads)| {
        // as the ranks of `passes` have them
        input(salt, &all, heads)
    });
    let mut ring = LocalRing::new(
        (Attention::new().causal(true), Division::new(), Runtime::new().threads(1)),
        DIMS,
        1,
    )
    .unwrap();
    ring.update(&documents()).unwrap();
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = ring.forward(&tensors).unwrap();
    let gradients = ring.backward(&tensors, &forward, dout.view(), None).unwrap();
    [forward.out, gradients.dq, gradients.dk, gradients.dv]
}

fn documents() -> Batch {
    Batch { cum_seqlens_q: Some(STARTS.to_vec()), ..Batch::default() }
}

/// Returns the strategy in force of a plan of four ranks with its parts of heads, and the bytes of
/// a forward pass.
fn chosen(attention: *const annulus_attention) -> ([i32; 2], u64) {
    let (mut plan, mut strategy, mut heads, mut bytes) = (ptr::null_mut(), 7, 7, 7);
    // SAFETY: pointers to locals
    unsafe {
        ok(annulus_plan_create_threads(attention, 4, &raw mut plan));
        packed(&STARTS, |batch| ok(annulus_plan_update(plan, batch)));
        ok(annulus_plan_strategy(plan, &raw mut strategy, &raw mut heads));
        ok(annulus_plan_predicted_bytes(plan, ANNULUS_PASS_FORWARD, &raw mut bytes));
    }
    ok(annulus_plan_destroy(plan));
    ([strategy, heads], bytes)
}

#[test]
fn ranks_ask_for_their_rows_and_compute_what_one_rank_does() {
    let want = on_one_rank();
    for ranks in [2, 4] {
        for layout in [ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_AUTO] {
            let of_ranks = on_all(ranks, |endpoint| run(endpoint, ranks, layout));
            let mut held = vec![0; DIMS.q_len];
            for (rows, parts) in &of_ranks {
                rows.iter().for_each(|&row| held[row as usize] += 1);
                for (part, want) in parts.iter().zip(&want) {
                    for (i, &row) in rows.iter().enumerate() {
                        let want = want.index_axis(Axis(1), row as usize);
                        let error = &part.index_axis(Axis(1), i) - &want;
                        let most = error.iter().fold(0f32, |most, error| most.max(error.abs()));
                        assert!(most < 2e-5, "row {row} of {ranks} ranks, {layout}: {most}");
                    }
                }
            }
            assert!(held.iter().all(|&ranks| ranks == 1), "{layout}: {held:?}");
        }
    }
}

#[test]
fn the_strategy_is_chosen_for_the_documents() {
    let attention = described(ANNULUS_LAYOUT_CONTIGUOUS, Some(8));
    let (by_mask, _) = chosen(attention);
    assert_eq!(by_mask, [ANNULUS_STRATEGY_HEADS_RING, 4]);
    // SAFETY: a batch that lives through the call
    packed(&STARTS, |batch| unsafe { ok(annulus_attention_set_documents(attention, batch)) });
    // no document is on two ranks
    assert_eq!(chosen(attention), ([ANNULUS_STRATEGY_RING, 1], 0));
    // SAFETY: NULL removes the documents
    unsafe { ok(annulus_attention_set_documents(attention, ptr::null())) };
    assert_eq!(chosen(attention).0, by_mask);
    ok(annulus_attention_destroy(attention));
}
