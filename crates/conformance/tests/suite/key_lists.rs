//! Key lists: random ones with every other condition of the mask, selected keys by head group,
//! blocks, and a mesh, on several ranks, against the oracle under the equal dense mask. Rows that
//! are sent are exactly those that are needed. Bad lists change nothing.

use std::{collections::BTreeSet, sync::Arc};

use annulus::{Attention, Division, LocalRing, Setup, Tensors};
use annulus_conformance::{
    Answer, Case, Draw, Facade, Masks,
    subjects::cpu,
    suite::{self, dense_twin, lists},
};
use annulus_core::{Batch, DType, Dims, Error, KeyLists, Spec};
use annulus_plan::{Layout, Route, Strategy};
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
