//! Descriptors of collective calls, and their encoding for the all-gather.

use annulus_core::{Fingerprint, Result};

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

    /// Returns a digest of names and values, in order.
    pub fn fingerprint(&self) -> u64 {
        let add = |digest: Fingerprint, field: &Field| {
            digest.bytes(field.name.as_bytes()).number(field.value)
        };
        self.fields.iter().fold(Fingerprint::new(), add).finish()
    }

    /// Returns a digest of the names, in order. Values are compared one by one if it is equal.
    fn names(&self) -> u64 {
        let add = |digest: Fingerprint, field: &Field| {
            digest.number(field.name.len() as u64).bytes(field.name.as_bytes())
        };
        self.fields.iter().fold(Fingerprint::new(), add).finish()
    }
}

/// Returns the first [`LONGEST_TEXT`] bytes of a text, or a few less to end with a character.
pub(super) fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(LONGEST_TEXT))
        .rev()
        .find(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    &text[..end]
}

/// Encodes what one rank contributes to an agreement, behind the versions: little-endian,
/// `[1][error text]` or
/// `[0][digest of names][values…]([index of a field u16][length u16][text])*`.
pub(super) fn encode(local: &Result<Descriptor>, bytes: &mut Vec<u8>) {
    let descriptor = match local {
        Err(error) => {
            bytes.push(1);
            bytes.extend_from_slice(cut(&error.to_string()).as_bytes());
            return;
        }
        Ok(descriptor) => descriptor,
    };
    bytes.push(0);
    bytes.extend_from_slice(&descriptor.names().to_le_bytes());
    for field in &descriptor.fields {
        bytes.extend_from_slice(&field.value.to_le_bytes());
    }
    for (index, field) in descriptor.fields.iter().enumerate() {
        let Some(text) = &field.text else { continue };
        let text = cut(text);
        for number in [index, text.len()] {
            bytes.extend_from_slice(&u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes());
        }
        bytes.extend_from_slice(text.as_bytes());
    }
}

/// Decoded contribution of one rank.
pub(super) enum Contribution<'a> {
    /// The rank refuses the call, with this error text.
    Refusal(String),
    Arguments(EncodedFields<'a>),
}

/// Fields of an encoded descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct EncodedFields<'a> {
    /// Digest of the names.
    pub(super) names: u64,
    values_and_texts: &'a [u8],
}

/// Decodes a contribution; `None` if it is malformed.
pub(super) fn decode(mut bytes: &[u8]) -> Option<Contribution<'_>> {
    match take(&mut bytes)? {
        [0] => {
            let names = u64::from_le_bytes(take(&mut bytes)?);
            Some(Contribution::Arguments(EncodedFields { names, values_and_texts: bytes }))
        }
        [1] => Some(Contribution::Refusal(String::from_utf8_lossy(bytes).into_owned())),
        _ => None,
    }
}

impl EncodedFields<'_> {
    /// Returns the value of field `index`; `None` if it is malformed.
    pub(super) fn value(&self, index: usize) -> Option<u64> {
        Some(u64::from_le_bytes(take(&mut self.values_and_texts.get(8 * index..)?)?))
    }

    /// Returns field `index` of `fields` as an error shows it; `None` if it is malformed.
    pub(super) fn text(&self, fields: usize, index: usize) -> Option<String> {
        let mut texts = self.values_and_texts.get(8 * fields..)?;
        while !texts.is_empty() {
            let (field, text) = take_text(&mut texts)?;
            if field == index {
                return Some(String::from_utf8_lossy(text).into_owned());
            }
        }
        self.value(index).map(|value| value.to_string())
    }

    /// True if these are `fields` values and well-formed texts.
    pub(super) fn are_well_formed(&self, fields: usize) -> bool {
        let Some(mut texts) = self.values_and_texts.get(8 * fields..) else { return false };
        while !texts.is_empty() {
            if take_text(&mut texts).is_none() {
                return false;
            }
        }
        true
    }
}

/// Takes a text and the index of its field from the front.
fn take_text<'a>(bytes: &mut &'a [u8]) -> Option<(usize, &'a [u8])> {
    let field = u16::from_le_bytes(take(bytes)?);
    let length = u16::from_le_bytes(take(bytes)?);
    let (text, others) = bytes.split_at_checked(length.into())?;
    *bytes = others;
    Some((field.into(), text))
}

/// Takes `N` bytes from the front.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*front)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_tell_descriptors_apart() {
        let base = Descriptor::new().field("a", 1).field("b", 2);
        assert_eq!(
            base.fingerprint(),
            Descriptor::new().field("a", 1).field_as("b", 2, "two").fingerprint()
        );
        assert_ne!(base.fingerprint(), Descriptor::new().field("b", 2).field("a", 1).fingerprint());
        assert_ne!(base.fingerprint(), Descriptor::new().field("a", 1).field("b", 3).fingerprint());
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut(&"é".repeat(LONGEST_TEXT)).len(), LONGEST_TEXT);
        assert_eq!(cut(&format!("x{}", "é".repeat(LONGEST_TEXT))).len(), LONGEST_TEXT - 1);
    }
}
