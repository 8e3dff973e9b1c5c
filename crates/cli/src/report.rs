//! Messages on standard error, and numbers in the form in which they are printed.

use std::{
    io::Write,
    sync::{Mutex, PoisonError},
};

use annulus_comm::Silence;
use indicatif::ProgressBar;

use crate::message;

/// Progress bar on standard error, if one is drawn.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Prints one line of at most a screen on standard error by a single write. Returns false if the
/// write failed.
pub(crate) fn print_message(text: std::fmt::Arguments<'_>) -> bool {
    let text = format!("annulus: {}\n", message::one_line(&text.to_string()));
    let print = || std::io::stderr().lock().write_all(text.as_bytes()).is_ok();
    let bar = bar().clone();
    bar.map_or_else(print, |bar| bar.suspend(print))
}

/// Sets the progress bar above which messages are printed; `None` if there is none.
pub(crate) fn set_progress_bar(new: Option<ProgressBar>) {
    *bar() = new;
}

/// Removes the progress bar before the process ends.
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
    ($($text:tt)*) => { $crate::report::print_message(format_args!($($text)*)) };
}
pub(crate) use complain;

/// Returns a callback that warns of a peer without heartbeats. In an all-gather all ranks wait for
/// the same peer, so only rank 0 and the next rank on the ring print the warning.
pub(crate) fn warn_of_silence(
    rank: usize,
    ranks: usize,
) -> impl Fn(Silence) + Send + Sync + 'static {
    move |Silence { peer, step, waited, .. }| {
        if rank == 0 || rank == (peer + 1) % ranks {
            complain!(
                "warning: rank {rank} has received nothing from rank {peer} for {:.1} s \
                 (step {step})",
                waited.as_secs_f64()
            );
        }
    }
}

/// Formats a summary as one line of JSON.
pub(crate) fn json_line(summary: &impl serde::Serialize) -> String {
    // cannot fail: all keys are strings
    serde_json::to_string(summary).unwrap_or_default()
}

/// Formats bytes in binary units with three digits.
pub(crate) fn bytes(bytes: impl Into<u128>) -> String {
    scaled(bytes.into() as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Formats a count: all digits below a million, else three digits and a word or a power of ten.
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

/// Formats bytes in binary units and, from 1 KiB on, also all digits.
pub(crate) fn exact_bytes(number: u64) -> String {
    if number < 1024 {
        bytes(number)
    } else {
        format!("{} ({} bytes)", bytes(number), grouped(number))
    }
}

/// Formats a count with its noun: `1 query`, `65 536 queries`.
pub(crate) fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { several })
}

/// Formats an integer with its digits in groups of three.
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
    // 999.5 and more would be rounded up to four digits
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
