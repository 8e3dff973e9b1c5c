//! SIMD vectors: the operations from which the hot loops are built.
//!
//! A [`crate::simd::dispatch::SimdKernel`] is written once over [`Vector`] and compiled for each
//! instruction set. [`Array`] is the portable vector, vectorised by the compiler. Where the
//! compiler does not keep it in registers, an instruction set has its own leaf (`avx512.rs`,
//! `neon.rs`).
//!
//! # Source
//! memchr's `Vector` trait: one generic algorithm, one trait, leaf methods per instruction set.

use half::bf16;

use crate::simd::element::{Float, WidenTo};

/// Repeats `body` for each of the first few indices, unrolled by hand.
///
/// Not a loop: the compiler would unroll the inner loop over lanes and vectorise across the outer
/// one, with gathers.
macro_rules! unrolled {
    ($i:ident < $count:ident, $j:ident < $more:ident, $body:expr) => {
        unrolled!($i < $count, unrolled!($j < $more, $body))
    };
    ($i:ident < $count:ident, $body:expr) => { unrolled!(@ $i, $count, $body, 0 1 2 3 4 5 6 7) };
    (@ $i:ident, $count:ident, $body:expr, $($n:literal)*) => {{
        $( if $n < $count { let $i = $n; $body; } )*
    }};
}
pub(crate) use unrolled;

/// Views elements as a strip: rows of `N` vectors.
#[inline(always)]
pub(crate) fn strip<A, const N: usize, const W: usize>(elements: &[A]) -> &[[[A; W]; N]] {
    elements.as_chunks::<W>().0.as_chunks::<N>().0
}

/// Views elements as a mutable strip.
#[inline(always)]
pub(crate) fn strip_mut<A, const N: usize, const W: usize>(
    elements: &mut [A],
) -> &mut [[[A; W]; N]] {
    elements.as_chunks_mut::<W>().0.as_chunks_mut::<N>().0
}

/// Maximum lanes of a vector: 64 bytes of f32.
pub(crate) const MAX_LANES: usize = 16;

/// Vectors of [`Vector::sums_of_fours`].
pub(crate) const FOUR: usize = 4;

/// Vector of elements of type `A`, one per lane.
pub(crate) trait Vector<A: Float>: Copy {
    /// The vector in memory.
    type Memory: Copy;
    /// Number of lanes.
    const WIDTH: usize;
    /// True if the compiler vectorises this type; [`each_row`] then keeps it from vectorising
    /// across rows.
    const AUTOVECTORIZED: bool;

    /// Views elements as a strip: rows of `N` vectors.
    fn strip<const N: usize>(elements: &[A]) -> &[[Self::Memory; N]];
    /// Views elements as a mutable strip.
    fn strip_mut<const N: usize>(elements: &mut [A]) -> &mut [[Self::Memory; N]];
    fn load(from: &Self::Memory) -> Self;
    fn store(self, into: &mut Self::Memory);
    fn splat(element: A) -> Self;
    /// Loads and widens the first elements of a slice, with 0 beyond its end.
    fn widen<E: WidenTo<Accumulator = A>>(from: &[E]) -> Self;

    fn plus(self, b: Self) -> Self;
    fn minus(self, b: Self) -> Self;
    fn times(self, b: Self) -> Self;
    /// Computes self·b + c, rounded once where the machine has a fused instruction.
    fn multiply_add(self, b: Self, c: Self) -> Self;
    /// Computes one step of a chain of products: self·b + c, or over pairs of bf16 the sum of both
    /// products and c.
    #[inline(always)]
    fn product(self, b: Self, c: Self) -> Self {
        self.multiply_add(b, c)
    }
    /// Returns self in the lanes where it is larger than `than`, else `than`. NaN is never larger.
    fn if_larger(self, than: Self) -> Self;
    /// Computes e^self for arguments at most slightly above 0: 0 where e^self is subnormal, NaN for
    /// NaN.
    fn softmax_exp(self) -> Self;
    /// Computes [`Vector::softmax_exp`], and adds e^self·self to `sum` in the lanes where e^self is
    /// not 0: 0·(−∞) would be NaN.
    #[inline(always)]
    fn softmax_exp_and_sum(self, sum: &mut Self) -> Self {
        let exp = self.softmax_exp();
        // e^x is 0 in f32 and f64 below this
        let least = Self::splat(A::from_f64(-1e4));
        *sum = exp.multiply_add(self.if_larger(least), *sum);
        exp
    }
    /// Returns self in the lanes whose bit of `word` is set, else `other`. Lane 0 is bit 0.
    fn select(self, word: u64, other: Self) -> Self;
    /// Returns `then` in the lanes where self equals `b`, else `other`.
    fn if_equal(self, b: Self, then: Self, other: Self) -> Self;
    /// True if all lanes equal those of `b`.
    fn all_equal(self, b: Self) -> bool;
    /// Sums all lanes pairwise, by halves.
    fn total(self) -> A;
    /// Sums the lanes of four vectors within each 4 lanes: lane 4·i + j of the result is the sum of
    /// lanes 4·i .. 4·i + 4 of vector j.
    fn sums_of_fours(vectors: [Self; FOUR]) -> Self;
    /// Sums results of [`Vector::sums_of_fours`], one for each 4 lanes: lane 4·i + j is the total of
    /// the lanes 4·l + j of result i.
    fn totals_of_fours(sums: [Self; FOUR]) -> Self;
    /// Transposes the first [`Vector::WIDTH`] vectors. The rest of `block` is unspecified.
    fn transpose(block: &mut [Self; MAX_LANES]);

    /// Views the first row of a strip.
    #[inline(always)]
    fn row<const N: usize>(elements: &[A]) -> Option<&[Self::Memory; N]> {
        Self::strip::<N>(elements).first()
    }

    /// Views the first row of a mutable strip.
    #[inline(always)]
    fn row_mut<const N: usize>(elements: &mut [A]) -> Option<&mut [Self::Memory; N]> {
        Self::strip_mut::<N>(elements).first_mut()
    }
}

/// Vector of f32 or, bit for bit, of bf16 pairs with the first element in the low half.
pub(crate) trait Bf16Pairs: Vector<f32> {
    /// Rounds both to nearest, ties to even, and pairs each lane of `low` with the same lane of
    /// `high`.
    fn interleaved(low: Self, high: Self) -> Self;
    /// Rounds both to nearest, ties to even, and pairs neighbouring lanes, first of `first`, then
    /// of `second`.
    fn in_order(first: Self, second: Self) -> Self;
    /// Pairs each element of the pairs `low` with the same element of the pairs `high`: the first
    /// 16 elements, then the others.
    fn zipped(low: Self, high: Self) -> [Self; 2];
    /// Keeps the bits of every lane that are set in `word`.
    fn masked(self, word: u32) -> Self;
}

/// Iterates over the rows of a strip.
///
/// Each row is opaque to an autovectorising compiler. Otherwise it unrolls the loop over lanes and
/// vectorises across rows, with gathers.
#[inline(always)]
pub(crate) fn each_row<A: Float, V: Vector<A>, T>(rows: &[T]) -> impl ExactSizeIterator<Item = &T> {
    rows.iter().map(|row| if V::AUTOVECTORIZED { std::hint::black_box(row) } else { row })
}

/// Iterates over the rows of a mutable strip; see [`each_row`].
#[inline(always)]
pub(crate) fn each_row_mut<A: Float, V: Vector<A>, T>(
    rows: &mut [T],
) -> impl ExactSizeIterator<Item = &mut T> {
    rows.iter_mut().map(|row| if V::AUTOVECTORIZED { std::hint::black_box(row) } else { row })
}

/// Iterates over rows, each opaque to the compiler; see [`each_row`].
#[inline(always)]
pub(crate) fn opaque_rows<T>(rows: &mut [T]) -> impl ExactSizeIterator<Item = &mut T> {
    rows.iter_mut().map(std::hint::black_box)
}

/// Applies a function to each element.
#[inline(always)]
pub(crate) fn map<A: Float, const W: usize>(mut a: [A; W], f: impl Fn(A) -> A) -> [A; W] {
    for a in &mut a {
        *a = f(*a);
    }
    a
}

/// Applies a function to each pair of elements.
#[inline(always)]
pub(crate) fn zip<A: Float, const W: usize>(
    mut a: [A; W],
    b: [A; W],
    f: impl Fn(A, A) -> A,
) -> [A; W] {
    for i in 0..W {
        a[i] = f(a[i], b[i]);
    }
    a
}

/// Widens the first elements of a slice, with 0 beyond its end.
#[inline(always)]
pub(crate) fn widened<E: WidenTo, const W: usize>(from: &[E]) -> [E::Accumulator; W] {
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

/// `W` elements that the compiler keeps in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Array<A, const FUSED: bool, const W: usize>([A; W]);

impl<A: Float, const FUSED: bool, const W: usize> Array<A, FUSED, W> {
    #[inline(always)]
    fn zip(mut self, b: Self, f: impl Fn(A, A) -> A) -> Self {
        for i in 0..W {
            self.0[i] = f(self.0[i], b.0[i]);
        }
        self
    }
}

impl<A: Float, const FUSED: bool, const W: usize> Vector<A> for Array<A, FUSED, W> {
    type Memory = [A; W];
    const WIDTH: usize = W;
    const AUTOVECTORIZED: bool = true;

    #[inline(always)]
    fn strip<const N: usize>(elements: &[A]) -> &[[[A; W]; N]] {
        strip(elements)
    }

    #[inline(always)]
    fn strip_mut<const N: usize>(elements: &mut [A]) -> &mut [[[A; W]; N]] {
        strip_mut(elements)
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
    fn widen<E: WidenTo<Accumulator = A>>(from: &[E]) -> Self {
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
    fn sums_of_fours(vectors: [Self; FOUR]) -> Self {
        let mut sums = vectors[0];
        for (i, sum) in sums.0.iter_mut().enumerate() {
            let [a, b, c, d] = [0, 1, 2, 3].map(|k| vectors[i % FOUR].0[i / FOUR * FOUR + k]);
            *sum = a + b + (c + d);
        }
        sums
    }

    #[inline(always)]
    fn totals_of_fours(sums: [Self; FOUR]) -> Self {
        let mut totals = sums[0];
        for (i, total) in totals.0.iter_mut().enumerate() {
            *total = A::ZERO;
            for four in sums[i / FOUR].0.chunks_exact(FOUR) {
                *total += four[i % FOUR];
            }
        }
        totals
    }

    #[inline(always)]
    fn transpose(block: &mut [Self; MAX_LANES]) {
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
    fn softmax_exp(mut self) -> Self {
        for i in 0..W {
            self.0[i] = self.0[i].softmax_exp::<FUSED>();
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

/// Reference implementation of the pair instructions, run by tests only.
impl<const FUSED: bool> Bf16Pairs for Array<f32, FUSED, 16> {
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
    fn zipped(low: Self, high: Self) -> [Self; 2] {
        let half = |pair: f32, i: usize| pair.to_bits() >> (i % 2 * 16) & 0xffff;
        [0, 16].map(|first| {
            Self(std::array::from_fn(|lane| {
                let i = first + lane;
                f32::from_bits(half(low.0[i / 2], i) | half(high.0[i / 2], i) << 16)
            }))
        })
    }

    #[inline(always)]
    fn masked(self, word: u32) -> Self {
        Self(self.0.map(|element| f32::from_bits(element.to_bits() & word)))
    }
}

/// Rounds and packs a pair of bf16.
fn word(low: f32, high: f32) -> f32 {
    let bits = |element| u32::from(bf16::from_f32(element).to_bits());
    f32::from_bits(bits(low) | bits(high) << 16)
}
