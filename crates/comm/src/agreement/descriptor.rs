//! Descriptors of collective calls, and their encoding for the all-gather.

use annulus_core::{Fingerprint, Result};

use crate::message::cut;

/// Longest text in a message, in bytes: an error of this library in full, so that an agreement
/// stays one short message per rank.
pub(super) const LONGEST_TEXT: usize = 400;

/// Arguments of a collective call, as named numbers that must be equal on all ranks, or of which
/// the ranks agree on the largest or on the sum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Descriptor {
    pub(super) fields: Vec<Field>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) name: &'static str,
    value: u64,
    text: Option<String>,
    pub(super) combination: Combination,
}

/// Derivation of one value of a field from those of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Combination {
    /// The values must be equal.
    Equal,
    /// The ranks agree on the largest.
    Largest,
    /// The ranks agree on the sum, modulo 2⁶⁴.
    Sum,
}

impl Descriptor {
    /// Creates a descriptor without fields, which equals any other of the same version.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a field that is shown as its number. Earlier fields are compared first.
    #[must_use]
    pub fn field(self, name: &'static str, value: u64) -> Self {
        self.combined(name, value, Combination::Equal)
    }

    /// Adds a field that an error shows as `text`. Only `value` is compared. The text is sent too,
    /// so keep it to a few words.
    #[must_use]
    pub fn field_as(mut self, name: &'static str, value: u64, text: impl ToString) -> Self {
        let text = Some(text.to_string());
        self.fields.push(Field { name, value, text, combination: Combination::Equal });
        self
    }

    /// Adds a field that may differ: [`agree`](super::agree) returns the largest value of all
    /// ranks.
    #[must_use]
    pub fn largest(self, name: &'static str, value: u64) -> Self {
        self.combined(name, value, Combination::Largest)
    }

    /// Adds a field that may differ: [`agree`](super::agree) returns the sum of the values of all
    /// ranks, modulo 2⁶⁴.
    #[must_use]
    pub fn sum(self, name: &'static str, value: u64) -> Self {
        self.combined(name, value, Combination::Sum)
    }

    fn combined(mut self, name: &'static str, value: u64, combination: Combination) -> Self {
        self.fields.push(Field { name, value, text: None, combination });
        self
    }

    /// Returns a digest of the names, in order. Values are compared one by one if it is equal.
    fn names(&self) -> u64 {
        let add = |digest: Fingerprint, field: &Field| {
            digest.number(field.name.len() as u64).bytes(field.name.as_bytes())
        };
        self.fields.iter().fold(Fingerprint::new(), add).finish()
    }
}

/// Encodes what one rank contributes to an agreement, behind the versions: little-endian,
/// `[1][error text]` or `[0][digest of names]([value][length u16][text])*`, with a text of length 0
/// for a field without one.
pub(super) fn encode(local: &Result<Descriptor>, bytes: &mut Vec<u8>) {
    let descriptor = match local {
        Err(error) => {
            bytes.push(1);
            bytes.extend_from_slice(cut(&error.to_string(), LONGEST_TEXT).as_bytes());
            return;
        }
        Ok(descriptor) => descriptor,
    };
    bytes.push(0);
    bytes.extend_from_slice(&descriptor.names().to_le_bytes());
    for field in &descriptor.fields {
        let text = cut(field.text.as_deref().unwrap_or_default(), LONGEST_TEXT);
        bytes.extend_from_slice(&field.value.to_le_bytes());
        bytes.extend_from_slice(&u16::try_from(text.len()).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
}

/// Fields of an encoded descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct EncodedFields<'a> {
    /// Digest of the names.
    pub(super) names: u64,
    values_and_texts: &'a [u8],
}

/// Value and text of a field of one rank.
pub(super) struct DecodedField<'a> {
    pub(super) value: u64,
    text: &'a [u8],
}

/// Decodes the contribution of a rank: its fields, or the error text with which it refuses the
/// call. `None` if it is malformed.
pub(super) fn decode(mut bytes: &[u8]) -> Option<Result<EncodedFields<'_>, String>> {
    match take(&mut bytes)? {
        [0] => {
            let names = u64::from_le_bytes(take(&mut bytes)?);
            Some(Ok(EncodedFields { names, values_and_texts: bytes }))
        }
        [1] => Some(Err(String::from_utf8_lossy(bytes).into_owned())),
        _ => None,
    }
}

impl<'a> EncodedFields<'a> {
    /// Decodes the fields; `None` if they are not `count` well-formed ones.
    pub(super) fn decode(&self, count: usize) -> Option<Vec<DecodedField<'a>>> {
        let mut bytes = self.values_and_texts;
        let mut fields = Vec::with_capacity(count);
        for _ in 0..count {
            let value = u64::from_le_bytes(take(&mut bytes)?);
            let length = u16::from_le_bytes(take(&mut bytes)?);
            let (text, rest) = bytes.split_at_checked(length.into())?;
            fields.push(DecodedField { value, text });
            bytes = rest;
        }
        bytes.is_empty().then_some(fields)
    }
}

impl DecodedField<'_> {
    /// Returns the field as an error shows it.
    pub(super) fn shown(&self) -> String {
        if self.text.is_empty() {
            return self.value.to_string();
        }
        String::from_utf8_lossy(self.text).into_owned()
    }
}

/// Takes `N` bytes from the front.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*front)
}
