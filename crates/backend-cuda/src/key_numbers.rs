//! Numbers of key rows in device memory: row numbers for a bias tensor and dropout, positions for
//! ALiBi.
//!
//! The keys of a KV cache get a few rows more with every call. A list that is the beginning of one
//! in device memory shares its memory, and one that continues it copies only its new numbers.

use std::sync::Arc;

use annulus_core::Result;
use annulus_device_cuda::{CudaBuffer, Stream};

/// Lists in device memory, the one that was used last at the end.
#[derive(Debug, Default)]
pub(crate) struct KeyNumbers {
    lists: Vec<List>,
}

#[derive(Debug)]
struct List {
    /// Numbers in the buffer, which may have room for more.
    numbers: Vec<u64>,
    buffer: Arc<CudaBuffer>,
    /// True if it was used since the last [`KeyNumbers::drop_unused`].
    is_used: bool,
}

/// Lists kept: row numbers and positions of as many blocks as [`crate::block_mask`] keeps. Beyond
/// it the list that was not used for longest is dropped.
const CAPACITY: usize = 512;

const NUMBER_BYTES: usize = size_of::<u64>();

impl KeyNumbers {
    /// Drops the lists that were not used since the last call, as those of earlier batches.
    pub(crate) fn drop_unused(&mut self) {
        self.lists.retain_mut(|list| std::mem::take(&mut list.is_used));
    }

    /// Returns memory that begins with these numbers.
    pub(crate) fn of(&mut self, numbers: Vec<u64>, stream: &Stream) -> Result<Arc<CudaBuffer>> {
        let is_same = |list: &List| {
            let common = list.numbers.len().min(numbers.len());
            common > 0 && list.numbers[..common] == numbers[..common]
        };
        let mut list = match self.lists.iter().position(is_same) {
            Some(found) => self.lists.remove(found).continued(numbers, stream)?,
            None => List::new(numbers, stream)?,
        };
        list.is_used = true;
        let buffer = Arc::clone(&list.buffer);
        if self.lists.len() >= CAPACITY {
            self.lists.remove(0);
        }
        self.lists.push(list);
        Ok(buffer)
    }
}

impl List {
    /// Copies a list to new memory, which has room for more numbers: a growing list is copied as a
    /// whole only when it has grown to a power of two.
    fn new(numbers: Vec<u64>, stream: &Stream) -> Result<Self> {
        let capacity = (numbers.len() + 1).next_power_of_two();
        let buffer = CudaBuffer::new(stream.device(), (capacity * NUMBER_BYTES) as u64)?;
        // SAFETY: the buffer is new and has at least as many bytes.
        unsafe { stream.copy_to_device(buffer.address(), &bytes(&numbers))? };
        Ok(Self { numbers, buffer: Arc::new(buffer), is_used: true })
    }

    /// Copies those of `numbers` that are not there. They begin as this list does.
    fn continued(mut self, numbers: Vec<u64>, stream: &Stream) -> Result<Self> {
        let present = self.numbers.len();
        let Some(new) = numbers.get(present..) else { return Ok(self) };
        if (numbers.len() * NUMBER_BYTES) as u64 > self.buffer.len() {
            return Self::new(numbers, stream);
        }
        let to = self.buffer.address() + (present * NUMBER_BYTES) as u64;
        // SAFETY: these bytes are in the buffer, and behind all that kernels read so far.
        unsafe { stream.copy_to_device(to, &bytes(new))? };
        self.numbers = numbers;
        Ok(self)
    }
}

fn bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}
