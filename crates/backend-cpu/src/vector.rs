//! One vector of sums in registers: the operations that the hot loops are made of.
//!
//! A [`crate::isa::Kernel`] is written once over [`Vector`] and compiled for each instruction set. [`Array`] is any machine's vector, left to the
//! compiler; where the compiler does not find the registers by itself, an instruction set brings a leaf of its own (`isa/avx512.rs`).

use half::bf16;

use crate::{input::Input, real::Real};

/// The most lanes that a vector has.
pub(crate) const MOST_WIDTH: usize = 16;

/// Elements of type `A`, one a lane.
pub(crate) trait Vector<A: Real>: Copy {
    /// The vector as it lies in memory.
    type Memory: Copy;
    /// Lanes.
    const WIDTH: usize;
    /// Whether the compiler finds the registers; then [`each_row`] helps it.
    const BY_COMPILER: bool;

    /// A strip of rows of `N` vectors.
    fn strip<const N: usize>(elements: &[A]) -> &[[Self::Memory; N]];
    /// The same for writing.
    fn strip_mut<const N: usize>(elements: &mut [A]) -> &mut [[Self::Memory; N]];
    fn load(from: &Self::Memory) -> Self;
    fn store(self, into: &mut Self::Memory);
    fn splat(element: A) -> Self;
    /// The first elements of a list, widened; 0 beyond its end.
    fn widen<E: Input<Accumulator = A>>(from: &[E]) -> Self;

    fn plus(self, b: Self) -> Self;
    fn minus(self, b: Self) -> Self;
    fn times(self, b: Self) -> Self;
    /// self·b + c, rounded once where that is one instruction.
    fn multiply_add(self, b: Self, c: Self) -> Self;
    /// A step of a chain of products: self·b + c; over pairs of bf16, the sum of both products and c.
    #[inline(always)]
    fn product(self, b: Self, c: Self) -> Self {
        self.multiply_add(b, c)
    }
    /// self where it is larger than `than`, else `than`: NaN is never larger.
    fn if_larger(self, than: Self) -> Self;
    /// e^self for what is hardly above 0: 0 where e^self is subnormal, NaN for NaN.
    fn weight(self) -> Self;
    /// self in the lanes whose bit of `word` is set, else `other`; lane 0 is bit 0.
    fn select(self, word: u64, other: Self) -> Self;
    /// `then` in the lanes where self equals `b`, else `other`.
    fn if_equal(self, b: Self, then: Self, other: Self) -> Self;
    /// Whether all lanes equal those of `b`.
    fn all_equal(self, b: Self) -> bool;
    /// The sum of all lanes, by halves.
    fn total(self) -> A;
    /// Exchanges rows and columns of the first [`Vector::WIDTH`] vectors; the others mean nothing.
    fn transpose(block: &mut [Self; MOST_WIDTH]);

    /// A strip of one row.
    #[inline(always)]
    fn row<const N: usize>(elements: &[A]) -> Option<&[Self::Memory; N]> {
        Self::strip::<N>(elements).first()
    }

    /// The same for writing.
    #[inline(always)]
    fn row_mut<const N: usize>(elements: &mut [A]) -> Option<&mut [Self::Memory; N]> {
        Self::strip_mut::<N>(elements).first_mut()
    }
}

/// Vectors of f32 or, bit for bit, of words: pairs of bf16, the first in the low half.
pub(crate) trait Pairs: Vector<f32> {
    /// Both rounded to nearest, ties to even: pairs of a lane of `low` and the same lane of `high`.
    fn interleaved(low: Self, high: Self) -> Self;
    /// Both rounded in the same way: pairs of neighbouring lanes, those of `first` before those of `second`.
    fn in_order(first: Self, second: Self) -> Self;
    /// The bits of all words that are set in `word`.
    fn masked(self, word: u32) -> Self;
}

/// The rows of a strip, one at a time. Each is opaque to a compiler that would vectorise across rows, with gathers, once the loop over lanes is
/// unrolled.
#[inline(always)]
pub(crate) fn each_row<A: Real, V: Vector<A>, T>(rows: &[T]) -> impl ExactSizeIterator<Item = &T> {
    rows.iter().map(|row| if V::BY_COMPILER { std::hint::black_box(row) } else { row })
}

/// The same for writing.
#[inline(always)]
pub(crate) fn each_row_mut<A: Real, V: Vector<A>, T>(rows: &mut [T]) -> impl ExactSizeIterator<Item = &mut T> {
    rows.iter_mut().map(|row| if V::BY_COMPILER { std::hint::black_box(row) } else { row })
}

/// The first elements of a list, widened; 0 beyond its end.
#[inline(always)]
pub(crate) fn widened<E: Input, const W: usize>(from: &[E]) -> [E::Accumulator; W] {
    let mut widened = [E::Accumulator::ZERO; W];
    if let Some(from) = from.first_chunk::<W>() {
        for i in 0..W {
            widened[i] = from[i].widen();
        }
    } else {
        widened.iter_mut().zip(from).for_each(|(into, &element)| *into = element.widen());
    }
    widened
}

/// `W` elements, for the compiler to keep in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Array<A, const FUSED: bool, const W: usize>([A; W]);

impl<A: Real, const FUSED: bool, const W: usize> Array<A, FUSED, W> {
    #[inline(always)]
    fn zip(mut self, b: Self, f: impl Fn(A, A) -> A) -> Self {
        for i in 0..W {
            self.0[i] = f(self.0[i], b.0[i]);
        }
        self
    }
}

impl<A: Real, const FUSED: bool, const W: usize> Vector<A> for Array<A, FUSED, W> {
    type Memory = [A; W];
    const WIDTH: usize = W;
    const BY_COMPILER: bool = true;

    #[inline(always)]
    fn strip<const N: usize>(elements: &[A]) -> &[[[A; W]; N]] {
        crate::lanes::strip(elements)
    }

    #[inline(always)]
    fn strip_mut<const N: usize>(elements: &mut [A]) -> &mut [[[A; W]; N]] {
        crate::lanes::strip_mut(elements)
    }

    #[inline(always)]
    fn load(from: &[A; W]) -> Self {
        Self(*from)
    }

    #[inline(always)]
    fn store(self, into: &mut [A; W]) {
        *into = self.0;
    }

    #[inline(always)]
    fn splat(element: A) -> Self {
        Self([element; W])
    }

    #[inline(always)]
    fn widen<E: Input<Accumulator = A>>(from: &[E]) -> Self {
        Self(widened(from))
    }

    #[inline(always)]
    fn total(mut self) -> A {
        let mut half = W;
        while half > 1 {
            half /= 2;
            for i in 0..half {
                self.0[i] += self.0[i + half];
            }
        }
        self.0[0]
    }

    #[inline(always)]
    fn transpose(block: &mut [Self; MOST_WIDTH]) {
        let rows = *block;
        for (i, column) in block.iter_mut().enumerate().take(W) {
            for (element, row) in column.0.iter_mut().zip(&rows) {
                *element = row.0[i];
            }
        }
    }

    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }

    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }

    #[inline(always)]
    fn times(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }

    #[inline(always)]
    fn multiply_add(self, b: Self, mut c: Self) -> Self {
        for i in 0..W {
            c.0[i] = self.0[i].fused::<FUSED>(b.0[i], c.0[i]);
        }
        c
    }

    #[inline(always)]
    fn if_larger(self, than: Self) -> Self {
        self.zip(than, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn weight(mut self) -> Self {
        for i in 0..W {
            self.0[i] = self.0[i].weight::<FUSED>();
        }
        self
    }

    #[inline(always)]
    fn select(self, word: u64, mut other: Self) -> Self {
        for i in 0..W {
            other.0[i] = if word >> i & 1 != 0 { self.0[i] } else { other.0[i] };
        }
        other
    }

    #[inline(always)]
    fn if_equal(self, b: Self, then: Self, mut other: Self) -> Self {
        for i in 0..W {
            other.0[i] = if self.0[i] == b.0[i] { then.0[i] } else { other.0[i] };
        }
        other
    }

    #[inline(always)]
    fn all_equal(self, b: Self) -> bool {
        self.0.iter().zip(&b.0).all(|(a, b)| a == b)
    }
}

/// What the types promise where no instruction does it; nothing runs it but tests.
impl<const FUSED: bool> Pairs for Array<f32, FUSED, 16> {
    #[inline(always)]
    fn interleaved(low: Self, high: Self) -> Self {
        Self(std::array::from_fn(|i| word(low.0[i], high.0[i])))
    }

    #[inline(always)]
    fn in_order(first: Self, second: Self) -> Self {
        Self(std::array::from_fn(|i| {
            let from = if i < 8 { &first.0 } else { &second.0 };
            word(from[2 * i % 16], from[2 * i % 16 + 1])
        }))
    }

    #[inline(always)]
    fn masked(self, word: u32) -> Self {
        Self(self.0.map(|element| f32::from_bits(element.to_bits() & word)))
    }
}

/// A pair of bf16.
fn word(low: f32, high: f32) -> f32 {
    let bits = |element| u32::from(bf16::from_f32(element).to_bits());
    f32::from_bits(bits(low) | bits(high) << 16)
}
