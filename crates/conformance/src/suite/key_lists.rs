//! Key lists: random ones with every other condition of the mask, and every kind of list that science
//! codes and language models have, against the oracle under the equal dense mask.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use annulus_core::{BackwardMode, DType, DenseMask, Dims, KeyLists, ListedKeys, Side, Spec};
use annulus_plan::Layout;
use annulus_test_cases::facade::as_bias;

use super::{LAYOUTS, Verdict, examine, judge, random_setting, run};
use crate::{Answer, Case, Draw, Masks, Setting, Subject};

/// Returns lists of `[batches, groups]` and the queries of `dims`, from the keys of each.
pub fn lists(
    [batches, groups]: [usize; 2],
    dims: &Dims,
    mut keys: impl FnMut([usize; 3]) -> Vec<usize>,
) -> Arc<KeyLists> {
    let mut offsets = vec![0];
    let mut all = Vec::new();
    for b in 0..batches {
        for g in 0..groups {
            for q in 0..dims.q_len {
                let sorted: BTreeSet<usize> = keys([b, g, q]).into_iter().collect();
                all.extend(sorted.into_iter().map(|key| key as u32));
                offsets.push(all.len() as u64);
            }
        }
    }
    Arc::new(KeyLists::by_group([batches, groups], offsets, all).expect("sorted keys, each once"))
}

/// Returns lists with random numbers of f32 for their pairs.
fn with_bias(lists: &KeyLists, draw: &mut Draw) -> Arc<KeyLists> {
    let bias = (0..lists.len()).map(|_| DType::F32.round(draw.normal())).collect();
    Arc::new(lists.clone().with_bias(bias).expect("finite numbers, one for each pair"))
}

/// Returns the case with a dense mask in the place of its lists, which the oracle computes, and a
/// bias in the place of the numbers of the pairs of one list, or of one for each head.
pub fn dense_twin(case: &Case) -> Case {
    let mut twin = case.clone();
    let Some(lists) = twin.batch.key_lists.take() else { return twin };
    let Dims { batch, q_heads, q_len, kv_len, .. } = case.spec.dims;
    let listed = ListedKeys::new(&lists, q_heads);
    if let Some(bias) = lists.bias() {
        let bias = as_bias(&lists, bias, kv_len);
        twin.spec.bias = Some(bias.dim().into());
        twin.bias = Some(bias);
    }
    let dense = case.batch.attention_mask.as_ref();
    twin.batch.attention_mask =
        Some(DenseMask::from_fn([batch, q_heads, q_len, kv_len], |[b, h, q, k]| {
            listed.contains(b, h, q, k as u64) && dense.is_none_or(|mask| mask.visible(b, h, q, k))
        }));
    twin
}

/// Runs random cases with random lists on random settings, all drawn from the seed. A backend that
/// computes key lists in `one_pass` only has no bias of pairs either.
pub fn key_lists(
    subject: &dyn Subject,
    one_pass: bool,
    seeds: impl Iterator<Item = u64>,
) -> Verdict {
    for seed in seeds {
        let draw = &mut Draw::new(seed ^ 0x5eed);
        let mut case = Case::random(seed).in_dtype(draw.pick(subject.dtypes()));
        let dims = case.spec.dims;
        let groups = draw.pick(&[1, dims.kv_heads, dims.q_heads]);
        let batches = draw.pick(&[1, dims.batch]);
        // few pairs are gathered, many are tiles
        let share = draw.pick(&[1, 3, 40, 60]);
        let mut listed = lists([batches, groups], &dims, |_| {
            (0..dims.kv_len).filter(|_| draw.once_in(share)).collect()
        });
        let has_bias = case.bias.is_none() && (groups == 1 || groups == dims.q_heads);
        if has_bias && !one_pass {
            listed = with_bias(&listed, draw);
        }
        case.batch.key_lists = Some(listed);
        let ranks = draw.pick(&[1, 2, 3, 5, 8]);
        let mut setting = random_setting(&case, ranks, draw);
        setting.route = None;
        if ranks > 1 && one_pass {
            case.spec.backward = BackwardMode::OnePass;
        }
        case.name = format!("lists of [{batches}, {groups}] with {}", case.name);
        examine(subject, &judge(&dense_twin(&case))?, &case, &setting)?;
    }
    Ok(())
}

/// Returns f64 cases of every kind of list, on sizes of several tiles: scattered keys, the best keys
/// of each group of heads, selected blocks, and the 5-hop mesh of an icosahedron that is divided
/// `subdivisions` times, in reverse Cuthill-McKee order. The first and the last have a bias.
pub fn listed_cases(subdivisions: usize) -> Vec<Case> {
    let dims = Dims { value_dim: 12, ..Dims::new(1, 200, 4, 20).kv_heads(2) };
    let mut selected = Draw::new(5);
    let causal = Masks { causal: true, ..Masks::default() };
    let scattered = lists([1, 1], &dims, |_| (0..9).map(|_| selected.below(200)).collect());
    let best = lists([1, 2], &dims, |[_, g, q]| {
        (0..12).map(|at| (at * 37 + q * (g + 2)) % (q + 1)).collect()
    });
    let mut offsets = vec![0];
    let mut blocks = Vec::new();
    for g in 0..2 {
        for q in 0..13_usize {
            blocks.extend(BTreeSet::from([0, q, q * (g + 3) % 7].map(|block| block as u32)));
            offsets.push(blocks.len() as u64);
        }
    }
    let blocks = KeyLists::from_blocks([1, 2], [200, 200], [16, 16], offsets, blocks);
    let mesh = icosahedral_mesh(subdivisions, 5);
    let of_mesh = Dims::new(1, mesh.len(), 2, 4).kv_heads(1);
    let mesh = lists([1, 1], &of_mesh, |[_, _, q]| mesh[q].clone());
    [
        ("scattered keys", dims, Masks::default(), with_bias(&scattered, &mut selected)),
        ("best keys by group", dims, causal.clone(), best),
        ("selected blocks", dims, causal, Arc::new(blocks.expect("ascending blocks"))),
        ("5-hop mesh", of_mesh, Masks::default(), with_bias(&mesh, &mut selected)),
    ]
    .into_iter()
    .enumerate()
    .map(|(number, (name, dims, masks, lists))| {
        let draw = &mut Draw::new(number as u64);
        let mut case = Case::new(name, Spec::new(dims, DType::F64), masks, draw);
        case.batch.key_lists = Some(lists);
        case
    })
    .collect()
}

/// Returns the nodes within `hops` edges of each node of the mesh, in reverse Cuthill-McKee order.
fn icosahedral_mesh(subdivisions: usize, hops: usize) -> Vec<Vec<usize>> {
    // a pole, rings of five, the other pole
    let ring = |first: usize, at: usize| first + at % 5;
    let mut faces: Vec<[usize; 3]> = (0..5)
        .flat_map(|at| {
            let [a, b] = [ring(1, at), ring(1, at + 1)];
            let [c, d] = [ring(6, at), ring(6, at + 1)];
            [[0, a, b], [a, b, c], [b, c, d], [c, d, 11]]
        })
        .collect();
    let mut nodes = 12;
    for _ in 0..subdivisions {
        let mut middles = BTreeMap::new();
        let mut middle = |a: usize, b: usize| {
            *middles.entry([a.min(b), a.max(b)]).or_insert_with(|| {
                nodes += 1;
                nodes - 1
            })
        };
        faces = faces
            .iter()
            .flat_map(|&[a, b, c]| {
                let [ab, bc, ca] = [middle(a, b), middle(b, c), middle(c, a)];
                [[a, ab, ca], [b, bc, ab], [c, ca, bc], [ab, bc, ca]]
            })
            .collect();
    }
    let mut edges = vec![BTreeSet::new(); nodes];
    for [a, b, c] in faces {
        for [from, to] in [[a, b], [b, c], [c, a]] {
            edges[from].insert(to);
            edges[to].insert(from);
        }
    }
    let ends = edges.iter().scan(0, |end, near| {
        *end += near.len() as i64;
        Some(*end)
    });
    let indptr: Vec<i64> = std::iter::once(0).chain(ends).collect();
    let indices: Vec<i64> = edges.iter().flatten().map(|&node| node as i64).collect();
    let order = Layout::graph(&indptr, &indices, 1).expect("a graph").shard(Side::Q, nodes, 0, 1);
    let order: Vec<usize> = order.iter().map(|node| node as usize).collect();
    let mut place = vec![0; nodes];
    order.iter().enumerate().for_each(|(at, &node)| place[node] = at);
    let within = |&node: &usize| {
        let mut found = BTreeSet::from([node]);
        for _ in 0..hops {
            found = found
                .iter()
                .flat_map(|&node| edges[node].iter().copied())
                .chain(found.clone())
                .collect();
        }
        found.into_iter().map(|node| place[node]).collect()
    };
    order.iter().map(within).collect()
}

/// Runs [`listed_cases`] on 1, 2, 3, 5 and 8 ranks, with both forms of the backward pass.
pub fn listed(subject: &dyn Subject, dtypes: &[DType]) -> Verdict {
    for case in listed_cases(3) {
        for &dtype in dtypes {
            let case = case.clone().in_dtype(dtype);
            let judge = judge(&dense_twin(&case))?;
            for ranks in [1, 2, 3, 5, 8] {
                let mut case = case.clone();
                if ranks % 3 == 2 {
                    case.spec.backward = BackwardMode::TwoPass;
                }
                let setting = Setting::new(ranks, LAYOUTS[ranks % 3].clone());
                examine(subject, &judge, &case, &setting)?;
            }
        }
    }
    Ok(())
}

/// Runs [`listed_cases`], and random lists, in the reproducible order: the same bits on every
/// number of ranks, in every layout, and the results of the oracle.
pub fn reproducible_lists(subject: &dyn Subject) -> Verdict {
    let random = (0..12).map(|seed| {
        let draw = &mut Draw::new(seed);
        let mut case = Case::random_long(seed);
        let groups = draw.pick(&[1, case.spec.dims.q_heads]);
        let kv_len = case.spec.dims.kv_len;
        let share = draw.pick(&[2, 30]);
        let listed = lists([1, groups], &case.spec.dims, |_| {
            (0..kv_len).filter(|_| draw.once_in(share)).collect()
        });
        let has_bias = case.bias.is_none();
        case.batch.key_lists = Some(if has_bias { with_bias(&listed, draw) } else { listed });
        case
    });
    for (number, case) in listed_cases(3).into_iter().chain(random).enumerate() {
        let mut case = case.in_dtype([DType::F32, DType::F64, DType::Bf16][number % 3]);
        case.spec.leaf_rows = Some(64);
        let judge = judge(&dense_twin(&case))?;
        let mut first: Option<Answer> = None;
        for ranks in [1, 2, 3, 5, 8] {
            let setting = Setting::new(ranks, LAYOUTS[(ranks + number) % 3].clone());
            let wrong = |wrong| format!("{} on {setting}: {wrong}", case.name);
            let answer = run(subject, &case, &setting)?;
            match &first {
                None => {
                    judge.check(&answer).map_err(wrong)?;
                    first = Some(answer);
                }
                Some(first) => answer.same_bits(first).map_err(wrong)?,
            }
        }
    }
    Ok(())
}
