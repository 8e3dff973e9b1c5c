//! Lower bound of the memory and disk space of a job, upper bound of what this machine has, and how
//! much memory this process has held.
//!
//! A system that promises more memory than it has ends the process that touches it. So a job whose
//! tensors alone pass what there is in all is refused before anything is made or read.

use std::{os::unix::process::CommandExt, path::Path, process::Command};

use annulus_core::{DType, Dims, Error, Result};
use rustix::process::{Resource, getrlimit};

use crate::failure::io;

/// Begins the program anew with one arena of glibc's allocator, where the address space is limited
/// (`ulimit -v`): for each thread that allocates glibc reserves another, of 64 MiB, as long as there
/// is room, and leaves none for what comes next. Does nothing if somebody has said how many there
/// are to be.
pub(crate) fn keep_address_space() {
    const ARENAS: &str = "MALLOC_ARENA_MAX";
    if getrlimit(Resource::As).current.is_none() || std::env::var_os(ARENAS).is_some() {
        return;
    }
    let (Ok(program), mut arguments) = (std::env::current_exe(), std::env::args_os()) else {
        return;
    };
    let mut anew = Command::new(program);
    if let Some(name) = arguments.next() {
        anew.arg0(name);
    }
    // it comes back only if it fails, and then everything is as it was
    drop(anew.args(arguments).env(ARENAS, "1").exec());
}

/// Tensors that a job holds at the same time, all rows of all ranks of this process.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tensors {
    bytes: u128,
}

impl Tensors {
    /// Query, key, value, out and lse; with `backward` also dout, dq, dk and dv.
    pub(crate) fn of(dims: &Dims, dtype: DType, backward: bool) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = *dims;
        let q = [batch, q_len, q_heads];
        let kv = [batch, kv_len, kv_heads];
        let times = if backward { 2 } else { 1 };
        // of keys and values backward adds a gradient each, of queries and out as well
        Self::default()
            .and(&q, times * (head_dim + value_dim), dtype.bytes())
            .and(&kv, times * (head_dim + value_dim), dtype.bytes())
            .and(&q, 1, dtype.accumulator().bytes())
    }

    /// These and one of `shape`, of so many bytes an element, `times` over.
    #[must_use]
    pub(crate) fn and(self, shape: &[usize], times: usize, element: usize) -> Self {
        let elements =
            shape.iter().fold(1u128, |product, &len| product.saturating_mul(len as u128));
        let bytes = elements.saturating_mul((times * element) as u128);
        Self { bytes: self.bytes.saturating_add(bytes) }
    }

    /// The share of one of so many processes.
    #[must_use]
    pub(crate) const fn shared_by(self, processes: usize) -> Self {
        Self { bytes: self.bytes / if processes == 0 { 1 } else { processes as u128 } }
    }

    /// Refuses what does not fit into all the memory that this process could ever have.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
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

/// The most bytes that this process could hold: memory and swap of the machine, within the limits
/// of the process's control group and of its address space; `None` where the system does not tell.
fn most_bytes() -> Option<u64> {
    let of_file = |path: &str| std::fs::read_to_string(path).ok();
    let meminfo = of_file("/proc/meminfo").unwrap_or_default();
    let swap = kibibytes(&meminfo, "SwapTotal:").unwrap_or_default();
    let machine = kibibytes(&meminfo, "MemTotal:").map(|memory| memory.saturating_add(swap));
    let group = of_file("/proc/self/cgroup").and_then(|groups| {
        // of the second version of control groups there is one, "0::/path"
        let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        of_file(&format!("/sys/fs/cgroup{path}/memory.max"))?.trim().parse::<u64>().ok()
    });
    let group = group.map(|most| most.saturating_add(swap));
    let held =
        kibibytes(&of_file("/proc/self/status").unwrap_or_default(), "VmSize:").unwrap_or_default();
    let limit = getrlimit(Resource::As).current.map(|limit| limit.saturating_sub(held));
    [machine, group, limit].into_iter().flatten().min()
}

/// The number of a line `name   number kB`, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let number =
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix("kB")?;
    number.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Refuses to fill more than the free space of the file system that `path` is, or will be, on.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn must_fit_on_disk(path: &Path, bytes: u64) -> Result<()> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // whoever cannot tell will say what is wrong with it when the file is made
    let Ok(space) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if bytes > free {
        return Err(io(path, format!("needs {bytes} bytes, and {free} are free there")));
    }
    Ok(())
}

/// The most bytes that were resident at once, where the system tells (`VmHWM` of Linux).
pub(crate) fn peak_bytes() -> Option<u64> {
    kibibytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_grows_with_what_is_held() {
        let before = peak_bytes().unwrap();
        let held = vec![1u8; 64 << 20];
        assert!(peak_bytes().unwrap() >= before.max(held.len() as u64));
    }

    #[test]
    fn tensors_are_counted_and_refused_with_figures() {
        let dims = Dims { kv_heads: 2, value_dim: 3, ..Dims::new(2, 10, 4, 5) };
        // query and out, key and value, lse; twice the first two where there is a backward pass
        let (queries, keys) = (2 * 10 * 4 * (5 + 3) * 2, 2 * 10 * 2 * (5 + 3) * 2);
        let lse = 2 * 10 * 4 * 4;
        assert_eq!(Tensors::of(&dims, DType::Bf16, false).bytes, queries + keys + lse);
        let both = Tensors::of(&dims, DType::Bf16, true);
        assert_eq!(both.bytes, 2 * (queries + keys) + lse);
        let vast = both.and(&[1 << 40, 1 << 20], 1, 8);
        assert!(vast.shared_by(4).must_fit_into(None).is_ok());
        let told = vast.must_fit_into(Some(1 << 40)).unwrap_err().to_string();
        let want =
            format!("a problem of this size needs {} bytes, {} free", vast.bytes, 1u64 << 40);
        assert_eq!(told, format!("out of memory: {want}"));
        assert!(both.must_fit_into(Some(u64::try_from(both.bytes).unwrap())).is_ok());
    }

    #[test]
    fn a_disk_that_is_too_small_is_named_with_figures() {
        let path = std::env::temp_dir().join("never-made");
        let told = must_fit_on_disk(&path, u64::MAX).unwrap_err().to_string();
        assert!(told.contains("never-made: needs 18446744073709551615 bytes"), "{told}");
        assert!(must_fit_on_disk(&path, 0).is_ok());
    }
}
