//! e^x and tanh x as branch-free arithmetic, which the compiler vectorises.
//!
//! ```text
//! exp:          n = round(x / ln 2)   r = x − n·ln 2, |r| ≤ ½ ln 2    e^x = 2^n·(1 + r + r²·q(r))
//! softmax exp:  z = x·log₂e           n = round(z), r = z − n, |r| ≤ ½  e^x = 2^n·p(r)
//! tanh x = x + x³·t(x²)                       for |x| < 0.625
//!        = sign(x) · (1 − 2 / (e^{2|x|} + 1))  otherwise
//! ```
//! Rounding to n adds 1.5·2^(mantissa bits), which leaves n in the low bits of the sum; adding
//! these to the exponent field multiplies by 2^n. The polynomials q, p and t are minimax fits in
//! relative error, made for this file, with p(0) = 1.

/// Computes a·b + c, rounded once if `FUSED`.
#[inline(always)]
fn fused32<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Computes a·b + c, rounded once if `FUSED`.
#[inline(always)]
fn fused64<const FUSED: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Computes e^x within 2 units in the last place: 0 below −87.3 (no subnormals), ∞ above 88.72, NaN
/// for NaN.
#[inline(always)]
pub(crate) fn exp32<const FUSED: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    // n·LN2_HIGH is exact: the low 14 bits of LN2_HIGH are 0 (Cody and Waite's reduction)
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -0.000_212_194_44;
    const Q: [f32; 5] = [0.499_999_94, 0.166_665_2, 0.041_668_393, 0.008_368_78, 0.001_381_446_7];
    let shifted = fused32::<FUSED>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fused32::<FUSED>(n, -LN2_LOW, fused32::<FUSED>(n, -LN2_HIGH, x));
    let mut q = Q[4];
    q = fused32::<FUSED>(q, r, Q[3]);
    q = fused32::<FUSED>(q, r, Q[2]);
    q = fused32::<FUSED>(q, r, Q[1]);
    q = fused32::<FUSED>(q, r, Q[0]);
    let y = 1.0 + fused32::<FUSED>(r * r, q, r);
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    // x + ∞: ∞ for large arguments, NaN for NaN
    let high = if x <= 88.722_83 { scaled } else { x + f32::INFINITY };
    if x < -87.33 { 0.0 } else { high }
}

/// Coefficients of 2^r for |r| ≤ ½, with a relative error of at most 9.4e-8; r⁰ first.
///
/// Degree 5 keeps the polynomial's error near one unit in the last place of f32 at five
/// multiply-adds.
#[expect(clippy::approx_constant, reason = "a coefficient of the fit: near to ln 2, but not equal")]
pub(crate) const EXP2_COEFFICIENTS: [f32; 6] =
    [1.0, 0.693_147, 0.240_222_47, 0.055_507_11, 0.009_671_291, 0.001_326_951_9];

/// Computes e^x for a softmax: 0 where e^x would be subnormal, ∞ above 88.72, NaN for NaN.
///
/// The relative error is that of the polynomial plus half a unit of x·log₂e, which grows with |x|.
/// For x ≤ 0 it is multiplied by e^x, so that the absolute error stays below 2e-7. That suffices
/// for a sum whose largest term is 1, and saves the two-step reduction of [`exp32`].
#[inline(always)]
pub(crate) fn softmax_exp32<const FUSED: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let z = x * std::f32::consts::LOG2_E;
    let shifted = z + ROUND;
    let r = z - (shifted - ROUND);
    let mut y = EXP2_COEFFICIENTS[5];
    y = fused32::<FUSED>(y, r, EXP2_COEFFICIENTS[4]);
    y = fused32::<FUSED>(y, r, EXP2_COEFFICIENTS[3]);
    y = fused32::<FUSED>(y, r, EXP2_COEFFICIENTS[2]);
    y = fused32::<FUSED>(y, r, EXP2_COEFFICIENTS[1]);
    y = fused32::<FUSED>(y, r, EXP2_COEFFICIENTS[0]);
    let scaled = f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23));
    // z + ∞: ∞ for large arguments, NaN for NaN
    let high = if z < 127.5 { scaled } else { z + f32::INFINITY };
    if z < -126.0 { 0.0 } else { high }
}

/// Computes e^x within 2 units in the last place: 0 below −708.3 (no subnormals), ∞ above 709.78,
/// NaN for NaN.
#[inline(always)]
pub(crate) fn exp64<const FUSED: bool>(x: f64) -> f64 {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // n·LN2_HIGH is exact: the low 21 bits of LN2_HIGH are 0
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const Q: [f64; 11] = [
        0.5,
        0.166_666_666_666_666_82,
        0.041_666_666_666_666_09,
        0.008_333_333_333_316_918,
        0.001_388_888_888_911_726_4,
        0.000_198_412_698_966_808_75,
        2.480_158_692_460_562e-5,
        2.755_723_455_886_436e-6,
        2.755_758_279_492_277e-7,
        2.511_214_446_444_666e-8,
        2.082_653_648_677_639_3e-9,
    ];
    let shifted = fused64::<FUSED>(x, std::f64::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fused64::<FUSED>(n, -LN2_LOW, fused64::<FUSED>(n, -LN2_HIGH, x));
    let mut q = Q[10];
    q = fused64::<FUSED>(q, r, Q[9]);
    q = fused64::<FUSED>(q, r, Q[8]);
    q = fused64::<FUSED>(q, r, Q[7]);
    q = fused64::<FUSED>(q, r, Q[6]);
    q = fused64::<FUSED>(q, r, Q[5]);
    q = fused64::<FUSED>(q, r, Q[4]);
    q = fused64::<FUSED>(q, r, Q[3]);
    q = fused64::<FUSED>(q, r, Q[2]);
    q = fused64::<FUSED>(q, r, Q[1]);
    q = fused64::<FUSED>(q, r, Q[0]);
    let y = 1.0 + fused64::<FUSED>(r * r, q, r);
    let scaled = f64::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 52));
    let high = if x <= 709.782_712_893_383 { scaled } else { x + f64::INFINITY };
    if x < -708.39 { 0.0 } else { high }
}

/// Computes tanh x within 3 units in the last place; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh32<const FUSED: bool>(x: f32) -> f32 {
    const T: [f32; 5] = [-0.333_332_8, 0.133_314_2, -0.053_737_797, 0.020_632_546, -0.005_697_384];
    let square = x * x;
    let mut t = T[4];
    t = fused32::<FUSED>(t, square, T[3]);
    t = fused32::<FUSED>(t, square, T[2]);
    t = fused32::<FUSED>(t, square, T[1]);
    t = fused32::<FUSED>(t, square, T[0]);
    let near = fused32::<FUSED>(x * square, t, x);
    let size = x.abs();
    let far = (1.0 - 2.0 / (exp32::<FUSED>(2.0 * size) + 1.0)).copysign(x);
    if size < 0.625 { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps32(got: f32, want: f64) -> f64 {
        let unit = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
        (f64::from(got) - want).abs() / unit.abs()
    }

    #[test]
    fn exponentials_are_close() {
        for i in -87_300..88_700 {
            let x = i as f32 / 1000.0 + 0.000_37;
            let want = f64::from(x).exp();
            for got in [exp32::<true>(x), exp32::<false>(x)] {
                assert!(ulps32(got, want) <= 2.0, "e^{x}: {got} {want}");
            }
        }
        for i in -70_800..70_970 {
            let x = f64::from(i) / 100.0 + 0.000_37;
            let want = x.exp();
            for got in [exp64::<true>(x), exp64::<false>(x)] {
                assert!((got - want).abs() <= 2.0 * f64::EPSILON * want, "e^{x}: {got} {want}");
            }
        }
    }

    #[test]
    fn softmax_exponentials_are_close() {
        for i in -87_300..1 {
            let x = i as f32 / 1000.0;
            let want = f64::from(x).exp();
            for got in [softmax_exp32::<true>(x), softmax_exp32::<false>(x)] {
                // rounding of x·log₂e, and the polynomial's error
                let error = (f64::from(x).abs() * 0.9e-7 + 2e-7) * want;
                assert!((f64::from(got) - want).abs() <= error, "e^{x}: {got} {want}");
            }
        }
        assert_eq!(softmax_exp32::<false>(0.0), 1.0);
        for x in [-89.0, -1e4, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(softmax_exp32::<true>(x), 0.0);
            assert_eq!(softmax_exp32::<true>(-x), f32::INFINITY);
        }
        for payload in [0, 1, 0x1ff, 0x3f_ffff] {
            assert!(softmax_exp32::<true>(f32::from_bits(0x7fc0_0000 | payload)).is_nan());
            assert!(softmax_exp32::<true>(f32::from_bits(0xffc0_0000 | payload)).is_nan());
        }
    }

    #[test]
    fn exponentials_saturate_at_their_bounds() {
        assert_eq!(exp32::<false>(0.0), 1.0);
        assert_eq!(exp64::<false>(0.0), 1.0);
        assert_eq!(exp32::<false>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp64::<false>(f64::NEG_INFINITY), 0.0);
        for x in [89.0, 1e4, f32::MAX, f32::INFINITY] {
            assert_eq!(exp32::<false>(x), f32::INFINITY);
            assert_eq!(exp32::<false>(-x), 0.0);
        }
        for x in [710.0, 1e5, f64::MAX, f64::INFINITY] {
            assert_eq!(exp64::<false>(x), f64::INFINITY);
            assert_eq!(exp64::<false>(-x), 0.0);
        }
        // NaN with any payload
        for payload in [0, 1, 0x1ff, 0x3f_ffff] {
            assert!(exp32::<false>(f32::from_bits(0x7fc0_0000 | payload)).is_nan());
            assert!(exp32::<false>(f32::from_bits(0xffc0_0000 | payload)).is_nan());
            assert!(
                exp64::<false>(f64::from_bits(0x7ff8_0000_0000_0000 | u64::from(payload))).is_nan()
            );
            assert!(tanh32::<false>(f32::from_bits(0x7fc0_0000 | payload)).is_nan());
        }
    }

    #[test]
    fn hyperbolic_tangents_are_close() {
        for i in -12_000..12_000 {
            let x = i as f32 / 1000.0 + 0.000_37;
            let want = f64::from(x).tanh();
            for got in [tanh32::<true>(x), tanh32::<false>(x)] {
                assert!(ulps32(got, want) <= 3.0, "tanh {x}: {got} {want}");
            }
        }
        assert_eq!(tanh32::<false>(0.0), 0.0);
        assert_eq!(tanh32::<false>(f32::INFINITY), 1.0);
        assert_eq!(tanh32::<false>(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh32::<false>(1e-20), 1e-20);
    }
}
