//! Pairs of problems whose results are related, whatever the results are.

use annulus_core::{Batch, DType, Dims, SinkShape, Spec};
use ndarray::{Array, Array2, Array4, Axis, Dimension, RemoveAxis, concatenate};

use super::{LAYOUTS, Verdict, ensure, judge, run};
use crate::{Answer, Case, Draw, Masks, Setting, Subject};

const DIMS: Dims =
    Dims { batch: 2, q_len: 26, kv_len: 26, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

/// Checks every relation in f32 and f64, if the subject computes them, on 1, 2, 3 and 5 ranks.
///
/// # Errors
/// The first relation that does not hold, with its element type and setting.
pub fn metamorphic(subject: &dyn Subject) -> Verdict {
    let [contiguous, zigzag, striped] = LAYOUTS;
    for dtype in
        [DType::F32, DType::F64].into_iter().filter(|dtype| subject.dtypes().contains(dtype))
    {
        for setting in [
            Setting::ALONE,
            Setting::new(2, contiguous.clone()),
            Setting::new(3, zigzag.clone()),
            Setting::new(5, striped.clone()),
        ] {
            let pair = Pair { subject, dtype, setting: &setting };
            let relation = |name: &str, verdict: Verdict| {
                verdict.map_err(|wrong| format!("{name} ({dtype} on {setting}): {wrong}"))
            };
            relation("packed sequences = separate ones", pair.packed_is_separate())?;
            relation("a window as long as the sequence = none", pair.wide_window())?;
            relation("sinks of −∞ = none", pair.sinks_of_nothing())?;
            relation("a constant bias = none", pair.constant_bias())?;
            relation("permuted heads = permuted answers", pair.permuted_heads())?;
            relation("duplicated keys = lse + ln 2", pair.duplicated_keys())?;
            relation("a causal prefix does not depend on later rows", pair.causal_prefix())?;
            relation(
                "permuted rows with their positions = permuted answers",
                pair.permuted_rows(),
            )?;
            relation("batch rows are independent", pair.batch_rows())?;
            relation("larger queries = a larger scale", pair.scaled_queries())?;
        }
    }
    Ok(())
}

/// Two problems computed by one subject.
struct Pair<'a> {
    subject: &'a dyn Subject,
    dtype: DType,
    setting: &'a Setting,
}

fn causal() -> Masks {
    Masks { causal: true, ..Masks::default() }
}

/// Selects the rows `order` of an axis.
fn pick<D: RemoveAxis>(array: &Array<f64, D>, axis: usize, order: &[usize]) -> Array<f64, D> {
    array.select(Axis(axis), order)
}

impl Pair<'_> {
    fn case(&self, masks: Masks, change: impl FnOnce(&mut Spec)) -> Case {
        let mut spec = Spec::new(DIMS, DType::F64);
        change(&mut spec);
        Case::new("metamorphic", spec, masks, &mut Draw::new(3)).in_dtype(self.dtype)
    }

    fn run(&self, case: &Case) -> Result<Answer, String> {
        run(self.subject, case, self.setting)
    }

    /// Compares two answers to `case` that were computed in different ways.
    fn same(&self, case: &Case, a: &Answer, b: &Answer) -> Verdict {
        judge(case)?.check_equal(a, b)
    }

    fn packed_is_separate(&self) -> Verdict {
        let mut packed = self.case(causal(), |_| {});
        let (first, second): (Vec<usize>, Vec<usize>) = (0..26).partition(|&row| row < 10);
        packed.batch.cum_seqlens_q = Some(vec![0, 10, 26]);
        packed.batch.cum_seqlens_k = Some(vec![0, 10, 26]);
        let separate = |rows: &[usize]| {
            let mut alone = packed.clone();
            alone.batch = Batch::default();
            alone.spec.dims.q_len = rows.len();
            alone.spec.dims.kv_len = rows.len();
            [&mut alone.q, &mut alone.k, &mut alone.v, &mut alone.dout]
                .into_iter()
                .for_each(|tensor| *tensor = pick(tensor, 1, rows));
            self.run(&alone)
        };
        let a = separate(&first)?;
        let b = separate(&second)?;
        let join = |a: &Array4<f64>, b: &Array4<f64>| {
            concatenate(Axis(1), &[a.view(), b.view()]).unwrap_or_default()
        };
        let joined = Answer {
            out: join(&a.out, &b.out),
            lse: concatenate(Axis(2), &[a.lse.view(), b.lse.view()]).unwrap_or_default(),
            max: concatenate(Axis(2), &[a.max.view(), b.max.view()]).unwrap_or_default(),
            sum: concatenate(Axis(2), &[a.sum.view(), b.sum.view()]).unwrap_or_default(),
            dq: join(&a.dq, &b.dq),
            dk: join(&a.dk, &b.dk),
            dv: join(&a.dv, &b.dv),
            ..a.clone()
        };
        self.same(&packed, &self.run(&packed)?, &joined)
    }

    fn wide_window(&self) -> Verdict {
        let plain = self.case(Masks::default(), |_| {});
        let windowed =
            plain.clone().masked(Masks { window: Some([Some(25), Some(25)]), ..Masks::default() });
        self.same(&plain, &self.run(&windowed)?, &self.run(&plain)?)
    }

    fn sinks_of_nothing(&self) -> Verdict {
        let mut with =
            self.case(causal(), |spec| spec.sinks = Some(SinkShape { per_head: true, count: 3 }));
        with.sinks.iter_mut().for_each(|sinks| sinks.fill(f64::NEG_INFINITY));
        let mut without = with.clone();
        without.spec.sinks = None;
        without.sinks = None;
        let mut got = self.run(&with)?;
        let dsinks = got.dsinks.take();
        ensure(dsinks.is_some_and(|dsinks| dsinks.iter().all(|&x| x == 0.0)), || {
            "dsinks is not 0".into()
        })?;
        self.same(&without, &got, &self.run(&without)?)
    }

    fn constant_bias(&self) -> Verdict {
        let mut with = self.case(causal(), |spec| spec.bias = Some([1, 1, 26, 26]));
        with.bias.iter_mut().for_each(|bias| bias.fill(1.75));
        let mut without = with.clone();
        without.spec.bias = None;
        without.bias = None;
        let mut got = self.run(&with)?;
        let dbias = got.dbias.take().map_or(f64::NAN, |dbias| dbias.sum());
        // every row of dS sums to 0, so the sum of all is 0 up to rounding
        ensure(dbias.abs() < if self.dtype == DType::F64 { 1e-11 } else { 1e-2 }, || {
            format!("dbias sums to {dbias}")
        })?;
        got.lse -= 1.75;
        got.max -= 1.75;
        self.same(&without, &got, &self.run(&without)?)
    }

    fn permuted_heads(&self) -> Verdict {
        let case = self.case(causal(), |_| {});
        // swaps the two KV heads, and the query heads within and with their groups
        let heads = [3, 2, 1, 0];
        let kv_heads = [1, 0];
        let mut permuted = case.clone();
        permuted.q = pick(&case.q, 2, &heads);
        permuted.dout = pick(&case.dout, 2, &heads);
        permuted.k = pick(&case.k, 2, &kv_heads);
        permuted.v = pick(&case.v, 2, &kv_heads);
        let answer = self.run(&case)?;
        let want = Answer {
            out: pick(&answer.out, 2, &heads),
            lse: pick(&answer.lse, 1, &heads),
            max: pick(&answer.max, 1, &heads),
            sum: pick(&answer.sum, 1, &heads),
            dq: pick(&answer.dq, 2, &heads),
            dk: pick(&answer.dk, 2, &kv_heads),
            dv: pick(&answer.dv, 2, &kv_heads),
            ..answer
        };
        self.same(&permuted, &self.run(&permuted)?, &want)
    }

    fn duplicated_keys(&self) -> Verdict {
        let once = self.case(Masks::default(), |_| {});
        let mut twice = once.clone();
        twice.spec.dims.kv_len = 52;
        let double = |tensor: &Array4<f64>| {
            concatenate(Axis(1), &[tensor.view(), tensor.view()]).unwrap_or_default()
        };
        twice.k = double(&once.k);
        twice.v = double(&once.v);
        let mut got = self.run(&twice)?;
        got.lse -= std::f64::consts::LN_2;
        got.sum /= 2.0;
        // each copy receives half of the gradient
        let halves = |tensor: &Array4<f64>| {
            let (a, b) = tensor.view().split_at(Axis(1), 26);
            &a + &b
        };
        got.dk = halves(&got.dk);
        got.dv = halves(&got.dv);
        self.same(&once, &got, &self.run(&once)?)
    }

    fn causal_prefix(&self) -> Verdict {
        let whole = self.case(causal(), |_| {});
        let mut other = whole.clone();
        let end: Vec<usize> = (17..26).collect();
        for tensor in [&mut other.q, &mut other.k, &mut other.v] {
            end.iter().for_each(|&row| {
                tensor.index_axis_mut(Axis(1), row).mapv_inplace(|x| -2.0 * x + 1.0)
            });
        }
        let prefix: Vec<usize> = (0..17).collect();
        let a = self.run(&whole)?;
        let b = self.run(&other)?;
        // the same tiles are computed from the same numbers, hence the same bits
        for (name, a, b) in [("out", &a.out, &b.out), ("dq", &a.dq, &b.dq)] {
            ensure(pick(a, 1, &prefix) == pick(b, 1, &prefix), || {
                format!("{name} of the prefix changed")
            })?;
        }
        ensure(pick(&a.lse, 2, &prefix) == pick(&b.lse, 2, &prefix), || {
            "lse of the prefix changed".into()
        })
    }

    fn permuted_rows(&self) -> Verdict {
        let case =
            self.case(Masks { window: Some([Some(7), Some(0)]), ..Masks::default() }, |_| {});
        let draw = &mut Draw::new(11);
        let q_order = draw.permutation(26);
        let kv_order = draw.permutation(26);
        let positions =
            |order: &[usize]| Array2::from_shape_fn((2, 26), |(_, row)| order[row] as i64);
        let mut permuted = case.clone();
        permuted.q = pick(&case.q, 1, &q_order);
        permuted.dout = pick(&case.dout, 1, &q_order);
        permuted.k = pick(&case.k, 1, &kv_order);
        permuted.v = pick(&case.v, 1, &kv_order);
        permuted.batch.q_positions = Some(positions(&q_order));
        permuted.batch.kv_positions = Some(positions(&kv_order));
        let answer = self.run(&case)?;
        let want = Answer {
            out: pick(&answer.out, 1, &q_order),
            lse: pick(&answer.lse, 2, &q_order),
            max: pick(&answer.max, 2, &q_order),
            sum: pick(&answer.sum, 2, &q_order),
            dq: pick(&answer.dq, 1, &q_order),
            dk: pick(&answer.dk, 1, &kv_order),
            dv: pick(&answer.dv, 1, &kv_order),
            ..answer
        };
        self.same(&permuted, &self.run(&permuted)?, &want)
    }

    fn batch_rows(&self) -> Verdict {
        fn second<D: Dimension + RemoveAxis>(array: &Array<f64, D>) -> Array<f64, D> {
            pick(array, 0, &[1])
        }
        let both = self.case(causal(), |_| {});
        let mut alone = both.clone();
        alone.spec.dims.batch = 1;
        [&mut alone.q, &mut alone.k, &mut alone.v, &mut alone.dout]
            .into_iter()
            .for_each(|tensor| *tensor = second(tensor));
        let answer = self.run(&both)?;
        let want = Answer {
            out: second(&answer.out),
            lse: second(&answer.lse),
            max: second(&answer.max),
            sum: second(&answer.sum),
            dq: second(&answer.dq),
            dk: second(&answer.dk),
            dv: second(&answer.dv),
            ..answer
        };
        let got = self.run(&alone)?;
        got.same_bits(&want)
    }

    fn scaled_queries(&self) -> Verdict {
        let case = self.case(causal(), |_| {});
        let mut scaled = case.clone();
        // a power of two scales without rounding
        scaled.q *= 4.0;
        scaled.spec.scale /= 4.0;
        let mut got = self.run(&scaled)?;
        got.dq *= 4.0;
        self.same(&case, &got, &self.run(&case)?)
    }
}
