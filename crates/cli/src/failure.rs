//! Failures of the command: one line on standard error and an exit code.

use std::{path::Path, process::ExitCode, time::Duration};

use annulus_core::Error;

pub(crate) use crate::message::one_line;
use crate::{interrupt, launcher::is_leader_output, message, report::complain};

/// Delay before a process exits that prints nothing. A launcher may kill the job as soon as one
/// process fails, so the process that prints the error needs time to do so.
pub(crate) const SILENT_EXIT_DELAY: Duration = Duration::from_millis(500);

/// Result of a subcommand.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Failure of the command.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Invalid command line: exit code 2. No file was changed.
    Usage(String),
    /// Error of the library, of a file or of a rank: exit code 1.
    Library(Error),
    /// Failed check whose lines are already printed: exit code 1.
    Reported,
    /// Failure on which all processes of a job have agreed.
    #[cfg(feature = "mpi")]
    Agreed {
        /// The rank that failed; `None` if all did.
        rank: Option<usize>,
        /// Exit code.
        code: u8,
        /// The error; empty if it is already printed.
        what: String,
    },
    /// Failure that this or another process has printed, with its exit code.
    #[cfg(feature = "mpi")]
    Printed(u8),
}

impl Failure {
    /// Creates the failure of an invalid value of a flag.
    pub(crate) fn usage(
        flag: &str,
        got: impl std::fmt::Display,
        want: impl std::fmt::Display,
    ) -> Self {
        Self::Usage(format!("{flag}: got {got}, want {want}"))
    }

    /// Converts an error of a subcommand all of whose arguments come from flags: an invalid
    /// argument is an invalid command line.
    pub(crate) fn of_flags(error: Error) -> Self {
        match error {
            Error::InvalidArgument { .. } => Self::Usage(error.to_string()),
            _ => Self::Library(error),
        }
    }

    /// Prints the failure, unless another process does, and returns the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        let what = self.text();
        if what.is_empty() {
            return ExitCode::from(self.code());
        }
        interrupt::report(self.code(), || {
            if is_leader_output() {
                complain!("{what}");
            } else {
                std::thread::sleep(SILENT_EXIT_DELAY);
            }
        });
        ExitCode::from(self.code())
    }

    /// Exit code.
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Library(_) | Self::Reported => 1,
            #[cfg(feature = "mpi")]
            Self::Agreed { code, .. } | Self::Printed(code) => *code,
        }
    }

    /// Formats the failure as one line, with advice; empty if it is already printed.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Usage(what) => one_line(what),
            Self::Library(error) => {
                let advice = advice(error);
                let separator = if advice.is_empty() { "" } else { "; " };
                one_line(&format!("{error}{separator}{advice}"))
            }
            Self::Reported => String::new(),
            #[cfg(feature = "mpi")]
            Self::Agreed { what, .. } => what.clone(),
            #[cfg(feature = "mpi")]
            Self::Printed(_) => String::new(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            // every subcommand sets it by this flag
            Error::InvalidArgument { argument, got, want } if argument == "strategy" => {
                Self::usage("--strategy", got, want)
            }
            error => Self::Library(error),
        }
    }
}

/// Creates an error of a file: `path: what`.
pub(crate) fn io(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::Io { path: message::path(path), what: what.to_string() }
}

/// Creates an error of a tensor in a file, or of a length that tensors determine:
/// `path: argument: …`.
pub(crate) fn of_file(
    path: &Path,
    argument: &str,
    got: impl std::fmt::Display,
    want: impl std::fmt::Display,
) -> Error {
    Error::invalid(format!("{}: {}", message::path(path), message::name(argument)), got, want)
}

/// True if the error of a rank only repeats that of another.
pub(crate) const fn is_echo(error: &Error) -> bool {
    matches!(error, Error::Refused { .. } | Error::Aborted { .. } | Error::PeerLost { .. })
}

/// Formats an error as one line, without advice.
pub(crate) fn text(error: &Error) -> String {
    one_line(&error.to_string())
}

/// Advice for errors that do not already name a valid value.
fn advice(error: &Error) -> &'static str {
    match error {
        // what a build, machine or processor lacks, but not what a backend or a cache never has
        Error::Unsupported { by, .. } if by.starts_with("this ") => {
            "`annulus doctor` lists the features of this build"
        }
        Error::RankMismatch { .. } => "give every rank the same arguments",
        Error::OutOfMemory { .. } => "use more ranks, shorter sequences or a smaller --dtype",
        Error::Timeout { .. } | Error::ArrivalTimeout { .. } => {
            "check that rank, or raise --deadline"
        }
        Error::PeerLost { .. } | Error::Aborted { .. } => "see the message of that rank",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_on_features_is_for_what_a_build_or_a_machine_lacks() {
        let text = |by: &str| Failure::Library(Error::unsupported("x", by)).text();
        assert!(text("this machine: no driver").contains("annulus doctor"));
        assert_eq!(text("the KV cache"), "x is not supported by the KV cache");
    }

    #[test]
    fn errors_of_files_carry_no_advice() {
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        assert_eq!(Failure::Library(io(Path::new("a"), denied)).text(), "a: permission denied");
        let text =
            Failure::Library(of_file(Path::new("in.st"), "query\u{1b}", "F8", "a float dtype"))
                .text();
        assert_eq!(text, "in.st: query\\u{1b}: got F8, want a float dtype");
    }

    #[test]
    fn an_invalid_argument_is_a_usage_failure_and_a_device_error_is_not() {
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
