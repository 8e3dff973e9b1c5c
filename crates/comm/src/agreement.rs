//! A collective call succeeds on all ranks or fails on all ranks: agreement on what is to be done, and the closing status.
//!
//! Every rank packs what it was asked to do into a [`Descriptor`], or the error for which it refuses. One gather later all ranks hold the
//! same bytes and judge them alike, in this order:
//!
//! | what the gathered bytes show | error |
//! |---|---|
//! | ranks with different versions of annulus or of its wire format | [`Error::RankMismatch`], the same on all ranks |
//! | a rank that refused its arguments | its own error there, [`Error::Refused`] with the lowest such rank elsewhere |
//! | different fields | [`Error::RankMismatch`] with the first such field and the lowest rank that differs from rank 0 |
//! | bytes that are no descriptor | [`Error::Comm`] |
//!
//! A rank that dies or stays silent meanwhile is the transport's affair: see [`threads`](crate::threads).

use std::time::Duration;

use annulus_core::{Error, Fingerprint, Result, Space, Transport};

/// Changes whenever what ranks send to each other changes: packed descriptors, records, tags, rounds.
pub const WIRE_VERSION: u64 = 2;

/// How long one look at the transport may wait. Nothing depends on it but how often a wait is looked after.
const PATIENCE: Duration = Duration::from_millis(20);

/// Texts that travel are cut to this many bytes.
const LONGEST_TEXT: usize = 400;

/// The arguments of a collective call, as named numbers that must be equal on all ranks or of which
/// the largest is agreed upon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Descriptor {
    fields: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: &'static str,
    value: u64,
    text: Option<String>,
    /// Not compared: the ranks agree on the largest value.
    largest: bool,
}

impl Descriptor {
    /// A descriptor without fields: equal on all ranks of one version.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a field that reads as its number. Earlier fields are compared first.
    #[must_use]
    pub fn field(mut self, name: &'static str, value: u64) -> Self {
        self.fields.push(Entry { name, value, text: None, largest: false });
        self
    }

    /// Adds a field that reads as `text` in an error. Only `value` is compared; the text travels, so keep it to a few words.
    #[must_use]
    pub fn field_as(mut self, name: &'static str, value: u64, text: impl ToString) -> Self {
        let text = Some(text.to_string());
        self.fields.push(Entry { name, value, text, largest: false });
        self
    }

    /// Adds a field that may differ: [`agree`] returns the largest value of all ranks.
    #[must_use]
    pub fn largest(mut self, name: &'static str, value: u64) -> Self {
        self.fields.push(Entry { name, value, text: None, largest: true });
        self
    }

    /// A digest of names and values, in order.
    pub fn fingerprint(&self) -> u64 {
        let add = |digest: Fingerprint, entry: &Entry| {
            digest.bytes(entry.name.as_bytes()).number(entry.value)
        };
        self.fields.iter().fold(Fingerprint::new(), add).finish()
    }

    /// A digest of the names, in order: equal digests mean that the values can be compared one by one.
    fn names(&self) -> u64 {
        let add = |digest: Fingerprint, entry: &Entry| {
            digest.number(entry.name.len() as u64).bytes(entry.name.as_bytes())
        };
        self.fields.iter().fold(Fingerprint::new(), add).finish()
    }
}

/// Gives every rank's bytes to every rank, in the order of ranks.
///
/// # Ordering
/// Collective: every rank of the ring gathers the same `round`, which is new. Blocks until all have.
/// # Errors
/// Those of the transport, which also bounds the wait.
pub fn gather<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    bytes: &[u8],
) -> Result<Vec<Vec<u8>>> {
    transport.start_all_gather(round, bytes)?;
    loop {
        if let Some(parts) = transport.try_all_gather(round)? {
            return Ok(parts);
        }
        transport.progress(PATIENCE)?;
    }
}

/// Waits until every rank has come here.
///
/// # Ordering
/// As [`gather`].
/// # Errors
/// As [`gather`].
pub fn barrier<S: Space>(transport: &mut dyn Transport<S>, round: u64) -> Result<()> {
    gather(transport, round, &[]).map(drop)
}

/// Checks that every rank got the same arguments and that none refuses. Returns the largest value
/// of each [`Descriptor::largest`] field, in order.
///
/// # Ordering
/// As [`gather`].
/// # Errors
/// See the [module](self). A rank that refused returns its own error, whatever else is wrong, except that a difference of versions comes first.
///
/// # Examples
/// ```
/// use annulus_comm::{Descriptor, agree, threads};
/// let ranks = threads::ring(2).into_iter().enumerate().map(|(rank, mut endpoint)| {
///     std::thread::spawn(move || {
///         let mine = Descriptor::new().field("q_len", 128).field_as("causal", rank as u64, rank == 1);
///         agree(&mut endpoint, 0, Ok(mine)).map_err(|error| error.to_string())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap().unwrap_err(), "causal differs between ranks: rank 1 has true, rank 0 has false");
/// }
/// ```
pub fn agree<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    local: Result<Descriptor>,
) -> Result<Vec<u64>> {
    let rank = transport.rank();
    let gathered = match (gather(transport, round, &pack(&local)), &local) {
        (Ok(gathered), _) => gathered,
        (Err(_), Err(own)) => return Err(own.clone()),
        (Err(lost), Ok(_)) => return Err(lost),
    };
    judge(rank, &local, &gathered)
}

/// Tells every rank whether all succeeded.
///
/// # Ordering
/// As [`gather`].
/// # Errors
/// This rank's own, if it has one. Otherwise, with the lowest rank that failed: [`Error::Aborted`] where its plan is dead, else
/// [`Error::Refused`].
pub fn close<S: Space>(
    transport: &mut dyn Transport<S>,
    round: u64,
    local: Result<()>,
) -> Result<()> {
    let status = match &local {
        Ok(()) => Vec::new(),
        Err(error) => [&[u8::from(error.is_fatal())], cut(&error.to_string()).as_bytes()].concat(),
    };
    let gathered = gather(transport, round, &status);
    local?;
    match gathered.map_err(mid_call)?.into_iter().enumerate().find(|(_, status)| !status.is_empty())
    {
        None => Ok(()),
        Some((rank, status)) => {
            let what = String::from_utf8_lossy(&status[1..]).into_owned();
            Err(if status[0] == 0 {
                Error::Refused { rank, what }
            } else {
                Error::Aborted { rank, what }
            })
        }
    }
}

/// Makes an error fatal that keeps this rank from the rest of a collective call.
///
/// The other ranks wait for it, so the plan cannot go on, whatever the kind of the error.
pub(crate) fn mid_call(error: Error) -> Error {
    if error.is_fatal() {
        return error;
    }
    Error::Device { what: format!("a collective call could not go on: {error}") }
}

/// The version of this build, as a number that orders like it and as text.
fn version() -> (u64, &'static str) {
    let part = |text: &str| text.parse::<u64>().unwrap_or(0);
    let (major, minor, patch) = (
        env!("CARGO_PKG_VERSION_MAJOR"),
        env!("CARGO_PKG_VERSION_MINOR"),
        env!("CARGO_PKG_VERSION_PATCH"),
    );
    (part(major) << 40 | part(minor) << 20 | part(patch), env!("CARGO_PKG_VERSION"))
}

/// At most [`LONGEST_TEXT`] bytes of a text.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(LONGEST_TEXT))
        .rev()
        .find(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    &text[..end]
}

/// The part of a rank: `[wire version][version]` in all versions for ever; then in this one
/// `[1][error text]` or `[0][digest of names][values…]([field number u16][length u16][text])*`, little endian.
fn pack(local: &Result<Descriptor>) -> Vec<u8> {
    let mut bytes = [WIRE_VERSION.to_le_bytes(), version().0.to_le_bytes()].concat();
    match local {
        Err(error) => {
            bytes.push(1);
            bytes.extend_from_slice(cut(&error.to_string()).as_bytes());
        }
        Ok(descriptor) => {
            bytes.push(0);
            bytes.extend_from_slice(&descriptor.names().to_le_bytes());
            for entry in &descriptor.fields {
                bytes.extend_from_slice(&entry.value.to_le_bytes());
            }
            for (place, text) in descriptor
                .fields
                .iter()
                .enumerate()
                .filter_map(|(place, entry)| Some((place, entry.text.as_ref()?)))
            {
                let text = cut(text);
                for number in [place, text.len()] {
                    bytes.extend_from_slice(
                        &u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes(),
                    );
                }
                bytes.extend_from_slice(text.as_bytes());
            }
        }
    }
    bytes
}

/// What one rank's part says, once the versions are known to be equal.
enum Part<'a> {
    Refuses(String),
    Asks { names: u64, rest: &'a [u8] },
}

/// Takes a number of `N` bytes off the front.
fn number<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (number, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*number)
}

fn unpack(mut bytes: &[u8]) -> Option<Part<'_>> {
    match number::<1>(&mut bytes)? {
        [0] => Some(Part::Asks { names: u64::from_le_bytes(number(&mut bytes)?), rest: bytes }),
        [1] => Some(Part::Refuses(String::from_utf8_lossy(bytes).into_owned())),
        _ => None,
    }
}

/// The value and the reading of field `place` of `fields`.
fn value(rest: &[u8], fields: usize, place: usize) -> Option<(u64, String)> {
    let value = u64::from_le_bytes(number(&mut rest.get(8 * place..)?)?);
    let mut texts = rest.get(8 * fields..)?;
    while !texts.is_empty() {
        let (of, length) =
            (u16::from_le_bytes(number(&mut texts)?), u16::from_le_bytes(number(&mut texts)?));
        let (text, others) = texts.split_at_checked(length.into())?;
        if usize::from(of) == place {
            return Some((value, String::from_utf8_lossy(text).into_owned()));
        }
        texts = others;
    }
    Some((value, value.to_string()))
}

/// The same verdict on every rank, from the same bytes; except that a rank that refused keeps its own error.
fn judge(rank: usize, local: &Result<Descriptor>, gathered: &[Vec<u8>]) -> Result<Vec<u64>> {
    let malformed = |peer| Error::Comm {
        peer,
        step: 0,
        what: "its part of the agreement makes no sense".to_owned(),
    };
    let mut bodies: Vec<&[u8]> = gathered.iter().map(Vec::as_slice).collect();
    let wire_text = |version: u64| version.to_string();
    let version_text = |version: u64| {
        format!("{}.{}.{}", version >> 40, version >> 20 & 0xf_ffff, version & 0xf_ffff)
    };
    let texts: [(&str, &dyn Fn(u64) -> String); 2] =
        [("wire version", &wire_text), ("annulus version", &version_text)];
    for (field, text) in texts {
        let mut values = Vec::new();
        for (peer, body) in bodies.iter_mut().enumerate() {
            values.push(u64::from_le_bytes(number(body).ok_or_else(|| malformed(peer))?));
        }
        if let Some(other) = values.iter().position(|&value| value != values[0]) {
            return Err(Error::RankMismatch {
                field: field.to_owned(),
                rank: other,
                got: text(values[other]),
                rank0: text(values[0]),
            });
        }
    }
    let mut parts = Vec::new();
    for (peer, body) in bodies.into_iter().enumerate() {
        parts.push(unpack(body).ok_or_else(|| malformed(peer))?);
    }
    let mine = local.as_ref().map_err(Error::clone)?;
    let mut asked = Vec::new();
    for (rank, part) in parts.into_iter().enumerate() {
        match part {
            Part::Refuses(what) => return Err(Error::Refused { rank, what }),
            Part::Asks { names, rest } => asked.push((names, rest)),
        }
    }
    let Some(&(names0, rest0)) = asked.first() else { return Err(malformed(rank)) };
    if let Some((rank, (names, _))) =
        asked.iter().enumerate().find(|(_, (names, _))| *names != names0)
    {
        let field = "set of fields".to_owned();
        return Err(Error::RankMismatch {
            field,
            rank,
            got: format!("{names:016x}"),
            rank0: format!("{names0:016x}"),
        });
    }
    let mut largest = Vec::new();
    for (place, entry) in mine.fields.iter().enumerate() {
        let read = |peer: usize, rest| {
            value(rest, mine.fields.len(), place).ok_or_else(|| malformed(peer))
        };
        let (value0, text0) = read(0, rest0)?;
        let mut maximum = value0;
        for (rank, &(_, rest)) in asked.iter().enumerate() {
            let (value, got) = read(rank, rest)?;
            maximum = maximum.max(value);
            if value != value0 && !entry.largest {
                return Err(Error::RankMismatch {
                    field: entry.name.to_owned(),
                    rank,
                    got,
                    rank0: text0,
                });
            }
        }
        if entry.largest {
            largest.push(maximum);
        }
    }
    Ok(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> Descriptor {
        (0..60).fold(Descriptor::new(), |descriptor, place| match place % 6 {
            0 => descriptor.field_as("dtype", place, "bf16"),
            1 => descriptor.field_as("window", place, "(128, 0)"),
            _ => descriptor.field("q_len", place << 40),
        })
    }

    #[test]
    fn sixty_fields_fit_into_a_kibibyte() {
        assert!(pack(&Ok(descriptor())).len() <= 1024);
    }

    #[test]
    fn versions_come_before_everything_else_even_on_a_rank_that_refuses() {
        let refusal = Err(Error::invalid("scale", "NaN", "a finite number"));
        let mut parts = vec![pack(&Ok(descriptor())), pack(&refusal), pack(&Ok(descriptor()))];
        parts[2][8..16].copy_from_slice(&(7u64 << 40 | 8 << 20 | 9).to_le_bytes());
        let rank0 = env!("CARGO_PKG_VERSION").to_owned();
        let versions = Error::RankMismatch {
            field: "annulus version".to_owned(),
            rank: 2,
            got: "7.8.9".to_owned(),
            rank0,
        };
        assert_eq!(judge(1, &refusal, &parts), Err(versions));
        // a format of the future may look like anything behind its number
        parts[1] = 9u64.to_le_bytes().to_vec();
        let format = Error::RankMismatch {
            field: "wire version".to_owned(),
            rank: 1,
            got: "9".to_owned(),
            rank0: WIRE_VERSION.to_string(),
        };
        assert_eq!(judge(1, &refusal, &parts), Err(format));
    }

    #[test]
    fn fields_that_may_differ_are_agreed_upon_as_their_largest() {
        let of = |tile: u64| Ok(descriptor().largest("kv_tile", tile).largest("other", 9 - tile));
        let parts: Vec<_> = [3, 8, 5].map(|tile| pack(&of(tile))).into();
        for rank in 0..3 {
            assert_eq!(judge(rank, &of([3, 8, 5][rank]), &parts), Ok(vec![8, 6]));
        }
        assert_eq!(judge(0, &Ok(descriptor()), &[pack(&Ok(descriptor()))]), Ok(vec![]));
    }

    #[test]
    fn nonsense_is_an_error_and_no_panic() {
        let whole = pack(&Ok(descriptor()));
        for length in 0..whole.len() {
            let verdict = judge(0, &Ok(descriptor()), &[whole.clone(), whole[..length].to_vec()]);
            // a cut between two texts loses only readings
            let only_texts = length >= 25 + 60 * 8;
            assert!(
                only_texts || matches!(verdict, Err(Error::Comm { peer: 1, .. })),
                "{length}: {verdict:?}"
            );
        }
        let mut odd = whole.clone();
        odd[16] = 2;
        assert!(matches!(
            judge(0, &Ok(descriptor()), &[odd, whole]),
            Err(Error::Comm { peer: 0, .. })
        ));
    }

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
