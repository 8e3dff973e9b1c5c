//! How the command fails: one line on standard error, and an exit code.

use std::{process::ExitCode, time::Duration};

use annulus_core::Error;

use crate::{launcher::speaks, report::complain};

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
    pub(crate) fn usage(flag: &str, got: impl std::fmt::Display, want: impl std::fmt::Display) -> Self {
        Self::Usage(format!("{flag}: got {got}, want {want}"))
    }

    /// For subcommands whose every argument is a flag: there an invalid argument is a bad command line.
    pub(crate) fn of_flags(error: Error) -> Self {
        match error {
            Error::InvalidArgument { .. } => Self::Usage(error.to_string()),
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
                let (what, advice) = (error.to_string(), advice(error));
                let separator = if advice.is_empty() { "" } else { "; " };
                format!("{}{separator}{advice}", one_line(&what))
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
pub(crate) fn io(path: &std::path::Path, what: impl std::fmt::Display) -> Error {
    Error::Io { path: path.display().to_string(), what: what.to_string() }
}

/// What to do about it, where the error itself does not say what would be right.
fn advice(error: &Error) -> &'static str {
    match error {
        Error::Unsupported { .. } => "`annulus doctor` lists what this build can do",
        Error::RankMismatch { .. } => "give every rank the same arguments",
        Error::OutOfMemory { .. } => "use more ranks, shorter sequences or a smaller --dtype",
        Error::Io { .. } => "check the path, the file and the free space",
        Error::Timeout { .. } => "look at that rank, or raise --deadline",
        Error::PeerLost { .. } | Error::Aborted { .. } => "look at that rank's own message",
        _ => "",
    }
}

/// Messages may quote what a user wrote; whatever that was, an error stays one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split(|c: char| c.is_control() || c.is_whitespace()).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_quoted_stays_one_line() {
        assert_eq!(one_line("a\n\n  b\tc\u{1b}[0m"), "a b c [0m");
    }

    #[test]
    fn an_invalid_flag_is_usage_and_a_dead_device_is_not() {
        assert!(matches!(Failure::of_flags(Error::invalid("ranks", 0, "at least 1")), Failure::Usage(_)));
        assert!(matches!(Failure::of_flags(Error::Device { what: String::new() }), Failure::Library(_)));
    }
}
