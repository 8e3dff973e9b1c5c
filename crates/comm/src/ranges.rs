//! Messages as byte ranges of a buffer, one after another.

use std::{ops::Range, sync::Arc};

use annulus_core::{Error, MessageHeader, Result, index};

/// Copies the bytes of the ranges `from_ranges` of `from`, one after another, into the ranges
/// `to_ranges` of `to`.
///
/// Stops where the shorter side ends; callers have compared the lengths and the bounds.
pub(crate) fn copy(
    from: &[u8],
    from_ranges: &[Range<u64>],
    to: &mut [u8],
    to_ranges: &[Range<u64>],
) {
    let mut sources = from_ranges.iter().cloned();
    let mut targets = to_ranges.iter().cloned();
    let mut source = 0..0;
    let mut target = 0..0;
    loop {
        while source.start == source.end {
            let Some(next) = sources.next() else { return };
            source = next;
        }
        while target.start == target.end {
            let Some(next) = targets.next() else { return };
            target = next;
        }
        let bytes = (source.end - source.start).min(target.end - target.start);
        to[index(target.start)..index(target.start + bytes)]
            .copy_from_slice(&from[index(source.start)..index(source.start + bytes)]);
        source.start += bytes;
        target.start += bytes;
    }
}

/// Returns the one range of a message of `bytes` bytes at the front of a buffer.
pub(crate) fn front(bytes: u64) -> Arc<[Range<u64>]> {
    std::iter::once(0..bytes).collect()
}

/// Checks that a message can be posted: its peer is a rank of this ring, and its ranges lie in a
/// buffer of `size` bytes.
pub(crate) fn check(header: &MessageHeader, ranks: usize, size: u64) -> Result<()> {
    if header.peer >= ranks {
        return Err(Error::invalid("header.peer", header.peer, format!("a rank below {ranks}")));
    }
    match header.ranges.iter().find(|range| range.start > range.end || range.end > size) {
        Some(range) => Err(Error::invalid(
            "header.ranges",
            format!("{range:?}"),
            format!("ascending ranges within {size} bytes"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_side_may_divide_the_bytes() {
        let from: Vec<u8> = (0..20).collect();
        let mut to = vec![0; 12];
        copy(&from, &[1..4, 4..4, 10..16], &mut to, &[0..0, 2..7, 8..12]);
        assert_eq!(to, [0, 0, 1, 2, 3, 10, 11, 0, 12, 13, 14, 15]);
    }

    #[test]
    fn empty_ranges_copy_nothing() {
        let mut to = [7; 2];
        copy(&[1, 2], std::slice::from_ref(&(1..1)), &mut to, &[]);
        assert_eq!(to, [7, 7]);
    }
}
