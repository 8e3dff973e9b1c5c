//! JVP and double backward against the oracle: random attentions on rings of threads, and what is
//! refused. The oracle itself against torch's autograd; `python/tests/second_derivatives.py`
//! compares the ring with finite differences.
//!
//! The error that a result may have follows from its condition: the oracle computes inputs that are
//! changed by a relative δ = 2⁻²⁰, and the largest change of an array, divided by δ, is multiplied
//! by ε of the type.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use annulus::{
    Attention, BackwardMode, Batch, BiasOrder, DType, Dims, Division, Element, Error, Layout,
    LocalRing, Plan, Result, Route, Runtime, Setup, SinkShape, Strategy, Tensors,
};
use annulus_comm::threads;
use annulus_conformance::{
    Case, Draw, Masks, epsilon,
    suite::{dense_twin, lists, with_bias_table},
};
use annulus_core::{
    KeyLists, Spec,
    oracle::{self, Direction},
};
use annulus_test_cases::facade::{CaseTensors, as_bias, attention, widen};
use half::{bf16, f16};
use ndarray::{Array, Array4, ArrayViewD, Dimension};

/// A case and a direction in the space of its inputs.
struct Directed {
    case: Case,
    /// As `case`: its q, k, v, bias and sinks are the direction.
    direction: Case,
}

/// Results by name.
type Results = Vec<(&'static str, Array<f64, ndarray::IxDyn>)>;

impl Directed {
    /// Draws a direction for a case, which is made one with second derivatives.
    fn of(case: Case, draw: &mut Draw) -> Self {
        let spec = Spec { normalize: true, ..case.spec.clone() };
        let case = Case { spec, ..case };
        let mut direction = case.clone();
        direction.draw_tensors(draw);
        Self { case, direction }
    }

    fn in_dtype(&self, dtype: DType) -> Self {
        Self { case: self.case.in_dtype(dtype), direction: self.direction.in_dtype(dtype) }
    }

    /// Changes every element by a relative `delta` times a random number.
    fn moved(&self, delta: f64, draw: &mut Draw) -> Self {
        fn moved<D: Dimension>(
            tensor: &Array<f64, D>,
            delta: f64,
            draw: &mut Draw,
        ) -> Array<f64, D> {
            tensor.mapv(|x| x * (1.0 + delta * draw.normal()))
        }
        let mut of = |case: &Case| {
            // a rounding would amplify the change
            let logits_dtype = case.spec.dtype.accumulator();
            Case {
                spec: Spec { logits_dtype, ..case.spec.clone() },
                q: moved(&case.q, delta, draw),
                k: moved(&case.k, delta, draw),
                v: moved(&case.v, delta, draw),
                bias: case.bias.as_ref().map(|bias| moved(bias, delta, draw)),
                sinks: case.sinks.as_ref().map(|sinks| moved(sinks, delta, draw)),
                dout: moved(&case.dout, delta, draw),
                dlse: case.dlse.as_ref().map(|dlse| moved(dlse, delta, draw)),
                ..case.clone()
            }
        };
        Self { case: of(&self.case), direction: of(&self.direction) }
    }

    fn direction(&self) -> Direction<'_> {
        let Case { q, k, v, bias, sinks, .. } = &self.direction;
        Direction {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            bias: bias.as_ref().map(|bias| bias.view()),
            sinks: sinks.as_ref().map(|sinks| sinks.view()),
        }
    }

    /// The oracle's results.
    fn truth(&self) -> Result<Results> {
        let Case { dout, dlse, .. } = &self.case;
        let dlse = dlse.as_ref().map(|dlse| dlse.view());
        let problem = self.case.problem();
        let truth = oracle::tangents(&problem, &self.direction(), Some(dout.view()), dlse)?;
        let forward = oracle::forward(&problem)?;
        let gradients = truth.gradients;
        let mut results = vec![
            ("out", forward.out.into_dyn()),
            ("lse", forward.lse.into_dyn()),
            ("ddout", truth.out.into_dyn()),
            ("ddlse", truth.lse.into_dyn()),
            ("dq", gradients.dq.into_dyn()),
            ("dk", gradients.dk.into_dyn()),
            ("dv", gradients.dv.into_dyn()),
        ];
        results.extend(gradients.dbias.map(|dbias| ("dbias", dbias.into_dyn())));
        results.extend(gradients.dsinks.map(|dsinks| ("dsoftmax_aux", dsinks.into_dyn())));
        Ok(results)
    }

    /// The results of the facade; those of the JVP replace none, but have to be equal.
    fn computed(&self, ring: &mut LocalRing) -> Result<Results> {
        match self.case.spec.dtype {
            DType::F64 => self.computed_in::<f64>(ring),
            DType::F32 => self.computed_in::<f32>(ring),
            DType::Bf16 => self.computed_in::<bf16>(ring),
            DType::F16 => self.computed_in::<f16>(ring),
        }
    }

    fn computed_in<T: Element>(&self, ring: &mut LocalRing) -> Result<Results> {
        if self.case.batch != Batch::default() {
            ring.update(&self.case.batch)?;
        }
        let primal = CaseTensors::<T>::new(&self.case, None);
        let direction = CaseTensors::<T>::new(&self.direction, None);
        let list_bias = lists_with_bias(&self.direction).and_then(|lists| lists.bias());
        let jvp = ring.jvp(&primal.tensors(), &direction.tensors(), list_bias)?;
        let dlse = primal.dlse.as_ref().map(|dlse| dlse.view());
        let (dout, tensors) = (primal.dout.view(), primal.tensors());
        let double = ring.double_backward(&tensors, dout, dlse, &direction.tensors(), list_bias)?;
        let sent = |report: &annulus::Report| report.bytes_sent == report.bytes_predicted;
        assert!(jvp.reports.iter().chain(&double.inputs.reports).all(sent));
        let bits = |x: &T| if x.to_f64().is_nan() { u64::MAX } else { x.to_f64().to_bits() };
        assert!(jvp.out_tangent.iter().map(bits).eq(double.ddout.iter().map(bits)));
        let gradients = double.inputs;
        let mut results = vec![
            ("out", widen(&jvp.out).into_dyn()),
            ("lse", widen(&jvp.lse).into_dyn()),
            ("ddout", widen(&double.ddout).into_dyn()),
            ("ddlse", widen(&double.ddlse).into_dyn()),
            ("dq", widen(&gradients.dq).into_dyn()),
            ("dk", widen(&gradients.dk).into_dyn()),
            ("dv", widen(&gradients.dv).into_dyn()),
        ];
        results.extend(gradients.dbias.map(|dbias| ("dbias", widen(&dbias).into_dyn())));
        if let Some(lists) = lists_with_bias(&self.case) {
            let dbias = ring.list_bias_gradient().unwrap();
            results.push(("dbias", as_bias(lists, &dbias, self.case.spec.dims.kv_len).into_dyn()));
        }
        results.extend(
            gradients.dsoftmax_aux.map(|dsinks| ("dsoftmax_aux", widen(&dsinks).into_dyn())),
        );
        Ok(results)
    }

    /// Compares results with the oracle's, each within the bound of its condition.
    fn judge(&self, got: &Results) -> Result<(), String> {
        const DELTA: f64 = 1.0 / (1 << 20) as f64;
        const FACTOR: f64 = 24.0;
        let dtype = self.case.spec.dtype;
        let want = self.truth().map_err(|error| error.to_string())?;
        let base = self.moved(0.0, &mut Draw::new(0)).truth().map_err(|error| error.to_string())?;
        let draw = &mut Draw::new(7);
        let mut changes = vec![0.0; want.len()];
        for _ in 0..4 {
            let near = self.moved(DELTA, draw).truth().map_err(|error| error.to_string())?;
            for (change, ((_, near), (_, base))) in changes.iter_mut().zip(near.iter().zip(&base)) {
                *change = apart(near.view(), base.view()).fold(*change, f64::max);
            }
        }
        for (((name, got), (_, want)), change) in got.iter().zip(&want).zip(changes) {
            let largest =
                want.iter().filter(|x| x.is_finite()).fold(0.0, |a: f64, x| a.max(x.abs()));
            let wide = epsilon(dtype.accumulator());
            let narrow = if dtype == dtype.accumulator() { wide } else { epsilon(dtype) };
            // an entry of a table sums terms of many pairs, which may cancel whatever the change
            let of_table = *name == "dbias" && self.case.spec.bias_table.is_some();
            let factor = if of_table { 8.0 * FACTOR } else { FACTOR };
            let bound = factor * wide * (change / DELTA + largest + 1.0) + narrow * largest;
            if got.shape() != want.shape() {
                return Err(format!("{name}: shape {:?}, want {:?}", got.shape(), want.shape()));
            }
            for (index, (got, want)) in got.iter().zip(want).enumerate() {
                let same = got == want || got.is_nan() && want.is_nan();
                let apart = (got - want).abs();
                if !same && (apart.is_nan() || apart > bound) {
                    return Err(format!("{name}[{index}]: got {got:e}, want {want:e} ± {bound:e}"));
                }
            }
        }
        Ok(())
    }
}

/// Returns the lists of a case whose bias has a derivative.
fn lists_with_bias(case: &Case) -> Option<&KeyLists> {
    case.batch.key_lists.as_deref().filter(|lists| lists.bias().is_some())
}

/// Differences of finite numbers.
fn apart<'a>(
    a: ArrayViewD<'a, f64>,
    b: ArrayViewD<'a, f64>,
) -> impl Iterator<Item = f64> + use<'a> {
    let pairs = a.into_iter().zip(b);
    pairs.map(|(a, b)| (a - b).abs()).filter(|apart| apart.is_finite())
}

fn ring(case: &Case, division: Division, threads: usize, ranks: usize) -> Result<LocalRing> {
    // in two passes queries are sent without their rows of a bias and of a dense mask
    let has_rows = case.spec.bias.is_some_and(|shape| shape[2] != 1);
    let one_pass = ranks > 1 && (has_rows || case.batch.attention_mask.is_some());
    let mode = if one_pass { BackwardMode::OnePass } else { case.spec.backward };
    let attention = attention(case).backward_mode(mode).second_derivatives(true);
    LocalRing::new((attention, division, Runtime::new().threads(threads)), case.spec.dims, ranks)
}

/// Computes cases on rings of 1, 2, 3 and 5 ranks, of 1 and 2 threads, with each layout and route.
fn check(cases: impl Iterator<Item = (u64, Case)>, dtype: DType) {
    let layouts = [None, Some(Layout::Contiguous), Some(Layout::Striped), Some(Layout::Zigzag)];
    let routes = [None, Some(Route::RelayUp), Some(Route::RelayDown), Some(Route::Direct)];
    let mut failures = Vec::new();
    let mut checked = 0;
    for (seed, case) in cases {
        let draw = &mut Draw::new(seed ^ 0x5eed);
        let directed = Directed::of(case, draw).in_dtype(dtype);
        let ranks = draw.pick(&[1, 2, 3, 5]);
        let threads = draw.pick(&[1, 2]);
        let layout = draw.pick(&layouts);
        let route = draw.pick(&routes);
        let ahead = draw.pick(&[None, Some(3)]);
        let division = Division::new().layout(layout.clone()).route(route).receive_ahead(ahead);
        let computed = ring(&directed.case, division, threads, ranks).and_then(|mut ring| {
            let first = directed.computed(&mut ring)?;
            // a plan is used again
            let again = directed.computed(&mut ring)?;
            assert!(
                first.iter().zip(&again).all(|((_, a), (_, b))| {
                    a.iter().zip(b).all(|(a, b)| a == b || a.is_nan() && b.is_nan())
                }),
                "seed {seed}"
            );
            Ok(first)
        });
        let judged = match computed {
            Ok(got) => directed.judge(&got),
            Err(error) => Err(error.to_string()),
        };
        checked += 1;
        if let Err(failure) = judged {
            failures.push(format!(
                "seed {seed} {dtype}, {ranks} ranks, {threads} threads, {layout:?}, {route:?}: {failure}"
            ));
        }
    }
    assert!(checked > 0);
    assert!(failures.is_empty(), "{} of {checked}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn random_attentions_have_the_second_derivatives_of_the_oracle() {
    check((0..200).map(|seed| (seed, Case::random(seed))), DType::F64);
    for (first, dtype) in [(1000, DType::F32), (2000, DType::Bf16), (3000, DType::F16)] {
        check((first..first + 60).map(|seed| (seed, Case::random(seed))), dtype);
    }
    for (first, dtype) in [(4000, DType::F64), (5000, DType::F32), (6000, DType::Bf16)] {
        check((first..first + 12).map(|seed| (seed, Case::random_long(seed))), dtype);
    }
}

#[test]
fn attentions_with_a_bias_table_have_the_second_derivatives_of_the_oracle() {
    for (first, dtype) in [(9000, DType::F64), (9100, DType::F32), (9200, DType::Bf16)] {
        let tabled = |seed| {
            let draw = &mut Draw::new(seed);
            let case = if seed % 4 == 0 { Case::random_long(seed) } else { Case::random(seed) };
            (seed, with_bias_table(case, draw))
        };
        check((first..first + 30).map(tabled), dtype);
    }
}

#[test]
fn heads_that_are_divided_among_ranks_have_the_second_derivatives_of_the_oracle() {
    let mut checked = 0;
    for seed in 9700..9760 {
        let draw = &mut Draw::new(seed);
        let dtype = draw.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16]);
        let directed = Directed::of(Case::random_heads(seed), draw).in_dtype(dtype);
        let ranks = draw.pick(&[2, 3, 4, 6]);
        let strategy = Strategy::HeadsRing { heads: draw.pick(&[2, 3, 4]) };
        let mut ring = match ring(&directed.case, Division::new().strategy(strategy), 1, ranks) {
            // ranks or heads that it does not divide
            Err(Error::InvalidArgument { argument, .. }) if argument == "strategy" => continue,
            planned => planned.unwrap(),
        };
        let judged = directed.judge(&directed.computed(&mut ring).unwrap());
        assert_eq!(judged, Ok(()), "seed {seed} {dtype} on {ranks} ranks, {strategy}");
        checked += 1;
    }
    assert!(checked >= 15, "{checked}");
}

/// Key lists, with a bias of their pairs in the place of a bias tensor.
#[test]
fn key_lists_with_a_bias_have_the_second_derivatives_of_the_equal_dense_bias() {
    for seed in 9500..9560 {
        let draw = &mut Draw::new(seed);
        let dtype = draw.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16]);
        let case = if seed % 4 == 0 { Case::random_long(seed) } else { Case::random(seed) };
        let mut directed = Directed::of(case, draw);
        let dims = directed.case.spec.dims;
        let shape = [draw.pick(&[1, dims.batch]), draw.pick(&[1, dims.q_heads])];
        let share = draw.pick(&[2, 6]);
        let listed =
            lists(shape, &dims, |_| (0..dims.kv_len).filter(|_| draw.once_in(share)).collect());
        for case in [&mut directed.case, &mut directed.direction] {
            let bias = (0..listed.len()).map(|_| DType::F32.round(draw.normal())).collect();
            let biased = KeyLists::clone(&listed).with_bias(bias).unwrap();
            let has_bias = case.spec.bias.is_none();
            case.batch.key_lists =
                Some(if has_bias { Arc::new(biased) } else { Arc::clone(&listed) });
        }
        let directed = directed.in_dtype(dtype);
        let [case, direction] = [&directed.case, &directed.direction].map(dense_twin);
        let ranks = draw.pick(&[1, 2, 3, 5]);
        let mut ring = ring(&directed.case, Division::new(), 1, ranks).unwrap();
        let got = directed.computed(&mut ring).unwrap();
        let judged = Directed { case, direction }.judge(&got);
        assert_eq!(judged, Ok(()), "seed {seed} {dtype} on {ranks} ranks");
    }
}

/// Number `n` of tensor `seed` of `scripts/second-derivatives-golden`.
fn number(n: usize, seed: usize) -> f64 {
    ((n + 1) * (2 * seed + 3) * 7919 % 1009) as f64 / 504.5 - 1.0
}

/// A tensor of `scripts/second-derivatives-golden`.
fn numbers<D: Dimension>(shape: impl ndarray::ShapeBuilder<Dim = D>, seed: usize) -> Array<f64, D> {
    let mut n = 0;
    Array::from_shape_simple_fn(shape, || {
        n += 1;
        number(n - 1, seed)
    })
}

#[test]
fn the_oracle_and_a_ring_have_the_double_backward_of_torch() {
    let golden = include_str!("second-derivatives.txt");
    let dims = Dims { kv_heads: 2, value_dim: 3, ..Dims::new(2, 7, 4, 5) };
    for (place, order) in [("after", BiasOrder::AfterSoftCap), ("before", BiasOrder::BeforeSoftCap)]
    {
        let spec = Spec {
            scale: 0.4,
            soft_cap: Some(3.0),
            bias: Some([1, 4, 7, 7]),
            bias_order: order,
            sinks: Some(SinkShape::per_head(2)),
            ..Spec::new(dims, DType::F64)
        };
        let masks = Masks { causal: true, ..Masks::default() };
        let draw = &mut Draw::new(0);
        let mut directed = Directed::of(Case::new("torch", spec, masks, draw), draw);
        for (case, first) in [(&mut directed.case, 0), (&mut directed.direction, 10)] {
            case.q = numbers((2, 7, 4, 5), first);
            case.k = numbers((2, 7, 2, 5), first + 1);
            case.v = numbers((2, 7, 2, 3), first + 2);
            case.bias = Some(numbers((1, 4, 7, 7), first + 3));
            case.sinks = Some(numbers((4, 2), first + 4));
        }
        directed.case.dout = numbers((2, 7, 4, 3), 20);
        directed.case.dlse = Some(numbers((2, 4, 7), 21));
        let mut ring = ring(&directed.case, Division::new(), 1, 3).unwrap();
        for results in [directed.truth().unwrap(), directed.computed(&mut ring).unwrap()] {
            let lines = golden.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            let lines: Vec<_> = lines.filter(|words| words[0] == place).collect();
            assert_eq!(lines.len(), 7);
            for words in lines {
                let (_, got) = results.iter().find(|(name, _)| *name == words[1]).unwrap();
                let want: Vec<f64> = words[2..].iter().map(|word| word.parse().unwrap()).collect();
                assert_eq!(got.len(), want.len());
                let apart = got.iter().zip(&want).map(|(got, want)| (got - want).abs());
                assert!(apart.fold(0.0, f64::max) < 1e-13, "{place} {}", words[1]);
            }
        }
    }
}

/// Results with one term left out, as of a kernel that forgets it, are not accepted.
#[test]
fn the_judge_finds_planted_mistakes() {
    let mut caught = 0;
    for seed in 8000..8020 {
        let dims = Dims { kv_heads: 1, ..Dims::new(1, 17, 2, 8) };
        let spec = Spec { soft_cap: Some(5.0), ..Spec::new(dims, DType::F64) };
        let draw = &mut Draw::new(seed);
        let case = Case::new("planted", spec, Masks::default(), draw);
        let right = Directed::of(case, draw);
        assert_eq!(right.judge(&right.truth().unwrap()), Ok(()));
        let wrong = |change: &dyn Fn(&mut Directed)| {
            let mut wrong =
                Directed { case: right.case.clone(), direction: right.direction.clone() };
            change(&mut wrong);
            right.judge(&wrong.truth().unwrap()).unwrap_err();
        };
        wrong(&|of| of.direction.k.fill(0.0));
        wrong(&|of| of.direction.v[[0, 3, 0, 1]] *= 1.0 + 1e-9);
        wrong(&|of| of.case.spec.soft_cap = None);
        wrong(&|of| of.case.dout[[0, 16, 1, 7]] += 1e-9);
        caught += 4;
    }
    assert_eq!(caught, 80);
}

#[test]
fn what_has_no_second_derivatives_is_refused_by_name() {
    let dims = Dims::new(1, 512, 2, 8);
    let refused = |attention: Attention, division: Division, ranks, by: &str| match LocalRing::new(
        (attention.second_derivatives(true), division),
        dims,
        ranks,
    ) {
        Err(Error::Unsupported { what, by: got }) => {
            assert!(what.contains("second_derivatives") && got.contains(by), "{what} {got}");
        }
        other => panic!("{by}: {other:?}"),
    };
    let new = Attention::new;
    refused(new().reproducible(true), Division::new(), 1, "reproducible");
    refused(new().unnormalized(true), Division::new(), 1, "unnormalized");
    refused(new(), Division::new().strategy(Strategy::PassQ), 2, "strategy");

    // of a plan without them, and of one that is forward only
    let x = Array4::<f32>::ones((1, 512, 2, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut plain = LocalRing::new(new(), dims, 2).unwrap();
    let error = plain.jvp(&tensors, &tensors, None).unwrap_err();
    assert!(error.to_string().contains("second_derivatives"), "{error}");
    let error = plain.double_backward(&tensors, x.view(), None, &tensors, None).unwrap_err();
    assert!(error.to_string().contains("second_derivatives"), "{error}");
    let forward_only = new().forward_only(true).second_derivatives(true);
    let mut ring = LocalRing::new(forward_only, dims, 2).unwrap();
    ring.jvp(&tensors, &tensors, None).unwrap();
    let error = ring.double_backward(&tensors, x.view(), None, &tensors, None).unwrap_err();
    assert!(error.to_string().contains("forward only"), "{error}");

    // a direction of another shape, and of a tensor that is not there
    let mut ring = LocalRing::new(new().second_derivatives(true), dims, 2).unwrap();
    let short = Array4::<f32>::ones((1, 512, 2, 4));
    let wrong = Tensors::new(short.view(), x.view(), x.view());
    assert!(ring.jvp(&tensors, &wrong, None).is_err());
    let bias = Array4::<f32>::ones((1, 1, 1, 1));
    assert!(ring.jvp(&tensors, &tensors.reborrow().with_bias(bias.view()), None).is_err());
    ring.jvp(&tensors, &tensors, None).unwrap();

    // numbers of lists, or of a bias, that are not there
    let refused = |error: Error| error.to_string().contains("direction of key_list_bias");
    let direction = Some(&[1.0; 512][..]);
    assert!(refused(ring.jvp(&tensors, &tensors, direction).unwrap_err()));
    let one = KeyLists::new((0..=512).collect(), vec![3; 512]).unwrap();
    ring.update(&Batch { key_lists: Some(Arc::new(one.clone())), ..Batch::default() }).unwrap();
    assert!(refused(ring.jvp(&tensors, &tensors, direction).unwrap_err()));
    ring.jvp(&tensors, &tensors, None).unwrap();

    let one = one.with_bias(vec![0.5; 512]).unwrap();
    ring.update(&Batch { key_lists: Some(Arc::new(one)), ..Batch::default() }).unwrap();
    assert!(refused(ring.jvp(&tensors, &tensors, Some(&[1.0])).unwrap_err()));
    let without = ring.jvp(&tensors, &tensors, None).unwrap().lse_tangent;
    let error = ring.jvp(&tensors, &wrong, direction).unwrap_err();
    assert!(error.to_string().starts_with("tangent of q: "), "{error}");
    assert_eq!(ring.jvp(&tensors, &tensors, direction).unwrap().lse_tangent, without + 1.0);

    // heads × ring has no lists
    let heads = Division::new().strategy(Strategy::HeadsRing { heads: 2 });
    let setup = Setup::from((new().second_derivatives(true), heads));
    let half = Array4::<f32>::ones((1, 256, 2, 8));
    let errors = threads::each_rank(threads::ring(2), |_, transport| {
        let mut plan = Plan::new(&setup, dims, transport)?;
        let tensors = Tensors::new(half.view(), half.view(), half.view());
        let error = plan.jvp(&tensors, &tensors, Some(&[1.0])).unwrap_err();
        plan.jvp(&tensors, &tensors, None).map(|_| error)
    });
    assert!(errors.unwrap().into_iter().all(refused));
}
