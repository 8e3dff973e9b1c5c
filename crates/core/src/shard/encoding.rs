//! Encoding of a shard as bytes. Ranks exchange their shards with every new batch, so it is
//! compact.
//!
//! ```text
//! shard = 1 | list(rows) | count | list(positions)… | count | list(segments)…
//! list  = number of runs | for each: start − the number after the previous run | step | count
//! ```
//! Numbers are LEB128 (base 128, low digits first), signed ones after zigzag mapping (0, −1, 1, −2,
//! …) as in Protocol Buffers. A typical run takes about four bytes.

use super::Shard;
use crate::{Error, Result, Run, Runs};

/// The first byte: the version of the format.
const VERSION: u8 = 1;
/// Largest absolute value of a position, see [`crate::Batch::validate`].
const MAX_POSITION: i64 = i64::MAX / 4;

impl Shard {
    /// Encodes this shard; the bytes are equal on every machine.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        put_list(&mut bytes, &self.rows);
        for lists in [&self.positions, &self.segments] {
            put(&mut bytes, lists.len() as u64);
            lists.iter().for_each(|list| put_list(&mut bytes, list));
        }
        bytes
    }

    /// Decodes the result of [`Shard::encode`].
    ///
    /// The caller must check that the shard has the rows that the layout assigns to its rank: a few
    /// bytes can encode any number of rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `shard` if the bytes are malformed: truncated, lists of
    /// different lengths, negative row numbers, positions out of range, trailing bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.byte()? != VERSION {
            return Err(reader.error("another version", format!("version {VERSION}")));
        }
        let rows = reader.list(0, i64::MAX)?;
        let lists = |reader: &mut Reader<'_>, least, most| -> Result<Vec<Runs>> {
            let count = reader.count(1)?;
            (0..count)
                .map(|_| {
                    let list = reader.list(least, most)?;
                    if list.len() == rows.len() {
                        Ok(list)
                    } else {
                        let got = format!("a list of {}", list.len());
                        Err(reader.error(got, format!("{} numbers", rows.len())))
                    }
                })
                .collect()
        };
        let positions = lists(&mut reader, -MAX_POSITION, MAX_POSITION)?;
        let segments = lists(&mut reader, i64::MIN, i64::MAX)?;
        if positions.is_empty() {
            return Err(reader.error("no positions", "at least one list of them"));
        }
        if reader.at < bytes.len() {
            return Err(
                reader.error(format!("{} trailing bytes", bytes.len() - reader.at), "the end")
            );
        }
        Ok(Self { rows, positions, segments })
    }
}

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn put_signed(bytes: &mut Vec<u8>, number: i64) {
    put(bytes, (number << 1 ^ number >> 63).cast_unsigned());
}

fn put_list(bytes: &mut Vec<u8>, list: &Runs) {
    put(bytes, list.runs().len() as u64);
    let mut next = 0i64;
    for run in list.runs() {
        put_signed(bytes, run.start.wrapping_sub(next));
        put_signed(bytes, run.step);
        put(bytes, run.count);
        next = run.at(run.count);
    }
}

/// A cursor over encoded bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn error(&self, got: impl ToString, want: impl ToString) -> Error {
        Error::invalid(
            "shard",
            format!("{} at byte {} of {}", got.to_string(), self.at, self.bytes.len()),
            want,
        )
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = *self.bytes.get(self.at).ok_or_else(|| self.error("the end", "another byte"))?;
        self.at += 1;
        Ok(byte)
    }

    fn number(&mut self) -> Result<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let digit = u64::from(byte & 0x7f);
            // the tenth digit has one bit
            if digit << shift >> shift != digit {
                break;
            }
            number |= digit << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(self.error("more than 64 bits", "a number of 64 bits"))
    }

    fn signed(&mut self) -> Result<i64> {
        let number = self.number()?;
        Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    /// Reads the number of elements that take at least `least_bytes` each. A false number is an
    /// error, so that it cannot cause an allocation that is larger than the bytes justify.
    fn count(&mut self, least_bytes: u64) -> Result<usize> {
        let count = self.number()?;
        let most = (self.bytes.len() - self.at) as u64 / least_bytes;
        if count > most {
            Err(self.error(format!("a count of {count}"), format!("at most {most}")))
        } else {
            Ok(crate::index(count))
        }
    }

    fn list(&mut self, least: i64, most: i64) -> Result<Runs> {
        let mut list = Runs::new();
        let mut next = 0i64;
        for _ in 0..self.count(3)? {
            let run = Run {
                start: next.wrapping_add(self.signed()?),
                step: self.signed()?,
                count: self.number()?,
            };
            let last = i128::from(run.start) + i128::from(run.step) * (i128::from(run.count) - 1);
            let within = |number: i128| (i128::from(least)..=i128::from(most)).contains(&number);
            let fits = list
                .len()
                .checked_add(run.count)
                .is_some_and(|len| len <= i64::MAX.cast_unsigned());
            if run.count == 0 || !fits || !within(run.start.into()) || !within(last) {
                return Err(self.error(
                    format!("{run:?}"),
                    format!("a run of numbers from {least} to {most}"),
                ));
            }
            list.push_run(run);
            next = run.at(run.count);
        }
        Ok(list)
    }
}
