//! Statistics of the scores, by row and by head, against the oracle: random attentions under every
//! strategy; their bits in the reproducible order; what is refused. And the rounding residual of
//! out, which backward adds.

use std::time::Duration;

use annulus::{
    Attention, Batch, DType, Dims, Division, Element, Error, Forward, Layout, LocalRing, Plan,
    Result, Route, Runtime, Setup, Strategy, Tensors, comm::threads,
};
use annulus_conformance::{
    Altered, Case, Draw, Facade, Setting, epsilon,
    subjects::{cpu, mock, mock_staged},
    suite,
};
use annulus_core::{Backend, Capabilities, Host, LEAF_ROWS, oracle};
use annulus_cpu::Cpu;
use annulus_test_cases::facade::{CaseTensors, attention, widen};
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
    let tensors = CaseTensors::<T>::new(case, None);
    let Forward { out, statistics, head_statistics, reports, .. } =
        ring.forward(&tensors.tensors())?;
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
    LocalRing::new(
        (attention(case), division, Runtime::new().threads(threads)),
        case.spec.dims,
        ranks,
    )
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
            let attention = attention(&case).reproducible(true);
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

fn rings() -> [Setting; 4] {
    let two = Setting::new(2, Layout::Contiguous);
    [Setting::ALONE, two, Setting::new(3, Layout::Striped), Setting::new(3, Layout::Zigzag)]
}

#[test]
fn dq_has_no_error_of_the_rounding_of_out_on_rings() {
    for setting in rings() {
        suite::out_residual(&cpu(), None, &setting).unwrap();
        suite::out_residual(&mock(), None, &setting).unwrap();
        suite::out_residual(&Facade, None, &setting).unwrap();
    }
    suite::out_residual(&mock_staged(Duration::ZERO), None, &Setting::new(2, Layout::Contiguous))
        .unwrap();
}

#[test]
fn dq_has_no_error_of_the_rounding_of_out_in_the_reproducible_order() {
    for setting in rings() {
        suite::out_residual(&cpu(), Some(64), &setting).unwrap();
        suite::out_residual(&Facade, Some(LEAF_ROWS), &setting).unwrap();
    }
}

#[test]
fn dq_has_no_error_of_the_rounding_of_out_on_grids() {
    for (ranks, strategy) in [
        (2, Strategy::HeadsRing { heads: 2 }),
        (4, Strategy::HeadsRing { heads: 2 }),
        (4, Strategy::AllToAll),
        (2, Strategy::AllGather),
        (3, Strategy::PassQ),
        (2, Strategy::Grid { heads: 1, queries: 1, keys: 2 }),
        (3, Strategy::Grid { heads: 1, queries: 1, keys: 3 }),
        (4, Strategy::Grid { heads: 1, queries: 2, keys: 2 }),
        (8, Strategy::Grid { heads: 2, queries: 2, keys: 2 }),
    ] {
        for layout in [None, Some(Layout::Striped)] {
            let setting = Setting { ranks, layout, strategy, ..Setting::ALONE };
            suite::out_residual(&Facade, None, &setting).unwrap();
        }
    }
}

/// The CPU backend without the residual.
fn without() -> impl Backend<Space = Host> {
    let without = |capabilities| Capabilities { out_residual: false, ..capabilities };
    Altered::new(without, |shard| Ok(shard.clone())).unwrap()
}

/// Runs both passes of a plan on one rank, with a residual if `given`, whatever the plan has.
/// Returns the results of the forward and of the backward pass.
fn both_passes<T: Element>(
    backend: impl Backend<Space = Host>,
    given: bool,
) -> Result<[Result<()>; 2]> {
    let attention = Attention::new().dtype(T::DTYPE);
    let transport = threads::ring(1).remove(0);
    let mut plan = Plan::with_backend(&attention, Dims::new(1, 8, 2, 4), backend, transport)?;
    let x = Array4::from_elem((1, 8, 2, 4), T::from_f64(0.5));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut forward = plan.forward(&tensors)?;
    assert_eq!(forward.out_residual.is_some(), plan.has_out_residual());
    forward.out_residual = given.then(|| x.clone());
    let of_forward = plan.forward_into(&tensors, forward.view_mut()).map(drop);
    let of_backward = plan.backward(&tensors, &forward, x.view(), None).map(drop);
    // a plan that refused a call still works
    forward.out_residual = None;
    plan.backward(&tensors, &forward, x.view(), None)?;
    Ok([of_forward, of_backward])
}

#[test]
fn a_backend_without_the_residual_refuses_it_by_name() {
    let cpu = || Cpu::new(1).unwrap();
    for result in both_passes::<bf16>(without(), true).unwrap() {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("out_residual"), "{error}");
    }
    let without = both_passes::<bf16>(without(), false).unwrap();
    let with = both_passes::<bf16>(cpu(), true).unwrap();
    for result in without.into_iter().chain(with) {
        result.unwrap();
    }
}

#[test]
fn wide_types_have_no_residual() {
    for result in both_passes::<f32>(Cpu::new(1).unwrap(), true).unwrap() {
        let error = result.unwrap_err();
        let named = matches!(&error, Error::InvalidArgument { argument, .. }
            if argument == "out_residual");
        assert!(named, "{error}");
    }
    for result in both_passes::<f64>(Cpu::new(1).unwrap(), false).unwrap() {
        result.unwrap();
    }
}

#[test]
fn ranks_that_differ_in_the_residual_are_refused_where_it_is_a_message() {
    let dims = Dims::new(1, 8, 2, 4);
    let attention = Setup::from((
        Attention::new().dtype(DType::F16),
        Division::new().strategy(Strategy::HeadsRing { heads: 2 }),
    ));
    let x = Array4::from_elem((1, 8, 2, 4), f16::from_f64(0.5));
    let errors = threads::each_rank(threads::ring(2), |rank, transport| {
        let mut plan = Plan::new(&attention, dims, transport)?;
        let rows = x.slice(s![.., ..4, .., ..]);
        let tensors = Tensors::new(rows, rows, rows);
        let mut forward = plan.forward(&tensors)?;
        forward.out_residual.take_if(|_| rank == 1);
        let refused = plan.forward_into(&tensors, forward.view_mut()).unwrap_err();
        plan.forward(&tensors)?;
        Ok(refused)
    });
    for error in errors.unwrap() {
        let named = matches!(&error, Error::RankMismatch { field, .. } if field == "out_residual");
        assert!(named, "{error}");
    }
}

/// Rows in memory before each other, elements apart: out and its residual are the same.
#[test]
fn a_residual_of_any_strides_is_out_before_rounding() {
    let dims = Dims::new(1, 21, 2, 6);
    let draw = |seed: usize| {
        Array4::from_shape_fn((1, 21, 2, 6), |(_, i, h, d)| {
            f16::from_f64(((seed + 7 * i + 3 * h + 5 * d) % 13) as f64 / 8.0 + 3.0)
        })
    };
    let (q, k, v) = (draw(1), draw(2), draw(3));
    let wide = |x: &Array4<f16>| x.mapv(f64::from);
    let attention = Attention::new();
    let mut ring = LocalRing::new(attention.clone().dtype(DType::F16), dims, 1).unwrap();
    let forward = ring.forward(&Tensors::new(q.view(), k.view(), v.view())).unwrap();
    let mut exact = LocalRing::new(attention.clone().dtype(DType::F64), dims, 1).unwrap();
    let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
    let want = exact.forward(&Tensors::new(q64.view(), k64.view(), v64.view())).unwrap().out;
    let mut strided = Array4::from_elem((6, 2, 21, 1), f16::NAN);
    let mut again = forward.clone();
    let mut outputs = again.view_mut();
    outputs.out_residual = Some(strided.view_mut().reversed_axes());
    ring.forward_into(&Tensors::new(q.view(), k.view(), v.view()), outputs).unwrap();
    let residual = forward.out_residual.as_ref().unwrap();
    assert_eq!(&strided.reversed_axes(), residual);
    let sum = wide(&forward.out) + wide(residual);
    let error = |of: &Array4<f64>| (of - &want).iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let errors = [error(&sum), error(&wide(&forward.out))];
    assert!(errors[0] < 1e-5 && errors[1] > 1e-4, "{errors:?}");
}
