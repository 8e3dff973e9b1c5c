//! Standard output: lines that are written as a whole, or end the command.

use std::io::Write;

use crate::{interrupt, message, report::complain};

/// Prints a line. If that fails, the command ends, after [`complain_of`], and removes its
/// unfinished files.
pub(crate) fn print_line(text: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let text = message::visible(&format!("{text}\n"));
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        complain_of(&error);
        interrupt::exit(1);
    }
}

/// Prints an error of standard output, such as a full disk. Prints nothing if the reader closed the
/// pipe, as `head` does.
pub(crate) fn complain_of(error: &std::io::Error) {
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        complain!("cannot write to standard output: {error}");
    }
}

/// As `println!`, but never panics.
macro_rules! say {
    ($($text:tt)*) => { $crate::stdout::print_line(format_args!($($text)*)) };
}
pub(crate) use say;
