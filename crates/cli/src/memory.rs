//! Memory and disk space: a lower bound of a run's needs, an upper bound of what is available, and
//! the peak memory of this process.
//!
//! A system that overcommits memory kills the process that touches too much of it. So a run whose
//! tensors alone exceed the available memory is refused before any file is read or created.

use std::path::Path;

use annulus_core::{DType, Dims, Error, Result};
use rustix::process::{Resource, getrlimit};

use crate::failure::io;

/// Size of the tensors that this process holds at the same time, for all its ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tensors {
    bytes: u128,
}

impl Tensors {
    /// Adds up query, key, value, out, lse, maximum and sum; with `backward` also dout, dq, dk and
    /// dv.
    pub(crate) fn of(dims: &Dims, dtype: DType, backward: bool) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = *dims;
        let q = [batch, q_len, q_heads];
        let kv = [batch, kv_len, kv_heads];
        let times = if backward { 2 } else { 1 };
        // the backward pass adds one gradient of the same shape for each tensor but the statistics
        Self::default()
            .and(&q, times * (head_dim + value_dim), dtype.bytes())
            .and(&kv, times * (head_dim + value_dim), dtype.bytes())
            .and(&q, 3, dtype.accumulator().bytes())
    }

    /// Adds `times` tensors of `shape` with `element` bytes per element.
    #[must_use]
    pub(crate) fn and(self, shape: &[usize], times: usize, element: usize) -> Self {
        let elements =
            shape.iter().fold(1u128, |product, &len| product.saturating_mul(len as u128));
        let bytes = elements.saturating_mul((times * element) as u128);
        Self { bytes: self.bytes.saturating_add(bytes) }
    }

    /// Returns the part of one of `processes` processes.
    #[must_use]
    pub(crate) const fn shared_by(self, processes: usize) -> Self {
        Self { bytes: self.bytes / if processes == 0 { 1 } else { processes as u128 } }
    }

    /// Checks that the tensors fit the memory that is available to this process at most.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if they do not.
    pub(crate) fn must_fit(self) -> Result<()> {
        self.must_fit_into(most_bytes())
    }

    fn must_fit_into(self, most: Option<u64>) -> Result<()> {
        match most.filter(|&most| self.bytes > u128::from(most)) {
            Some(most) => {
                let asked = u64::try_from(self.bytes).unwrap_or(u64::MAX);
                Err(Error::OutOfMemory {
                    what: "a problem of this size".into(),
                    asked,
                    free: Some(most),
                })
            }
            None => Ok(()),
        }
    }
}

/// Upper bound of the memory available to this process, in bytes: memory and swap of the machine,
/// within the limits of the control group and of the address space. `None` if all are unknown.
pub(crate) fn most_bytes() -> Option<u64> {
    let of_file = |path: &str| std::fs::read_to_string(path).ok();
    let meminfo = of_file("/proc/meminfo").unwrap_or_default();
    let swap = kibibytes(&meminfo, "SwapTotal:").unwrap_or_default();
    let machine = kibibytes(&meminfo, "MemTotal:").map(|memory| memory.saturating_add(swap));
    let group = of_file("/proc/self/cgroup").and_then(|groups| {
        // cgroup v2 has one line, "0::/path"
        let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        of_file(&format!("/sys/fs/cgroup{path}/memory.max"))?.trim().parse::<u64>().ok()
    });
    let group = group.map(|most| most.saturating_add(swap));
    let held =
        kibibytes(&of_file("/proc/self/status").unwrap_or_default(), "VmSize:").unwrap_or_default();
    let limit = getrlimit(Resource::As).current.map(|limit| limit.saturating_sub(held));
    [machine, group, limit].into_iter().flatten().min()
}

/// Parses a line `name   number kB` into bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let number =
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix("kB")?;
    number.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Checks that a file of `bytes` at `path` fits the free space of its file system.
///
/// # Errors
/// [`Error::Io`] if it does not.
pub(crate) fn must_fit_on_disk(path: &Path, bytes: u64) -> Result<()> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // unknown free space: creating the file reports what is wrong with the folder
    let Ok(space) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if bytes > free {
        return Err(io(path, format!("needs {bytes} bytes, {free} are free")));
    }
    Ok(())
}

/// Peak resident memory of this process in bytes (`VmHWM` of Linux); `None` on other systems.
pub(crate) fn peak_bytes() -> Option<u64> {
    kibibytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_includes_held_memory() {
        let before = peak_bytes().unwrap();
        let held = vec![1u8; 64 << 20];
        assert!(peak_bytes().unwrap() >= before.max(held.len() as u64));
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused_with_both_sizes() {
        let dims = Dims { kv_heads: 2, value_dim: 3, ..Dims::new(2, 10, 4, 5) };
        // query and out, key and value, lse, maximum and sum; the first two twice with backward
        let queries = 2 * 10 * 4 * (5 + 3) * 2;
        let keys = 2 * 10 * 2 * (5 + 3) * 2;
        let statistics = 3 * 2 * 10 * 4 * 4;
        assert_eq!(Tensors::of(&dims, DType::Bf16, false).bytes, queries + keys + statistics);
        let both = Tensors::of(&dims, DType::Bf16, true);
        assert_eq!(both.bytes, 2 * (queries + keys) + statistics);
        let vast = both.and(&[1 << 40, 1 << 20], 1, 8);
        assert!(vast.shared_by(4).must_fit_into(None).is_ok());
        let text = vast.must_fit_into(Some(1 << 40)).unwrap_err().to_string();
        let want =
            format!("a problem of this size needs {} bytes, {} free", vast.bytes, 1u64 << 40);
        assert_eq!(text, format!("out of memory: {want}"));
        assert!(both.must_fit_into(Some(u64::try_from(both.bytes).unwrap())).is_ok());
    }

    #[test]
    fn a_file_that_does_not_fit_the_disk_is_refused_with_its_size() {
        let path = std::env::temp_dir().join("never-made");
        let text = must_fit_on_disk(&path, u64::MAX).unwrap_err().to_string();
        assert!(text.contains("never-made: needs 18446744073709551615 bytes"), "{text}");
        assert!(must_fit_on_disk(&path, 0).is_ok());
    }
}
