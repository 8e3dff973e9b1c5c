//! Checks of an input file's tensors against each other.

use annulus_core::{Dims, Error, Result};

use super::Input;
use crate::file::{float, of_floats};

impl Input {
    /// Checks that the shapes of all tensors match those of query, key and value.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first tensor that does not match.
    pub(super) fn check_shapes(&self) -> Result<()> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        let wanted: [(&str, &[usize]); 8] = [
            ("key", &[batch, kv_len, kv_heads, head_dim]),
            ("value", &[batch, kv_len, kv_heads, value_dim]),
            ("dout", &[batch, q_len, q_heads, value_dim]),
            ("dlse", &[batch, q_heads, q_len]),
            ("q_segment_ids", &[batch, q_len]),
            ("kv_segment_ids", &[batch, kv_len]),
            ("q_positions", &[batch, q_len]),
            ("kv_positions", &[batch, kv_len]),
        ];
        for (name, want) in wanted {
            if let Some(entry) = self.tensors.get(name).filter(|entry| entry.shape != want) {
                return Err(Error::invalid(
                    name,
                    format!("shape {:?}", entry.shape),
                    format!("{want:?}, to match query and key"),
                ));
            }
        }
        if let Some(entry) = self.tensors.get("attention_mask") {
            let fits = |axis: usize, len| entry.shape[axis] == len || entry.shape[axis] == 1;
            if entry.shape.len() != 4
                || !fits(0, batch)
                || !fits(1, q_heads)
                || entry.shape[2..] != [q_len, kv_len]
            {
                let or_1 = |len| if len == 1 { "1".to_owned() } else { format!("{len} or 1") };
                let want = format!("[{}, {}, {q_len}, {kv_len}]", or_1(batch), or_1(q_heads));
                return Err(Error::invalid(
                    "attention_mask",
                    format!("shape {:?}", entry.shape),
                    want,
                ));
            }
        }
        for name in ["cum_seqlens_q", "cum_seqlens_k"] {
            if let Some(entry) = self.tensors.get(name).filter(|entry| entry.shape.len() != 1) {
                return Err(Error::invalid(
                    name,
                    format!("shape {:?}", entry.shape),
                    "[sequences + 1]",
                ));
            }
        }
        Ok(())
    }

    /// Checks the element types: floats, integers, and key and value as query.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first tensor of a wrong type.
    pub(super) fn check_dtypes(&self) -> Result<()> {
        for name in ["key", "value", "dout", "dlse", "bias", "softmax_aux"] {
            if let Some(entry) = self.tensors.get(name).filter(|entry| float(entry.dtype).is_none())
            {
                return Err(Error::invalid(name, entry.dtype, "a float dtype"));
            }
        }
        for name in ["key", "value"] {
            let got = self.tensors.need(name, 4)?.dtype;
            let want = of_floats(self.dtype);
            if got != want {
                return Err(Error::invalid(name, got, format!("{want}, the dtype of query")));
            }
        }
        let integers = [
            "attention_mask",
            "q_segment_ids",
            "kv_segment_ids",
            "cum_seqlens_q",
            "cum_seqlens_k",
            "q_positions",
            "kv_positions",
        ];
        integers.into_iter().try_for_each(|name| self.tensors.refuse_floats(name))
    }
}
