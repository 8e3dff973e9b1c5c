//! A 64-bit digest by which ranks notice that their arguments differ (FNV-1a; not a defence against an adversary).

/// A running FNV-1a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    /// The digest of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Digests more bytes.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self
    }

    /// Digests one number.
    pub fn number(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    /// Digests a text and its length, so that neighbouring texts do not run together.
    pub fn text(self, text: &str) -> Self {
        self.number(text.len() as u64).bytes(text.as_bytes())
    }

    /// Digests a number or its absence.
    pub fn optional(self, number: Option<u64>) -> Self {
        match number {
            Some(number) => self.number(1).number(number),
            None => self.number(0),
        }
    }

    /// The digest.
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
