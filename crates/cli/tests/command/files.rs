//! Safetensors files, read and written by the reference implementation.

use std::{collections::BTreeMap, path::Path};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Tensors by name: element type, shape, bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tensors {
    pub(crate) all: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Tensors {
    pub(crate) fn with(
        mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        bytes: Vec<u8>,
    ) -> Self {
        self.all.insert(name.into(), (dtype, shape.to_vec(), bytes));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.all.remove(name);
        self
    }

    pub(crate) fn f32(self, name: &str, shape: &[usize], number: impl Fn(usize) -> f32) -> Self {
        let bytes =
            (0..shape.iter().product()).flat_map(|index| number(index).to_le_bytes()).collect();
        self.with(name, Dtype::F32, shape, bytes)
    }

    pub(crate) fn f64(
        self,
        name: &str,
        shape: &[usize],
        numbers: impl IntoIterator<Item = f64>,
    ) -> Self {
        self.with(name, Dtype::F64, shape, numbers.into_iter().flat_map(f64::to_le_bytes).collect())
    }

    pub(crate) fn i64(self, name: &str, shape: &[usize], numbers: &[i64]) -> Self {
        self.with(
            name,
            Dtype::I64,
            shape,
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        )
    }

    /// Creates query, key and value of one batch row with pseudo-random values.
    pub(crate) fn qkv(q: [usize; 3], k: [usize; 3], value_dim: usize) -> Self {
        let wave =
            |phase: f32| move |index: usize| ((index * 37 + 11) as f32 * 0.618 + phase).sin();
        Self::default()
            .f32("query", &[1, q[0], q[1], q[2]], wave(0.0))
            .f32("key", &[1, k[0], k[1], k[2]], wave(1.0))
            .f32("value", &[1, k[0], k[1], value_dim], wave(2.0))
    }

    pub(crate) fn write(&self, path: &Path) {
        let views = self.all.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let all = file.iter().map(|(name, view)| {
            (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        });
        Self { all: all.collect() }
    }

    /// Returns the values of a float tensor, widened.
    pub(crate) fn numbers(&self, name: &str) -> Vec<f64> {
        let (dtype, _, bytes) = &self.all[name];
        match dtype {
            Dtype::F64 => {
                bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
            }
            Dtype::F32 => bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
                .collect(),
            Dtype::BF16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|bytes| half::bf16::from_le_bytes(*bytes).to_f64())
                .collect(),
            other => panic!("{name} is {other:?}"),
        }
    }
}
