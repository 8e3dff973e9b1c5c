//! Products of bf16 pairs on tiles of 16 × 16: AMX's `TDPBF16PS`, or an emulation with the same
//! bits.
//!
//! ```text
//! C[16 × 16] += A[16 × 16 pairs] · B[16 pairs × 16]     a pair: two bf16 of neighbouring k
//!
//! per element:   e = o = 0
//!                for k ascending:  e = fma(a.low, b.low, e);  o = fma(a.high, b.high, o)
//!                c = c + (e + o)
//! ```
//! Every step is rounded once to nearest in f32. Subnormal numbers are read as 0, results below the
//! smallest normal number are written as 0. There is no shortcut for a factor of 0: 0·NaN is NaN.
//!
//! The tile registers are configured and released in each call: 55 ns on a Xeon. A configuration
//! that lives longer would be lost in a signal handler that jumps, or to another user of the tiles
//! on this thread.
//!
//! # Source
//! Intel's instruction set reference, `TDPBF16PS`. The order of the two chains and the treatment of
//! NaN were compared with a processor, bit for bit.

use crate::simd::{
    dispatch::{ArrayKernel, IsaToken},
    tile_unit::{TILE_SIZE, TileUnit},
};

/// Maximum tiles of B and C in one product: their registers, one of A and one of B.
const MAX_TILES: usize = 4;

/// C = A·B, or C += A·B with `add`. Elements of A and B are pairs of bf16.
pub(crate) struct TileProduct<'a> {
    /// `rows` rows of `chunks` × 16 pairs, `a_stride` apart.
    pub(crate) a: &'a [f32],
    pub(crate) a_stride: usize,
    /// `chunks` × 16 rows of `tiles` × 16 pairs, `b_stride` apart.
    pub(crate) b: &'a [f32],
    pub(crate) b_stride: usize,
    /// `rows` rows of `tiles` × 16 elements, `c_stride` apart.
    pub(crate) c: &'a mut [f32],
    pub(crate) c_stride: usize,
    pub(crate) rows: usize,
    pub(crate) chunks: usize,
    /// 1 to 4.
    pub(crate) tiles: usize,
    pub(crate) add: bool,
}

impl TileProduct<'_> {
    /// True if the operands are as long as their sizes and strides say.
    fn is_in_bounds(&self) -> bool {
        let Self { rows, chunks, tiles, a_stride, b_stride, c_stride, .. } = *self;
        let holds = |elements: &[f32], lines: usize, stride: usize, line: usize| {
            (lines - 1)
                .checked_mul(stride)
                .and_then(|before| before.checked_add(line))
                .is_some_and(|end| end <= elements.len())
        };
        (1..=MAX_TILES).contains(&tiles)
            && holds(self.a, rows, a_stride, chunks * TILE_SIZE)
            && holds(self.b, chunks * TILE_SIZE, b_stride, tiles * TILE_SIZE)
            && holds(self.c, rows, c_stride, tiles * TILE_SIZE)
    }
}

impl TileUnit {
    /// Computes a product. `token` is that of the unit.
    pub(crate) fn run(self, token: IsaToken, product: TileProduct<'_>) {
        if product.rows == 0 || product.chunks == 0 {
            return;
        }
        assert!(product.is_in_bounds(), "operands of a tile product are too short");
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => hardware::run(product),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Amx => token.run::<_, TILE_SIZE>(1, Emulation(product)),
            Self::Emulated => token.run::<_, TILE_SIZE>(1, Emulation(product)),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod hardware {
    use std::arch::asm;

    use super::{TILE_SIZE, TileProduct};

    /// Operand of `LDTILECFG`.
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl Config {
        /// Tiles 0 to 3 are C, 4 is A, each of `rows` rows; 5 is B.
        fn new(rows: usize) -> Self {
            let mut config = Self {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                row_bytes: [0; 16],
                rows: [0; 16],
            };
            for tile in 0..6 {
                config.row_bytes[tile] = 64;
                config.rows[tile] = if tile < 5 { rows as u8 } else { TILE_SIZE as u8 };
            }
            config
        }
    }

    /// Computes a product whose operands are in bounds.
    pub(super) fn run(product: TileProduct<'_>) {
        let TileProduct { a, a_stride, b, b_stride, c, c_stride, rows, chunks, tiles, add } =
            product;
        let mut first = 0;
        while first < rows {
            let block = (rows - first).min(TILE_SIZE);
            if first == 0 || block < TILE_SIZE {
                let config = Config::new(block);
                // SAFETY: a unit of this kind exists only where `amx_refusal` is `None`. The
                // operand is 64 readable bytes that describe tiles within palette 1. No code of
                // this process depends on the contents of tiles across calls.
                unsafe {
                    asm!("ldtilecfg [{config}]", config = in(reg) &raw const config,
                        options(nostack, preserves_flags, readonly));
                }
            }
            let pointers = (
                a[first * a_stride..].as_ptr(),
                b.as_ptr(),
                c[first * c_stride..].as_mut_ptr(),
                [a_stride, b_stride, c_stride].map(|stride| stride * size_of::<f32>()),
            );
            // SAFETY: the caller has checked that `rows` rows of A and C, and `chunks` × 16 rows of
            // B, are as long as the tiles that are read and written here, with these strides.
            unsafe {
                match tiles {
                    1 => block_product::<1>(pointers, chunks, add),
                    2 => block_product::<2>(pointers, chunks, add),
                    3 => block_product::<3>(pointers, chunks, add),
                    _ => block_product::<4>(pointers, chunks, add),
                }
            }
            first += block;
        }
        // SAFETY: as for the configuration. Released tiles need not be saved in a context switch.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }

    type Pointers = (*const f32, *const f32, *mut f32, [usize; 3]);

    /// Computes the rows of C that the configuration names.
    ///
    /// # Safety
    /// The tiles are configured by [`Config::new`]. Row `i` of A is readable from `a + i·stride` on
    /// for `chunks` × 64 bytes, row `k` of B for `TILES` × 64 bytes, and row `i` of C is readable
    /// and writable for `TILES` × 64 bytes, with strides in bytes.
    #[inline(always)]
    unsafe fn block_product<const TILES: usize>(
        (a, b, c, [a_stride, b_stride, c_stride]): Pointers,
        chunks: usize,
        add: bool,
    ) {
        // one block of assembly: the compiler makes no promise about tiles between two
        macro_rules! product {
            ($($tile:literal)*) => {
                asm!(
                    "test {add}, {add}",
                    "jz 2f",
                    $(concat!("tileloadd tmm", $tile, ", [{c} + {c_stride}*1 + ", $tile, "*64]"),)*
                    "jmp 3f",
                    "2:",
                    $(concat!("tilezero tmm", $tile),)*
                    "3:",
                    "tileloadd tmm4, [{a} + {a_stride}*1]",
                    $(
                        concat!("tileloadd tmm5, [{b} + {b_stride}*1 + ", $tile, "*64]"),
                        concat!("tdpbf16ps tmm", $tile, ", tmm4, tmm5"),
                    )*
                    "add {a}, 64",
                    "add {b}, {step}",
                    "dec {chunks}",
                    "jnz 3b",
                    $(concat!("tilestored [{c} + {c_stride}*1 + ", $tile, "*64], tmm", $tile),)*
                    add = in(reg) usize::from(add),
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    c = in(reg) c,
                    a_stride = in(reg) a_stride,
                    b_stride = in(reg) b_stride,
                    c_stride = in(reg) c_stride,
                    step = in(reg) b_stride * TILE_SIZE,
                    chunks = inout(reg) chunks => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                    out("tmm5") _,
                    options(nostack),
                )
            };
        }
        // SAFETY: by the conditions on the caller, every address of a tile is valid; `chunks` is
        // not 0.
        unsafe {
            match TILES {
                1 => product!(0),
                2 => product!(0 1),
                3 => product!(0 1 2),
                _ => product!(0 1 2 3),
            }
        }
    }
}

/// A product by scalar arithmetic, in vectors of lanes where the compiler can.
struct Emulation<'a>(TileProduct<'a>);

impl ArrayKernel for Emulation<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let TileProduct { a, a_stride, b, b_stride, c, c_stride, rows, chunks, tiles, add } =
            self.0;
        for row in 0..rows {
            let a = &a[row * a_stride..][..chunks * TILE_SIZE];
            for tile in 0..tiles {
                let Some(c) = c[row * c_stride + tile * TILE_SIZE..].first_chunk_mut() else {
                    return;
                };
                if !add {
                    *c = [0.0; TILE_SIZE];
                }
                for chunk in 0..chunks {
                    let mut chains = [[0.0f32; TILE_SIZE]; 2];
                    for k in chunk * TILE_SIZE..(chunk + 1) * TILE_SIZE {
                        let b = &b[k * b_stride + tile * TILE_SIZE..];
                        let Some(b) = b.first_chunk::<TILE_SIZE>() else { return };
                        for (half, chain) in chains.iter_mut().enumerate() {
                            let b = std::array::from_fn(|lane| element(b[lane], half));
                            *chain = step(element(a[k], half), &b, chain);
                        }
                    }
                    let [even, odd] = chains;
                    *c = std::array::from_fn(|lane| sum(c[lane], sum(even[lane], odd[lane])));
                }
            }
        }
    }
}

/// Returns element `half` of a pair, a subnormal one as 0.
#[inline(always)]
fn element(pair: f32, half: usize) -> f32 {
    let bits = if half == 0 { pair.to_bits() << 16 } else { pair.to_bits() & 0xffff_0000 };
    without_subnormals(f32::from_bits(bits))
}

#[inline(always)]
fn without_subnormals(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

/// Computes one step of the chains of 16 lanes.
#[inline(always)]
fn step(a: f32, b: &[f32; TILE_SIZE], chain: &[f32; TILE_SIZE]) -> [f32; TILE_SIZE] {
    let mut is_special = false;
    let next = std::array::from_fn(|lane| {
        let next = a.mul_add(b[lane], chain[lane]);
        is_special |= next.is_nan() | (next.abs() == f32::MIN_POSITIVE);
        without_subnormals(next)
    });
    if is_special {
        return std::array::from_fn(|lane| special_step(a, b[lane], chain[lane]));
    }
    next
}

/// Result of an invalid operation.
const INVALID: f32 = f32::from_bits(0xffc0_0000);

/// Computes a·b + chain where NaN or the smallest normal number may result.
fn special_step(a: f32, b: f32, chain: f32) -> f32 {
    let is_invalid = a.is_infinite() && b == 0.0 || a == 0.0 && b.is_infinite();
    match first_nan([a, b, chain]) {
        Some(nan) => nan,
        None if is_invalid => INVALID,
        None => rounded(a.mul_add(b, chain), f64::from(a) * f64::from(b) + f64::from(chain)),
    }
}

/// Computes a + b.
fn sum(a: f32, b: f32) -> f32 {
    let [a, b] = [a, b].map(without_subnormals);
    first_nan([a, b]).unwrap_or_else(|| rounded(a + b, f64::from(a) + f64::from(b)))
}

/// Returns the first NaN, quiet.
fn first_nan<const N: usize>(operands: [f32; N]) -> Option<f32> {
    const QUIET: u32 = 1 << 22;
    let nan = operands.into_iter().find(|operand| operand.is_nan())?;
    Some(f32::from_bits(nan.to_bits() | QUIET))
}

/// Returns a rounded result as it is written. The smallest normal number stays only if rounding
/// with an unbounded exponent reaches it.
fn rounded(result: f32, exact: f64) -> f32 {
    let smallest = f64::from(f32::MIN_POSITIVE);
    let half_a_unit_below = smallest / f64::from(1 << 25);
    if result.is_nan() {
        INVALID
    } else if result.abs() == f32::MIN_POSITIVE && exact.abs() < smallest - half_a_unit_below {
        0f32.copysign(result)
    } else {
        without_subnormals(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;

    /// Bit patterns without a pattern.
    struct Bits(u64);

    impl Bits {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            self.0 >> 16
        }

        /// A bf16: of magnitude about 1, about 2⁻⁶³ (products near the smallest normal number), or
        /// any bits.
        fn bf16(&mut self, class: usize) -> u16 {
            let bits = self.next();
            let exponent = match class {
                0 => 120 + bits % 12,
                1 => 62 + bits % 3,
                _ => return (bits >> 8) as u16,
            };
            (bits >> 20 & 0x8000 | exponent << 7 | bits >> 30 & 0x7f) as u16
        }
    }

    fn emulated(product: TileProduct<'_>) {
        TileUnit::Emulated.run(IsaToken::new(Isa::AmxEmulated).unwrap(), product);
    }

    #[test]
    fn an_element_has_two_chains_that_are_added_to_it() {
        const UNIT: f32 = f32::EPSILON;
        let pair = |low: f32, high: f32| {
            let [low, high] = [low, high].map(|x| u32::from(half::bf16::from_f32(x).to_bits()));
            f32::from_bits(low | high << 16)
        };
        let mut a = [0.0; 16];
        let mut b = [[0.0; 16]; 16];
        // low: 1 + 2⁻²⁴ rounds to 1 twice; high: the sum of both is 2⁻²³
        a[..3].copy_from_slice(&[
            pair(1.0, UNIT / 2.0),
            pair(UNIT / 2.0, UNIT / 2.0),
            pair(UNIT / 2.0, 0.0),
        ]);
        b[..3].fill([pair(1.0, 1.0); 16]);
        let mut c = [0.0; 16];
        emulated(TileProduct {
            a: &a,
            a_stride: 16,
            b: b.as_flattened(),
            b_stride: 16,
            c: &mut c,
            c_stride: 16,
            rows: 1,
            chunks: 1,
            tiles: 1,
            add: true,
        });
        assert_eq!(c, [1.0 + UNIT; 16]);
        // 0·NaN and 0·∞ are NaN, subnormal factors are 0
        for (factor, other, wanted) in [
            (0.0, f32::NAN, None),
            (0.0, f32::INFINITY, None),
            (1e-39, 1e38, Some(0.0)),
            (1e-30, 1e-30, Some(0.0)),
        ] {
            assert_eq!(
                Some(special_step(without_subnormals(factor), other, 0.0)).filter(|x| !x.is_nan()),
                wanted
            );
        }
    }

    #[test]
    fn the_instructions_have_the_bits_of_the_emulation() {
        let Ok(token) = IsaToken::new(Isa::Amx) else {
            return eprintln!("NOT RUN: this processor lacks AMX");
        };
        let mut bits = Bits(11);
        for number in 0..3000 {
            let class = number % 3;
            let rows = 1 + number % 40;
            let (chunks, tiles) = (1 + number % 3, 1 + number % 4);
            let mut list = |len: usize| -> Vec<f32> {
                (0..len)
                    .map(|_| {
                        let [low, high] = [(); 2].map(|()| u32::from(bits.bf16(class)));
                        f32::from_bits(low | high << 16)
                    })
                    .collect()
            };
            let [a_stride, b_stride, c_stride] = [chunks * 16, tiles * 16 + 16, tiles * 16];
            let (a, b, c) =
                (list(rows * a_stride), list(chunks * 16 * b_stride), list(rows * c_stride));
            let [got, want] = [TileUnit::Amx, TileUnit::Emulated].map(|unit| {
                let mut c = c.clone();
                unit.run(
                    token,
                    TileProduct {
                        a: &a,
                        a_stride,
                        b: &b,
                        b_stride,
                        c: &mut c,
                        c_stride,
                        rows,
                        chunks,
                        tiles,
                        add: number % 2 == 0,
                    },
                );
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            assert_eq!(got, want, "{number}");
        }
    }
}
