//! Key lists: random ones with every other condition of the mask, selected keys by head group,
//! blocks, and a mesh, on several ranks, against the oracle under the equal dense mask. Rows that
//! are sent are exactly those that are needed. Bad lists change nothing. And neighbourhoods on
//! grids: results, and the rows that ranks receive.

use std::{collections::BTreeSet, sync::Arc};

use annulus::{
    Attention, Dims, Division, Layout, LocalRing, Setup, Tensors,
    mask::{Key, Mask, Neighborhood, Query},
};
use annulus_conformance::{
    Answer, Case, Draw, Facade, Judge, Masks, Setting,
    subjects::cpu,
    suite::{self, dense_twin, lists},
};
use annulus_core::{BackwardMode, Batch, DType, Error, KeyLists, LEAF_ROWS, Spec};
use annulus_plan::{Route, Strategy};
use annulus_test_cases::facade::{self, as_bias};
use ndarray::Array4;

#[test]
fn random_lists_hold_with_every_other_condition() {
    suite::key_lists(&Facade, false, 0..160).unwrap();
}

#[test]
fn every_kind_of_list_holds_on_several_ranks() {
    suite::listed(&Facade, &[DType::F32, DType::F64, DType::Bf16]).unwrap();
}

#[test]
fn every_kind_of_list_has_the_same_bits_in_the_reproducible_order() {
    suite::reproducible_lists(&cpu()).unwrap();
}

const DIMS: Dims =
    Dims { batch: 2, q_len: 60, kv_len: 60, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

fn rings(ranks: usize, layout: Layout) -> LocalRing {
    let setup = Setup::from((&Attention::new(), Division::new().layout(layout)));
    LocalRing::new(setup, DIMS, ranks).unwrap()
}

/// Requires that each pass of a ring of self-attention sends every remote row that a query sees
/// exactly once, and a partial gradient back; `row_bytes` is that of a key and a value of all heads.
/// Returns the number of such rows.
fn sends_distinct_remote_rows(
    ring: &mut LocalRing,
    dims: Dims,
    row_bytes: u64,
    visible: &BTreeSet<(usize, usize)>,
) -> usize {
    let mut owner = vec![0; dims.kv_len];
    for plan in ring.plans() {
        plan.kv_rows().iter().for_each(|row| owner[row as usize] = plan.rank());
    }
    let needed: BTreeSet<_> = visible.iter().map(|&(q, key)| (owner[q], key)).collect();
    let remote = needed.iter().filter(|&&(rank, key)| owner[key] != rank).count();
    let of = |heads, dim| Array4::<f32>::ones((dims.batch, dims.q_len, heads, dim));
    let [q, k] = [dims.q_heads, dims.kv_heads].map(|heads| of(heads, dims.head_dim));
    let [v, dout] = [dims.kv_heads, dims.q_heads].map(|heads| of(heads, dims.value_dim));
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = ring.forward(&tensors).unwrap();
    let backward = ring.backward(&tensors, &forward, dout.view(), None).unwrap();
    let bytes = remote as u64 * row_bytes;
    // keys and values again, and one partial gradient a row and rank
    for (reports, want) in [(&forward.reports, bytes), (&backward.reports, 2 * bytes)] {
        assert!(reports.iter().all(|report| report.bytes_sent == report.bytes_predicted));
        assert_eq!(reports.iter().map(|report| report.bytes_sent).sum::<u64>(), want);
    }
    remote
}

#[test]
fn bytes_received_are_the_distinct_remote_rows() {
    for ranks in [2, 3, 5] {
        for layout in [Layout::Contiguous, Layout::Striped] {
            let draw = &mut Draw::new(ranks as u64);
            let mut ring = rings(ranks, layout);
            for width in [3, 1, 0] {
                let mut pairs = BTreeSet::new();
                let key_lists = lists([1, 1], &DIMS, |[_, _, q]| {
                    let keys: Vec<usize> = (0..width).map(|_| draw.below(60)).collect();
                    pairs.extend(keys.iter().map(|&key| (q, key)));
                    keys
                });
                ring.update(&Batch { key_lists: Some(key_lists), ..Batch::default() }).unwrap();
                // 2 batch rows × 2 KV heads × (8 + 6) f32
                sends_distinct_remote_rows(&mut ring, DIMS, 2 * 2 * 14 * 4, &pairs);
                assert_eq!(ring.plan().route(), Route::Direct);
            }
        }
    }
}

#[test]
fn bad_lists_and_what_cannot_be_computed_are_refused_and_change_nothing() {
    let listed = |key| {
        let one = KeyLists::new((0..=60).collect(), vec![key; 60]).unwrap();
        Batch { key_lists: Some(Arc::new(one)), ..Batch::default() }
    };
    let tensor = |heads: usize, dim: usize| {
        Array4::from_shape_fn((2, 60, heads, dim), |(_, i, _, _)| (i % 7) as f32)
    };
    let [q, k, v] = [tensor(4, 8), tensor(2, 8), tensor(2, 6)];
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let mut ring = rings(3, Layout::Zigzag);
    ring.update(&listed(3)).unwrap();
    let before = ring.forward(&tensors).unwrap().out;
    let short = Arc::new(KeyLists::new(vec![0; 60], vec![]).unwrap());
    for bad in [listed(60), Batch { key_lists: Some(short), ..Batch::default() }] {
        let error = ring.update(&bad).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument { argument, .. } if argument == "key_lists")
        );
    }
    assert_eq!(ring.forward(&tensors).unwrap().out, before);

    let unsupported = |setup: Setup| {
        let mut ring = LocalRing::new(setup, DIMS, 2).unwrap();
        match ring.update(&listed(3)).unwrap_err() {
            Error::Unsupported { what, .. } => assert!(what.contains("key_lists"), "{what}"),
            other => panic!("{other}"),
        }
    };
    let attention = Attention::new();
    unsupported(Setup::from((&attention, Division::new().route(Route::RelayUp))));
    unsupported(Setup::from((&attention, Division::new().strategy(Strategy::AllToAll))));
    unsupported(Setup::from((&attention, Division::new().strategy(Strategy::PassQ))));
}

/// The gradient of a number a pair is that of the equal dense bias, summed over the heads and batch
/// rows that share the list.
#[test]
fn the_list_bias_and_its_gradient_are_those_of_the_equal_dense_bias() {
    let draw = &mut Draw::new(11);
    // gathered rows serve the first; tiles serve statistics, an output that is not normalised, and
    // the reproducible order
    let forms = [
        (1, 1, None, [false, false, false]),
        (2, 2, None, [true, false, false]),
        (4, 1, Some(1.5), [true, false, false]),
        (4, 1, Some(1.5), [false, true, false]),
        (2, 1, None, [false, false, true]),
        (1, 2, Some(1.5), [false; 3]),
    ];
    for (groups, batches, soft_cap, [statistics, unnormalized, reproducible]) in forms {
        let leaf_rows = reproducible.then_some(LEAF_ROWS);
        let normalize = !unnormalized;
        let plain = Spec::new(DIMS, DType::F64);
        let spec = Spec { soft_cap, normalize, statistics, leaf_rows, ..plain };
        let mut case = Case::new("list bias", spec, Masks::default(), draw);
        let listed = lists([batches, groups], &DIMS, |_| (0..7).map(|_| draw.below(60)).collect());
        let numbers: Vec<f64> = (0..listed.len()).map(|_| draw.normal()).collect();
        let mut twin = dense_twin(&Case {
            batch: Batch { key_lists: Some(Arc::clone(&listed)), ..Batch::default() },
            ..case.clone()
        });
        // the bias of a group is that of each of its heads
        let of_groups = as_bias(&listed, &numbers, 60);
        let shape = [batches, 4, 60, 60];
        twin.spec.bias = Some(shape);
        twin.bias = Some(Array4::from_shape_fn(shape, |(b, h, q, key)| {
            of_groups[[b, h * groups / 4, q, key]]
        }));
        let truth = twin.truth().unwrap();
        let want_statistics = truth.forward.statistics.clone();
        let mut want = Answer::of(truth, normalize);
        let of_heads = want.dbias.take().unwrap();
        let mut dbias = Array4::zeros(of_groups.raw_dim());
        of_heads.indexed_iter().for_each(|((b, h, q, key), ds)| {
            dbias[[b, h * groups / 4, q, key]] += ds;
        });
        want.dbias = Some(dbias);
        let biased = KeyLists::clone(&listed).with_bias(numbers).unwrap();
        case.batch.key_lists = Some(Arc::new(biased));
        for ranks in [1, 3] {
            let mut ring = LocalRing::new(facade::attention(&case), DIMS, ranks).unwrap();
            let got = facade::compute(&case, &mut ring, 1, true).unwrap().remove(0);
            assert_eq!(got.compare(&want, |_| 1e-12), Ok(()), "{groups} groups, {ranks} ranks");
            if statistics {
                let tensors = Tensors::new(case.q.view(), case.k.view(), case.v.view());
                let got = ring.forward(&tensors).unwrap().statistics.unwrap();
                let apart = got.iter().zip(&want_statistics).map(|(a, b)| (a - b).abs());
                assert!(apart.fold(0.0, f64::max) < 1e-12, "statistics, {ranks} ranks");
            }
        }
    }
    let one = KeyLists::new((0..=60).collect(), vec![0; 60]).unwrap();
    assert!(one.with_bias(vec![f64::NAN; 60]).unwrap_err().to_string().contains("row 0, entry 0"));
}

fn mask(text: &str) -> Neighborhood {
    text.parse().unwrap()
}

fn shape(mask: &Neighborhood) -> Vec<u64> {
    mask.axes.iter().map(|axis| axis.len).collect()
}

fn case(text: &str, dtype: DType, change: impl Fn(&mut Spec)) -> Case {
    let mask = mask(text);
    let len = shape(&mask).iter().product::<u64>() as usize;
    let dims = Dims { kv_heads: 1, ..Dims::new(1, len, 2, 4) };
    let masks = Masks { objects: vec![Arc::new(mask)], ..Masks::default() };
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    Case::new(text, spec, masks, &mut Draw::new(len as u64)).in_dtype(dtype)
}

#[test]
fn neighbourhoods_match_the_oracle_on_rings() {
    let dtypes = [DType::F32, DType::F64, DType::Bf16];
    for (index, text) in [
        "13x17:7x7",
        "9x19:6x4:edge=clip",
        "12x15:5x3+1:causal=1x0:periodic=0x1",
        "10x10x11:5:dilation=2",
        "5x6x9:3x4x3:dilation=1x1x2:periodic=1x0x1:causal=0x1x0",
        "70:9:dilation=3",
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in dtypes {
            // all types and ranks for small grids, some for the largest
            if index == 3 && dtype != DType::F32 {
                continue;
            }
            let two_pass = case(text, dtype, |spec| spec.backward = BackwardMode::TwoPass);
            let case = case(text, dtype, |_| ());
            let judge = Judge::new(&case).unwrap();
            let all = [1, 2, 3, 5, 8];
            for &ranks in if index == 3 { &all[2..4] } else { &all } {
                let boxes = Layout::boxes(&shape(&mask(text)), ranks).unwrap();
                for layout in [Layout::Contiguous, boxes] {
                    let case = if ranks == 3 { &two_pass } else { &case };
                    let setting = Setting::new(ranks, layout);
                    let answer = suite::run(&cpu(), case, &setting).unwrap();
                    let verdict = judge.check(&answer);
                    assert_eq!(verdict, Ok(()), "{text} {dtype} on {setting}");
                }
            }
        }
    }
}

#[test]
fn neighbourhoods_have_the_same_bits_in_the_reproducible_order() {
    let case = case("24x29:5x4:periodic=1x0", DType::F32, |spec| {
        spec.leaf_rows = Some(LEAF_ROWS);
    });
    let judge = Judge::new(&case).unwrap();
    let run = |ranks, layout| suite::run(&cpu(), &case, &Setting::new(ranks, layout)).unwrap();
    let alone = run(1, Layout::Contiguous);
    assert_eq!(judge.check(&alone), Ok(()));
    for ranks in [2, 3, 5] {
        for layout in [Layout::Contiguous, Layout::Striped] {
            run(ranks, layout).same_bits(&alone).unwrap();
        }
    }
}

#[test]
fn ranks_receive_exactly_the_distinct_remote_rows() {
    for (text, ranks, halo) in [
        // boxes of 8 × 8 on 4 × 4 ranks: 14 × 14 points around inner boxes, 11 × 11 in a corner
        ("32x32:7x7:edge=clip", 16, Some(4 * (196 - 64) + 8 * (154 - 64) + 4 * (121 - 64))),
        ("32x32:7x7:periodic=1", 16, Some(16 * (196 - 64))),
        ("11x13:6x4", 5, None),
        ("8x8x8:3x3x3:dilation=2x1x1:causal=0x0x1", 8, None),
        ("9x10:5x2:dilation=1x3:periodic=0x1", 3, None),
    ] {
        let mask = mask(text);
        let len = shape(&mask).iter().product::<u64>() as usize;
        let layout = Layout::boxes(&shape(&mask), ranks).unwrap();
        let rows = || 0..len as i64;
        let query = |position| Query { batch: 0, head: 0, row: 0, position };
        let sees = |q, key| mask.visible(&query(q), &Key { row: 0, position: key });
        let visible = rows().flat_map(|q| rows().map(move |key| (q, key)));
        let visible = visible.filter(|&(q, key)| sees(q, key));
        let visible = visible.map(|(q, key)| (q as usize, key as usize)).collect();
        let dims = Dims::new(1, len, 1, 4);
        let attention = Attention::new().mask(Arc::new(mask.clone()));
        let mut ring = LocalRing::new((attention, Division::new().layout(layout)), dims, ranks);
        // keys and values of 4 numbers of 4 bytes
        let ring = ring.as_mut().unwrap();
        let distinct = sends_distinct_remote_rows(ring, dims, 2 * 4 * 4, &visible);
        assert!(halo.is_none_or(|halo| halo == distinct), "{text}: {distinct} remote rows");
    }
}
