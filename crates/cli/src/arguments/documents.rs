//! Packed documents: the lengths of `--documents`.

use annulus_core::{Batch, Dims};

use crate::failure::{Failure, Outcome};

/// Name of the flag.
pub(crate) const FLAG: &str = "--documents";

/// Returns the rows of all documents.
///
/// # Errors
/// [`Failure::Usage`] for 2⁶³ rows or more.
pub(crate) fn rows(documents: &[usize]) -> Outcome<usize> {
    let total = documents.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    let total = total.filter(|&total| i64::try_from(total).is_ok());
    total.ok_or_else(|| {
        Failure::usage(FLAG, "lengths of 2^63 or more together", "shorter documents")
    })
}

/// Checks that documents fill both sequences.
///
/// # Errors
/// [`Failure::Usage`] naming the flag and both lengths.
pub(crate) fn check(documents: &[usize], dims: &Dims) -> Outcome {
    if documents.is_empty() {
        return Ok(());
    }
    let rows = rows(documents)?;
    for (len, side) in [(dims.q_len, "queries"), (dims.kv_len, "keys")] {
        if rows != len {
            let got = format!("lengths of {rows} rows together");
            return Err(Failure::usage(FLAG, got, format!("{len}, the number of {side}")));
        }
    }
    Ok(())
}

/// Returns the batch of the documents: the default one if there are none. [`rows`] must have
/// accepted them.
pub(crate) fn batch(documents: &[usize]) -> Batch {
    let starts = std::iter::once(0).chain(documents.iter().scan(0i64, |end, &len| {
        *end += len as i64;
        Some(*end)
    }));
    let starts = (!documents.is_empty()).then(|| starts.collect::<Vec<_>>());
    Batch { cum_seqlens_q: starts.clone(), cum_seqlens_k: starts, ..Batch::default() }
}
