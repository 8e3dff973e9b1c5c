//! Bias tables against the dense bias that they stand for: random attentions have its bits, and the
//! sums of its gradient. Bits over threads and, in the reproducible order, over ranks; refusals.

use annulus::{
    Attention, Batch, DType, Dims, Division, Element, Error, Layout, LocalRing, Result, Route,
    Runtime, Strategy, Tensors, bias::BiasTable,
};
use annulus_conformance::{Answer, Case, Draw, compute, epsilon};
use annulus_core::BackwardMode;
use annulus_test_cases::facade::attention;
use ndarray::{Array2, Array4};

/// A table of any kind. Window and grid are small, so that offsets are clipped.
fn random_table(draw: &mut Draw) -> BiasTable {
    let table = match draw.below(5) {
        0 => BiasTable::clipped(draw.pick(&[0, 3, 40]), draw.pick(&[0, 5, 100])),
        1 => BiasTable::t5(true, 8, draw.pick(&[5, 20])),
        2 => BiasTable::t5(false, draw.pick(&[2, 16]), 40),
        3 => BiasTable::grid(&[(5, draw.pick(&[2, 5])), (7, draw.pick(&[3, 7]))]),
        _ => BiasTable::grid(&[(3, 2), (2, 2), (4, 4)]),
    };
    let table = table.unwrap();
    if draw.once_in(3) { table.shared_by_heads() } else { table }
}

/// The case with a table as its bias, and with the dense bias that the table stands for.
fn with_table(mut case: Case, dtype: DType, draw: &mut Draw) -> [Case; 2] {
    let table = random_table(draw);
    let shape = table.shape(case.spec.dims.q_heads);
    case.spec.backward = BackwardMode::OnePass;
    let mut values: Array4<f64> = draw.tensor(shape);
    if draw.once_in(3) {
        values.mapv_inplace(|x| if draw.once_in(5) { f64::NEG_INFINITY } else { x });
    }
    case.spec.bias = Some(shape);
    case.spec.bias_table = Some(table.clone());
    case.bias = Some(values);
    let case = case.in_dtype(dtype);
    let mut dense = case.clone();
    let Dims { batch, q_len, kv_len, q_heads, .. } = case.spec.dims;
    dense.spec.bias_table = None;
    dense.spec.bias = Some([batch, q_heads, q_len, kv_len]);
    let problem = case.problem();
    let visibility = problem.visibility().unwrap();
    let values = case.bias.as_ref().unwrap();
    let of_pair = |(b, h, i, j)| {
        let (Some(query), Some(key)) = (visibility.query(b, h, i), visibility.key(b, j)) else {
            return 0.0;
        };
        let head = if shape[1] == 1 { 0 } else { h };
        values[[0, head, 0, table.index(query.position, key.position)]]
    };
    dense.bias = Some(Array4::from_shape_fn((batch, q_heads, q_len, kv_len), of_pair));
    [case, dense]
}

/// The sums of a dense dbias over the pairs of each entry, and of its magnitudes.
fn summed(case: &Case, dense: &Array4<f64>) -> [Array4<f64>; 2] {
    let (shape, table) = (case.spec.bias.unwrap(), case.spec.bias_table.as_ref().unwrap());
    let mut sums = [Array4::zeros(shape), Array4::zeros(shape)];
    let problem = case.problem();
    let visibility = problem.visibility().unwrap();
    for ((b, h, i, j), &x) in dense.indexed_iter() {
        if let (Some(query), Some(key)) = (visibility.query(b, h, i), visibility.key(b, j)) {
            let head = if shape[1] == 1 { 0 } else { h };
            let at = [0, head, 0, table.index(query.position, key.position)];
            sums[0][at] += x;
            sums[1][at] += x.abs();
        }
    }
    sums
}

fn ring(case: &Case, division: Division, threads: usize, ranks: usize) -> Result<LocalRing> {
    let attention = attention(case).bias(case.spec.bias.filter(|_| case.spec.bias_table.is_none()));
    let attention = attention.bias_table(case.spec.bias_table.clone());
    let attention = attention.reproducible(case.spec.leaf_rows.is_some());
    LocalRing::new((attention, division, Runtime::new().threads(threads)), case.spec.dims, ranks)
}

fn answer(case: &Case, division: Division, threads: usize, ranks: usize) -> Result<Answer> {
    let mut ring = ring(case, division, threads, ranks)?;
    let [first, again] = compute(case, &mut ring, 2, true)?.try_into().unwrap();
    assert_eq!(first.same_bits(&again), Ok(()), "a plan is used again");
    Ok(first)
}

#[test]
fn tables_have_the_bits_of_their_dense_bias() {
    let mut checked = 0;
    for seed in 0..90 {
        let draw = &mut Draw::new(seed ^ 0x7ab1e);
        let case = match seed % 3 {
            0 => Case::random(seed),
            1 => Case::random_long(seed),
            _ => Case::random_heads(seed),
        };
        let dtype = draw.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16]);
        let [case, dense] = with_table(case, dtype, draw);
        let mut ranks = draw.pick(&[1, 2, 3, 5]);
        let mut division = Division::new()
            .layout(draw.pick(&[None, Some(Layout::Contiguous), Some(Layout::Striped)]))
            .route(draw.pick(&[None, Some(Route::RelayUp), Some(Route::Direct)]));
        if seed % 3 == 2 {
            ranks = draw.pick(&[2, 4]);
            division = Division::new().strategy(draw.pick(&[
                Strategy::HeadsRing { heads: 2 },
                Strategy::PassQ,
                Strategy::AllGather,
                Strategy::Grid { heads: 2, queries: 1, keys: ranks / 2 },
            ]));
        }
        let name = format!("seed {seed} {dtype}, {ranks} ranks, {division:?}");
        let threads = draw.pick(&[1, 2]);
        let got = match answer(&case, division.clone(), threads, ranks) {
            Err(Error::InvalidArgument { .. } | Error::Unsupported { .. }) if seed % 3 == 2 => {
                continue;
            }
            got => got.unwrap_or_else(|error| panic!("{name}: {error}")),
        };
        let want = answer(&dense, division, threads, ranks).unwrap();
        let without = |answer: &Answer| Answer { dbias: None, ..answer.clone() };
        assert_eq!(without(&got).same_bits(&without(&want)), Ok(()), "{name}");
        let [sums, magnitudes] = summed(&case, want.dbias.as_ref().unwrap());
        let dbias = got.dbias.as_ref().unwrap();
        for ((index, &got), (&want, &size)) in
            dbias.indexed_iter().zip(sums.iter().zip(&magnitudes))
        {
            // a diagonal is summed in the accumulator's type; in f64 1e-12 of the terms
            let bound = 64.0 * epsilon(dtype.accumulator()) * size;
            let same = got == want || got.is_nan() && want.is_nan();
            assert!(same || (got - want).abs() <= bound, "{name} {index:?}: {got:e} {want:e}");
        }
        checked += 1;
    }
    assert!(checked > 60, "{checked}");
}

#[test]
fn table_gradients_of_two_passes_equal_the_oracle() {
    for seed in 0..40 {
        let draw = &mut Draw::new(seed ^ 0x2a55);
        let [mut case, _] = with_table(Case::random_long(seed), DType::F64, draw);
        case.batch.attention_mask = None;
        case.spec.backward = BackwardMode::TwoPass;
        let want = Answer::of(case.truth().unwrap(), case.spec.normalize);
        let got = answer(&case, Division::new(), 2, draw.pick(&[1, 2, 3])).unwrap();
        let size = |name: &str| {
            let arrays = want.arrays();
            let (_, of) = arrays.iter().find(|(of, _)| *of == name).unwrap();
            of.iter().filter(|x| x.is_finite()).fold(1.0, |a: f64, x| a.max(x.abs()))
        };
        assert_eq!(got.compare(&want, |name| 1e-11 * size(name)), Ok(()), "seed {seed}");
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
        let [mut case, _] = with_table(case, DType::F32, draw);
        let bits =
            |case: &Case, ranks, threads| answer(case, Division::new(), threads, ranks).unwrap();
        let one = bits(&case, 2, 1);
        assert_eq!(one.same_bits(&bits(&case, 2, 3)), Ok(()), "seed {seed}");
        case.spec.leaf_rows = Some(annulus_core::LEAF_ROWS);
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
