//! Expected arrays of a case and their tolerances.
//!
//! The file of a case has the arrays of its f32 inputs, computed in f64, and tolerances for f32 and
//! f64. In 16 bits the inputs are rounded first. The oracle therefore computes the arrays of the
//! rounded inputs, and the judge of the test suite bounds the errors.

use std::collections::BTreeMap;

use annulus::{Attention, Tensors};
use annulus_core::{Element, Error, Result, Runs, SinkShape};
use annulus_test_cases::{Answer, Judge, Masks};
use ndarray::Axis;

use super::{compare::Expected, index::Case};
use crate::input::Input;

/// Source of the expected arrays of a case in one element type.
pub(super) enum Truth<'a> {
    /// The file, with its tolerances by array.
    File(&'a Input, &'a BTreeMap<String, f64>),
    /// The oracle.
    Oracle(Box<Judge>),
}

impl<'a> Truth<'a> {
    /// Chooses the source for `T`, and computes what the file does not have.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the case has no tolerance for `T`; as [`Input::share`].
    pub(super) fn new<T: Element>(
        input: &'a Input,
        case: &'a Case,
        sinks: Option<SinkShape>,
        attention: &Attention,
    ) -> Result<Self> {
        if T::DTYPE.bytes() == 2 {
            let of_file = unrounded(input, sinks, attention)?;
            return Ok(Self::Oracle(Box::new(Judge::new(&of_file.in_dtype(T::DTYPE))?)));
        }
        let tolerances =
            case.tolerance.get(T::DTYPE.name()).filter(|tolerances| !tolerances.is_empty());
        let none = || {
            let what = format!("dtype {}", T::DTYPE.name());
            Error::unsupported(what, "this case, which has no tolerance for it")
        };
        Ok(Self::File(input, tolerances.ok_or_else(none)?))
    }

    /// Tolerance of each array to compare.
    pub(super) fn tolerances(&self) -> Vec<(&str, f64)> {
        match self {
            Self::File(_, tolerances) => {
                tolerances.iter().map(|(name, &tolerance)| (name.as_str(), tolerance)).collect()
            }
            Self::Oracle(judge) => {
                let arrays = judge.want().arrays().into_iter();
                // ties are no output of the facade
                let compared = arrays.filter(|&(name, _)| name != "ties");
                compared.map(|(name, _)| (name_in_files(name), judge.bound(name))).collect()
            }
        }
    }

    /// Returns a whole array.
    pub(super) fn whole(&self, name: &str) -> Result<Expected> {
        match self {
            Self::File(input, _) => Expected::whole(input, name),
            Self::Oracle(judge) => Expected::of_oracle(judge.want(), name, None),
        }
    }

    /// Returns the rows `rows` along `axis` of an array.
    #[cfg(feature = "mpi")]
    pub(super) fn rows(&self, name: &str, axis: usize, rows: &Runs) -> Result<Expected> {
        match self {
            Self::File(input, _) => Expected::rows(input, name, axis, rows),
            Self::Oracle(judge) => Expected::of_oracle(judge.want(), name, Some((axis, rows))),
        }
    }
}

/// Name in files of an array of the oracle.
fn name_in_files(name: &'static str) -> &'static str {
    if name == "dsinks" { "dsoftmax_aux" } else { name }
}

impl Expected {
    /// Copies an array of the oracle, or its rows along an axis.
    fn of_oracle(answer: &Answer, name: &str, rows: Option<(usize, &Runs)>) -> Result<Self> {
        let mut arrays = answer.arrays().into_iter();
        let found = arrays.find(|&(own, _)| name_in_files(own) == name);
        let (_, array) = found.ok_or_else(|| {
            Error::invalid(name, "nothing", "an array that this attention computes")
        })?;
        let array = match rows {
            None => array.to_owned(),
            Some((axis, rows)) => {
                let rows: Vec<usize> =
                    rows.iter().map(|row| annulus_core::index(row.cast_unsigned())).collect();
                array.select(Axis(axis), &rows)
            }
        };
        Ok(Self { shape: array.shape().to_vec(), numbers: array.iter().copied().collect() })
    }
}

/// Reads the case of a file in f64.
fn unrounded(
    input: &Input,
    sinks: Option<SinkShape>,
    attention: &Attention,
) -> Result<annulus_test_cases::Case> {
    let all = |len: usize| Runs::counting(0, len as u64);
    let q_rows = all(input.dims.q_len);
    let kv_rows = all(input.dims.kv_len);
    let share = input.share::<f64>(sinks, &q_rows, &kv_rows)?;
    let gradients = input.output_gradients::<f64>(&q_rows)?;
    let Tensors { q, k, v, bias, softmax_aux } = share.tensors();
    Ok(annulus_test_cases::Case {
        name: input.path().display().to_string(),
        spec: attention.spec(input.dims)?,
        masks: Masks::default(),
        batch: input.batch(&q_rows, &kv_rows)?,
        q: q.to_owned(),
        k: k.to_owned(),
        v: v.to_owned(),
        bias: bias.map(|bias| bias.to_owned()),
        sinks: softmax_aux.map(|sinks| sinks.to_owned()),
        dlse: gradients.dlse_view().map(|dlse| dlse.to_owned()),
        dout: gradients.dout,
    })
}
