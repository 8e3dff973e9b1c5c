//! Disk cache of compiled images, so that a program is compiled once per machine.
//!
//! An entry is written to a temporary file and then renamed, so that no reader gets a partial one.
//! It carries a digest: a damaged entry is ignored and rewritten. A cache that cannot be written
//! costs compile time, but is not an error.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use annulus_core::Fingerprint;

/// Kinds of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// Machine code for one architecture.
    Cubin,
    /// PTX, which the driver compiles for the GPU.
    Ptx,
    /// Machine code for one AMD GPU.
    CodeObject,
}

/// A compiled program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Kind of `bytes`.
    pub kind: ImageKind,
    /// The image.
    pub bytes: Vec<u8>,
    /// Log of the compiler: registers, shared memory, spills.
    pub log: String,
}

/// Folder of cached images.
#[derive(Debug, Clone)]
pub struct ImageCache {
    folder: PathBuf,
}

const MAGIC: &[u8; 8] = b"annulus1";
/// Begins the name of the file that records a compiler.
const COMPILER: &str = "nvrtc-";

impl ImageCache {
    /// Environment variable that sets the folder; "none" disables the cache.
    pub const VARIABLE: &'static str = "ANNULUS_KERNEL_CACHE";

    /// Uses this folder, which is created by the first write.
    pub const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the user's cache: [`ImageCache::VARIABLE`], else `annulus` in `$XDG_CACHE_HOME` or
    /// `~/.cache`; `None` if neither is set.
    pub fn of_user() -> Option<Self> {
        if let Some(folder) = std::env::var_os(Self::VARIABLE) {
            return (folder != "none").then(|| Self::new(folder.into()));
        }
        let caches = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let caches = caches
            .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
        caches.map(|caches| Self::new(caches.join("annulus")))
    }

    /// Hashes all inputs of an image to 128 bits.
    pub fn key<'a>(texts: impl Iterator<Item = &'a str>) -> String {
        let mut one = Fingerprint::new();
        let mut other = Fingerprint::new().number(1);
        for text in texts {
            one = digest(one, text.as_bytes());
            other = digest(other, text.as_bytes());
        }
        format!("{:016x}{:016x}", one.finish(), other.finish())
    }

    /// Reads the image of this key, if it exists and its digest matches.
    pub fn get(&self, key: &str, kind: ImageKind) -> Option<Image> {
        let bytes = fs::read(self.file(key)).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, rest) = rest.split_first_chunk::<8>()?;
        if digest(Fingerprint::new(), rest).finish() != u64::from_le_bytes(*sum) {
            return None;
        }
        let (log_len, rest) = rest.split_first_chunk::<8>()?;
        let (log, image) =
            rest.split_at_checked(usize::try_from(u64::from_le_bytes(*log_len)).ok()?)?;
        Some(Image { kind, bytes: image.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
    }

    /// Writes an image, if the folder is writable.
    pub fn put(&self, key: &str, image: &Image) {
        let mut body = (image.log.len() as u64).to_le_bytes().to_vec();
        body.extend_from_slice(image.log.as_bytes());
        body.extend_from_slice(&image.bytes);
        let sum = digest(Fingerprint::new(), &body).finish().to_le_bytes();
        self.write(&self.file(key), &[MAGIC.as_slice(), &sum, &body].concat());
    }

    /// Writes a file at once, if the folder is writable.
    fn write(&self, file: &Path, bytes: &[u8]) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let own = self.folder.join(format!(
            "{}.{}.tmp",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        let written = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&own, bytes))
            .and_then(|()| fs::rename(&own, file));
        if written.is_err() {
            // remove a partial file; a failed write is not the caller's error
            fs::remove_file(&own).unwrap_or_default();
        }
    }

    /// Records a compiler, unless it is there: its version in the file's name, the architectures
    /// that it supports in the file.
    pub(crate) fn put_compiler(&self, (major, minor): (i32, i32), architectures: &[i32]) {
        let file = self.folder.join(format!("{COMPILER}{major}.{minor}"));
        if !file.exists() {
            let numbers: Vec<String> = architectures.iter().map(i32::to_string).collect();
            self.write(&file, numbers.join(" ").as_bytes());
        }
    }

    /// Returns version and architectures of the newest compiler that was recorded.
    pub(crate) fn newest_compiler(&self) -> Option<((i32, i32), Vec<i32>)> {
        let compiler = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let (major, minor) = name.strip_prefix(COMPILER)?.split_once('.')?;
            let version = (major.parse().ok()?, minor.parse().ok()?);
            let text = fs::read_to_string(entry.path()).ok()?;
            let numbers: Result<Vec<i32>, _> = text.split(' ').map(str::parse).collect();
            Some((version, numbers.ok()?))
        };
        fs::read_dir(&self.folder).ok()?.filter_map(|entry| compiler(entry.ok()?)).max()
    }

    fn file(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.image"))
    }
}

fn digest(start: Fingerprint, bytes: &[u8]) -> Fingerprint {
    start.number(bytes.len() as u64).bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("annulus-cache-{name}-{}", std::process::id()));
        fs::remove_dir_all(&folder).unwrap_or_default();
        folder
    }

    #[test]
    fn images_round_trip_and_damaged_ones_are_ignored() {
        let folder = folder("damage");
        let cache = ImageCache::new(folder.clone());
        let image =
            Image { kind: ImageKind::Cubin, bytes: vec![7; 100], log: "12 registers".into() };
        let key = ImageCache::key(["a", "b"].into_iter());
        assert_eq!(cache.get(&key, ImageKind::Cubin), None);
        cache.put(&key, &image);
        assert_eq!(cache.get(&key, ImageKind::Cubin), Some(image.clone()));
        let file = cache.file(&key);
        let whole = fs::read(&file).unwrap();
        for damage in [
            whole[..whole.len() - 1].to_vec(),
            whole[..10].to_vec(),
            Vec::new(),
            [&whole[..40], &[1], &whole[41..]].concat(),
        ] {
            fs::write(&file, damage).unwrap();
            assert_eq!(cache.get(&key, ImageKind::Cubin), None);
        }
        // the entry is written anew, and no other file remains
        cache.put(&key, &image);
        assert_eq!(cache.get(&key, ImageKind::Cubin), Some(image));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn keys_differ_for_different_inputs() {
        let key = |texts: &[&str]| ImageCache::key(texts.iter().copied());
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_ne!(key(&["a"]), key(&["a", ""]));
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_failure() {
        let cache = ImageCache::new(PathBuf::from("/proc/annulus"));
        cache.put("key", &Image { kind: ImageKind::Ptx, bytes: Vec::new(), log: String::new() });
        assert_eq!(cache.get("key", ImageKind::Ptx), None);
    }
}
