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
//! The tile registers are configured and released in each product: 55 ns on a Xeon. A configuration
//! that lives longer would be lost in a signal handler that jumps, or to another user of the tiles
//! on this thread.
//!
//! # Source
//! Intel's instruction set reference, `TDPBF16PS`. The order of the two chains and the treatment of
//! NaN were compared with a processor, bit for bit.

use crate::{
    simd::{
        dispatch::{ArrayKernel, IsaToken, Real, SimdKernel},
        tile_unit::{TILE_SIZE, TileUnit},
        vector::Vector,
    },
    tile::operands::Previous,
};

/// Maximum tiles of B and C in one product: their registers, one of A and one of B.
const MAX_TILES: usize = 4;

/// Maximum lanes of B and C in one product.
pub(crate) const MAX_TILE_LANES: usize = MAX_TILES * TILE_SIZE;

/// C = Σ A·B, C += Σ A·B or C = C·rescale + Σ A·B over some passes, in their order. Elements of A
/// and B are pairs of bf16.
///
/// The sum starts at 0 and is rounded into C once, as in the products of vectors.
pub(crate) struct TileProduct<'a> {
    /// `rows` rows of `chunks` × 16 pairs, `a_stride` apart.
    pub(crate) a: &'a [f32],
    pub(crate) a_stride: usize,
    /// `chunks` × 16 rows of `tiles` × 16 pairs, `b_stride` apart.
    pub(crate) b: &'a [f32],
    pub(crate) b_stride: usize,
    /// First elements of A and B of each pass.
    pub(crate) passes: &'a [[usize; 2]],
    /// `rows` rows of `tiles` × 16 elements, `c_stride` apart.
    pub(crate) c: &'a mut [f32],
    pub(crate) c_stride: usize,
    pub(crate) previous: Previous<'a, f32>,
    /// Powers of two by which the rows of A and the lanes of B were multiplied, and by which the
    /// sum is divided. An empty list: 1. NaN: the sum is left as it is.
    pub(crate) factors: Option<[&'a [f32]; 2]>,
    pub(crate) rows: usize,
    pub(crate) chunks: usize,
    /// 1 to 4.
    pub(crate) tiles: usize,
}

impl TileProduct<'_> {
    /// True if the operands are as long as their sizes and strides say.
    fn is_in_bounds(&self) -> bool {
        let Self { rows, chunks, tiles, a_stride, b_stride, c_stride, .. } = *self;
        let holds = |elements: usize, first: usize, lines: usize, stride: usize, line: usize| {
            (lines - 1)
                .checked_mul(stride)
                .and_then(|before| before.checked_add(line)?.checked_add(first))
                .is_some_and(|end| end <= elements)
        };
        (1..=MAX_TILES).contains(&tiles)
            && self.passes.iter().all(|&[a, b]| {
                holds(self.a.len(), a, rows, a_stride, chunks * TILE_SIZE)
                    && holds(self.b.len(), b, chunks * TILE_SIZE, b_stride, tiles * TILE_SIZE)
            })
            && holds(self.c.len(), 0, rows, c_stride, tiles * TILE_SIZE)
    }
}

/// At most 16 rows of a product, which overwrite C.
struct Block<'a> {
    a: &'a [f32],
    a_stride: usize,
    b: &'a [f32],
    b_stride: usize,
    passes: &'a [[usize; 2]],
    c: &'a mut [f32],
    c_stride: usize,
    rows: usize,
    chunks: usize,
    tiles: usize,
}

impl TileUnit {
    /// Computes a product. `token` is that of the unit.
    pub(crate) fn run(self, token: IsaToken, product: TileProduct<'_>) {
        let TileProduct { rows, chunks, tiles, c_stride, previous, factors, .. } = product;
        if rows == 0 || chunks == 0 {
            return;
        }
        assert!(product.is_in_bounds(), "operands of a tile product are too short");
        let mut sums = [0.0; TILE_SIZE * MAX_TILE_LANES];
        let sums_stride = tiles * TILE_SIZE;
        #[cfg(target_arch = "x86_64")]
        let mut configuration = hardware::Configuration::default();
        for first in (0..rows).step_by(TILE_SIZE) {
            let rows = (rows - first).min(TILE_SIZE);
            let c = &mut product.c[first * c_stride..];
            let overwrites = matches!(previous, Previous::Overwrite);
            let (into, into_stride) =
                if overwrites { (&mut *c, c_stride) } else { (&mut sums[..], sums_stride) };
            let block = Block {
                a: &product.a[first * product.a_stride..],
                a_stride: product.a_stride,
                b: product.b,
                b_stride: product.b_stride,
                passes: product.passes,
                c: into,
                c_stride: into_stride,
                rows,
                chunks,
                tiles,
            };
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Amx => configuration.run(block),
                #[cfg(not(target_arch = "x86_64"))]
                Self::Amx => token.run::<_, TILE_SIZE>(1, Emulation(block)),
                Self::Emulated => token.run::<_, TILE_SIZE>(1, Emulation(block)),
            }
            let (into, into_stride) =
                if overwrites { (&mut *c, c_stride) } else { (&mut sums[..], sums_stride) };
            if let Some([of_rows, of_lanes]) = factors {
                let of_rows = of_rows.get(first..).unwrap_or_default();
                for (row, line) in into.chunks_mut(into_stride).enumerate().take(rows) {
                    divide(&mut line[..sums_stride], of_rows.get(row).copied(), of_lanes);
                }
            }
            if !overwrites {
                let rescale = previous.rescale();
                f32::run_kernel(
                    token,
                    1,
                    AddSums { sums: &sums, c, c_stride, rows, tiles, rescale },
                );
            }
        }
    }
}

/// Divides sums by the factors of their row and lanes. Exact but for results that are subnormal.
fn divide(sums: &mut [f32], of_row: Option<f32>, of_lanes: &[f32]) {
    let of_row = of_row.unwrap_or(1.0);
    for (lane, sum) in sums.iter_mut().enumerate() {
        let factor = f64::from(of_row) * f64::from(of_lanes.get(lane).copied().unwrap_or(1.0));
        if factor != 1.0 && !factor.is_nan() {
            *sum = (f64::from(*sum) / factor) as f32;
        }
    }
}

/// C ← C + sums or C·rescale + sums.
struct AddSums<'a> {
    /// Rows of `tiles` × 16 elements.
    sums: &'a [f32],
    c: &'a mut [f32],
    c_stride: usize,
    rows: usize,
    tiles: usize,
    rescale: Option<&'a [f32]>,
}

impl SimdKernel<f32> for AddSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<f32>, const ROWS: usize, const VECTORS: usize>(self) {
        let width = self.tiles * TILE_SIZE;
        let rescale = self.rescale.map(V::strip::<1>);
        for (sums, c) in
            self.sums.chunks_exact(width).zip(self.c.chunks_mut(self.c_stride)).take(self.rows)
        {
            let lines = V::strip::<1>(sums).iter().zip(V::strip_mut::<1>(&mut c[..width]));
            for (v, ([sum], [c])) in lines.enumerate() {
                let (sum, old) = (V::load(sum), V::load(c));
                match rescale.and_then(|rescale| rescale.get(v)) {
                    Some([rescale]) => V::load(rescale).multiply_add(old, sum).store(c),
                    None => old.plus(sum).store(c),
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod hardware {
    use std::arch::asm;

    use super::{Block, TILE_SIZE};

    /// Operand of `LDTILECFG`.
    #[repr(C, align(64))]
    struct Layout {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    impl Layout {
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

    /// Configuration of the tiles, released when it is dropped.
    #[derive(Default)]
    pub(super) struct Configuration {
        /// Rows of A and C; 0 before the first block.
        rows: usize,
    }

    impl Drop for Configuration {
        fn drop(&mut self) {
            if self.rows > 0 {
                // SAFETY: a block has run, so that the processor has the instruction. Released
                // tiles need not be saved in a context switch.
                unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
            }
        }
    }

    impl Configuration {
        /// Computes a block whose operands are in bounds. Called only where AMX is available.
        pub(super) fn run(&mut self, block: Block<'_>) {
            if self.rows != block.rows {
                self.rows = block.rows;
                let layout = Layout::new(block.rows);
                // SAFETY: a unit of this kind exists only where this process may use AMX. The
                // operand is 64 readable bytes that describe tiles within palette 1. No code of
                // this process depends on the contents of tiles across calls.
                unsafe {
                    asm!("ldtilecfg [{layout}]", layout = in(reg) &raw const layout,
                        options(nostack, preserves_flags, readonly));
                }
            }
            // SAFETY: the caller has checked that the rows of A and C, and `chunks` × 16 rows of B,
            // are as long as the tiles that are read and written here, with these strides and, of A
            // and B, from the first elements of each pass on. There is a pass and a chunk.
            unsafe {
                match block.tiles {
                    1 => multiply::<1>(block),
                    2 => multiply::<2>(block),
                    3 => multiply::<3>(block),
                    _ => multiply::<4>(block),
                }
            }
        }
    }

    /// Computes the rows of C that the configuration names.
    ///
    /// # Safety
    /// The tiles are configured by [`Layout::new`]. For each pass, `rows` rows of A are readable
    /// from its first element of A on, and `chunks` × 16 rows of B from its first element of B on,
    /// as long as the tiles. `rows` rows of C are writable. There is a pass and a chunk.
    #[inline(always)]
    unsafe fn multiply<const TILES: usize>(block: Block<'_>) {
        let Block { a, a_stride, b, b_stride, passes, c, c_stride, chunks, .. } = block;
        let [a_stride, b_stride, c_stride] =
            [a_stride, b_stride, c_stride].map(|stride| stride * size_of::<f32>());
        // one block of assembly: the compiler makes no promise about tiles between two
        macro_rules! product {
            ($($tile:literal)*) => {
                asm!(
                    $(concat!("tilezero tmm", $tile),)*
                    "2:",
                    "mov {a_chunk}, [{pass}]",
                    "mov {b_chunk}, [{pass} + 8]",
                    "lea {a_chunk}, [{a} + {a_chunk}*4]",
                    "lea {b_chunk}, [{b} + {b_chunk}*4]",
                    "mov {chunk}, {chunks}",
                    "3:",
                    "tileloadd tmm4, [{a_chunk} + {a_stride}*1]",
                    $(
                        concat!("tileloadd tmm5, [{b_chunk} + {b_stride}*1 + ", $tile, "*64]"),
                        concat!("tdpbf16ps tmm", $tile, ", tmm4, tmm5"),
                    )*
                    "add {a_chunk}, 64",
                    // 16 rows of B
                    "lea {b_chunk}, [{b_chunk} + {b_stride}*8]",
                    "lea {b_chunk}, [{b_chunk} + {b_stride}*8]",
                    "dec {chunk}",
                    "jnz 3b",
                    "add {pass}, 16",
                    "cmp {pass}, {last}",
                    "jne 2b",
                    $(concat!("tilestored [{c} + {c_stride}*1 + ", $tile, "*64], tmm", $tile),)*
                    a = in(reg) a.as_ptr(),
                    b = in(reg) b.as_ptr(),
                    c = in(reg) c.as_mut_ptr(),
                    a_stride = in(reg) a_stride,
                    b_stride = in(reg) b_stride,
                    c_stride = in(reg) c_stride,
                    pass = inout(reg) passes.as_ptr_range().start => _,
                    last = in(reg) passes.as_ptr_range().end,
                    chunks = in(reg) chunks,
                    a_chunk = out(reg) _,
                    b_chunk = out(reg) _,
                    chunk = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                    out("tmm5") _,
                    options(nostack),
                )
            };
        }
        // SAFETY: by the conditions on the caller, every address of a tile is valid.
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
struct Emulation<'a>(Block<'a>);

impl ArrayKernel for Emulation<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let Block { a, a_stride, b, b_stride, passes, c, c_stride, rows, chunks, tiles } = self.0;
        for row in 0..rows {
            for tile in 0..tiles {
                let Some(c) = c[row * c_stride + tile * TILE_SIZE..].first_chunk_mut() else {
                    return;
                };
                *c = [0.0; TILE_SIZE];
                for &[first_a, first_b] in passes {
                    let a = &a[first_a + row * a_stride..][..chunks * TILE_SIZE];
                    for chunk in 0..chunks {
                        let mut chains = [[0.0f32; TILE_SIZE]; 2];
                        for k in chunk * TILE_SIZE..(chunk + 1) * TILE_SIZE {
                            let b = &b[first_b + k * b_stride + tile * TILE_SIZE..];
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
        // C + (sum of both chains): 1 + 2⁻²³, not 1 + 2⁻²⁴ twice
        let product = |c: &mut [f32], previous: Previous<'_, f32>| {
            emulated(TileProduct {
                a: &a,
                a_stride: 16,
                b: b.as_flattened(),
                b_stride: 16,
                passes: &[[0, 0]],
                c,
                c_stride: 16,
                previous,
                factors: Some([&[], &[0.5; 16]]),
                rows: 1,
                chunks: 1,
                tiles: 1,
            });
        };
        let mut c = [f32::NAN; 16];
        product(&mut c, Previous::Overwrite);
        assert_eq!(c, [2.0 + 2.0 * UNIT; 16]);
        product(&mut c, Previous::Rescale(&[3.0; 16]));
        assert_eq!(c, [8.0 + 8.0 * UNIT; 16]);
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
            // the second pass starts 16 pairs later
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
                        passes: &[[0, 0], [0, 16], [0, 0]][..1 + number % 3],
                        c: &mut c,
                        c_stride,
                        previous: [Previous::Overwrite, Previous::Add][number % 2],
                        factors: None,
                        rows,
                        chunks,
                        tiles,
                    },
                );
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            assert_eq!(got, want, "{number}");
        }
    }
}
