//! Statistics of the scores, by row and by head, against the oracle: random attentions under every
//! strategy; their bits in the reproducible order; what is refused.

use annulus::{
    Attention, Batch, DType, Dims, Division, Element, Error, Forward, Layout, LocalRing, Result,
    Route, Runtime, Setup, Strategy, Tensors,
};
use annulus_conformance::{Case, Draw, epsilon};
use annulus_core::oracle;
use annulus_test_cases::facade::{attention, narrow, widen};
use half::{bf16, f16};
use ndarray::{Array3, Array4, Axis, s};

/// Results of a forward pass in f64: out, and the statistics of rows and heads.
#[derive(Debug, PartialEq)]
struct Results {
    out: Array4<f64>,
    rows: Option<Array4<f64>>,
    heads: Option<Array3<f64>>,
}

fn compute(case: &Case, ring: &mut LocalRing) -> Result<Results> {
    match case.spec.dtype {
        DType::F64 => compute_in::<f64>(case, ring),
        DType::F32 => compute_in::<f32>(case, ring),
        DType::Bf16 => compute_in::<bf16>(case, ring),
        DType::F16 => compute_in::<f16>(case, ring),
    }
}

fn compute_in<T: Element>(case: &Case, ring: &mut LocalRing) -> Result<Results> {
    if case.batch != Batch::default() {
        ring.update(&case.batch)?;
    }
    let [q, k, v] = [&case.q, &case.k, &case.v].map(narrow::<T, _>);
    let bias = case.bias.as_ref().map(narrow::<T::Accumulator, _>);
    let sinks = case.sinks.as_ref().map(narrow::<T::Accumulator, _>);
    let tensors = Tensors {
        bias: bias.as_ref().map(|bias| bias.view()),
        softmax_aux: sinks.as_ref().map(|sinks| sinks.view()),
        ..Tensors::new(q.view(), k.view(), v.view())
    };
    let Forward { out, statistics, head_statistics, reports, .. } = ring.forward(&tensors)?;
    assert!(reports.iter().all(|report| report.bytes_sent == report.bytes_predicted));
    Ok(Results {
        out: widen(&out),
        rows: statistics.as_ref().map(widen),
        heads: head_statistics.as_ref().map(widen),
    })
}

/// Every number as bits, in which NaN is one number.
fn bits(results: &Results) -> Vec<u64> {
    let numbers = results.out.iter().chain(results.rows.iter().flatten());
    let numbers = numbers.chain(results.heads.iter().flatten());
    numbers.map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
}

/// Maximum and mean over the rows with a visible key.
fn by_head(rows: &Array4<f64>) -> Array3<f64> {
    let mut heads = Array3::zeros((rows.len_of(Axis(1)), 3, 2));
    for ((head, statistic, which), into) in heads.indexed_iter_mut() {
        let of_head = rows.slice(s![.., head, .., ..]);
        let visible = of_head.lanes(Axis(2)).into_iter().filter(|row| row[1] != f64::NEG_INFINITY);
        let numbers: Vec<f64> = visible.map(|row| row[statistic]).collect();
        let nan = numbers.iter().any(|x| x.is_nan());
        *into = match which {
            0 if nan => f64::NAN,
            0 => numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            _ => numbers.iter().sum::<f64>() / numbers.len() as f64,
        };
    }
    heads
}

fn judge(case: &Case, got: &Results) -> std::result::Result<(), String> {
    let want = oracle::forward(&case.problem()).unwrap().statistics;
    let heads = by_head(&want);
    let largest = want.iter().filter(|x| x.is_finite()).fold(1.0, |a: f64, x| a.max(x.abs()));
    let bound = 40.0 * epsilon(case.spec.dtype.accumulator()) * largest;
    let pairs = [
        ("rows", got.rows.as_ref().unwrap().view().into_dyn(), want.view().into_dyn()),
        ("heads", got.heads.as_ref().unwrap().view().into_dyn(), heads.view().into_dyn()),
    ];
    for (name, got, want) in pairs {
        assert_eq!(got.shape(), want.shape());
        for ((index, got), want) in got.indexed_iter().zip(want) {
            let same = got == want || got.is_nan() && want.is_nan();
            let apart = (got - want).abs();
            if !same && (apart.is_nan() || apart > bound) {
                return Err(format!("{name}{index:?}: got {got:e}, want {want:e} ± {bound:e}"));
            }
        }
    }
    Ok(())
}

fn ring(case: &Case, division: Division, threads: usize, ranks: usize) -> Result<LocalRing> {
    let attention = attention(case).statistics(case.spec.statistics);
    LocalRing::new((attention, division, Runtime::new().threads(threads)), case.spec.dims, ranks)
}

fn with_statistics(mut case: Case, dtype: DType) -> Case {
    case.spec.statistics = true;
    case.in_dtype(dtype)
}

#[test]
fn random_attentions_have_the_statistics_of_the_oracle() {
    let mut failures = Vec::new();
    for seed in 0..120 {
        let draw = &mut Draw::new(seed ^ 0x57a7);
        let dtype = draw.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16, DType::F16]);
        let case = match seed % 3 {
            0 => Case::random(seed),
            1 => Case::random_long(seed),
            _ => Case::random_heads(seed),
        };
        let case = with_statistics(case, dtype);
        let mut ranks = draw.pick(&[1, 2, 3, 5]);
        let layout = draw.pick(&[None, Some(Layout::Contiguous), Some(Layout::Striped)]);
        let route = draw.pick(&[None, Some(Route::RelayUp), Some(Route::Direct)]);
        let division = if seed % 3 == 2 {
            ranks = draw.pick(&[2, 4, 8]);
            Division::new().strategy(draw.pick(&[
                Strategy::AllToAll,
                Strategy::HeadsRing { heads: 2 },
                Strategy::PassQ,
                Strategy::AllGather,
                Strategy::OncePerNode { node_ranks: 2 },
                Strategy::Grid { heads: 1, queries: ranks / 2, keys: 2 },
                Strategy::Grid { heads: 2, queries: 1, keys: ranks / 2 },
            ]))
        } else {
            Division::new().layout(layout).route(route)
        };
        let threads = draw.pick(&[1, 2]);
        let name = format!("seed {seed} {dtype}, {ranks} ranks, {division:?}");
        let judged = match ring(&case, division.clone(), threads, ranks) {
            // a strategy that does not divide these heads, or has no backward pass of this case
            Err(Error::Unsupported { what, .. }) if !what.contains("statistics") => continue,
            Err(Error::InvalidArgument { .. }) if seed % 3 == 2 => continue,
            Err(error) => Err(error.to_string()),
            Ok(mut with) => {
                compute(&case, &mut with).map_err(|error| error.to_string()).and_then(|got| {
                    // a plan is used again, and out has the bits of a plan without statistics
                    assert_eq!(bits(&got), bits(&compute(&case, &mut with).unwrap()), "{name}");
                    let mut plain = case.clone();
                    plain.spec.statistics = false;
                    let mut without = ring(&plain, division, threads, ranks).unwrap();
                    let plain = compute(&case, &mut without).unwrap();
                    assert!(plain.rows.is_none() && plain.heads.is_none());
                    let out = Results { rows: None, heads: None, out: got.out.clone() };
                    // few queries without statistics are computed by split-KV decode
                    if case.spec.dims.q_len >= 64 {
                        assert_eq!(bits(&out), bits(&plain), "{name}");
                    }
                    judge(&case, &got)
                })
            }
        };
        failures.extend(judged.err().map(|failure| format!("{name}: {failure}")));
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn bits_of_statistics_do_not_depend_on_the_ranks() {
    let mut checked = 0;
    for seed in 0..12 {
        let mut case = Case::random_long(seed);
        case.spec.dims.q_len = 700;
        case.spec.dims.kv_len = 700;
        case.spec.bias = None;
        case.batch = Batch::default();
        case.masks.objects.clear();
        let masks = case.masks.clone();
        let mut case = case.masked(masks);
        case.draw_tensors(&mut Draw::new(seed));
        let case = with_statistics(case, if seed % 2 == 0 { DType::F32 } else { DType::F64 });
        let bits_on = |ranks, threads, layout| {
            let attention = attention(&case).statistics(true).reproducible(true);
            let setup = Setup::from((
                attention.forward_only(true),
                Division::new().layout(layout),
                Runtime::new().threads(threads),
            ));
            let mut ring = LocalRing::new(setup, case.spec.dims, ranks).unwrap();
            let results = compute(&case, &mut ring).unwrap();
            assert_eq!(judge(&case, &results), Ok(()), "seed {seed}, {ranks} ranks");
            bits(&results)
        };
        let want = bits_on(1, 1, None);
        for (ranks, layout) in [(2, None), (3, Some(Layout::Zigzag)), (3, Some(Layout::Contiguous))]
        {
            assert_eq!(bits_on(ranks, 2, layout), want, "seed {seed}, {ranks} ranks");
            checked += 1;
        }
    }
    assert!(checked > 0);
}

#[test]
fn statistics_are_refused_by_name() {
    let dims = Dims::new(1, 64, 2, 8);
    let refused = |result: Result<()>, by: &str| match result {
        Err(Error::Unsupported { what, by: got }) => {
            assert!(what == "statistics" && got.contains(by), "{what} {got}");
        }
        other => panic!("{by}: {other:?}"),
    };
    let attention = Attention::new().statistics(true);
    let second = attention.clone().second_derivatives(true);
    refused(LocalRing::new(second, dims, 2).map(drop), "second_derivatives");
    // a plan with statistics writes them, one without does not
    let x = Array4::<f32>::ones((1, 64, 2, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut ring = LocalRing::new(&attention, dims, 2).unwrap();
    let mut forward = ring.forward(&tensors).unwrap();
    let statistics = forward.statistics.take();
    let error = ring.forward_into(&tensors, forward.view_mut()).unwrap_err();
    assert!(error.to_string().contains("statistics"), "{error}");
    forward.statistics = statistics;
    ring.forward_into(&tensors, forward.view_mut()).unwrap();
    let mut plain = LocalRing::new(Attention::new(), dims, 2).unwrap();
    let error = plain.forward_into(&tensors, forward.view_mut()).unwrap_err();
    assert!(error.to_string().contains("statistics"), "{error}");
}
