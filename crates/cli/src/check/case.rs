//! One case in one element type: loaded once, computed on every ring that was asked for, forward and backward.

use std::{collections::BTreeMap, path::Path, time::Duration};

use annulus::{Attention, Backward, Forward, LocalRing};
use annulus_core::{
    Backend, Batch, Dims, Element, Error, HostTensors, Layout, Result, Runs, SinkShape,
};

use super::{
    compare::{Expected, largest_error},
    index::Case,
};
use crate::{
    crew::Endpoint,
    engine::{Engine, with_backend},
    failure::of_file,
    input::{Input, OutputGradients, Share},
};

/// A case computes in moments, and kernels are compiled in less than a minute: a ring that is silent for this long is stuck.
pub(super) const DEADLINE: Duration = Duration::from_secs(120);

/// A ring to compute on.
#[derive(Debug, Clone)]
pub(super) struct Ring {
    /// Ranks.
    pub(super) ranks: usize,
    /// The layout, or `None` to choose one from the mask.
    pub(super) layout: Option<Layout>,
}

/// How one case went on one ring.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Every array is within its tolerance.
    Passed,
    /// These arrays are not: array, error, tolerance.
    Wrong(Vec<(String, f64, f64)>),
    /// It could not be computed.
    Failed(Error),
}

/// Everything that a case needs, in memory.
struct Loaded<T: Element> {
    input: Input,
    attention: Attention,
    share: Share<T>,
    batch: Batch,
    gradients: OutputGradients<T>,
    expected: BTreeMap<String, (f64, Expected)>,
}

/// Computes `case` in `T` on every ring.
pub(super) fn run<T: Element>(
    folder: &Path,
    case: &Case,
    rings: &[Ring],
    engine: &Engine,
) -> Vec<Verdict> {
    match Loaded::<T>::new(folder, case) {
        Ok(loaded) => rings
            .iter()
            .map(|ring| loaded.judge(case, ring, engine).unwrap_or_else(Verdict::Failed))
            .collect(),
        Err(error) => rings.iter().map(|_| Verdict::Failed(error.clone())).collect(),
    }
}

/// A case's file, and what it makes of the case.
pub(super) struct Opened {
    pub(super) input: Input,
    pub(super) sinks: Option<SinkShape>,
    pub(super) attention: Attention,
}

impl Opened {
    /// Opens the file of a case that is to be computed in `T`.
    pub(super) fn new<T: Element>(folder: &Path, case: &Case) -> Result<Self> {
        let input = Input::open(&folder.join(&case.file))?;
        if input.dims != case.dims() {
            let (got, want) = (lengths(case.dims()), lengths(input.dims));
            return Err(of_file(
                &folder.join(&case.file),
                "dims",
                format!("{got} in the index"),
                format!("{want}, as its tensors have it"),
            ));
        }
        let sinks = input.sinks(case.sinks_form()).map_err(|error| input.named(error))?;
        let attention =
            case.attention(T::DTYPE)?.deadline(DEADLINE).bias(input.bias).softmax_aux(sinks);
        Ok(Self { input, sinks, attention })
    }
}

/// Lengths with their names.
fn lengths(dims: Dims) -> String {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
    format!(
        "batch {batch}, q_len {q_len}, kv_len {kv_len}, q_heads {q_heads}, kv_heads {kv_heads}, head_dim {head_dim}, value_dim {value_dim}"
    )
}

/// The arrays that a case judges in `T`, with their tolerances.
pub(super) fn tolerances<T: Element>(case: &Case) -> Result<&BTreeMap<String, f64>> {
    let tolerances =
        case.tolerance.get(T::DTYPE.name()).filter(|tolerances| !tolerances.is_empty());
    tolerances.ok_or_else(|| {
        Error::unsupported(
            format!("dtype {}", T::DTYPE.name()),
            "this case, which has no tolerance for it",
        )
    })
}

impl<T: Element> Loaded<T> {
    fn new(folder: &Path, case: &Case) -> Result<Self> {
        let Opened { input, sinks, attention } = Opened::new::<T>(folder, case)?;
        let all = |len: usize| Runs::counting(0, len as u64);
        let (q_rows, kv_rows) = (all(input.dims.q_len), all(input.dims.kv_len));
        let named = |error| input.named(error);
        Ok(Self {
            attention,
            share: input.share(sinks, &q_rows, &kv_rows).map_err(named)?,
            batch: input.batch(&q_rows, &kv_rows).map_err(named)?,
            gradients: input.output_gradients(&q_rows).map_err(named)?,
            expected: Self::expected(&input, case)?,
            input,
        })
    }

    /// Tolerance and wanted numbers of every array that the case judges.
    fn expected(input: &Input, case: &Case) -> Result<BTreeMap<String, (f64, Expected)>> {
        let load = |(name, &tolerance): (&String, &f64)| {
            Ok((name.clone(), (tolerance, Expected::whole(input, name)?)))
        };
        tolerances::<T>(case)?.iter().map(load).collect()
    }

    fn judge(&self, case: &Case, ring: &Ring, engine: &Engine) -> Result<Verdict> {
        with_backend!(engine, 1, make => {
            let make = |_, endpoint| make(Endpoint::Thread(Box::new(endpoint)));
            let attention = self.attention.clone().layout(ring.layout.clone());
            self.judge_ring(LocalRing::with_transports(&attention, case.dims(), ring.ranks, make)?)
        })
    }

    fn judge_ring<B: Backend<Space: HostTensors>>(
        &self,
        mut ring: LocalRing<B>,
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
            // a NaN is within no tolerance
            let within = error <= *tolerance;
            if !within {
                wrong.push((name.clone(), error, *tolerance));
            }
        }
        Ok(if wrong.is_empty() { Verdict::Passed } else { Verdict::Wrong(wrong) })
    }
}

/// The largest error of one of the arrays that a forward and a backward pass give.
pub(super) fn error_of<T: Element>(
    name: &str,
    want: &Expected,
    forward: &Forward<T>,
    backward: &Backward<T>,
) -> Result<f64> {
    let missing = || Error::invalid(name, "nothing", "an array that this attention gives");
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
