//! Numbers that are random enough for tests and the same everywhere.

use ndarray::{Array, Dimension, ShapeBuilder};

/// SplitMix64.
///
/// # Source
/// Steele, Lea, Flood 2014.
#[derive(Debug, Clone)]
pub struct Draw(u64);

impl Draw {
    /// A generator that gives the same numbers for the same seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..count`.
    pub const fn below(&mut self, count: usize) -> usize {
        annulus_core::index(self.bits() % count as u64)
    }

    /// True once in `every` draws.
    pub const fn once_in(&mut self, every: usize) -> bool {
        self.below(every) == 0
    }

    /// One of these.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    /// A number in 0..1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / 2f64.powi(53)
    }

    /// A standard normal number (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Standard normal numbers.
    pub fn tensor<D: Dimension, S: ShapeBuilder<Dim = D>>(&mut self, shape: S) -> Array<f64, D> {
        Array::from_shape_simple_fn(shape, || self.normal())
    }

    /// The numbers `0..count` in another order.
    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        (1..count).rev().for_each(|last| order.swap(last, self.below(last + 1)));
        order
    }
}
