//! Outputs that share memory with another tensor of the same call.
//!
//! Two tensors whose byte ranges overlap may still share no element: q, k and v of one packed
//! projection `[batch, seq, 3, heads, dim]` interleave. Disjoint elements are proved by a period P:
//! axes whose strides are multiples of P only move an element by multiples of P, so modulo P each
//! tensor lies in the interval that its other axes reach. If the two intervals are disjoint on the
//! circle of length P, so are the tensors. Every stride of either is tried as P. What cannot be
//! proved is refused.

use annulus::{Error, Result};

use crate::tensor::Checked;

/// Checks that no output shares an element with another tensor.
///
/// # Errors
/// [`Error::InvalidArgument`] naming both.
pub(crate) fn check<I: Iterator<Item = Checked>, O: Iterator<Item = Checked>>(
    inputs: impl Fn() -> I,
    outputs: impl Fn() -> O,
) -> Result<()> {
    for (place, output) in outputs().enumerate() {
        let mut others = outputs().take(place).chain(inputs());
        if let Some(other) = others.find(|other| !are_disjoint(&output, other)) {
            return Err(Error::invalid(
                output.name,
                format!("memory that {} has as well", other.name),
                "elements of its own",
            ));
        }
    }
    Ok(())
}

fn are_disjoint(a: &Checked, b: &Checked) -> bool {
    let start = |tensor: &Checked| tensor.data.addr();
    let end = |tensor: &Checked| start(tensor) + tensor.extent * tensor.element.bytes;
    if a.extent == 0 || b.extent == 0 || end(a) <= start(b) || end(b) <= start(a) {
        return true;
    }
    let strides = |tensor: &Checked| tensor.strides.map(|stride| stride * tensor.element.bytes);
    strides(a).into_iter().chain(strides(b)).any(|period| are_apart(a, b, period))
}

/// Returns true if the tensors are disjoint modulo `period` bytes.
fn are_apart(a: &Checked, b: &Checked, period: usize) -> bool {
    if period == 0 {
        return false;
    }
    // bytes that the axes reach whose strides are no multiples of the period
    let width = |tensor: &Checked| {
        let axes = tensor.dims.iter().zip(tensor.strides);
        axes.filter(|(_, stride)| !(stride * tensor.element.bytes).is_multiple_of(period))
            .map(|(&len, stride)| len.saturating_sub(1) * stride * tensor.element.bytes)
            .sum::<usize>()
            + tensor.element.bytes
    };
    // from the beginning of one to that of the other, around the circle
    let gap = |from: &Checked, to: &Checked| {
        (to.data.addr() % period + period - from.data.addr() % period) % period
    };
    width(a) <= gap(a, b) && width(b) <= gap(b, a)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::tensor::{ANNULUS_F32, annulus_tensor};

    fn tensor(first: usize, dims: [i64; 4], strides: [i64; 4]) -> Checked {
        let data = std::ptr::without_provenance_mut(0x10000 + 4 * first);
        // SAFETY: a tensor on the stack, whose elements are never read
        unsafe { Checked::read("x", &annulus_tensor { data, dtype: ANNULUS_F32, dims, strides }) }
            .unwrap()
    }

    fn elements(tensor: &Checked) -> HashSet<usize> {
        let [b, s, h, d] = tensor.dims;
        let mut all = HashSet::new();
        for index in 0..b * s * h * d {
            let at = [index / (s * h * d), index / (h * d) % s, index / d % h, index % d];
            let offset: usize = at.iter().zip(tensor.strides).map(|(i, stride)| i * stride).sum();
            all.insert(tensor.data.addr() + 4 * offset);
        }
        all
    }

    #[test]
    fn tensors_of_one_packed_projection_are_disjoint() {
        // [batch 2, seq 5, 3, heads 2, dim 4]
        let part = |number: usize| tensor(8 * number, [2, 5, 2, 4], [120, 24, 4, 1]);
        for (a, b) in [(0, 1), (0, 2), (1, 2), (2, 0)] {
            assert!(are_disjoint(&part(a), &part(b)), "{a} {b}");
        }
        assert!(!are_disjoint(&part(1), &part(1)));
        // heads of one tensor, interleaved: even and odd
        let heads = |first| tensor(first, [1, 5, 2, 4], [0, 16, 8, 1]);
        assert!(are_disjoint(&heads(0), &heads(4)));
        assert!(!are_disjoint(&heads(0), &heads(3)));
    }

    #[test]
    fn what_is_called_disjoint_shares_no_element() {
        let mut disjoint = 0;
        for first in 0..40 {
            for strides in [[0, 24, 4, 1], [0, 8, 4, 1], [0, 1, 20, 5], [0, 24, 12, 3]] {
                let a = tensor(7, [1, 3, 2, 2], [0, 24, 4, 1]);
                let b = tensor(first, [1, 3, 2, 2], strides);
                if are_disjoint(&a, &b) {
                    disjoint += 1;
                    assert!(elements(&a).is_disjoint(&elements(&b)), "{first} {strides:?}");
                } else {
                    assert!(!are_disjoint(&b, &a));
                }
            }
        }
        assert!(disjoint > 20, "{disjoint}");
        let empty = tensor(7, [1, 0, 2, 2], [0, 24, 4, 1]);
        assert!(are_disjoint(&empty, &tensor(7, [1, 3, 2, 2], [0, 24, 4, 1])));
    }
}
