//! Pseudo-random numbers for tests, the same on every machine.

use ndarray::{Array, Dimension, ShapeBuilder};

/// SplitMix64.
///
/// # Source
/// Steele, Lea, Flood 2014.
#[derive(Debug, Clone)]
pub struct Draw(u64);

impl Draw {
    /// Creates a generator; the same seed gives the same numbers.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..count`.
    pub const fn below(&mut self, count: usize) -> usize {
        annulus_core::index(self.bits() % count as u64)
    }

    /// True with probability 1 / `every`.
    pub const fn once_in(&mut self, every: usize) -> bool {
        self.below(every) == 0
    }

    /// Returns one of `choices`.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    /// Returns a number in [0, 1) with 53 random bits, as many as an f64 holds.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / 2f64.powi(53)
    }

    /// Returns a standard normal number (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Returns an array of standard normal numbers.
    pub fn tensor<D: Dimension, S: ShapeBuilder<Dim = D>>(&mut self, shape: S) -> Array<f64, D> {
        Array::from_shape_simple_fn(shape, || self.normal())
    }

    /// Returns a permutation of `0..count` (Fisher–Yates).
    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        (1..count).rev().for_each(|last| order.swap(last, self.below(last + 1)));
        order
    }
}
