//! Bias tables: random attentions against the oracle, on rings and on grids. Bits over threads and,
//! in the reproducible order, over ranks; refusals.

use annulus::{
    Attention, Batch, DType, Dims, Division, Element, LocalRing, Runtime, Tensors, bias::BiasTable,
};
use annulus_conformance::{
    Answer, Case, Draw, Facade, Setting, compute,
    suite::{self, with_bias_table},
};
use annulus_core::LEAF_ROWS;
use annulus_test_cases::facade::attention;
use ndarray::{Array2, Array4};

#[test]
fn random_attentions_with_tables_hold_on_rings_and_grids() {
    for seed in 0..120 {
        let draw = &mut Draw::new(seed ^ 0x7ab1e);
        let case = match seed % 3 {
            0 => Case::random(seed),
            1 => Case::random_long(seed),
            _ => Case::random_heads(seed),
        };
        let dtype = draw.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16]);
        let case = with_bias_table(case, draw).in_dtype(dtype);
        let setting = if seed % 3 == 2 {
            let ranks = draw.pick(&[2, 4]);
            let published = suite::published_settings(&case, ranks).into_iter();
            let grids = suite::strategy_settings(&case, ranks, seed as usize);
            draw.pick(&published.chain(grids).collect::<Vec<Setting>>())
        } else {
            suite::random_setting(&case, draw.pick(&[1, 2, 3, 5]), draw)
        };
        let judge = suite::judge(&case).unwrap();
        let verdict = suite::examine_twice(&Facade, &judge, &case, &setting);
        assert_eq!(verdict, Ok(()), "seed {seed}");
    }
}

#[test]
fn bits_of_tables_depend_on_neither_threads_nor_in_the_reproducible_order_on_ranks() {
    for seed in 0..6 {
        let draw = &mut Draw::new(seed);
        let mut case = Case::random_long(seed);
        case.spec.dims = Dims { q_len: 700, kv_len: 700, ..case.spec.dims };
        case.batch = Batch::default();
        case.masks.objects.clear();
        let masks = case.masks.clone();
        let mut case = case.masked(masks);
        case.spec.bias = None;
        case.dlse = None;
        case.draw_tensors(draw);
        let mut case = with_bias_table(case, draw).in_dtype(DType::F32);
        let bits = |case: &Case, ranks, threads| -> Answer {
            let setup = (attention(case), Division::new(), Runtime::new().threads(threads));
            let mut ring = LocalRing::new(setup, case.spec.dims, ranks).unwrap();
            compute(case, &mut ring, 1, true).unwrap().remove(0)
        };
        let one = bits(&case, 2, 1);
        assert_eq!(one.same_bits(&bits(&case, 2, 3)), Ok(()), "seed {seed}");
        case.spec.leaf_rows = Some(LEAF_ROWS);
        let one = bits(&case, 1, 1);
        for (ranks, threads) in [(2, 1), (3, 2)] {
            assert_eq!(one.same_bits(&bits(&case, ranks, threads)), Ok(()), "{seed} {ranks}");
        }
    }
}

#[test]
fn tables_are_refused_by_name() {
    let dims = Dims::new(1, 64, 2, 8);
    let table = BiasTable::clipped(4, 4).unwrap();
    let attention = Attention::new().bias_table(table.clone());
    let both = attention.clone().bias([1, 1, 1, 64]);
    let error = LocalRing::new(both, dims, 1).unwrap_err();
    assert!(error.to_string().starts_with("bias_table"), "{error}");
    let x = Array4::<f32>::ones((1, 64, 2, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut ring = LocalRing::new(&attention, dims, 2).unwrap();
    assert!(ring.forward(&tensors).unwrap_err().to_string().starts_with("bias"));
    let short = Array2::<f32>::ones((2, 8));
    let error = ring.forward(&tensors.reborrow().with_bias_table(short.view())).unwrap_err();
    assert!(error.to_string().starts_with("bias"), "{error}");
    let whole = Array2::from_shape_fn((2, 9), |(h, e)| f32::from_f64((h + e) as f64));
    ring.forward(&tensors.with_bias_table(whole.view())).unwrap();
}
