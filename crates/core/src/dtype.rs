//! Element types of the tensors, the types of their accumulators, and tensors of any of them.

use half::{bf16, f16};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{Result, memory};

/// The element type of q, k, v, out and their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary64, accumulated in f64.
    F64,
    /// IEEE binary32, accumulated in f32.
    F32,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// IEEE binary16, accumulated in f32.
    F16,
}

impl DType {
    /// Returns the number of bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns the type of accumulators, lse, bias, sinks and dK/dV records: f64 for f64, otherwise
    /// f32.
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// Returns the name on the command line and in files: `f64`, `f32`, `bf16`, `f16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Rounds `value` to this type (ties to even) and widens it again.
    #[inline]
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F64 => value,
            Self::F32 => f32::from_f64(value).to_f64(),
            Self::Bf16 => <bf16 as Element>::from_f64(value).to_f64(),
            Self::F16 => <f16 as Element>::from_f64(value).to_f64(),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f64 {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A Rust type that a tensor can hold.
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Copy + Send + Sync + PartialEq + std::fmt::Debug + 'static
{
    /// Type of accumulators, lse, bias and sinks.
    type Accumulator: Element;
    /// Element type as a value.
    const DTYPE: DType;
    /// Widens exactly.
    fn to_f64(self) -> f64;
    /// Rounds to nearest, ties to even.
    fn from_f64(value: f64) -> Self;
    /// Wraps a tensor as a view of any element type.
    fn view(view: ArrayView4<'_, Self>) -> HostView<'_>;
    /// Wraps a writable tensor as a view of any element type.
    fn view_mut(view: ArrayViewMut4<'_, Self>) -> HostViewMut<'_>;
    /// Unwraps a tensor; `None` if it holds another element type.
    fn array(view: HostView<'_>) -> Option<ArrayView4<'_, Self>>;
    /// Unwraps a writable tensor; `None` if it holds another element type.
    fn array_mut(view: HostViewMut<'_>) -> Option<ArrayViewMut4<'_, Self>>;
}

macro_rules! host_views {
    ($variant:ident) => {
        fn view(view: ArrayView4<'_, Self>) -> HostView<'_> {
            HostView::$variant(view)
        }
        fn view_mut(view: ArrayViewMut4<'_, Self>) -> HostViewMut<'_> {
            HostViewMut::$variant(view)
        }
        fn array(view: HostView<'_>) -> Option<ArrayView4<'_, Self>> {
            if let HostView::$variant(view) = view { Some(view) } else { None }
        }
        fn array_mut(view: HostViewMut<'_>) -> Option<ArrayViewMut4<'_, Self>> {
            if let HostViewMut::$variant(view) = view { Some(view) } else { None }
        }
    };
}

impl Element for f64 {
    type Accumulator = f64;
    const DTYPE: DType = DType::F64;
    host_views!(F64);
    #[inline]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline]
    fn from_f64(value: f64) -> Self {
        value
    }
}

impl Element for f32 {
    type Accumulator = f32;
    const DTYPE: DType = DType::F32;
    host_views!(F32);
    #[inline]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "rounds to f32")]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Element for bf16 {
    type Accumulator = f32;
    const DTYPE: DType = DType::Bf16;
    host_views!(Bf16);
    #[inline]
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
    #[inline]
    fn from_f64(value: f64) -> Self {
        bf16::from_f32(to_odd(value))
    }
}

impl Element for f16 {
    type Accumulator = f32;
    const DTYPE: DType = DType::F16;
    host_views!(F16);
    #[inline]
    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
    #[inline]
    fn from_f64(value: f64) -> Self {
        f16::from_f32(to_odd(value))
    }
}

/// Rounds to odd: an inexact value becomes the neighbour whose last bit is 1.
///
/// Rounding the result to nearest in a type of at least two bits less is then the one rounding of
/// `value` itself: the last bit records on which side of a tie it is. `half` 2.7 rounds an f64
/// from its upper 32 bits alone, so it rounds values wrongly that differ from a tie in the lower
/// bits only.
///
/// # Source
/// Boldo, Melquiond 2008, Emulation of FMA and correctly rounded sums: proved algorithms using
/// rounding to odd, theorem 3.
#[expect(clippy::cast_possible_truncation, reason = "the rounding error is corrected below")]
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || value.is_nan() {
        return nearest;
    }
    let away = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

/// Evaluates an expression for the array of a view, whatever its element type.
macro_rules! with_array {
    ($kind:ident, $view:expr, $array:ident => $body:expr) => {
        match $view {
            $kind::F64($array) => $body,
            $kind::F32($array) => $body,
            $kind::Bf16($array) => $body,
            $kind::F16($array) => $body,
        }
    };
}
pub(crate) use with_array;

macro_rules! views {
    ($(#[$doc:meta])* $name:ident, $array:ident, $($derive:ident),*) => {
        $(#[$doc])*
        #[derive(Debug, $($derive),*)]
        pub enum $name<'a> {
            /// f64 elements.
            F64($array<'a, f64>),
            /// f32 elements.
            F32($array<'a, f32>),
            /// bf16 elements.
            Bf16($array<'a, half::bf16>),
            /// f16 elements.
            F16($array<'a, half::f16>),
        }

        impl $name<'_> {
            /// Returns the element type.
            pub const fn dtype(&self) -> DType {
                match self {
                    Self::F64(_) => DType::F64,
                    Self::F32(_) => DType::F32,
                    Self::Bf16(_) => DType::Bf16,
                    Self::F16(_) => DType::F16,
                }
            }

            /// Returns the four lengths.
            pub fn shape(&self) -> [usize; 4] {
                with_array!(Self, self, view => view.dim().into())
            }
        }
    };
}

views!(
    /// A four-dimensional tensor in host memory, borrowed, of any element type and strides.
    ///
    /// Tensors of fewer dimensions have axes of length 1: lse is `[b, heads, q_len, 1]`, sinks are
    /// `[heads|1, sinks, 1, 1]`.
    HostView, ArrayView4, Clone, Copy
);
impl HostView<'_> {
    /// Borrows the same tensor for a shorter time.
    pub fn reborrow(&self) -> HostView<'_> {
        with_array!(Self, self, view => Element::view(view.view()))
    }
}

views!(
    /// A four-dimensional tensor in host memory, borrowed for writing.
    HostViewMut, ArrayViewMut4,
);

impl HostViewMut<'_> {
    /// Borrows the same tensor for a shorter time.
    pub fn reborrow(&mut self) -> HostViewMut<'_> {
        with_array!(Self, self, view => Element::view_mut(view.view_mut()))
    }

    /// Replaces the elements in logical order, at most `chunk` at a time: widens them to f64, calls
    /// `map`, and rounds the results to the element type.
    ///
    /// # Errors
    /// Those of `map`; [`crate::Error::OutOfMemory`].
    pub fn map_widened(
        &mut self,
        chunk: usize,
        map: impl FnMut(&mut [f64]) -> Result<()>,
    ) -> Result<()> {
        with_array!(Self, self, view => map_widened(view, chunk, map))
    }
}

fn map_widened<T: Element>(
    view: &mut ArrayViewMut4<'_, T>,
    chunk: usize,
    mut map: impl FnMut(&mut [f64]) -> Result<()>,
) -> Result<()> {
    let mut widened = memory::filled("a chunk of a tensor", chunk.min(view.len()), 0.0)?;
    let mut elements = view.iter_mut();
    while elements.len() > 0 {
        let part = chunk.min(elements.len());
        let elements: Vec<&mut T> = elements.by_ref().take(part).collect();
        widened.iter_mut().zip(&elements).for_each(|(wide, element)| *wide = element.to_f64());
        map(&mut widened[..part])?;
        elements
            .into_iter()
            .zip(&widened)
            .for_each(|(element, &wide)| *element = T::from_f64(wide));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the numbers next to the finite |`value`| in a type with `digits` bits of
    /// significand, exponents from `least` on and no largest exponent.
    fn neighbours(value: f64, digits: i32, least: i32) -> (f64, f64) {
        let exponent = if value == 0.0 { least } else { exponent(value).max(least) };
        let unit = 2f64.powi((exponent - digits + 1).max(-1074));
        // exact: a division by a power of two
        let low = (value.abs() / unit).floor() * unit;
        (low, low + unit)
    }

    fn exponent(value: f64) -> i32 {
        let biased = (value.to_bits() >> 52 & 0x7ff) as i32;
        if biased == 0 { -1023 } else { biased - 1023 }
    }

    /// Rounds to nearest, ties to even, by exact comparisons with both neighbours.
    fn expected(value: f64, digits: i32, least: i32, largest: f64) -> f64 {
        if value.is_nan() || value.is_infinite() {
            return value;
        }
        let (low, high) = neighbours(value, digits, least);
        let middle = low + (high - low) / 2.0;
        let even = |x: f64| (x / (high - low)) % 2.0 == 0.0;
        let up = value.abs() > middle || (value.abs() == middle && !even(low));
        let rounded = if up { high } else { low };
        (if rounded > largest { f64::INFINITY } else { rounded }).copysign(value)
    }

    fn check(value: f64) {
        let same = |got: f64, want: f64, name: &str| {
            let equal = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(
                equal,
                "{value:e} ({:#018x}) to {name}: got {got:e}, want {want:e}",
                value.to_bits()
            );
        };
        let from = |dtype| match dtype {
            DType::F32 => <f32 as Element>::from_f64(value).to_f64(),
            DType::Bf16 => <bf16 as Element>::from_f64(value).to_f64(),
            _ => <f16 as Element>::from_f64(value).to_f64(),
        };
        for (dtype, digits, least, largest) in [
            (DType::F32, 24, -126, f64::from(f32::MAX)),
            (DType::Bf16, 8, -126, bf16::MAX.to_f64()),
            (DType::F16, 11, -14, f16::MAX.to_f64()),
        ] {
            let want = expected(value, digits, least, largest);
            same(from(dtype), want, dtype.name());
            same(dtype.round(value), want, dtype.name());
        }
    }

    /// Tests every number of 16 bits, every tie between two of them, and the neighbours of each tie
    /// in f64 and in f32; also the largest and smallest numbers, and NaN with a payload in the low
    /// bits.
    #[test]
    fn values_next_to_ties_are_rounded_once() {
        for bits in 0..=u16::MAX {
            for (value, next) in [
                (f16::from_bits(bits).to_f64(), f16::from_bits(bits.wrapping_add(1)).to_f64()),
                (bf16::from_bits(bits).to_f64(), bf16::from_bits(bits.wrapping_add(1)).to_f64()),
            ] {
                check(value);
                let tie = value + (next - value) / 2.0;
                if tie.is_finite() {
                    let narrow = tie as f32;
                    for near in [tie, tie.next_up(), tie.next_down()] {
                        check(near);
                    }
                    for near in [narrow, narrow.next_up(), narrow.next_down()] {
                        check(f64::from(near));
                    }
                }
            }
        }
        let edges = [65_519.999_999_999_99, 65520.0, 3.4e38, 3.402_823_567e38, 1e300, f64::MAX];
        let tiny = [f64::MIN_POSITIVE, 5e-324, 2f64.powi(-25), 2f64.powi(-150), 2f64.powi(-134)];
        for value in edges.into_iter().chain(tiny).chain([0.0, f64::INFINITY]) {
            [value, -value, value.next_up(), value.next_down()].into_iter().for_each(check);
        }
        for nan in [0x7ff0_0000_0000_0001u64, 0xfff0_0000_1000_0000, 0x7ff8_0000_0000_0000] {
            check(f64::from_bits(nan));
        }
    }

    proptest! {
        #[test]
        fn any_f64_is_rounded_to_the_nearer_neighbour(bits in any::<u64>(), near in -160i32..140) {
            check(f64::from_bits(bits));
            // the same significand with an exponent in the range of the narrow types
            let significand = f64::from_bits((bits & !(0x7ff << 52)) | 1023 << 52);
            check(significand * 2f64.powi(near));
        }

        #[test]
        fn any_f32_is_rounded_to_the_nearer_neighbour(bits in any::<u32>()) {
            check(f64::from(f32::from_bits(bits)));
        }
    }
}
