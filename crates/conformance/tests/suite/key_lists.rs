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
use annulus_core::{BackwardMode, Batch, DType, Error, KeyLists, LEAF_ROWS, Side, Spec};
use annulus_plan::{Route, Strategy};
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

#[test]
fn bytes_received_are_the_distinct_remote_rows() {
    let tensor = |heads: usize, dim: usize| {
        Array4::from_shape_fn((2, 60, heads, dim), |(b, i, h, c)| {
            ((b * 3 + i * 7 + h * 5 + c) % 13) as f32 * 0.125 - 0.75
        })
    };
    let [q, k, v, dout] = [tensor(4, 8), tensor(2, 8), tensor(2, 6), tensor(4, 6)];
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    for ranks in [2, 3, 5] {
        for layout in [Layout::Contiguous, Layout::Striped] {
            let draw = &mut Draw::new(ranks as u64);
            let mut ring = rings(ranks, layout);
            for width in [3, 1, 0] {
                let mut pairs = Vec::new();
                let key_lists = lists([1, 1], &DIMS, |[_, _, q]| {
                    let keys: Vec<usize> = (0..width).map(|_| draw.below(60)).collect();
                    pairs.extend(keys.iter().map(|&key| (q, key)));
                    keys
                });
                ring.update(&Batch { key_lists: Some(key_lists), ..Batch::default() }).unwrap();
                let forward = ring.forward(&tensors).unwrap();
                let backward = ring.backward(&tensors, &forward, dout.view(), None).unwrap();
                let owner = |row: usize| {
                    let is_owner =
                        |plan: &&annulus::Plan| plan.kv_rows().iter().any(|r| r == row as i64);
                    ring.plans().find(is_owner).unwrap().rank()
                };
                // self-attention: a rank owns the same rows of both sides
                let remote: BTreeSet<(usize, usize)> = pairs
                    .iter()
                    .map(|&(q, key)| (owner(q), key))
                    .filter(|&(rank, key)| owner(key) != rank)
                    .collect();
                // 2 batch rows × 2 KV heads × (8 + 6) f32
                let rows = remote.len() as u64 * 2 * 2 * 14 * 4;
                let sent = |reports: &[annulus::comm::ring::Report]| -> u64 {
                    assert!(
                        reports.iter().all(|report| report.bytes_sent == report.bytes_predicted)
                    );
                    reports.iter().map(|report| report.bytes_sent).sum()
                };
                assert_eq!(sent(&forward.reports), rows, "{ranks} ranks");
                // keys and values again, and one partial gradient a row and rank
                assert_eq!(sent(&backward.reports), 2 * rows, "{ranks} ranks");
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
        let spec = Spec { soft_cap, normalize: !unnormalized, ..Spec::new(DIMS, DType::F64) };
        let mut case = Case::new("list bias", spec, Masks::default(), draw);
        let mut keys = Draw::new(7);
        let unbiased =
            lists([batches, groups], &DIMS, |_| (0..7).map(|_| keys.below(60)).collect());
        let bias: Vec<f64> = (0..unbiased.len()).map(|_| draw.normal()).collect();
        case.batch.key_lists = Some(Arc::clone(&unbiased));
        let mut twin = dense_twin(&case);
        let shape = [batches, 4, 60, 60];
        let entry = |[b, h, q, k]: [usize; 4]| {
            let entries = unbiased.entries(b, h * groups / 4, q);
            let at = unbiased.keys()[entries.clone()].binary_search(&(k as u32)).ok()?;
            Some(entries.start + at)
        };
        twin.spec.bias = Some(shape);
        twin.bias = Some(Array4::from_shape_fn(shape, |(b, h, q, k)| {
            entry([b, h, q, k]).map_or(0.0, |entry| bias[entry])
        }));
        let truth = twin.truth().unwrap();
        let want_statistics = truth.forward.statistics.clone();
        let truth = Answer::of(truth, true);
        let want = |name: &str| {
            let arrays = truth.arrays();
            arrays.into_iter().find(|(of, _)| *of == name).unwrap().1.to_owned()
        };
        let mut dbias = vec![0.0; unbiased.len()];
        for (index, &ds) in want("dbias").indexed_iter() {
            let at = entry([index[0], index[1], index[2], index[3]]);
            at.into_iter().for_each(|entry| dbias[entry] += ds);
        }
        let biased = KeyLists::clone(&unbiased).with_bias(bias.clone()).unwrap();
        for ranks in [1, 3] {
            let attention = Attention::new().dtype(DType::F64).logits_soft_cap(soft_cap);
            let attention = attention.statistics(statistics).unnormalized(unnormalized);
            let attention = attention.reproducible(reproducible);
            let mut ring = LocalRing::new(&attention, DIMS, ranks).unwrap();
            let key_lists = Some(Arc::new(biased.clone()));
            ring.update(&Batch { key_lists, ..Batch::default() }).unwrap();
            let tensors = Tensors::new(case.q.view(), case.k.view(), case.v.view());
            let forward = ring.forward(&tensors).unwrap();
            let backward = ring.backward(&tensors, &forward, case.dout.view(), None).unwrap();
            let near = |name: &str, got: Vec<f64>, want: Vec<f64>| {
                let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(got.len() == want.len() && worst < 1e-12, "{name}, {ranks} ranks: {worst}");
            };
            let all = |name: &str| want(name).iter().copied().collect::<Vec<f64>>();
            near("out", forward.out.iter().copied().collect(), all("out"));
            near("dq", backward.dq.iter().copied().collect(), all("dq"));
            near("dk", backward.dk.iter().copied().collect(), all("dk"));
            near("dv", backward.dv.iter().copied().collect(), all("dv"));
            near("bias", ring.list_bias_gradient().unwrap(), dbias.clone());
            if let Some(got) = forward.statistics {
                let want = want_statistics.iter().copied().collect();
                near("statistics", got.iter().copied().collect(), want);
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
        let rows = |rank| layout.shard(Side::Kv, len, rank, ranks).iter().collect::<BTreeSet<_>>();
        let remote = |rank| {
            let own = rows(rank);
            let visible = |key: &i64| {
                own.iter().any(|&position| {
                    let query = Query { batch: 0, head: 0, row: 0, position };
                    mask.visible(&query, &Key { row: 0, position: *key })
                })
            };
            (0..len as i64).filter(|key| !own.contains(key) && visible(key)).count()
        };
        let distinct = (0..ranks).map(remote).sum::<usize>();
        assert!(halo.is_none_or(|halo| halo == distinct), "{text}: {distinct} remote rows");
        let dims = Dims::new(1, len, 1, 4);
        let attention = Attention::new().mask(Arc::new(mask));
        let division = Division::new().layout(layout.clone());
        let mut ring = LocalRing::new((attention, division), dims, ranks).unwrap();
        let x = Array4::<f32>::ones((1, len, 1, 4));
        let tensors = Tensors::new(x.view(), x.view(), x.view());
        let report = ring.forward(&tensors).unwrap().reports;
        let sum = |of: fn(&annulus::Report) -> u64| report.iter().map(of).sum::<u64>();
        // keys and values of 4 numbers of 4 bytes
        assert_eq!(sum(|report| report.bytes_sent), 32 * distinct as u64, "{text}: sent");
        assert_eq!(sum(|report| report.bytes_predicted), 32 * distinct as u64, "{text}: predicted");
    }
}
