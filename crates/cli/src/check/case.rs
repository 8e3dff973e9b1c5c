//! One case in one element type: loads it once and computes it on every ring, forward and backward.

use std::{collections::BTreeMap, path::Path, time::Duration};

use annulus::{Attention, Backward, Forward, LocalRing};
use annulus_core::{Batch, Dims, Element, Error, HeadGrid, Result, Runs, SinkShape, Strategy};
use ndarray::{Array, Dimension};

use super::{
    compare::{Expected, largest_error},
    index::Case,
    truth::Truth,
};
use crate::{
    arguments::values::LayoutName,
    backend::{BackendChoice, with_backend},
    failure::of_file,
    input::{Input, OutputGradients, Share},
    job::RankEndpoint,
};

/// Deadline of the rings. Cases compute in well under a second, and kernels compile in less than a
/// minute, so a longer silence is a deadlock.
pub(super) const DEADLINE: Duration = Duration::from_secs(120);

/// Ring to compute on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Layout.
    pub(super) layout: LayoutName,
    /// Division of the attention among the ranks.
    pub(super) strategy: Strategy,
    /// Threads of each rank.
    pub(super) threads: usize,
    /// True to compute in the reproducible order, and to compare the bits with the first ring's.
    pub(super) reproducible: bool,
}

impl Ring {
    /// Checks that the strategy can divide the heads of a case among the ranks.
    ///
    /// # Errors
    /// [`Error::Unsupported`], so that a folder of cases with different heads can be checked.
    pub(super) fn check_heads(&self, dims: &Dims) -> Result<()> {
        HeadGrid::of(dims, self.ranks, self.strategy).map(drop).map_err(|error| {
            Error::unsupported(format!("strategy {}", self.strategy), error.to_string())
        })
    }
}

/// Result of one case on one ring.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Every array is within its tolerance.
    Passed,
    /// Some arrays exceed their tolerance.
    Wrong(Vec<WrongArray>),
    /// Some bits differ from those of the first ring.
    Different(Difference),
    /// The computation failed.
    Failed(Error),
}

/// Array whose error exceeds its tolerance.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct WrongArray {
    /// Name of the array.
    pub(super) name: String,
    /// Its largest error; NaN or infinite where it cannot be compared.
    pub(super) error: f64,
    /// The largest error that passes.
    pub(super) tolerance: f64,
}

/// First element whose bits differ from those of the first ring.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Difference {
    /// Name of the array.
    pub(super) name: &'static str,
    /// Index of the element.
    pub(super) index: Vec<usize>,
    /// The element.
    pub(super) got: f64,
    /// The element of the first ring.
    pub(super) first: f64,
}

/// Case with all its arrays in memory.
struct Loaded<T: Element> {
    input: Input,
    attention: Attention,
    share: Share<T>,
    batch: Batch,
    gradients: OutputGradients<T>,
    /// Tolerance and expected values, by array.
    expected: BTreeMap<String, (f64, Expected)>,
}

/// Computes `case` in `T` on every ring and returns a verdict for each.
pub(super) fn run<T: Element>(
    folder: &Path,
    case: &Case,
    rings: &[Ring],
    backend: &BackendChoice,
) -> Vec<Verdict> {
    match Loaded::<T>::new(folder, case) {
        Ok(loaded) => {
            let mut first = None;
            let mut judge = |ring| loaded.judge(case, ring, backend, &mut first);
            rings.iter().map(|ring| judge(ring).unwrap_or_else(Verdict::Failed)).collect()
        }
        Err(error) => rings.iter().map(|_| Verdict::Failed(error.clone())).collect(),
    }
}

/// Opened file of a case, with the attention that it defines.
pub(super) struct Opened {
    pub(super) input: Input,
    pub(super) sinks: Option<SinkShape>,
    pub(super) attention: Attention,
}

impl Opened {
    /// Opens the file of a case to be computed in `T`.
    pub(super) fn new<T: Element>(folder: &Path, case: &Case) -> Result<Self> {
        let input = Input::open(&folder.join(&case.file))?;
        if input.dims != case.dims() {
            let got = lengths(case.dims());
            let want = lengths(input.dims);
            return Err(of_file(
                &folder.join(&case.file),
                "dims",
                format!("{got} in the index"),
                format!("{want}, the lengths of its tensors"),
            ));
        }
        let sinks = input.sinks(case.sinks_form()).map_err(|error| input.named(error))?;
        let attention = case
            .attention(T::DTYPE)?
            .deadline(DEADLINE)
            .arrival_deadline(DEADLINE)
            .bias(input.bias)
            .softmax_aux(sinks);
        Ok(Self { input, sinks, attention })
    }
}

/// Formats lengths with their names.
fn lengths(dims: Dims) -> String {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
    format!(
        "batch {batch}, q_len {q_len}, kv_len {kv_len}, q_heads {q_heads}, kv_heads {kv_heads}, \
         head_dim {head_dim}, value_dim {value_dim}"
    )
}

impl<T: Element> Loaded<T> {
    fn new(folder: &Path, case: &Case) -> Result<Self> {
        let Opened { input, sinks, attention } = Opened::new::<T>(folder, case)?;
        let all = |len: usize| Runs::counting(0, len as u64);
        let q_rows = all(input.dims.q_len);
        let kv_rows = all(input.dims.kv_len);
        let named = |error| input.named(error);
        let expected = Self::expected(&Truth::new::<T>(&input, case, sinks, &attention)?)?;
        Ok(Self {
            attention,
            share: input.share(sinks, &q_rows, &kv_rows).map_err(named)?,
            batch: input.batch(&q_rows, &kv_rows).map_err(named)?,
            gradients: input.output_gradients(&q_rows).map_err(named)?,
            expected,
            input,
        })
    }

    /// Loads the expected values of every array that the case has a tolerance for.
    fn expected(truth: &Truth<'_>) -> Result<BTreeMap<String, (f64, Expected)>> {
        let load =
            |(name, tolerance): (&str, f64)| Ok((name.into(), (tolerance, truth.whole(name)?)));
        truth.tolerances().into_iter().map(load).collect()
    }

    /// Computes the case on a ring. `first` is the result of the first reproducible ring.
    fn judge(
        &self,
        case: &Case,
        ring: &Ring,
        backend: &BackendChoice,
        first: &mut Option<Results<T>>,
    ) -> Result<Verdict> {
        let attention = self.attention.clone().reproducible(ring.reproducible);
        let attention = attention.strategy(ring.strategy);
        ring.check_heads(&case.dims())?;
        let batch = || Ok(self.batch.clone());
        let attention = ring.layout.apply(attention, case.dims(), ring.ranks, batch);
        let attention = attention.map_err(|error| self.input.named(error))?;
        let plan = with_backend!(backend, ring.threads, make => {
            let make = |_, endpoint| make(RankEndpoint::Thread(Box::new(endpoint)));
            LocalRing::with_transports(&attention, case.dims(), ring.ranks, make)
        })?;
        self.judge_ring(plan, ring.reproducible.then_some(first))
    }

    /// Compares the results with the expected ones and, with `first`, their bits with those of the
    /// first ring.
    fn judge_ring(
        &self,
        mut ring: LocalRing,
        first: Option<&mut Option<Results<T>>>,
    ) -> Result<Verdict> {
        if self.batch != Batch::default() {
            ring.update(&self.batch).map_err(|error| self.input.named(error))?;
        }
        let tensors = self.share.tensors();
        let forward = ring.forward(&tensors)?;
        let backward = ring.backward(
            &tensors,
            &forward,
            self.gradients.dout.view(),
            self.gradients.dlse_view(),
        )?;
        let mut wrong = Vec::new();
        for (name, (tolerance, want)) in &self.expected {
            let error = error_of(name, want, &forward, &backward)?;
            wrong.extend(exceeding(name, error, *tolerance));
        }
        if !wrong.is_empty() {
            return Ok(Verdict::Wrong(wrong));
        }
        let Some(first) = first else { return Ok(Verdict::Passed) };
        let results = Results { forward, backward };
        let Some(first) = first else {
            *first = Some(results);
            return Ok(Verdict::Passed);
        };
        Ok(results.first_difference(first).map_or(Verdict::Passed, Verdict::Different))
    }
}

/// Returns a [`WrongArray`] if the error exceeds the tolerance, as a NaN always does.
pub(super) fn exceeding(name: &str, error: f64, tolerance: f64) -> Option<WrongArray> {
    let within = error <= tolerance;
    (!within).then(|| WrongArray { name: name.to_owned(), error, tolerance })
}

/// Returns the largest error of one array of a forward or a backward pass.
///
/// # Errors
/// [`Error::InvalidArgument`] if this attention has no such array; [`Error::Unsupported`] if no
/// attention has.
pub(super) fn error_of<T: Element>(
    name: &str,
    want: &Expected,
    forward: &Forward<T>,
    backward: &Backward<T>,
) -> Result<f64> {
    let missing = || missing(name);
    Ok(match name {
        "out" => largest_error(&forward.out, want),
        "lse" => largest_error(&forward.lse, want),
        "max" => largest_error(forward.max.as_ref().ok_or_else(missing)?, want),
        "sum" => largest_error(forward.sum.as_ref().ok_or_else(missing)?, want),
        "dq" => largest_error(&backward.dq, want),
        "dk" => largest_error(&backward.dk, want),
        "dv" => largest_error(&backward.dv, want),
        "dbias" => largest_error(backward.dbias.as_ref().ok_or_else(missing)?, want),
        "dsoftmax_aux" => largest_error(backward.dsoftmax_aux.as_ref().ok_or_else(missing)?, want),
        _ => return Err(Error::unsupported(format!("expected array {name}"), "this version")),
    })
}

fn missing(name: &str) -> Error {
    Error::invalid(name, "nothing", "an array that this attention computes")
}

/// Results of a reproducible ring.
struct Results<T: Element> {
    forward: Forward<T>,
    backward: Backward<T>,
}

impl<T: Element> Results<T> {
    /// Returns the first element of which the bits differ from those of `first`.
    fn first_difference(&self, first: &Self) -> Option<Difference> {
        let (got, want) = (&self.forward, &first.forward);
        let statistics = [("max", &got.max, &want.max), ("sum", &got.sum, &want.sum)];
        let mut statistics = statistics.into_iter().filter_map(|(name, got, first)| {
            different_element(name, got.as_ref()?, first.as_ref()?)
        });
        different_element("out", &got.out, &want.out)
            .or_else(|| different_element("lse", &got.lse, &want.lse))
            .or_else(|| statistics.next())
            .or_else(|| self.first_difference_backward(&first.backward))
    }

    fn first_difference_backward(&self, want: &Backward<T>) -> Option<Difference> {
        let got = &self.backward;
        let sinks = (got.dsoftmax_aux.as_ref(), want.dsoftmax_aux.as_ref());
        different_element("dq", &got.dq, &want.dq)
            .or_else(|| different_element("dk", &got.dk, &want.dk))
            .or_else(|| different_element("dv", &got.dv, &want.dv))
            .or_else(|| different_element("dbias", got.dbias.as_ref()?, want.dbias.as_ref()?))
            .or_else(|| different_element("dsoftmax_aux", sinks.0?, sinks.1?))
    }
}

fn different_element<T: Element, D: Dimension>(
    name: &'static str,
    got: &Array<T, D>,
    first: &Array<T, D>,
) -> Option<Difference> {
    // widening is exact, and keeps the sign of zero and the bits of a NaN apart
    let (got, first) = (got.view().into_dyn(), first.view().into_dyn());
    got.indexed_iter().zip(first).find_map(|((index, got), first)| {
        let got = got.to_f64();
        let first = first.to_f64();
        let index = || index.as_array_view().to_vec();
        (got.to_bits() != first.to_bits()).then(|| Difference { name, index: index(), got, first })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::arr2;

    #[test]
    fn the_first_element_with_other_bits_is_found() {
        let first = arr2(&[[1.0f32, 0.0], [f32::NAN, 2.0]]);
        assert_eq!(different_element("out", &first, &first), None);
        for (index, number) in [([0, 1], -0.0), ([1, 1], 2.0 + f32::EPSILON * 2.0)] {
            let mut other = first.clone();
            other[index] = number;
            let want = Difference {
                name: "out",
                index: index.to_vec(),
                got: number.into(),
                first: first[index].into(),
            };
            assert_eq!(different_element("out", &other, &first), Some(want));
        }
    }
}
