//! Small messages: a header of fixed length, and the body that it announces.

use annulus::{Error, Result};
use annulus_core::{Channel, HostBuffer, index};

/// Tag of headers.
pub(super) const HEADER_TAG: i32 = 0;
/// Tag of bodies.
pub(super) const BODY_TAG: i32 = 1;
/// Bytes of a header: a mark with the kind, a number, the bytes of the body.
pub(super) const HEADER: u64 = 24;

/// Marks a header, so that a message of somebody else's is noticed: "annulu" and the kind.
const MARK: u64 = 0x616e_6e75_6c75_0000;

/// Maximum bytes of an error's text in a message.
const LONGEST_TEXT: usize = 2000;

/// Tag of the bytes of hops in a channel.
pub(super) const fn hop_tag(channel: Channel) -> i32 {
    match channel {
        Channel::Kv => 2,
        Channel::PartialGrad => 3,
        Channel::FinalGrad => 4,
    }
}

/// A small message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// The sender lives, and has worked this many times.
    Beat { worked: u64 },
    /// The sender's part of an all-gather.
    Part { round: u64, bytes: Vec<u8> },
    /// Rank `rank` failed first.
    Abort { rank: u64, what: String },
    /// The last message of the sender.
    Goodbye,
}

impl Frame {
    /// Header and body, in buffers of their own.
    pub(super) fn encode(&self) -> Result<[HostBuffer; 2]> {
        let (kind, number, body): (u64, u64, &[u8]) = match self {
            Self::Beat { worked } => (0, *worked, &[]),
            Self::Part { round, bytes } => (1, *round, bytes),
            Self::Abort { rank, what } => {
                (2, *rank, &what.as_bytes()[..what.len().min(LONGEST_TEXT)])
            }
            Self::Goodbye => (3, 0, &[]),
        };
        let header = [MARK | kind, number, body.len() as u64].map(u64::to_le_bytes).concat();
        Ok([buffer_of(&header)?, buffer_of(body)?])
    }

    /// Bytes of the body that a header announces.
    pub(super) fn body_bytes(header: &[u8], peer: usize) -> Result<u64> {
        let [mark, _, bytes] = numbers(header);
        if mark & !0xffff == MARK { Ok(bytes) } else { Err(nonsense(peer)) }
    }

    /// Reads a message of `peer`.
    pub(super) fn decode(header: &[u8], body: &[u8], peer: usize) -> Result<Self> {
        let [mark, number, _] = numbers(header);
        Ok(match mark & 0xffff {
            0 => Self::Beat { worked: number },
            1 => Self::Part { round: number, bytes: body.to_vec() },
            2 => Self::Abort { rank: number, what: String::from_utf8_lossy(body).into_owned() },
            3 => Self::Goodbye,
            _ => return Err(nonsense(peer)),
        })
    }
}

fn nonsense(peer: usize) -> Error {
    let what = "a message that is none of annulus".to_owned();
    Error::Comm { peer, step: 0, what }
}

/// The three numbers of a header.
fn numbers(header: &[u8]) -> [u64; 3] {
    let (words, _) = header.as_chunks::<8>();
    std::array::from_fn(|index| words.get(index).map_or(0, |word| u64::from_le_bytes(*word)))
}

fn buffer_of(bytes: &[u8]) -> Result<HostBuffer> {
    let mut buffer = HostBuffer::zeroed(bytes.len() as u64)?;
    if let Some(into) = buffer.bytes_mut() {
        into[..index(bytes.len() as u64)].copy_from_slice(bytes);
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were_and_others_are_errors() {
        for frame in [
            Frame::Beat { worked: 7 },
            Frame::Part { round: u64::MAX, bytes: vec![1, 2, 3] },
            Frame::Part { round: 2, bytes: vec![] },
            Frame::Abort { rank: 2, what: "é".into() },
            Frame::Goodbye,
        ] {
            let [header, body] = frame.encode().unwrap();
            assert_eq!(header.bytes().len() as u64, HEADER);
            let announced = Frame::body_bytes(header.bytes(), 1);
            assert_eq!(announced, Ok(body.bytes().len() as u64));
            assert_eq!(Frame::decode(header.bytes(), body.bytes(), 1), Ok(frame));
        }
        assert!(matches!(Frame::body_bytes(&[7; 24], 1), Err(Error::Comm { peer: 1, .. })));
        let unknown = [MARK | 9, 0, 0].map(u64::to_le_bytes).concat();
        assert!(Frame::decode(&unknown, &[], 1).is_err());
    }

    #[test]
    fn a_long_text_is_cut() {
        let frame = Frame::Abort { rank: 0, what: "x".repeat(3 * LONGEST_TEXT) };
        assert_eq!(frame.encode().unwrap()[1].bytes().len(), LONGEST_TEXT);
    }
}
