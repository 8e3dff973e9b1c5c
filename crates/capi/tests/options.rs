//! Every option of the C interface against the facade: the same bits, forward and backward, and
//! other bits than without the option, so that none is ignored.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::{
    ffi::{CStr, CString, c_void},
    ptr,
    sync::Arc,
    time::Duration,
};

use annulus::{
    Alignment, Attention, Backward, BackwardMode, Batch, BiasOrder, DType, Dims, Division, Element,
    Forward, Layout, LocalRing, Precision, Route, Runtime, Setup, SinkShape, Strategy, Tensors,
    backend::{AnyBackend, BackendName},
    bias::{Alibi, BiasTable},
    half::{bf16, f16},
    mask::{Axis, DenseMask, Edge, KeyLists, Neighborhood, Predicate},
    planning::{CustomLayout, Runs},
};
use annulus_capi::*;
use common::{
    args, attention, batch, described, last_error, ok, options, plan_of_threads, pointer, tensor,
};
use ndarray::{Array, Array1, Array2, Array3, Array4, Dimension, array};

const DIMS: Dims =
    Dims { batch: 2, q_len: 23, kv_len: 23, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };
/// Heads that groups of three ranks divide.
const HEADS_DIMS: Dims = Dims { q_heads: 6, kv_heads: 3, ..DIMS };
const RANKS: usize = 3;

/// Numbers that look random and are the same everywhere.
fn numbers<T: Element, D: Dimension>(
    seed: u64,
    shape: impl ndarray::ShapeBuilder<Dim = D>,
) -> Array<T, D> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    Array::from_shape_simple_fn(shape, || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        T::from_f64((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    })
}

/// The tensors of both passes.
struct Data<T: Element> {
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    bias: Option<Array4<T::Accumulator>>,
    sinks: Option<Array2<T::Accumulator>>,
    dout: Array4<T>,
    dlse: Array3<T::Accumulator>,
}

impl<T: Element> Data<T> {
    fn of(dims: Dims, bias: Option<[usize; 4]>, sinks: Option<SinkShape>) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
        let heads = |sinks: SinkShape| if sinks.per_head { q_heads } else { 1 };
        Self {
            q: numbers(1, (batch, q_len, q_heads, head_dim)),
            k: numbers(2, (batch, kv_len, kv_heads, head_dim)),
            v: numbers(3, (batch, kv_len, kv_heads, value_dim)),
            bias: bias.map(|shape| numbers(4, shape)),
            sinks: sinks.map(|sinks| numbers(5, (heads(sinks), sinks.count))),
            dout: numbers(6, (batch, q_len, q_heads, value_dim)),
            dlse: numbers(7, (batch, q_heads, q_len)),
        }
    }
}

/// Everything that both passes return, as numbers: `bits` tells −0 from 0 and NaN from NaN.
#[derive(Debug, PartialEq)]
struct Answer(Vec<(&'static str, Vec<u64>)>);

fn bits<T: Element, D: Dimension>(array: &Array<T, D>) -> Vec<u64> {
    array.iter().map(|number| number.to_f64().to_bits()).collect()
}

fn answer<T: Element>(forward: &Forward<T>, gradients: &Backward<T>) -> Answer {
    let mut answer = vec![
        ("out", bits(&forward.out)),
        ("lse", bits(&forward.lse)),
        ("dq", bits(&gradients.dq)),
        ("dk", bits(&gradients.dk)),
        ("dv", bits(&gradients.dv)),
    ];
    answer.extend(forward.max.iter().map(|max| ("max", bits(max))));
    answer.extend(forward.sum.iter().map(|sum| ("sum", bits(sum))));
    answer.extend(forward.ties.iter().map(|ties| ("ties", bits(ties))));
    answer.extend(forward.out_residual.iter().map(|residual| ("out_residual", bits(residual))));
    answer.extend(forward.statistics.iter().map(|of| ("statistics", bits(of))));
    answer.extend(forward.head_statistics.iter().map(|of| ("head_statistics", bits(of))));
    answer.extend(gradients.dbias.iter().map(|dbias| ("dbias", bits(dbias))));
    answer.extend(gradients.dsoftmax_aux.iter().map(|dsinks| ("dsinks", bits(dsinks))));
    Answer(answer)
}

impl Answer {
    fn with_list_bias(mut self, gradient: Option<Vec<f64>>) -> Self {
        self.0.extend(gradient.map(|of| ("dkey_list_bias", bits(&Array1::from_vec(of)))));
        self
    }
}

/// The answer of the facade.
fn by_facade<T: Element>(
    attention: &Attention,
    data: &Data<T>,
    batch: &Batch,
    backend: BackendName,
) -> Answer {
    let runtime = Runtime::new().backend(AnyBackend::open(backend, None, 0).unwrap());
    let setup = (attention.clone().dtype(T::DTYPE), Division::new(), runtime);
    let mut ring = LocalRing::new(setup, DIMS, RANKS).unwrap();
    ring.update(batch).unwrap();
    let mut tensors = Tensors::new(data.q.view(), data.k.view(), data.v.view());
    tensors.bias = data.bias.as_ref().map(|bias| bias.view());
    tensors.softmax_aux = data.sinks.as_ref().map(|sinks| sinks.view());
    let forward = ring.forward(&tensors).unwrap();
    let dlse = Some(data.dlse.view());
    let gradients = ring.backward(&tensors, &forward, data.dout.view(), dlse).unwrap();
    answer(&forward, &gradients).with_list_bias(ring.list_bias_gradient())
}

/// The answer of the C interface.
fn by_c<T: Element>(case: &Case, data: &Data<T>, backend: BackendName) -> Answer {
    let mut options = options(DIMS);
    options.dtype = tensor(&data.q).dtype;
    (case.options)(&mut options);
    options.backend = backend as i32;
    let (attention, mut plan) = (attention(&options), ptr::null_mut());
    (case.add)(attention);
    // SAFETY: a pointer to a local
    ok(unsafe { annulus_plan_create_threads(attention, RANKS as i64, &raw mut plan) });
    // the plan lives on
    ok(annulus_attention_destroy(attention));
    update(plan, &case.batch);

    let Dims { batch, q_len, q_heads, value_dim, .. } = DIMS;
    let (seven, seven_of_sums) = (T::from_f64(7.0), T::Accumulator::from_f64(7.0));
    let is_narrow = matches!(T::DTYPE, DType::Bf16 | DType::F16);
    let has_residual = is_narrow && matches!(backend, BackendName::Cpu);
    let of_out = || Array4::from_elem((batch, q_len, q_heads, value_dim), seven);
    let statistics = || Array3::from_elem((batch, q_heads, q_len), seven_of_sums);
    let forward = Forward::<T> {
        out: of_out(),
        lse: statistics(),
        max: Some(statistics()),
        sum: Some(statistics()),
        ties: (options.unnormalized == 1).then(statistics),
        out_residual: has_residual.then(of_out),
        statistics: (options.statistics == 1)
            .then(|| Array4::from_elem((batch, q_heads, q_len, 3), seven_of_sums)),
        head_statistics: (options.statistics == 1)
            .then(|| Array3::from_elem((q_heads, 3, 2), seven_of_sums)),
        reports: Vec::new(),
    };
    let gradients = Backward::<T> {
        dq: Array4::from_elem(data.q.raw_dim(), seven),
        dk: Array4::from_elem(data.k.raw_dim(), seven),
        dv: Array4::from_elem(data.v.raw_dim(), seven),
        dbias: data.bias.as_ref().map(|bias| Array4::from_elem(bias.raw_dim(), seven_of_sums)),
        dsoftmax_aux: data.sinks.as_ref().map(|to| Array2::from_elem(to.raw_dim(), seven_of_sums)),
        reports: Vec::new(),
    };

    let inputs = [&data.q, &data.k, &data.v, &data.dout].map(tensor);
    let outputs = [tensor(&forward.out), tensor(&forward.lse)];
    let to = [&gradients.dq, &gradients.dk, &gradients.dv].map(tensor);
    let statistics = [&forward.max, &forward.sum, &forward.ties];
    let statistics = statistics.map(|array| array.as_ref().map(tensor));
    let [max, sum, ties] = statistics.each_ref().map(|tensor| pointer(tensor.as_ref()));
    let optional = [
        data.bias.as_ref().map(tensor),
        data.sinks.as_ref().map(tensor),
        forward.out_residual.as_ref().map(tensor),
        Some(tensor(&data.dlse)),
        gradients.dbias.as_ref().map(tensor),
        gradients.dsoftmax_aux.as_ref().map(tensor),
        forward.statistics.as_ref().map(tensor),
        forward.head_statistics.as_ref().map(tensor),
    ];
    let optional = optional.each_ref().map(|tensor| pointer(tensor.as_ref()));
    let [bias, softmax_aux, out_residual, dlse, dbias, dsoftmax_aux, of_rows, of_heads] = optional;
    let (args, of_backward) = args(inputs.each_ref(), outputs.each_ref(), to.each_ref());
    let args = annulus_forward_args { bias, softmax_aux, max, sum, ties, out_residual, ..args };
    let (statistics, head_statistics) = (of_rows, of_heads);
    let args = annulus_forward_args { statistics, head_statistics, ..args };
    let of_backward =
        annulus_backward_args { bias, softmax_aux, max, sum, ties, out_residual, ..of_backward };
    let of_backward = annulus_backward_args { dlse, dbias, dsoftmax_aux, ..of_backward };
    // SAFETY: the arrays outlive the calls, and nobody touches them meanwhile
    unsafe {
        ok(annulus_forward(plan, &raw const args));
        ok(annulus_backward(plan, &raw const of_backward));
    }
    let mut dlist_bias = None;
    if case.batch.key_lists.as_ref().is_some_and(|lists| lists.bias().is_some()) {
        let mut count = 0;
        // SAFETY: pointers to locals, of as many numbers as the function says
        unsafe {
            ok(annulus_plan_list_bias_gradient(plan, ptr::null_mut(), 0, &raw mut count));
            let numbers = dlist_bias.insert(vec![7.0; count as usize]);
            let room = numbers.as_mut_ptr();
            ok(annulus_plan_list_bias_gradient(plan, room, count, &raw mut count));
        }
    }
    ok(annulus_plan_destroy(plan));
    answer(&forward, &gradients).with_list_bias(dlist_bias)
}

fn update(plan: *mut annulus_plan, batch: &Batch) {
    let integers = |numbers: &Vec<i64>| Array::from_vec(numbers.clone());
    let mask = batch.attention_mask.as_ref().map(|mask| {
        let shape = mask.shape();
        Array4::from_shape_fn(shape, |(b, h, q, k)| mask.visible(b, h, q, k))
    });
    let lens = [&batch.cum_seqlens_q, &batch.cum_seqlens_k].map(|lens| lens.as_ref().map(integers));
    let ids = [&batch.q_segment_ids, &batch.kv_segment_ids];
    let ids = ids.map(|ids| ids.as_ref().map(|ids| described(ids, ANNULUS_I32)));
    let at = [&batch.q_positions, &batch.kv_positions];
    let at = at.map(|at| at.as_ref().map(|at| described(at, ANNULUS_I64)));
    let cum = lens.each_ref().map(|lens| lens.as_ref().map(|lens| described(lens, ANNULUS_I64)));
    let mask_tensor = mask.as_ref().map(|mask| described(mask, ANNULUS_BOOL));
    let lists = batch.key_lists.as_deref();
    let [offsets, keys, bias] = [lists, lists, lists.filter(|lists| lists.bias().is_some())];
    let offsets = offsets.map(|lists| {
        let [batches, groups, queries] = lists.shape();
        Array3::from_shape_fn((batches, groups, queries + 1), |(b, g, q)| match q {
            0 => lists.entries(b, g, 0).start as i64,
            _ => lists.entries(b, g, q - 1).end as i64,
        })
    });
    let keys = keys.map(|lists| lists.keys().iter().map(|&key| key as i32).collect::<Array1<_>>());
    let bias = bias.and_then(|lists| Some(Array1::from_vec(lists.bias()?.to_vec())));
    let offsets = offsets.as_ref().map(|offsets| described(offsets, ANNULUS_I64));
    let keys = keys.as_ref().map(|keys| described(keys, ANNULUS_I32));
    let bias = bias.as_ref().map(|bias| described(bias, ANNULUS_F64));
    let batch = annulus_batch {
        struct_size: size_of::<annulus_batch>() as u64,
        q_segment_ids: pointer(ids[0].as_ref()),
        kv_segment_ids: pointer(ids[1].as_ref()),
        q_positions: pointer(at[0].as_ref()),
        kv_positions: pointer(at[1].as_ref()),
        attention_mask: pointer(mask_tensor.as_ref()),
        cum_seqlens_q: pointer(cum[0].as_ref()),
        cum_seqlens_k: pointer(cum[1].as_ref()),
        key_list_offsets: pointer(offsets.as_ref()),
        key_list_indices: pointer(keys.as_ref()),
        key_list_ends: ptr::null(),
        key_list_bias: pointer(bias.as_ref()),
    };
    // SAFETY: the arrays outlive the call
    ok(unsafe { annulus_plan_update(plan, &raw const batch) });
}

/// Options whose passes are compared.
struct Case {
    name: &'static str,
    options: Change,
    /// Adds the option to the handle.
    add: fn(*mut annulus_attention),
    attention: Attention,
    batch: Batch,
}

type Change = fn(&mut annulus_options);

impl Case {
    fn new(name: &'static str, options: Change, attention: Attention) -> Self {
        Self { name, options, add: |_| {}, attention, batch: Batch::default() }
    }

    fn with_batch(name: &'static str, batch: Batch) -> Self {
        Self { batch, ..Self::new(name, |o| o.causal = 1, Attention::new().causal(true)) }
    }
}

unsafe extern "C" fn odd_head_sees_even_keys(
    context: *mut c_void,
    pair: *const annulus_pair,
) -> i32 {
    assert_eq!(context.addr(), 77);
    // SAFETY: annulus passes a pair that lives through the call
    let pair = unsafe { &*pair };
    (pair.head % 2 == 0 || pair.kv_row % 2 == 0).into()
}

unsafe extern "C" fn every_third_position(_: *mut c_void, pair: *const annulus_pair) -> i32 {
    // SAFETY: annulus passes a pair that lives through the call
    let pair = unsafe { &*pair };
    assert_eq!((pair.batch, pair.head), (0, 0));
    ((pair.q_position - pair.kv_position) % 3 == 0).into()
}

unsafe extern "C" fn per_row_bias(_: *mut c_void, pair: *const annulus_pair) -> f64 {
    // SAFETY: annulus passes a pair that lives through the call
    let pair = unsafe { &*pair };
    (pair.head * 10 + pair.q_position - pair.kv_position) as f64 * 0.125
}

/// Options of scores and masks that take tensors or functions, by pairs.
fn cases() -> Vec<Case> {
    let new = Attention::new;
    let [batch, heads, queries, keys] = [DIMS.batch, DIMS.q_heads, DIMS.q_len, DIMS.kv_len];
    vec![
        Case {
            // SAFETY: the name is a text, and the function lives as long as the program
            add: |attention| unsafe {
                let context = ptr::without_provenance_mut(77);
                let flags = ANNULUS_MASK_PER_HEAD;
                let visible = Some(odd_head_sees_even_keys as _);
                let name = c"even keys".as_ptr();
                ok(annulus_attention_add_mask(attention, name, flags, visible, context));
            },
            ..Case::new(
                "a mask by head",
                |_| {},
                new().mask(Arc::new(Predicate::of_pairs("even keys", |query, key| {
                    query.head % 2 == 0 || key.row % 2 == 0
                }))),
            )
        },
        Case {
            // SAFETY: as above
            add: |attention| unsafe {
                let visible = Some(every_third_position as _);
                let name = c"thirds".as_ptr();
                ok(annulus_attention_add_mask(attention, name, 0, visible, ptr::null_mut()));
            },
            ..Case::new(
                "a mask by position, and causal",
                |o| o.causal = 1,
                new()
                    .causal(true)
                    .mask(Arc::new(Predicate::of_positions("thirds", |i, j| (i - j) % 3 == 0))),
            )
        },
        Case {
            // SAFETY: as above
            add: |attention| unsafe {
                let (name, bias) = (c"rows".as_ptr(), Some(per_row_bias as _));
                let null = ptr::null_mut();
                ok(annulus_attention_set_bias_function(attention, name, bias, null));
            },
            ..Case::new(
                "a bias function",
                |_| {},
                new().bias_function(Arc::new(annulus_core::PositionBias::new(
                    "rows",
                    |head, i, j| (head as i64 * 10 + i - j) as f64 * 0.125,
                ))),
            )
        },
        Case::new(
            "a bias of all pairs, sinks and a cap",
            |o| {
                (o.has_softmax_scale, o.softmax_scale, o.logits_soft_cap) = (1, -0.5, 0.75);
                o.bias_dims = [o.batch, o.q_heads, o.q_len, o.kv_len];
                o.sinks = 2;
            },
            new()
                .softmax_scale(-0.5)
                .logits_soft_cap(0.75)
                .bias([batch, heads, queries, keys])
                .softmax_aux(SinkShape::shared(2)),
        ),
        Case {
            // SAFETY: the text is one of the program
            add: |attention| unsafe {
                ok(annulus_attention_set_bias_table(attention, c"t5:8,16".as_ptr()));
            },
            ..Case::new(
                "a bias table, and statistics",
                |o| (o.bias_dims, o.statistics) = ([1, o.q_heads, 1, 8], 1),
                new().bias_table(BiasTable::t5(true, 8, 16).unwrap()).statistics(true),
            )
        },
        Case::new(
            "sinks_per_head, unnormalized and dropout",
            |o| {
                (o.sinks, o.sinks_per_head, o.unnormalized) = (1, 1, 1);
                (o.dropout_prob, o.dropout_seed) = (0.25, 1 << 40);
            },
            new().softmax_aux(SinkShape::per_head(1)).unnormalized(true).dropout(0.25, 1 << 40),
        ),
    ]
}

fn documents() -> Batch {
    Batch { cum_seqlens_q: Some(vec![0, 5, 17, 23]), ..Batch::default() }
}

fn batches() -> Vec<Case> {
    let ids = Array2::from_shape_fn((2, 23), |(b, row)| (row as i32 / (5 + b as i32)) - 1);
    let positions = Array2::from_shape_fn((2, 23), |(b, row)| (row as i64 * 3) % (7 + b as i64));
    let dense = DenseMask::from_fn([1, 4, 23, 23], |[_, h, q, k]| (h + q * 3 + k * 5) % 4 != 0);
    let other = Array2::from_shape_fn((2, 23), |(_, row)| row as i32 / 4);
    vec![
        Case::with_batch(
            "segment ids of one side",
            Batch { q_segment_ids: Some(ids.clone()), ..Batch::default() },
        ),
        Case::with_batch(
            "segment ids, positions and attention_mask",
            Batch {
                q_segment_ids: Some(ids),
                kv_segment_ids: Some(other),
                q_positions: Some(positions.clone()),
                kv_positions: Some(positions),
                attention_mask: Some(dense),
                ..Batch::default()
            },
        ),
        Case::with_batch(
            "cum_seqlens",
            Batch {
                cum_seqlens_q: Some(vec![0, 4, 20]),
                cum_seqlens_k: Some(vec![0, 7, 21]),
                ..Batch::default()
            },
        ),
        Case::with_batch("key lists with a bias", listed([1, 1], true)),
        Case::with_batch("key lists of groups and batch rows", listed([2, 2], false)),
    ]
}

/// A batch of key lists, most with several keys.
fn listed([batches, groups]: [usize; 2], is_biased: bool) -> Batch {
    let mut offsets = vec![0];
    let mut keys = Vec::new();
    for list in 0..batches * groups * 23 {
        keys.extend((0..23).filter(|key| (list * 5 + key * 7) % 4 == list % 5));
        offsets.push(keys.len() as u64);
    }
    let bias = (0..keys.len()).map(|pair| (pair % 9) as f64 * 0.25 - 1.0).collect();
    let keys = keys.into_iter().map(|key| key as u32).collect();
    let lists = KeyLists::by_group([batches, groups], offsets, keys).unwrap();
    let lists = if is_biased { lists.with_bias(bias).unwrap() } else { lists };
    Batch { key_lists: Some(Arc::new(lists)), ..Batch::default() }
}

#[test]
fn ranges_of_keys_are_lists_and_bad_lists_change_nothing() {
    let data = Data::<f32>::of(DIMS, None, None);
    let plan = plan_of_threads(&options(DIMS), RANKS);
    let (out, lse) = (Array4::<f32>::zeros((2, 23, 4, 6)), Array3::<f32>::zeros((2, 4, 23)));
    let [q, k, v, to_out] = [&data.q, &data.k, &data.v, &out].map(tensor);
    let (args, _) = args([&q, &k, &v, &to_out], [&to_out, &tensor(&lse)], [&q, &k, &v]);
    // every query attends to the keys 3, 4 and 7
    let offsets = Array3::from_shape_fn((1, 1, 24), |(_, _, q)| 2 * q as i32);
    let starts = Array1::from_iter((0..46).map(|at| [3i32, 7][at % 2]));
    let ends = Array1::from_iter((0..46).map(|at| [5i64, 8][at % 2]));
    let [far, empty] = [24, 3].map(|end| {
        let mut ends = ends.clone();
        ends[9] = end;
        ends
    });
    let offsets = described(&offsets, ANNULUS_I32);
    let [starts, mut short] = [described(&starts, ANNULUS_I32); 2];
    let [ends, far, empty] = [&ends, &far, &empty].map(|ends| described(ends, ANNULUS_I64));
    short.dims[0] = 45;
    let lists = annulus_batch {
        key_list_offsets: &raw const offsets,
        key_list_indices: &raw const starts,
        key_list_ends: &raw const ends,
        ..batch()
    };
    let want = by_facade(
        &Attention::new(),
        &data,
        &Batch {
            key_lists: Some(Arc::new(
                KeyLists::new((0..24).map(|q| 3 * q).collect(), [3, 4, 7].repeat(23)).unwrap(),
            )),
            ..Batch::default()
        },
        BackendName::Cpu,
    );
    let refused = |batch: &annulus_batch, text: &str| {
        // SAFETY: the arrays outlive the call
        let status = unsafe { annulus_plan_update(plan, ptr::from_ref(batch)) };
        assert_eq!(status, ANNULUS_INVALID_ARGUMENT);
        assert!(last_error().contains(text), "{text}: {}", last_error());
    };
    let mut count = 0;
    // SAFETY: all pointers are to locals, which nobody touches meanwhile
    unsafe {
        ok(annulus_plan_update(plan, &raw const lists));
        refused(&annulus_batch { key_list_indices: &raw const short, ..lists }, "46 ends of 45");
        refused(&annulus_batch { key_list_indices: ptr::null(), ..lists }, "key_list_indices");
        refused(&annulus_batch { key_list_offsets: ptr::null(), ..lists }, "key_list_offsets");
        refused(
            &annulus_batch { key_list_bias: &raw const starts, ..lists },
            "key_list_bias.dtype",
        );
        refused(
            &annulus_batch { key_list_ends: &raw const far, ..lists },
            "row 4, entry 18: key 23",
        );
        refused(
            &annulus_batch { key_list_ends: &raw const empty, ..lists },
            "row 4, entry 1: keys 7..3",
        );
        let status = annulus_plan_list_bias_gradient(plan, ptr::null_mut(), 0, &raw mut count);
        assert_eq!(status, ANNULUS_INVALID_ARGUMENT, "{}", last_error());
        ok(annulus_forward(plan, &raw const args));
    }
    assert!(bits(&out) == want.0[0].1, "the lists before the refused ones");
    ok(annulus_plan_destroy(plan));
}

/// The bias of key lists has a direction in a JVP and in a double backward.
#[test]
fn key_lists_with_a_bias_have_second_derivatives() {
    let data = Data::<f32>::of(DIMS, None, None);
    let keys: Vec<u32> = (0..23).flat_map(|q| [q % 3, 3 + q % 20]).collect();
    let bias: Array1<f64> = numbers(8, 46);
    let direction: Array1<f64> = numbers(9, 46);
    let lists = KeyLists::new((0..24).map(|q| 2 * q).collect(), keys).unwrap();
    let lists = Some(Arc::new(lists.with_bias(bias.to_vec()).unwrap()));
    let lists = Batch { key_lists: lists, ..Batch::default() };
    let setup = (Attention::new().second_derivatives(true), Division::new());
    let mut ring = LocalRing::new(setup, DIMS, RANKS).unwrap();
    ring.update(&lists).unwrap();
    let tensors = Tensors::new(data.q.view(), data.k.view(), data.v.view());
    let list_bias = direction.as_slice();
    let jvp = ring.jvp(&tensors, &tensors, list_bias).unwrap();
    let dout = data.dout.view();
    let double = ring.double_backward(&tensors, dout, None, &tensors, list_bias).unwrap();

    let mut options = options(DIMS);
    options.second_derivatives = 1;
    let plan = plan_of_threads(&options, RANKS);
    update(plan, &lists);
    let [q, k, v, dout] = [&data.q, &data.k, &data.v, &data.dout].map(tensor);
    let [out, ddout] = [0, 1].map(|_| Array4::<f32>::zeros(data.dout.dim()));
    let [lse, ddlse] = [0, 1].map(|_| Array3::<f32>::zeros(data.dlse.dim()));
    let [dq, dk, dv] = [&data.q, &data.k, &data.v].map(|of| Array4::<f32>::zeros(of.dim()));
    let [to_dq, to_dk, to_dv, to_out, to_ddout] = [&dq, &dk, &dv, &out, &ddout].map(tensor);
    let [to_lse, to_ddlse] = [&lse, &ddlse].map(tensor);
    let direction = described(&direction, ANNULUS_F64);
    // SAFETY: pointers may be null
    let (of_jvp, of_double): (annulus_jvp_args, annulus_double_backward_args) =
        unsafe { std::mem::zeroed() };
    let of_jvp = annulus_jvp_args {
        struct_size: size_of::<annulus_jvp_args>() as u64,
        q: &raw const q,
        k: &raw const k,
        v: &raw const v,
        q_tangent: &raw const q,
        k_tangent: &raw const k,
        v_tangent: &raw const v,
        out_tangent: &raw const to_out,
        lse_tangent: &raw const to_lse,
        key_list_bias_tangent: &raw const direction,
        ..of_jvp
    };
    let of_double = annulus_double_backward_args {
        struct_size: size_of::<annulus_double_backward_args>() as u64,
        q: &raw const q,
        k: &raw const k,
        v: &raw const v,
        dout: &raw const dout,
        q_cotangent: &raw const q,
        k_cotangent: &raw const k,
        v_cotangent: &raw const v,
        dq: &raw const to_dq,
        dk: &raw const to_dk,
        dv: &raw const to_dv,
        ddout: &raw const to_ddout,
        ddlse: &raw const to_ddlse,
        key_list_bias_cotangent: &raw const direction,
        ..of_double
    };
    let mut dbias = Array1::<f64>::zeros(46);
    let mut count = 0;
    // SAFETY: all pointers are to locals, which nobody touches meanwhile
    unsafe {
        ok(annulus_jvp(plan, &raw const of_jvp));
        ok(annulus_double_backward(plan, &raw const of_double));
        ok(annulus_plan_list_bias_gradient(plan, dbias.as_mut_ptr(), 46, &raw mut count));
        ok(annulus_plan_destroy(plan));
    }
    assert!(bits(&out) == bits(&jvp.out_tangent) && bits(&ddout) == bits(&double.ddout));
    assert!(bits(&dq) == bits(&double.inputs.dq) && bits(&dk) == bits(&double.inputs.dk));
    assert_eq!(dbias.to_vec(), ring.list_bias_gradient().unwrap());
    assert!(dbias.iter().any(|&number| number != 0.0));
}

/// Compares passes of C with those of the facade.
fn check<T: Element>(cases: &[Case], backend: BackendName) {
    for case in cases {
        let spec = case.attention.spec(DIMS).unwrap();
        let data = Data::<T>::of(DIMS, spec.bias, spec.sinks);
        let want = by_facade(&case.attention, &data, &case.batch, backend);
        let got = by_c(case, &data, backend);
        let names = |answer: &Answer| answer.0.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(names(&got), names(&want), "{}", case.name);
        let differs = got.0.iter().zip(&want.0).find(|(got, want)| got != want);
        let differs = differs.map(|((name, _), _)| name);
        assert_eq!(differs, None, "{} in {}", case.name, T::DTYPE);
        // the inputs alone give another answer
        let plain = Data { bias: None, sinks: None, ..Data::<T>::of(DIMS, None, None) };
        let without = by_facade(&Attention::new(), &plain, &Batch::default(), backend);
        let has_effect = got.0[..5] != without.0[..5];
        assert!(has_effect, "{} has no effect in {}", case.name, T::DTYPE);
    }
}

#[test]
fn tensors_functions_and_batches_give_the_bits_of_the_facade() {
    let cases: Vec<Case> = cases().into_iter().chain(batches()).collect();
    let [some, others] = [0, 1].map(|first| {
        let all = self::cases().into_iter().chain(batches());
        all.skip(first).step_by(2).collect::<Vec<_>>()
    });
    check::<f32>(&cases, BackendName::Cpu);
    check::<f64>(&some, BackendName::Cpu);
    check::<f16>(&some, BackendName::Cpu);
    check::<bf16>(&others, BackendName::Cpu);
}

/// Requires that C's description is the builder's, and another one than without the option.
fn is_described(
    name: &str,
    change: impl Fn(&mut annulus_options),
    add: impl Fn(*mut annulus_attention),
    want: impl Into<Setup>,
) {
    let described = |options: &annulus_options, add: &dyn Fn(*mut annulus_attention)| {
        let attention = attention(options);
        add(attention);
        let setup = setup_of(attention).unwrap();
        ok(annulus_attention_destroy(attention));
        format!("{setup:?}")
    };
    let mut changed = options(DIMS);
    change(&mut changed);
    let got = described(&changed, &add);
    let backend = AnyBackend::open(BackendName::Cpu, None, 1).unwrap();
    let want = want.into().map_runtime(|runtime| runtime.backend(backend));
    // C has an element type in any case
    let want = format!("{want:?}").replace("dtype: None", "dtype: Some(F32)");
    assert_eq!(got, want, "{name}");
    assert_ne!(got, described(&options(DIMS), &|_| {}), "{name} has no effect");
}

#[test]
fn options_of_the_mathematics_are_those_of_the_builder() {
    let mesh = Neighborhood {
        axes: vec![Axis { periodic: true, ..Axis::new(5, 3) }, Axis::new(4, 2).causal()],
        edge: Edge::Shift,
    };
    is_described(
        "all",
        |o| {
            (o.dtype, o.logits_dtype) = (ANNULUS_BF16, ANNULUS_F16);
            (o.causal, o.chunk_size, o.prefix_len) = (1, 5, 0);
            (o.window_left, o.window_right, o.attention_sink_size) = (3, 2, 2);
            o.alignment = ANNULUS_ALIGN_BOTTOM_RIGHT;
            // and a scale of 0
            (o.has_softmax_scale, o.logits_soft_cap) = (1, 0.5);
            (o.bias_dims, o.bias_order) = ([1, 4, 1, 23], ANNULUS_BIAS_BEFORE_SOFT_CAP);
            (o.sinks, o.sinks_per_head, o.unnormalized, o.statistics) = (2, 1, 1, 1);
            (o.dropout_prob, o.dropout_seed) = (0.25, 9);
            o.precision = ANNULUS_PRECISION_DEFAULT;
            o.backward_mode = ANNULUS_BACKWARD_TWO_PASS;
            (o.forward_only, o.local_gradients) = (1, 1);
            (o.reproducible, o.second_derivatives) = (1, 1);
        },
        // SAFETY: the text ends with a zero byte, and there are as many slopes as are said
        |attention| unsafe {
            let text = c"5x4:3x2:causal=0x1:periodic=1x0";
            ok(annulus_attention_add_neighborhood(attention, text.as_ptr()));
            let slopes = [0.5, 0.25, 0.125, 1.0];
            ok(annulus_attention_set_alibi(attention, slopes.as_ptr(), 4));
        },
        Attention::new()
            .dtype(DType::Bf16)
            .logits_dtype(DType::F16)
            .causal(true)
            .chunk_size(5)
            .prefix_len(0)
            .sliding_window(3, 2)
            .attention_sink_size(2)
            .align(Alignment::BottomRight)
            .softmax_scale(0.0)
            .logits_soft_cap(0.5)
            .bias([1, 4, 1, 23])
            .bias_order(BiasOrder::BeforeSoftCap)
            .softmax_aux(SinkShape::per_head(2))
            .unnormalized(true)
            .statistics(true)
            .dropout(0.25, 9)
            .precision(Precision::Default)
            .backward_mode(BackwardMode::TwoPass)
            .forward_only(true)
            .local_gradients(true)
            .reproducible(true)
            .second_derivatives(true)
            .mask(Arc::new(mesh))
            .bias_function(Arc::new(Alibi { slopes: vec![0.5, 0.25, 0.125, 1.0] })),
    );
}

#[test]
fn options_of_the_division_and_the_runtime_are_those_of_the_builder() {
    let by = |division| Setup::from((Attention::new(), division));
    for (of_layout, of_route, layout, route) in [
        (ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_ROUTE_DIRECT, Layout::Contiguous, Route::Direct),
        (ANNULUS_LAYOUT_ZIGZAG, ANNULUS_ROUTE_RELAY_DOWN, Layout::Zigzag, Route::RelayDown),
        (ANNULUS_LAYOUT_STRIPED, ANNULUS_ROUTE_RELAY_UP, Layout::Striped, Route::RelayUp),
    ] {
        let change = |o: &mut annulus_options| (o.layout, o.route) = (of_layout, of_route);
        let want = by(Division::new().layout(layout.clone()).route(route));
        is_described(layout.name(), change, |_| {}, want);
    }
    let grid = Strategy::Grid { heads: 1, queries: 2, keys: 3 };
    for (of_strategy, parts, strategy) in [
        (ANNULUS_STRATEGY_HEADS_RING, [3, 0, 0], Strategy::HeadsRing { heads: 3 }),
        (ANNULUS_STRATEGY_GRID, [1, 2, 3], grid),
        (ANNULUS_STRATEGY_ALL_GATHER, [0; 3], Strategy::AllGather),
        (ANNULUS_STRATEGY_ALL_TO_ALL, [0; 3], Strategy::AllToAll),
        (ANNULUS_STRATEGY_PASS_Q, [0; 3], Strategy::PassQ),
        (ANNULUS_STRATEGY_AUTO, [0; 3], Strategy::Auto),
    ] {
        let change = |o: &mut annulus_options| {
            o.strategy = of_strategy;
            [o.strategy_heads, o.strategy_queries, o.strategy_keys] = parts;
        };
        let want = by(Division::new().strategy(strategy));
        is_described(&strategy.to_string(), change, |_| {}, want);
    }
    is_described(
        "blocks and deadlines",
        |o| {
            (o.kv_block_size, o.receive_ahead) = (64, 2);
            (o.deadline_seconds, o.arrival_deadline_seconds) = (30.0, 60.0);
        },
        |_| {},
        by(Division::new().kv_block_size(64).receive_ahead(2)).map_runtime(|runtime| {
            let minute = Duration::from_secs(60);
            runtime.deadline(minute / 2).arrival_deadline(minute)
        }),
    );
}

#[test]
fn listed_layouts_are_those_of_the_builder() {
    let thirds = |first: i64| (0..23).filter(move |row| row * 7 % 3 == first);
    let shards = || [1, 0, 2].map(|first| thirds(first).collect::<Runs>()).to_vec();
    let layout = |layout| Setup::from((Attention::new(), Division::new().layout(layout)));
    is_described(
        "a custom layout",
        |o| o.layout = ANNULUS_LAYOUT_CUSTOM,
        |attention| {
            let rows: Vec<i64> = thirds(1).chain(thirds(0)).chain(thirds(2)).collect();
            let counts = [1, 0, 2].map(|first| thirds(first).count() as i64);
            let (counts, rows) = (counts.as_ptr(), rows.as_ptr());
            // SAFETY: the lists have the lengths that are said
            ok(unsafe {
                annulus_attention_set_custom_layout(attention, 3, counts, rows, counts, rows)
            });
        },
        layout(Layout::Custom(Arc::new(CustomLayout { q: shards(), kv: shards() }))),
    );
    is_described(
        "boxes",
        |o| (o.q_len, o.kv_len, o.layout) = (24, 24, ANNULUS_LAYOUT_CUSTOM),
        // SAFETY: there are as many numbers as are said
        |attention| unsafe {
            ok(annulus_attention_set_boxes_layout(attention, 3, 2, [4, 6].as_ptr()));
        },
        layout(Layout::boxes(&[4, 6], 3).unwrap()),
    );
    let full = Attention::new();
    let balanced = Division::new().balanced(&full, DIMS, &documents(), RANKS).unwrap();
    is_described(
        "a balanced layout",
        |o| o.layout = ANNULUS_LAYOUT_BALANCED,
        |attention| {
            let starts = Array::from_vec(documents().cum_seqlens_q.unwrap_or_default());
            let packed = described(&starts, ANNULUS_I64);
            let batch = annulus_batch { cum_seqlens_q: &raw const packed, ..batch() };
            // SAFETY: the list lives through the call
            ok(unsafe { annulus_attention_set_balanced_layout(attention, 3, &raw const batch) });
            for rank in 0..3 {
                let (mut rows, mut count) = ([-1; 23], 0);
                let first = rows.as_mut_ptr();
                // SAFETY: rows have room for all
                ok(unsafe {
                    annulus_attention_q_rows(attention, 3, rank, first, 23, &raw mut count)
                });
                let want = balanced.rank_rows(&full, DIMS, 3, rank as usize).unwrap().q;
                assert_eq!(rows[..count as usize], want.iter().collect::<Vec<_>>());
            }
        },
        (full.clone(), balanced.clone()),
    );
}

/// A sample of the options on the GPU; wgpu tests of the backend itself are elsewhere.
#[cfg(feature = "wgpu")]
#[test]
fn wgpu_gives_the_bits_of_the_facade() {
    if annulus::backend::wgpu::Gpu::list().is_empty() {
        let required = std::env::var("ANNULUS_REQUIRE")
            .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
        assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
        eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
        return;
    }
    check::<f32>(&cases()[..1], BackendName::Wgpu);
    check::<bf16>(&batches()[2..3], BackendName::Wgpu);
    // a cache is on the backend as well, which has no reproducible order
    let mut options = options(Dims { q_len: 0, kv_len: 0, ..DIMS });
    (options.reproducible, options.backend) = (1, ANNULUS_BACKEND_WGPU);
    let (attention, mut cache) = (attention(&options), ptr::null_mut());
    // SAFETY: a pointer to a local
    let status = unsafe { annulus_cache_create_threads(attention, 1, &raw mut cache) };
    assert_eq!(status, ANNULUS_UNSUPPORTED, "{}", last_error());
    ok(annulus_attention_destroy(attention));
}

#[test]
fn a_backend_that_is_not_there_is_refused_by_name() {
    let refusal = |change: &dyn Fn(&mut annulus_options)| {
        let mut options = options(DIMS);
        change(&mut options);
        let mut attention = ptr::null_mut();
        // SAFETY: all pointers are to locals
        let status = unsafe { annulus_attention_create(&raw const options, &raw mut attention) };
        assert!(attention.is_null());
        (status, last_error())
    };
    let changes: [(Change, &str); 3] = [
        (|o| o.backend = 4, "backend: got 4, want"),
        (|o| o.device = 1, "device: got 1, want 0, or has_device"),
        (|o| o.has_device = 1, "device: got 0, want none: the CPU"),
    ];
    for (change, text) in changes {
        let (status, why) = refusal(&change);
        assert_eq!(status, ANNULUS_INVALID_ARGUMENT);
        assert!(why.starts_with(text), "{why}");
    }
    for (name, feature, backend) in [
        ("wgpu", "wgpu", ANNULUS_BACKEND_WGPU),
        ("cuda", "cuda", ANNULUS_BACKEND_CUDA),
        ("hip", "cuda", ANNULUS_BACKEND_HIP),
    ] {
        let is_built = annulus_feature_names().any(|built| built == feature);
        let (status, why) = refusal(&|o| (o.backend, o.threads) = (backend, 2));
        if is_built {
            assert_eq!(status, ANNULUS_INVALID_ARGUMENT, "{why}");
            assert!(why.starts_with("threads: got 2, want 0"), "{why}");
        } else {
            assert_eq!(status, ANNULUS_UNSUPPORTED, "{why}");
            assert!(why.contains(&format!("backend {name}")), "{why}");
        }
        if is_built {
            // of a machine without this GPU, or of one that has fewer
            let (status, why) =
                refusal(&|o| (o.backend, o.has_device, o.device) = (backend, 1, 99));
            let refusals = [ANNULUS_UNSUPPORTED, ANNULUS_INVALID_ARGUMENT];
            assert!(refusals.contains(&status), "{status}: {why}");
        }
    }
}

/// The features of the library.
fn annulus_feature_names() -> impl Iterator<Item = &'static str> {
    // SAFETY: a text that is never freed
    unsafe { CStr::from_ptr(annulus_features()) }.to_str().unwrap().split(' ')
}

#[test]
fn a_batch_of_32_bit_lengths_is_that_of_64_bits_and_null_removes_it() {
    let data = Data::<f32>::of(DIMS, None, None);
    let case = batches().into_iter().find(|case| case.name == "cum_seqlens").unwrap();
    let want = by_c(&case, &data, BackendName::Cpu);
    let none = Case::with_batch("none", Batch::default());
    let none = by_c(&none, &data, BackendName::Cpu);
    assert!(want != none, "cum_seqlens have no effect");

    let plan = plan_of_threads(&annulus_options { causal: 1, ..options(DIMS) }, RANKS);
    let lens = [array![0i32, 4, 20], array![0i32, 7, 21]];
    let tensors = lens.each_ref().map(|lens| described(lens, ANNULUS_I32));
    let [cum_seqlens_q, cum_seqlens_k] = tensors.each_ref().map(ptr::from_ref);
    let batch = annulus_batch { cum_seqlens_q, cum_seqlens_k, ..batch() };
    let out = Array4::<f32>::zeros((2, 23, 4, 6));
    let lse = Array3::<f32>::zeros((2, 4, 23));
    let [q, k, v, to_out] = [&data.q, &data.k, &data.v, &out].map(tensor);
    let (args, _) = args([&q, &k, &v, &to_out], [&to_out, &tensor(&lse)], [&q, &k, &v]);
    // SAFETY: all pointers are to locals, which nobody touches meanwhile
    unsafe {
        ok(annulus_plan_update(plan, &raw const batch));
        ok(annulus_forward(plan, &raw const args));
        assert!(bits(&out) == want.0[0].1, "lengths of 32 bits");
        ok(annulus_plan_update(plan, ptr::null()));
        ok(annulus_forward(plan, &raw const args));
        assert!(bits(&out) == none.0[0].1, "no batch");
    }
    ok(annulus_plan_destroy(plan));
}

#[test]
fn a_plan_tells_what_it_chose() {
    let plan = plan_of_threads(&annulus_options { causal: 1, ..options(DIMS) }, RANKS);
    let facade = LocalRing::new(
        (Attention::new().causal(true), Division::new(), Runtime::new().threads(1)),
        DIMS,
        RANKS,
    )
    .unwrap();
    let (mut rank, mut ranks, mut count) = (7, 7, 7);
    let (mut layout, mut route, mut bytes) = (7, 7, 7);
    let mut rows = [7; 23];
    let numerics = CString::new(facade.plan().numerics()).unwrap();
    let mut text = vec![7; numerics.count_bytes() + 1];
    // SAFETY: all pointers are to locals
    unsafe {
        ok(annulus_plan_numerics(plan, ptr::null_mut(), 0, &raw mut count));
        assert_eq!(count, numerics.count_bytes() as i64);
        // the zero byte at the end needs room as well
        let status = annulus_plan_numerics(plan, text.as_mut_ptr(), count, &raw mut count);
        assert_eq!((status, text[0]), (ANNULUS_INVALID_ARGUMENT, 7));
        ok(annulus_plan_numerics(plan, text.as_mut_ptr(), count + 1, &raw mut count));
        assert_eq!(CStr::from_ptr(text.as_ptr()), &*numerics);
        ok(annulus_plan_rank(plan, &raw mut rank));
        ok(annulus_plan_ranks(plan, &raw mut ranks));
        ok(annulus_plan_layout(plan, &raw mut layout));
        ok(annulus_plan_route(plan, &raw mut route));
        ok(annulus_plan_workspace_bytes(plan, &raw mut bytes));
        ok(annulus_plan_q_rows(plan, ptr::null_mut(), 0, &raw mut count));
        assert_eq!(count, 23);
        let status = annulus_plan_kv_rows(plan, rows.as_mut_ptr(), 22, &raw mut count);
        assert_eq!((status, count, rows[0]), (ANNULUS_INVALID_ARGUMENT, 23, 7));
        ok(annulus_plan_kv_rows(plan, rows.as_mut_ptr(), 23, &raw mut count));
    }
    assert_eq!((rank, ranks, layout), (0, 3, ANNULUS_LAYOUT_ZIGZAG));
    assert_eq!(*facade.plan().layout(), Layout::Zigzag);
    assert_eq!(
        route,
        1 + Route::ALL.iter().position(|&r| r == facade.plan().route()).unwrap() as i32
    );
    assert!(rows.iter().copied().eq(0..23));
    // more than the keys and values of all ranks, and than their gradients in f32
    assert!(bytes >= 2 * 2 * 23 * 2 * (8 + 6) * 4, "{bytes}");
    ok(annulus_plan_destroy(plan));
}

#[test]
fn a_plan_tells_its_strategy() {
    let chosen = |options: annulus_options| {
        let plan = plan_of_threads(&options, RANKS);
        let (mut strategy, mut heads, mut ranks, mut count) = (7, 7, 7, 7);
        // SAFETY: all pointers are to locals
        unsafe {
            let status = annulus_plan_strategy(plan, &raw mut strategy, ptr::null_mut());
            assert_eq!((status, strategy), (ANNULUS_INVALID_ARGUMENT, 7));
            ok(annulus_plan_strategy(plan, &raw mut strategy, &raw mut heads));
            let (mut queries, mut keys) = (7, 7);
            ok(annulus_plan_grid(plan, &raw mut queries, &raw mut keys));
            assert_eq!(heads * queries * keys, RANKS as i32);
            assert_eq!(keys > 1, strategy == ANNULUS_STRATEGY_GRID);
            ok(annulus_plan_ranks(plan, &raw mut ranks));
            ok(annulus_plan_q_rows(plan, ptr::null_mut(), 0, &raw mut count));
        }
        ok(annulus_plan_destroy(plan));
        assert_eq!((ranks, count), (3, 23));
        (strategy, heads)
    };
    let options = options(HEADS_DIMS);
    assert_eq!(chosen(options), (ANNULUS_STRATEGY_RING, 1));
    let strategy = ANNULUS_STRATEGY_HEADS_RING;
    let by_heads = annulus_options { strategy, strategy_heads: 3, ..options };
    assert_eq!(chosen(by_heads), (ANNULUS_STRATEGY_HEADS_RING, 3));
    let strategy = ANNULUS_STRATEGY_GRID;
    let grid = annulus_options { strategy_queries: 1, strategy_keys: 3, ..options };
    let grid = annulus_options { strategy, strategy_heads: 1, ..grid };
    assert_eq!(chosen(grid), (ANNULUS_STRATEGY_GRID, 1));
    let named = |strategy| chosen(annulus_options { strategy, ..options });
    assert_eq!(named(ANNULUS_STRATEGY_ALL_GATHER), (ANNULUS_STRATEGY_RING, 1));
    assert_eq!(named(ANNULUS_STRATEGY_ALL_TO_ALL), (ANNULUS_STRATEGY_HEADS_RING, 3));
    assert_eq!(named(ANNULUS_STRATEGY_PASS_Q), (ANNULUS_STRATEGY_GRID, 1));
}
