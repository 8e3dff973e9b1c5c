//! How much memory this process has held at most.

/// The most bytes that were resident at once, where the system tells (`VmHWM` of Linux).
pub(crate) fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kibibytes: u64 = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_grows_with_what_is_held() {
        let before = super::peak_bytes().unwrap();
        let held = vec![1u8; 64 << 20];
        assert!(super::peak_bytes().unwrap() >= before.max(held.len() as u64));
    }
}
