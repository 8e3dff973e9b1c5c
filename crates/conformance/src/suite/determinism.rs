//! Same inputs, ranks and layout: the same bits at every repetition and in any order of arrivals.

use annulus_core::{BackwardMode, DType, Dims, Layout, Route, SinkShape, Spec};

use super::{Verdict, ensure};
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
///
/// # Errors
/// The array that differed.
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
///
/// # Errors
/// The array that differed.
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
            for steps in [1, 2, 3, 9] {
                let setting = ahead(Some(steps));
                same_bits(subject, &setting, &run(&setting)?, &by_default[0])?;
            }
        }
    }
    Ok(())
}

/// Runs the same case with delayed messages: `delayed` must give the bits of `prompt` every time.
///
/// # Errors
/// The array that differed.
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
