//! Arithmetic on one vector of `W` elements, written so that the compiler keeps it in a register.

use crate::real::Real;

/// `body` for each of the first few numbers. A loop would do, were it not for the compiler's wish to vectorise it, with gathers, once the loop over
/// lanes within it is unrolled.
macro_rules! unrolled {
    ($i:ident < $count:ident, $j:ident < $more:ident, $body:expr) => { unrolled!($i < $count, unrolled!($j < $more, $body)) };
    ($i:ident < $count:ident, $body:expr) => { unrolled!(@ $i, $count, $body, 0 1 2 3 4 5 6 7) };
    (@ $i:ident, $count:ident, $body:expr, $($n:literal)*) => {{ $( if $n < $count { let $i = $n; $body; } )* }};
}
pub(crate) use unrolled;

/// A strip: rows of `N` vectors.
#[inline(always)]
pub(crate) fn strip<A, const N: usize, const W: usize>(elements: &[A]) -> &[[[A; W]; N]] {
    elements.as_chunks::<W>().0.as_chunks::<N>().0
}

/// A strip for writing.
#[inline(always)]
pub(crate) fn strip_mut<A, const N: usize, const W: usize>(elements: &mut [A]) -> &mut [[[A; W]; N]] {
    elements.as_chunks_mut::<W>().0.as_chunks_mut::<N>().0
}

/// The rows of a strip, one at a time, for writing. Each is opaque to the compiler, for the same reason.
#[inline(always)]
pub(crate) fn each_row_mut<T>(rows: &mut [T]) -> impl ExactSizeIterator<Item = &mut T> {
    rows.iter_mut().map(std::hint::black_box)
}

/// a·b + c with one a for all lanes.
#[inline(always)]
pub(crate) fn scaled_add<A: Real, const FUSED: bool, const W: usize>(a: A, b: [A; W], mut c: [A; W]) -> [A; W] {
    for i in 0..W {
        c[i] = a.fused::<FUSED>(b[i], c[i]);
    }
    c
}

/// a·b + c.
#[inline(always)]
pub(crate) fn multiply_add<A: Real, const FUSED: bool, const W: usize>(a: [A; W], b: [A; W], mut c: [A; W]) -> [A; W] {
    for i in 0..W {
        c[i] = a[i].fused::<FUSED>(b[i], c[i]);
    }
    c
}

/// Any function of one element.
#[inline(always)]
pub(crate) fn map<A: Real, const W: usize>(mut a: [A; W], f: impl Fn(A) -> A) -> [A; W] {
    for a in &mut a {
        *a = f(*a);
    }
    a
}

/// Any function of two elements.
#[inline(always)]
pub(crate) fn zip<A: Real, const W: usize>(mut a: [A; W], b: [A; W], f: impl Fn(A, A) -> A) -> [A; W] {
    for i in 0..W {
        a[i] = f(a[i], b[i]);
    }
    a
}

/// `a` in the lanes whose bit in `word` from bit `first` on is set, else `b`.
#[inline(always)]
pub(crate) fn select<A: Real, const W: usize>(word: u64, first: usize, a: [A; W], mut b: [A; W]) -> [A; W] {
    for i in 0..W {
        b[i] = if word >> (first + i) & 1 != 0 { a[i] } else { b[i] };
    }
    b
}
