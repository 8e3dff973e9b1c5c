//! What is printed: lines on standard output, and numbers as people read them.

use std::io::Write;

use annulus_comm::Silence;

/// Prints a line. If that fails the command ends and nothing unfinished is left: without a word if the reader stopped reading, else
/// (a full disk) with a complaint.
pub(crate) fn line(text: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
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

/// Prints a line on standard error; if nobody can read it, there is nobody to tell.
pub(crate) fn complaint(text: std::fmt::Arguments<'_>) -> bool {
    writeln!(std::io::stderr().lock(), "annulus: {text}").is_ok()
}

/// As `eprintln!` with the command's name, but never panics.
macro_rules! complain {
    ($($text:tt)*) => { $crate::report::complaint(format_args!($($text)*)) };
}
pub(crate) use complain;

/// What a rank says of one that it waits for and does not hear. Where all wait for the same one, as in a gather, two of them say so: the first rank,
/// and the next one after it.
pub(crate) fn of_silence(rank: usize, ranks: usize) -> impl Fn(Silence) + Send + Sync + 'static {
    move |Silence { peer, step, waited }| {
        if rank == 0 || rank == (peer + 1) % ranks {
            complain!("warning: rank {rank} has heard nothing of rank {peer} for {:.1} s (step {step})", waited.as_secs_f64());
        }
    }
}

/// Bytes in binary units, three digits.
pub(crate) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// A count: in full while it is short, else three digits and a word.
pub(crate) fn count(count: f64) -> String {
    if count < 1e6 {
        return grouped(count as usize);
    }
    scaled(count, 1000.0, &["", "thousand", "million", "billion", "trillion"]).trim_end().to_owned()
}

/// A whole number with its digits in groups of three.
pub(crate) fn grouped(number: usize) -> String {
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
    let digits = if whole { 0 } else { 2 - (number.max(1.0).log10().floor().clamp(0.0, 2.0) as usize) };
    format!("{number:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_a_unit() {
        assert_eq!([grouped(0), grouped(999), grouped(1000), grouped(65536)], ["0", "999", "1 000", "65 536"]);
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1000), "1000 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(128 << 20), "128 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!([count(136.0), count(12_345.0)], ["136", "12 345"]);
        assert_eq!(count(134_225_920.0), "134 million");
    }
}
