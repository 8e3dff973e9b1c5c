//! Frames: control messages, encoded as a kind byte, little-endian numbers, and a payload.

use std::sync::Arc;

use annulus_core::{Channel, Error, HostBuffer, Result};

use super::messages::{Announcement, number as channel_number};
use crate::message::{MessageKey, cut};

/// A control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ControlFrame {
    /// The sender lives. The latest work that it knows of is number `count` of `rank`, and
    /// `age` nanoseconds old.
    Heartbeat { rank: u64, count: u64, age: u64 },
    /// The sender starts sending a message.
    Announce { context: u64, message: Announcement },
    /// Parts of all-gather `round` of a context.
    GatherParts { context: u64, round: u64, parts: Vec<PartRun> },
    /// `rank` failed first, with the error text `what`.
    Abort { rank: u64, what: String },
    /// `rank`, which is the sender unless the frame was forwarded, has left a context, or with it
    /// the endpoint. It has started `started` all-gathers, and of the rounds `unfinished` has not
    /// sent all that other ranks need.
    Leave { context: u64, rank: u64, started: u64, leaving: Leaving, unfinished: Vec<u64> },
    /// Message of `round` of that barrier.
    Barrier { round: u64 },
}

/// Equal parts of consecutive ranks in an all-gather.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PartRun {
    pub(super) first: u64,
    /// Number of ranks.
    pub(super) ranks: u64,
    pub(super) bytes: Arc<[u8]>,
}

/// Participant that a rank withdraws from the job with a last frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// A context.
    PlanContext,
    /// The endpoint, through the barrier that frees the communicators.
    MpiEndpoint,
    /// The endpoint after a failure, without the barrier.
    FailedEndpoint,
}

impl Leaving {
    const fn number(self) -> u64 {
        match self {
            Self::PlanContext => 0,
            Self::MpiEndpoint => 1,
            Self::FailedEndpoint => 2,
        }
    }

    const fn of_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::PlanContext),
            1 => Some(Self::MpiEndpoint),
            2 => Some(Self::FailedEndpoint),
            _ => None,
        }
    }
}

/// Longest error text in a frame, in bytes: long enough for the messages of this library, and below
/// the eager limit of Open MPI (4 KiB in shared memory), so that an abort leaves at once.
const LONGEST_TEXT: usize = 2000;

impl ControlFrame {
    /// Encodes the frame into a new buffer.
    pub(super) fn encode(&self) -> Result<HostBuffer> {
        let listed: Vec<u8>;
        let (kind, numbers, rest): (u8, &[u64], &[u8]) = match self {
            Self::Heartbeat { rank, count, age } => (0, &[*rank, *count, *age], &[]),
            Self::Announce { context, message } => {
                let &Announcement { key, step, bytes, piece, number } = message;
                let channel = channel_number(key.channel);
                (1, &[*context, channel, key.tag, step as u64, bytes, piece, number], &[])
            }
            Self::GatherParts { context, round, parts } => {
                let encoded = |PartRun { first, ranks, bytes }: &PartRun| {
                    let numbers = [*first, *ranks, bytes.len() as u64].map(u64::to_le_bytes);
                    [numbers.as_flattened(), bytes].concat()
                };
                listed = parts.iter().flat_map(encoded).collect();
                (2, &[*context, *round], &listed)
            }
            Self::Abort { rank, what } => (3, &[*rank], cut(what, LONGEST_TEXT).as_bytes()),
            Self::Leave { context, rank, started, leaving, unfinished } => {
                listed = unfinished.iter().flat_map(|round| round.to_le_bytes()).collect();
                (4, &[*context, *rank, *started, leaving.number()], &listed)
            }
            Self::Barrier { round } => (5, &[*round], &[]),
        };
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        let head: Vec<u8> = std::iter::once(kind).chain(numbers).collect();
        let mut buffer = HostBuffer::zeroed((head.len() + rest.len()) as u64)?;
        if let Some(bytes) = buffer.bytes_mut() {
            bytes[..head.len()].copy_from_slice(&head);
            bytes[head.len()..].copy_from_slice(rest);
        }
        Ok(buffer)
    }

    /// Decodes a frame from `peer`.
    pub(super) fn decode(bytes: &[u8], peer: usize) -> Result<Self> {
        let malformed = || Error::Comm {
            peer,
            step: 0,
            what: format!("a malformed control message of {} bytes", bytes.len()),
        };
        read(bytes, peer).ok_or_else(malformed)
    }
}

/// Decodes a frame from `peer`; `None` if it is malformed.
fn read(bytes: &[u8], peer: usize) -> Option<ControlFrame> {
    let (&kind, mut rest) = bytes.split_first()?;
    let mut next = || {
        let (number, behind) = rest.split_first_chunk::<8>()?;
        rest = behind;
        Some(u64::from_le_bytes(*number))
    };
    let frame = match kind {
        0 => ControlFrame::Heartbeat { rank: next()?, count: next()?, age: next()? },
        1 => ControlFrame::Announce {
            context: next()?,
            message: Announcement {
                key: MessageKey { peer, channel: channel(next()?)?, tag: next()? },
                step: usize::try_from(next()?).ok()?,
                bytes: next()?,
                piece: next()?,
                number: next()?,
            },
        },
        2 => ControlFrame::GatherParts {
            context: next()?,
            round: next()?,
            parts: parts(std::mem::take(&mut rest))?,
        },
        3 => ControlFrame::Abort {
            rank: next()?,
            what: String::from_utf8_lossy(std::mem::take(&mut rest)).into_owned(),
        },
        4 => ControlFrame::Leave {
            context: next()?,
            rank: next()?,
            started: next()?,
            leaving: Leaving::of_number(next()?)?,
            unfinished: numbers(std::mem::take(&mut rest))?,
        },
        5 => ControlFrame::Barrier { round: next()? },
        _ => return None,
    };
    rest.is_empty().then_some(frame)
}

/// Decodes parts of an all-gather: first rank, number of ranks, length and bytes of each run.
fn parts(mut bytes: &[u8]) -> Option<Vec<PartRun>> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let (head, rest) = bytes.split_first_chunk::<24>()?;
        let [first, ranks, length] = numbers(head)?.try_into().ok()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        parts.push(PartRun { first, ranks, bytes: part.into() });
        bytes = rest;
    }
    Some(parts)
}

fn numbers(bytes: &[u8]) -> Option<Vec<u64>> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| numbers.iter().map(|number| u64::from_le_bytes(*number)).collect())
}

const fn channel(number: u64) -> Option<Channel> {
    match number {
        0 => Some(Channel::Kv),
        1 => Some(Channel::PartialGrad),
        2 => Some(Channel::FinalGrad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_truncated_ones_are_errors() {
        let run = |first, ranks, bytes: &[u8]| PartRun { first, ranks, bytes: bytes.into() };
        let announce = |channel| ControlFrame::Announce {
            context: 2,
            message: Announcement {
                key: MessageKey { peer: 1, channel, tag: u64::MAX },
                step: 3,
                bytes: 1 << 40,
                piece: 7,
                number: 8,
            },
        };
        let leave = |leaving| ControlFrame::Leave {
            context: 5,
            rank: 2,
            started: 3,
            leaving,
            unfinished: vec![1, u64::MAX],
        };
        let frames = [
            ControlFrame::Heartbeat { rank: 3, count: 7, age: u64::MAX },
            announce(Channel::Kv),
            announce(Channel::PartialGrad),
            announce(Channel::FinalGrad),
            ControlFrame::GatherParts {
                context: 1,
                round: 9,
                parts: vec![run(4, 1, &[1, 2, 3]), run(5, 7, &[]), run(0, 2, &[7; 20])],
            },
            ControlFrame::Abort { rank: 2, what: "é".into() },
            leave(Leaving::PlanContext),
            leave(Leaving::MpiEndpoint),
            leave(Leaving::FailedEndpoint),
            ControlFrame::Barrier { round: 12 },
        ];
        for frame in frames {
            let buffer = frame.encode().unwrap();
            assert_eq!(ControlFrame::decode(buffer.bytes(), 1), Ok(frame));
            for end in 0..buffer.bytes().len().min(9) {
                assert!(matches!(
                    ControlFrame::decode(&buffer.bytes()[..end], 1),
                    Err(Error::Comm { peer: 1, .. })
                ));
            }
        }
        assert!(ControlFrame::decode(&[[0].as_slice(), &[0; 25]].concat(), 1).is_err());
        assert!(ControlFrame::decode(&[6], 1).is_err());
        // a part that is shorter than its length, a list that ends within a number
        let parts =
            ControlFrame::GatherParts { context: 0, round: 9, parts: vec![run(4, 1, &[1, 2, 3])] };
        let whole = parts.encode().unwrap();
        assert!(ControlFrame::decode(&whole.bytes()[..whole.bytes().len() - 1], 1).is_err());
        assert!(ControlFrame::decode(&[[4].as_slice(), &[0; 36]].concat(), 1).is_err());
        // no way to leave
        assert!(ControlFrame::decode(&[[4].as_slice(), &[3; 32]].concat(), 1).is_err());
    }
}
