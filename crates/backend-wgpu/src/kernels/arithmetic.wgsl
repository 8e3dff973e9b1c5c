// Functions whose bits must not depend on the adapter: e^x, ln, tanh, rounding. WGSL's own
// versions have implementation-defined accuracy.

const NEGATIVE_INFINITY: u32 = 0xff800000u;
const POSITIVE_INFINITY: u32 = 0x7f800000u;

fn is_negative_infinity(x: f32) -> bool {
    return bitcast<u32>(x) == NEGATIVE_INFINITY;
}

// NaN test on the bits: a compiler may assume x == x.
fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

// e^x = 2^n · e^r with |r| ≤ ln 2 / 2 (Cody-Waite reduction in two parts), e^r by a polynomial.
// Returns 0 below the least normal number; NaN stays NaN. Arguments are at most about 0 where the
// result is used.
//
// The sum of the integer n and 1.5·2^23 + 127 has n + 127 in its lowest bits, which are the
// exponent of 2^n. A conversion of n to an integer would take four instructions, because WGSL
// clamps it.
fn exponentials(x: vec4<f32>) -> vec4<f32> {
    let n = round(x * 1.4426950408889634);
    var r = fma(n, vec4<f32>(-0.693145751953125), x);
    r = fma(n, vec4<f32>(-1.428606765330187e-6), r);
    var p = vec4<f32>(0.001394111037259098);
    p = fma(p, r, vec4<f32>(0.008375127947359048));
    p = fma(p, r, vec4<f32>(0.041666352873458885));
    p = fma(p, r, vec4<f32>(0.16666415496046252));
    p = fma(p, r, vec4<f32>(0.5000000047123031));
    p = fma(p, r, vec4<f32>(1.0000000377204041));
    p = fma(p, r, vec4<f32>(1.0));
    let power = bitcast<vec4<f32>>(bitcast<vec4<u32>>(n + vec4<f32>(12583039.0)) << vec4<u32>(23u));
    return select(p * power, vec4<f32>(0.0), x < vec4<f32>(-87.3));
}

fn exponential(x: f32) -> f32 {
    return exponentials(vec4<f32>(x)).x;
}

// ln x for normal x > 0: x = 2^n · f with f around 1, ln f = 2·artanh((f − 1)/(f + 1)).
fn logarithm(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    var n = i32(bits >> 23u) - 127;
    var f = bitcast<f32>((bits & 0x007fffffu) | 0x3f800000u);
    if (f > 1.4142135) {
        f = f * 0.5;
        n = n + 1;
    }
    let t = (f - 1.0) / (f + 1.0);
    let z = t * t;
    var p = 0.09090909;
    p = fma(p, z, 0.11111111);
    p = fma(p, z, 0.14285714);
    p = fma(p, z, 0.2);
    p = fma(p, z, 0.33333333);
    let tail = fma(p * z, 2.0 * t, f32(n) * -2.12194440e-4);
    return f32(n) * 0.693359375 + (tail + 2.0 * t);
}

fn hyperbolic_tangent(x: f32) -> f32 {
    let a = abs(x);
    let z = x * x;
    var p = 0.0022121340;
    p = fma(p, z, -0.008245525);
    p = fma(p, z, 0.021725056);
    p = fma(p, z, -0.053950536);
    p = fma(p, z, 0.13333229);
    p = fma(p, z, -0.33333331);
    let small = fma(x * z, p, x);
    let large = 1.0 - 2.0 / (exponential(2.0 * min(a, 10.0)) + 1.0);
    let signed = select(large, -large, x < 0.0);
    return select(select(signed, small, a < 0.6), x, is_nan(x));
}

fn hyperbolic_tangents(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(
        hyperbolic_tangent(x.x), hyperbolic_tangent(x.y),
        hyperbolic_tangent(x.z), hyperbolic_tangent(x.w));
}

// Rounds to bf16 bits, nearest, ties to even. Conversions have no branches: a kernel converts many
// elements.
fn to_bf16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits >> 16u) | 0x40u, (bits & 0x7fffffffu) > 0x7f800000u);
}

fn from_bf16(bits: u32) -> f32 {
    return bitcast<f32>(bits << 16u);
}

// Rounds to f16 bits, nearest, ties to even.
fn to_f16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    let normal = (size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u;
    // a multiple of 2^-24
    let subnormal = u32(round(bitcast<f32>(min(size, 0x38800000u)) * 16777216.0));
    let finite = select(normal, subnormal, size < 0x38800000u);
    let infinite = select(0x7c00u, 0x7e00u, size > 0x7f800000u);
    return sign | select(finite, infinite, size >= 0x477ff000u);
}

fn from_f16(bits: u32) -> f32 {
    let sign = (bits & 0x8000u) << 16u;
    let exponent = (bits >> 10u) & 31u;
    let fraction = bits & 0x3ffu;
    let wide = select(exponent + 112u, 255u, exponent == 31u);
    let normal = (wide << 23u) | (fraction << 13u);
    let subnormal = bitcast<u32>(f32(fraction) * 5.9604644775390625e-8);
    return bitcast<f32>(sign | select(normal, subnormal, exponent == 0u));
}

// Rounds to f16, or else to bf16, nearest, ties to even: x + 1.5·2^n has the distance of such
// numbers at x if n is 13, or 16, more than the exponent of x. Few instructions are of integers,
// which GPUs execute at half the speed of f32.
//
// f16 has distances of at least 2^-24 and overflows from 65,520 on, as the product by 2^112 does.
// bf16 is computed from x·2^-32, because the sum would overflow, and has distances of at least
// 2^-101: of smaller scores no softmax knows.
fn rounded_to_half(x: vec4<f32>, is_f16: bool) -> vec4<f32> {
    let before = select(2.3283064365386963e-10, 1.0, is_f16);
    let least = select(1.1754943508222875e-38, 6.103515625e-5, is_f16);
    let distance = select(98304.0, 12288.0, is_f16);
    let grown = select(4294967296.0, 5.192296858534828e33, is_f16);
    let after = select(1.0, 1.925929944387236e-34, is_f16);
    let y = x * before;
    let power = clamp(bitcast<vec4<f32>>(bitcast<vec4<u32>>(y) & vec4<u32>(0x7f800000u)),
        vec4<f32>(least), vec4<f32>(7.922816251426434e28));
    let sum = fma(power, vec4<f32>(distance), y);
    return (fma(power, vec4<f32>(-distance), sum) * grown) * after;
}
