//! What is printed: lines on standard output, and numbers as people read them.

use std::{
    io::Write,
    sync::{Mutex, PoisonError},
};

use annulus_comm::Silence;
use indicatif::ProgressBar;

/// The progress bar that is drawn on standard error now.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

use crate::message;

/// Prints a line. If that fails the command ends and nothing unfinished is left: without a word if the reader stopped reading, else
/// (a full disk) with a complaint.
pub(crate) fn line(text: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let written =
        message::write_visible(&mut out, format_args!("{text}\n")).and_then(|()| out.flush());
    if let Err(error) = written {
        if error.kind() != std::io::ErrorKind::BrokenPipe {
            complain!("cannot write to standard output: {error}");
        }
        crate::interrupt::leave(1);
    }
}

/// As `println!`, but never panics.
macro_rules! say {
    ($($text:tt)*) => { $crate::report::line(format_args!($($text)*)) };
}
pub(crate) use say;

/// Prints one line of at most a screen on standard error, in one piece. If nobody can read it,
/// there is nobody to tell.
pub(crate) fn complaint(text: std::fmt::Arguments<'_>) -> bool {
    let text = format!("annulus: {}\n", message::one_line(&text.to_string()));
    let print = || std::io::stderr().lock().write_all(text.as_bytes()).is_ok();
    let bar = bar().clone();
    bar.map_or_else(print, |bar| bar.suspend(print))
}

/// From now on messages on standard error are printed above this bar, or, with `None`, above none.
pub(crate) fn draw_around(new: Option<ProgressBar>) {
    *bar() = new;
}

/// Wipes the progress bar, if there is one, for good: the process is about to end.
pub(crate) fn end_progress() {
    if let Some(bar) = bar().take() {
        bar.finish_and_clear();
    }
}

fn bar() -> std::sync::MutexGuard<'static, Option<ProgressBar>> {
    BAR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As `eprintln!` with the command's name, but never panics.
macro_rules! complain {
    ($($text:tt)*) => { $crate::report::complaint(format_args!($($text)*)) };
}
pub(crate) use complain;

/// What a rank says of one that it waits for and does not hear. Where all wait for the same one, as in a gather, two of them say so: the first rank,
/// and the next one after it.
pub(crate) fn of_silence(rank: usize, ranks: usize) -> impl Fn(Silence) + Send + Sync + 'static {
    move |Silence { peer, step, waited, .. }| {
        if rank == 0 || rank == (peer + 1) % ranks {
            complain!(
                "warning: rank {rank} has heard nothing of rank {peer} for {:.1} s (step {step})",
                waited.as_secs_f64()
            );
        }
    }
}

/// Bytes in binary units, three digits.
pub(crate) fn bytes(bytes: impl Into<u128>) -> String {
    scaled(bytes.into() as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// A count: in full while it is short, else three digits and a word, or a power of ten.
pub(crate) fn count(count: f64) -> String {
    if count < 1e6 {
        return grouped(count as u64);
    }
    if count >= 1e21 {
        return format!("{count:.2e}");
    }
    let words = ["", "thousand", "million", "billion", "trillion", "quadrillion", "quintillion"];
    scaled(count, 1000.0, &words).trim_end().to_owned()
}

/// Bytes in binary units and, where that is another number, in full.
pub(crate) fn exact_bytes(number: u64) -> String {
    if number < 1024 {
        bytes(number)
    } else {
        format!("{} ({} bytes)", bytes(number), grouped(number))
    }
}

/// A count with its noun: `1 query`, `65 536 queries`.
pub(crate) fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { several })
}

/// A whole number with its digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let (head, groups) = digits.as_bytes().split_at(digits.len() % 3);
    let all = std::iter::once(head).chain(groups.chunks(3)).filter(|group| !group.is_empty());
    all.map(String::from_utf8_lossy).collect::<Vec<_>>().join(" ")
}

fn scaled(mut number: f64, step: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = units.next().unwrap_or(&"");
    let whole = number < step;
    // 999.9 would round up to a fourth digit
    while number >= step * 0.9995 {
        let Some(next) = units.next() else { break };
        number /= step;
        unit = next;
    }
    let digits =
        if whole { 0 } else { 2 - (number.max(1.0).log10().floor().clamp(0.0, 2.0) as usize) };
    format!("{number:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_a_unit() {
        assert_eq!(
            [grouped(0), grouped(999), grouped(1000), grouped(65536)],
            ["0", "999", "1 000", "65 536"]
        );
        assert_eq!(bytes(0u64), "0 B");
        assert_eq!(bytes(1000u64), "1000 B");
        assert_eq!(bytes(1536u64), "1.50 KiB");
        assert_eq!(bytes(128u64 << 20), "128 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!([count(136.0), count(12_345.0)], ["136", "12 345"]);
        assert_eq!(count(134_225_920.0), "134 million");
        assert_eq!(
            [count(5e18), count(9.9999e20), count(5e24)],
            ["5.00 quintillion", "1000 quintillion", "5.00e24"]
        );
        assert_eq!(
            [exact_bytes(1000), exact_bytes(37_748_736)],
            ["1000 B", "36.0 MiB (37 748 736 bytes)"]
        );
        assert_eq!(
            [counted(1, "query", "queries"), counted(1000, "query", "queries")],
            ["1 query", "1 000 queries"]
        );
    }
}
