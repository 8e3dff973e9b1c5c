//! Key lists: random ones with every other condition of the mask, against the oracle under the equal
//! dense mask.

use std::{collections::BTreeSet, sync::Arc};

use annulus_core::{BackwardMode, DenseMask, Dims, KeyLists, ListedKeys};

use super::{Verdict, examine, judge, random_setting};
use crate::{Case, Draw, Subject};

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

/// Returns the case with a dense mask in the place of its lists, which the oracle computes.
pub fn dense_twin(case: &Case) -> Case {
    let mut twin = case.clone();
    let Some(lists) = twin.batch.key_lists.take() else { return twin };
    let Dims { batch, q_heads, q_len, kv_len, .. } = case.spec.dims;
    let listed = ListedKeys { lists: &lists, q_heads };
    let dense = case.batch.attention_mask.as_ref();
    twin.batch.attention_mask =
        Some(DenseMask::from_fn([batch, q_heads, q_len, kv_len], |[b, h, q, k]| {
            listed.contains(b, h, q, k as u64) && dense.is_none_or(|mask| mask.visible(b, h, q, k))
        }));
    twin
}

/// Runs random cases with random lists on random settings, all drawn from the seed.
pub fn key_lists(subject: &dyn Subject, seeds: impl Iterator<Item = u64>) -> Verdict {
    for seed in seeds {
        let draw = &mut Draw::new(seed ^ 0x5eed);
        let mut case = Case::random(seed).in_dtype(draw.pick(subject.dtypes()));
        let dims = case.spec.dims;
        let groups = draw.pick(&[1, dims.kv_heads, dims.q_heads]);
        let batches = draw.pick(&[1, dims.batch]);
        // few pairs are gathered, many are tiles
        let share = draw.pick(&[1, 3, 40, 60]);
        case.batch.key_lists = Some(lists([batches, groups], &dims, |_| {
            (0..dims.kv_len).filter(|_| draw.once_in(share)).collect()
        }));
        let ranks = draw.pick(&[1, 2, 3, 5, 8]);
        let mut setting = random_setting(&case, ranks, draw);
        setting.route = None;
        if ranks > 1 {
            case.spec.backward = BackwardMode::OnePass;
        }
        case.name = format!("lists of [{batches}, {groups}] with {}", case.name);
        examine(subject, &judge(&dense_twin(&case))?, &case, &setting)?;
    }
    Ok(())
}
