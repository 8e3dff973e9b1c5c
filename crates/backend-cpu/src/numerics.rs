//! Fingerprint of the arithmetic: ranks with the same one compute the same bits.

use annulus_core::Fingerprint;

use crate::simd::isa::Isa;

/// Version of the kernels' arithmetic. Increased by every change that alters a bit of a result: the
/// order of a sum, the size of a KV tile, a coefficient of e^x.
const VERSION: u32 = 2;

/// Returns the fingerprint of the kernels on `isa`.
///
/// The epilogue computes e^x and ln x of f64 by the C library, whose variants round differently on
/// different processors: its results at some points are part of the fingerprint.
pub fn id(isa: Isa) -> String {
    let points = (0..512u32).map(|index| f64::from(index) * 0.043 + 1e-3);
    let of_library = points.fold(Fingerprint::new(), |all, x| {
        all.number((-x).exp().to_bits()).number(x.ln().to_bits())
    });
    format!("cpu {} v{VERSION} libm {:016x}", isa.name(), of_library.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_have_their_own_fingerprint() {
        let ids = Isa::ALL.map(id);
        assert!(ids.iter().enumerate().all(|(index, id)| !ids[..index].contains(id)), "{ids:?}");
        assert_eq!(id(Isa::Portable), ids[0]);
    }
}
