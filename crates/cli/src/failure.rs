//! How the command fails: one line on standard error, and an exit code.

use std::{path::Path, process::ExitCode, time::Duration};

use annulus_core::Error;

pub(crate) use crate::message::one_line;
use crate::{
    launcher::speaks,
    message::{self, fitted},
    report::complain,
};

/// The most bytes of what an error quotes of each kind: what was given, and what is wrong with it.
const MOST_QUOTED_BYTES: usize = 400;
/// The most bytes of a sentence that another part of the program, the system or another rank wrote.
const MOST_SENTENCE_BYTES: usize = 1000;
/// The most bytes of an argument: a path and the name of a tensor.
const MOST_ARGUMENT_BYTES: usize = 820;

/// How long a process that has nothing to say stays for the one that has.
pub(crate) const LINGER: Duration = Duration::from_millis(500);

/// What every subcommand returns.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Why the command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line has no meaning: exit code 2. Nothing was touched.
    Usage(String),
    /// The library, a file or a rank failed: exit code 1.
    Library(Error),
    /// What was to be verified did not hold, and the lines already printed say so: exit code 1.
    Reported,
    /// The same on all processes of a job: what the rank `rank` failed with, or, where none is named, all of them.
    #[cfg(feature = "mpi")]
    Agreed {
        /// Who, if not all.
        rank: Option<usize>,
        /// The exit code.
        code: u8,
        /// Why; empty if the lines already printed say it.
        what: String,
    },
    /// It has been said, or is another process's to say; the exit code.
    #[cfg(feature = "mpi")]
    Told(u8),
}

impl Failure {
    /// A flag whose value has no meaning.
    pub(crate) fn usage(
        flag: &str,
        got: impl std::fmt::Display,
        want: impl std::fmt::Display,
    ) -> Self {
        let (got, want) = (
            fitted(&got.to_string(), MOST_QUOTED_BYTES),
            fitted(&want.to_string(), MOST_SENTENCE_BYTES),
        );
        Self::Usage(format!("{flag}: got {got}, want {want}"))
    }

    /// For subcommands whose every argument is a flag: there an invalid argument is a bad command line.
    pub(crate) fn of_flags(error: Error) -> Self {
        match error {
            Error::InvalidArgument { .. } => Self::Usage(bounded(&error).to_string()),
            _ => Self::Library(error),
        }
    }

    /// Prints the one line, if there is one and no other process prints it, and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        let what = self.text();
        if what.is_empty() {
            return ExitCode::from(self.code());
        }
        if speaks() {
            complain!("{what}");
        } else {
            // a launcher may end a job as soon as one process fails: the one that speaks comes first
            std::thread::sleep(LINGER);
        }
        ExitCode::from(self.code())
    }

    /// The exit code.
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Library(_) | Self::Reported => 1,
            #[cfg(feature = "mpi")]
            Self::Agreed { code, .. } | Self::Told(code) => *code,
        }
    }

    /// The one line, and what to do about it; empty if nothing is left to say.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Usage(what) => one_line(what),
            Self::Library(error) => {
                let advice = advice(error);
                let separator = if advice.is_empty() { "" } else { "; " };
                one_line(&format!("{}{separator}{advice}", bounded(error)))
            }
            Self::Reported => String::new(),
            #[cfg(feature = "mpi")]
            Self::Agreed { what, .. } => what.clone(),
            #[cfg(feature = "mpi")]
            Self::Told(_) => String::new(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// A file failed: `path: what`.
pub(crate) fn io(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::Io { path: message::path(path), what: what.to_string() }
}

/// A tensor of a file, or what several of them make together, has no meaning: `path: argument: …`.
pub(crate) fn of_file(
    path: &Path,
    argument: &str,
    got: impl std::fmt::Display,
    want: impl std::fmt::Display,
) -> Error {
    Error::invalid(format!("{}: {}", message::path(path), message::name(argument)), got, want)
}

/// The error as one line, without advice.
pub(crate) fn text(error: &Error) -> String {
    one_line(&bounded(error).to_string())
}

/// The error with everything that it quotes cut to what a message has room for.
fn bounded(error: &Error) -> Error {
    let quoted = |text: &str| fitted(text, MOST_QUOTED_BYTES);
    let sentence = |text: &str| fitted(text, MOST_SENTENCE_BYTES);
    match error.clone() {
        Error::InvalidArgument { argument, got, want } => Error::InvalidArgument {
            argument: fitted(&argument, MOST_ARGUMENT_BYTES),
            got: quoted(&got),
            want: quoted(&want),
        },
        Error::Unsupported { what, by } => {
            Error::Unsupported { what: quoted(&what), by: sentence(&by) }
        }
        Error::RankMismatch { field, rank, got, rank0 } => Error::RankMismatch {
            field: quoted(&field),
            rank,
            got: quoted(&got),
            rank0: quoted(&rank0),
        },
        Error::Refused { rank, what } => Error::Refused { rank, what: sentence(&what) },
        Error::Aborted { rank, what } => Error::Aborted { rank, what: sentence(&what) },
        Error::Io { path, what } => {
            Error::Io { path: fitted(&path, MOST_ARGUMENT_BYTES), what: sentence(&what) }
        }
        other => other,
    }
}

/// What to do about it, where the error itself does not say what would be right.
fn advice(error: &Error) -> &'static str {
    match error {
        Error::Unsupported { .. } => "`annulus doctor` lists what this build can do",
        Error::RankMismatch { .. } => "give every rank the same arguments",
        Error::OutOfMemory { .. } => "use more ranks, shorter sequences or a smaller --dtype",
        Error::Timeout { .. } => "look at that rank, or raise --deadline",
        Error::PeerLost { .. } | Error::Aborted { .. } => "look at that rank's own message",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_argument_hides_neither_what_is_wrong_nor_what_would_be_right() {
        let long = "x".repeat(1 << 20);
        let error = Error::invalid(&long, format!("shape {:?}", vec![1; 100_000]), "4 dimensions");
        let text = Failure::Library(error).text();
        assert!(text.len() < message::MOST_MESSAGE_BYTES, "{}", text.len());
        assert!(
            text.contains("(1048576 bytes)")
                && text.contains("got shape [1, 1, ")
                && text.ends_with("want 4 dimensions"),
            "{text}"
        );
        let text = Failure::usage("--case", &long, "a pattern").text();
        assert!(
            text.len() < message::MOST_MESSAGE_BYTES && text.ends_with("want a pattern"),
            "{text}"
        );
        let text = Failure::Library(io(Path::new(&long), &long)).text();
        assert!(text.len() < message::MOST_MESSAGE_BYTES, "{}", text.len());
    }

    #[test]
    fn a_file_s_error_says_what_is_wrong_and_gives_no_advice_that_may_not_fit() {
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        assert_eq!(Failure::Library(io(Path::new("a"), denied)).text(), "a: permission denied");
        let text =
            Failure::Library(of_file(Path::new("in.st"), "query\u{1b}", "F8", "a float dtype"))
                .text();
        assert_eq!(text, "in.st: query\\u{1b}: got F8, want a float dtype");
    }

    #[test]
    fn an_invalid_flag_is_usage_and_a_dead_device_is_not() {
        assert!(matches!(
            Failure::of_flags(Error::invalid("ranks", 0, "at least 1")),
            Failure::Usage(_)
        ));
        assert!(matches!(
            Failure::of_flags(Error::Device { what: String::new() }),
            Failure::Library(_)
        ));
    }
}
