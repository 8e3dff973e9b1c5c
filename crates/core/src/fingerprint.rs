//! 64-bit digests of arguments, by which ranks detect that theirs differ.
//!
//! The digest is FNV-1a, which detects mistakes but no deliberate collisions.

/// An FNV-1a digest of the data added so far.
///
/// # Source
/// Fowler, Noll, Vo: offset basis and prime of the 64-bit variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    /// Creates the digest of no data.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self
    }

    /// Adds a number, in little-endian order.
    pub fn number(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    /// Adds a text and its length, so that ("ab", "c") and ("a", "bc") differ.
    pub fn text(self, text: &str) -> Self {
        self.number(text.len() as u64).bytes(text.as_bytes())
    }

    /// Adds a number or its absence.
    pub fn optional(self, number: Option<u64>) -> Self {
        match number {
            Some(number) => self.number(1).number(number),
            None => self.number(0),
        }
    }

    /// Returns the digest.
    pub const fn finish(self) -> u64 {
        self.0
    }
}

impl std::fmt::Write for Fingerprint {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        *self = self.bytes(text.as_bytes());
        Ok(())
    }
}
