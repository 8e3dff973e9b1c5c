//! Neighbourhoods on grids: results, and the rows that ranks receive.

use std::{collections::BTreeSet, sync::Arc};

use annulus::{
    Attention, Dims, Division, Layout, LocalRing, Tensors,
    mask::{Key, Mask, Neighborhood, Query},
};
use annulus_conformance::{Case, Draw, Judge, Masks, Setting, subjects::cpu, suite};
use annulus_core::{BackwardMode, DType, LEAF_ROWS, Side, Spec};
use ndarray::Array4;

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
