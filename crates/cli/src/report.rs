//! Numbers as people read them.

/// Bytes in binary units, three digits.
pub(crate) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// A count in thousands, three digits.
pub(crate) fn count(count: f64) -> String {
    scaled(count, 1000.0, &["", "thousand", "million", "billion", "trillion"]).trim_end().to_owned()
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
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1000), "1000 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(128 << 20), "128 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(count(136.0), "136");
        assert_eq!(count(134_225_920.0), "134 million");
    }
}
