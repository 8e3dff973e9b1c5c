//! Equal bits: at every repetition and in any order of arrivals; of rows that do not depend on
//! others; in the reproducible order, over ranks, layouts, routes and threads too.

use std::{ops::Range, sync::Arc};

use annulus_core::{
    BackwardMode, Batch, DType, DenseMask, Dims, Run, Runs, SinkShape, Spec, index,
};
use annulus_plan::{CustomLayout, Layout, Route};
use ndarray::{Array, Axis, Dimension, RemoveAxis, s};

use super::{LAYOUTS, Verdict, ensure, judge, matrix::routes, numeric::large_constants, run};
use crate::{Answer, Case, Draw, Masks, Setting, Subject};

/// A case with every sum over ranks: GQA, sinks, a bias that is broadcast over queries; in f32, or
/// else in the first type that the subject supports.
fn summed_everywhere(subject: &dyn Subject) -> Case {
    let draw = &mut Draw::new(7);
    let dims = Dims {
        batch: 2,
        q_len: 29,
        kv_len: 29,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 8,
        value_dim: 8,
    };
    let mut spec = Spec::new(dims, DType::F32);
    spec.sinks = Some(SinkShape { per_head: false, count: 2 });
    spec.bias = Some([1, 4, 1, 29]);
    let mut case =
        Case::new("summed everywhere", spec, Masks { causal: true, ..Masks::default() }, draw);
    case.dlse = Some(draw.tensor((2, 4, 29)));
    let first = subject.dtypes().iter().find(|&&dtype| dtype == DType::F32);
    case.in_dtype(*first.or(subject.dtypes().first()).unwrap_or(&DType::F32))
}

fn same_bits(
    subject: &dyn Subject,
    setting: &Setting,
    answers: &[Answer],
    first: &Answer,
) -> Verdict {
    for (time, answer) in answers.iter().enumerate() {
        answer
            .same_bits(first)
            .map_err(|wrong| format!("{} on {setting}: call {time}: {wrong}", subject.name()))?;
    }
    Ok(())
}

/// Repeats one plan many times, then plans again: every answer has the same bits.
pub fn same_bits_over_repeats(subject: &dyn Subject, times: usize) -> Verdict {
    let case = summed_everywhere(subject);
    for setting in [
        Setting::new(4, Layout::Zigzag),
        Setting::new(3, Layout::Contiguous),
        Setting::new(7, Layout::Striped),
    ] {
        let text = |error: annulus_core::Error| format!("{} on {setting}: {error}", subject.name());
        let answers = subject.run(&case, &setting, times).map_err(text)?;
        ensure(answers.len() == times, || {
            format!("{}: {} answers for {times} calls", subject.name(), answers.len())
        })?;
        let Some(first) = answers.first() else { continue };
        same_bits(subject, &setting, &answers, first)?;
        same_bits(subject, &setting, &subject.run(&case, &setting, 1).map_err(text)?, first)?;
    }
    Ok(())
}

/// Receives further ahead, on every route, in one pass and in two: the bits stay the same.
pub fn same_bits_received_ahead(subject: &dyn Subject) -> Verdict {
    for (backward, route) in [BackwardMode::OnePass, BackwardMode::TwoPass]
        .into_iter()
        .flat_map(|backward| Route::ALL.map(|route| (backward, route)))
    {
        let mut case = summed_everywhere(subject);
        case.spec.backward = backward;
        for setting in [Setting::new(5, Layout::Zigzag), Setting::new(4, Layout::Contiguous)] {
            let ahead =
                |receive_ahead| Setting { route: Some(route), receive_ahead, ..setting.clone() };
            let run = |setting: &Setting| {
                let answers = subject.run(&case, setting, 2);
                answers.map_err(|error| format!("{} on {setting}: {error}", subject.name()))
            };
            let by_default = run(&ahead(None))?;
            for steps in [1, 3, 9] {
                let setting = ahead(Some(steps));
                same_bits(subject, &setting, &run(&setting)?, &by_default[0])?;
            }
        }
    }
    Ok(())
}

/// Runs the same case with delayed messages: `delayed` must give the bits of `prompt` every time.
pub fn same_bits_under_delay(prompt: &dyn Subject, delayed: &dyn Subject, times: usize) -> Verdict {
    let case = summed_everywhere(prompt);
    for setting in [Setting::new(4, Layout::Zigzag), Setting::new(3, Layout::Striped)] {
        let text = |error: annulus_core::Error| format!("{} on {setting}: {error}", delayed.name());
        let want = prompt.run(&case, &setting, 1).map_err(text)?;
        let answers = delayed.run(&case, &setting, times).map_err(text)?;
        ensure(answers.len() == times && want.len() == 1, || {
            format!("{}: {} answers", delayed.name(), answers.len())
        })?;
        same_bits(delayed, &setting, &answers, &want[0])?;
    }
    Ok(())
}

/// Computes a causal case again with other later rows, and with one of its batch rows alone, in f32
/// and f64 if the subject computes them: the bits of rows that do not depend on them are the same.
pub fn independent_rows(subject: &dyn Subject) -> Verdict {
    let [contiguous, zigzag, striped] = LAYOUTS;
    let settings = [
        Setting::ALONE,
        Setting::new(2, contiguous),
        Setting::new(3, zigzag),
        Setting::new(5, striped),
    ];
    let dtypes = [DType::F32, DType::F64].into_iter();
    for dtype in dtypes.filter(|dtype| subject.dtypes().contains(dtype)) {
        let dims = Dims { value_dim: 6, ..Dims::new(2, 26, 4, 8).kv_heads(2) };
        let masks = Masks { causal: true, ..Masks::default() };
        let spec = Spec::new(dims, DType::F64);
        let case = Case::new("independent rows", spec, masks, &mut Draw::new(3)).in_dtype(dtype);
        for setting in &settings {
            let context = |wrong| format!("{dtype} on {setting}: {wrong}");
            causal_prefix(subject, &case, setting).map_err(context)?;
            batch_row(subject, &case, setting).map_err(context)?;
        }
    }
    Ok(())
}

/// Out, lse and dq of the first 17 rows do not depend on later ones.
fn causal_prefix(subject: &dyn Subject, case: &Case, setting: &Setting) -> Verdict {
    let mut other = case.clone();
    for tensor in [&mut other.q, &mut other.k, &mut other.v] {
        tensor.slice_mut(s![.., 17.., .., ..]).mapv_inplace(|x| -2.0 * x + 1.0);
    }
    let [a, b] = [run(subject, case, setting)?, run(subject, &other, setting)?];
    // the same tiles are computed from the same numbers
    for (name, a, b) in [("out", &a.out, &b.out), ("dq", &a.dq, &b.dq)] {
        let rows = s![.., ..17, .., ..];
        ensure(a.slice(rows) == b.slice(rows), || format!("{name} of the prefix changed"))?;
    }
    let rows = s![.., .., ..17];
    ensure(a.lse.slice(rows) == b.lse.slice(rows), || "lse of the prefix changed".into())
}

/// The second batch row alone has the bits that it has beside the first.
fn batch_row(subject: &dyn Subject, case: &Case, setting: &Setting) -> Verdict {
    fn second<D: RemoveAxis>(array: &Array<f64, D>) -> Array<f64, D> {
        array.select(Axis(0), &[1])
    }
    let mut alone = case.clone();
    alone.spec.dims.batch = 1;
    for tensor in [&mut alone.q, &mut alone.k, &mut alone.v, &mut alone.dout] {
        *tensor = second(tensor);
    }
    let both = run(subject, case, setting)?;
    let want = Answer {
        out: second(&both.out),
        lse: second(&both.lse),
        max: second(&both.max),
        sum: second(&both.sum),
        dq: second(&both.dq),
        dk: second(&both.dk),
        dv: second(&both.dv),
        ..both
    };
    run(subject, &alone, setting)?.same_bits(&want).map_err(|wrong| format!("alone: {wrong}"))
}

/// Rows of a leaf: those of the CPU's KV tile, so that short sequences have several leaves.
const LEAF_ROWS: u64 = 64;

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

const RANKS: [usize; 7] = [1, 2, 3, 5, 7, 8, 16];

/// Computes random cases on all subjects, ring sizes and layouts, with routes in turn: the answers
/// to a case have the same bits.
pub fn reproducible_bits(subjects: &[&dyn Subject], seeds: Range<u64>) -> Verdict {
    for seed in seeds {
        let case = random_case(seed);
        one_set_of_bits(subjects, &case, settings(&case, seed))?;
    }
    Ok(())
}

/// As [`reproducible_bits`], of one random case on one rank, on `ranks` ranks with each layout, and
/// on `ranks` ranks that own random leaves.
pub fn reproducible_ranks(subjects: &[&dyn Subject], seed: u64, ranks: usize) -> Verdict {
    let case = random_case(seed);
    let random = random_leaves(&case, ranks, &mut Draw::new(seed));
    let layouts = LAYOUTS.into_iter().chain([random]);
    let settings = layouts.map(|layout| Setting::new(ranks, layout));
    one_set_of_bits(subjects, &case, [Setting::ALONE].into_iter().chain(settings))
}

/// Returns a random case with short leaves, of an element type that follows from the seed.
fn random_case(seed: u64) -> Case {
    let mut case = Case::random_long(seed).in_dtype(DTYPES[index(seed % 4)]);
    case.spec.leaf_rows = Some(LEAF_ROWS);
    case
}

/// Computes a case with each setting, on the subjects in turn: the answers have the same bits.
fn one_set_of_bits(
    subjects: &[&dyn Subject],
    case: &Case,
    settings: impl IntoIterator<Item = Setting>,
) -> Verdict {
    let mut first: Option<Answer> = None;
    for (number, setting) in settings.into_iter().enumerate() {
        let subject = subjects[number % subjects.len()];
        let answer = run(subject, case, &setting)?;
        match &first {
            None => first = Some(answer),
            Some(first) => answer.same_bits(first).map_err(|wrong| {
                format!("{}: {} on {setting}: {wrong}", subject.name(), case.name)
            })?,
        }
    }
    Ok(())
}

/// Computes a case with sinks for each shape of a bias, some with a dense mask or unnormalised, on
/// rings of several sizes and layouts: all gradients have the same bits, and are those of the
/// oracle.
pub fn reproducible_gradients(subjects: &[&dyn Subject]) -> Verdict {
    for number in 0..16u64 {
        let draw = &mut Draw::new(number);
        let dims = Dims { kv_len: 140, kv_heads: 1, ..Dims::new(2, 100, 2, 4) };
        let full = [dims.batch, dims.q_heads, dims.q_len, dims.kv_len];
        let is_one = |axis: usize| number >> axis & 1 != 0;
        let bias = std::array::from_fn(|axis| if is_one(axis) { 1 } else { full[axis] });
        let spec = Spec {
            bias: Some(bias),
            sinks: Some(SinkShape { per_head: is_one(0), count: 2 }),
            normalize: !is_one(1),
            ..Spec::new(dims, DType::F64)
        };
        let masks = Masks { causal: is_one(2), ..Masks::default() };
        let mut case = Case::new(format!("bias {bias:?}"), spec, masks, draw);
        case.draw_tensors(draw);
        if number % 3 == 0 {
            let shape = [1 + index(number / 3 % 2), 1 + index(number % 2), dims.q_len, dims.kv_len];
            let mask = DenseMask::from_fn(shape, |[b, h, i, j]| (b + h + 3 * i + j) % 5 != 0);
            case.batch.attention_mask = Some(mask);
        }
        let (dtype, within) = [(DType::F64, 1e-11), (DType::F32, 1e-3)][index(number % 2)];
        let mut case = case.in_dtype(dtype);
        case.spec.leaf_rows = Some(LEAF_ROWS);
        let truth = case.truth().map_err(|error| error.to_string())?;
        let truth = Answer::of(truth, case.spec.normalize);
        let mut first: Option<Answer> = None;
        for (at, ranks) in [1, 2, 3, 5].into_iter().enumerate() {
            let random = random_leaves(&case, ranks, &mut Draw::new(number + ranks as u64));
            for layout in [LAYOUTS[at % LAYOUTS.len()].clone(), random] {
                let setting = Setting::new(ranks, layout);
                let subject = subjects[at % subjects.len()];
                let answer = run(subject, &case, &setting)?;
                answer
                    .compare(&truth, |_| within)
                    .map_err(|wrong| format!("{}: {wrong}", case.name))?;
                match &first {
                    None => first = Some(answer),
                    Some(first) => answer
                        .same_bits(first)
                        .map_err(|wrong| format!("{} on {setting}: {wrong}", case.name))?,
                }
            }
        }
    }
    Ok(())
}

/// Returns settings of all ring sizes with each layout, and one whose ranks own random leaves.
fn settings(case: &Case, seed: u64) -> Vec<Setting> {
    let mut settings = Vec::new();
    for ranks in RANKS {
        let random = random_leaves(case, ranks, &mut Draw::new(seed + ranks as u64));
        for layout in LAYOUTS.into_iter().chain([random]) {
            let routes = routes(ranks);
            let route = routes[(settings.len() + ranks) % routes.len()];
            settings.push(Setting { route, ..Setting::new(ranks, layout) });
        }
    }
    settings
}

/// Assigns leaves to ranks at random, in random order; the last, which may be short, ends its
/// shard. Segment ids of one side only require the same rows on both.
fn random_leaves(case: &Case, ranks: usize, draw: &mut Draw) -> Layout {
    let Batch { q_segment_ids, kv_segment_ids, .. } = &case.batch;
    let alike = q_segment_ids.is_some() != kv_segment_ids.is_some();
    let mut deal = |len: usize| {
        let mut leaves: Vec<u64> = (0..(len as u64).div_ceil(LEAF_ROWS)).collect();
        let shuffled = leaves.len().saturating_sub(1);
        for index in (1..shuffled).rev() {
            leaves.swap(index, draw.below(index + 1));
        }
        let mut shards = vec![Runs::new(); ranks];
        for leaf in leaves {
            let start = leaf * LEAF_ROWS;
            let count = LEAF_ROWS.min(len as u64 - start);
            let run = Run { start: start.cast_signed(), step: 1, count };
            shards[draw.below(ranks)].push_run(run);
        }
        shards
    };
    let q = deal(case.spec.dims.q_len);
    let kv = if alike { q.clone() } else { deal(case.spec.dims.kv_len) };
    Layout::Custom(Arc::new(CustomLayout { q, kv }))
}

/// Compares the mean square errors of out, lse, dq, dk and dv in the reproducible order with those
/// in the free order, on cases of 1,024 rows, and checks the bounds of [`crate::Judge`].
pub fn reproducible_accuracy(subject: &dyn Subject) -> Verdict {
    let mut squares = [[0.0; 5]; 2];
    for seed in 0..4 {
        let draw = &mut Draw::new(seed);
        let dims = Dims::new(1, 1024, 1, 16);
        let masks = Masks { causal: seed % 2 == 0, ..Masks::default() };
        let spec = Spec::new(dims, DType::F64);
        let case = Case::new("accuracy", spec, masks, draw).in_dtype(DType::F32);
        let judge = judge(&case)?;
        let truth = case.truth().map_err(|error| error.to_string())?;
        let truth = Answer::of(truth, case.spec.normalize);
        for (leaf_rows, squares) in [None, Some(LEAF_ROWS)].into_iter().zip(&mut squares) {
            let mut case = case.clone();
            case.spec.leaf_rows = leaf_rows;
            let answer = run(subject, &case, &Setting::new(4, Layout::Contiguous))?;
            judge.check(&answer)?;
            squares[0] += square_error(&answer.out, &truth.out);
            squares[1] += square_error(&answer.lse, &truth.lse);
            squares[2] += square_error(&answer.dq, &truth.dq);
            squares[3] += square_error(&answer.dk, &truth.dk);
            squares[4] += square_error(&answer.dv, &truth.dv);
        }
    }
    for setting in [Setting::ALONE, Setting::new(3, Layout::Striped)] {
        large_constants(subject, DType::F32, Some(LEAF_ROWS), &setting)?;
    }
    let [free, leaves] = squares;
    for ((name, free), leaves) in ["out", "lse", "dq", "dk", "dv"].iter().zip(free).zip(leaves) {
        // 5 % are within the scatter of roundings
        ensure(leaves <= 1.05 * free, || {
            format!("{name}: mean square error {leaves:e} in the reproducible order, {free:e} free")
        })?;
    }
    Ok(())
}

/// Returns the sum of the squares of the differences.
fn square_error<D: Dimension>(got: &Array<f64, D>, want: &Array<f64, D>) -> f64 {
    got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum()
}
