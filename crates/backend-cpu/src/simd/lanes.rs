//! Arithmetic on arrays of `W` elements, in a form that the compiler keeps in vector registers.

use crate::simd::element::Float;

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

/// Iterates over the rows of a strip, each opaque to the compiler, which would otherwise vectorise
/// across rows with gathers.
#[inline(always)]
pub(crate) fn each_row_mut<T>(rows: &mut [T]) -> impl ExactSizeIterator<Item = &mut T> {
    rows.iter_mut().map(std::hint::black_box)
}

/// Computes a·b + c with one a for all lanes.
#[inline(always)]
pub(crate) fn scaled_add<A: Float, const FUSED: bool, const W: usize>(
    a: A,
    b: [A; W],
    mut c: [A; W],
) -> [A; W] {
    for i in 0..W {
        c[i] = a.fused::<FUSED>(b[i], c[i]);
    }
    c
}

/// Computes a·b + c.
#[inline(always)]
pub(crate) fn multiply_add<A: Float, const FUSED: bool, const W: usize>(
    a: [A; W],
    b: [A; W],
    mut c: [A; W],
) -> [A; W] {
    for i in 0..W {
        c[i] = a[i].fused::<FUSED>(b[i], c[i]);
    }
    c
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

/// Selects `a` in the lanes whose bit of `word`, counted from bit `first`, is set, else `b`.
#[inline(always)]
pub(crate) fn select<A: Float, const W: usize>(
    word: u64,
    first: usize,
    a: [A; W],
    mut b: [A; W],
) -> [A; W] {
    for i in 0..W {
        b[i] = if word >> (first + i) & 1 != 0 { a[i] } else { b[i] };
    }
    b
}
