//! Device memory behind handles, and a queue of work on it.

use std::{
    collections::{HashMap, VecDeque},
    ops::{ControlFlow, Range},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Error, Result, Tick, index};

/// One device: its memory and its queue. A clone is the same device.
#[derive(Debug, Clone, Default)]
pub struct Device(Arc<DeviceState>);

#[derive(Default)]
struct DeviceState {
    /// Locked while work runs, so that work runs in order whichever thread polls.
    queue: Mutex<Queue>,
    memory: Mutex<SlotTable>,
    /// Slots whose last owner was dropped. Locked apart from `memory`, because an owner may be
    /// dropped while work runs.
    freed: Mutex<Vec<u64>>,
    next_slot: AtomicU64,
    /// Least time of a wait for queued work.
    busy: Duration,
    /// Time that each tile kernel takes. Default: none.
    kernel_time: Duration,
    /// Longest time of a tile kernel, after which the device counts as hung. Default: no bound.
    hang: Option<Duration>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    /// Time at which the first item began, if it takes time and was polled.
    began: Option<Instant>,
    issued: u64,
    done: u64,
    failure: Option<Error>,
}

/// An item of queued work.
struct Work {
    /// True for a tile kernel, which takes [`DeviceState::kernel_time`].
    is_kernel: bool,
    run: Run,
}

type Run = Box<dyn FnOnce(&mut SlotTable) -> Result<()> + Send>;

/// Result of a poll of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Polled {
    /// There is no work.
    Idle,
    /// The first item takes longer.
    Busy,
    /// An item was executed.
    Executed,
}

/// The bytes of all allocations of a device, accessible to its work.
#[derive(Default)]
pub(crate) struct SlotTable {
    slots: HashMap<u64, Slot>,
}

#[derive(Default)]
struct Slot {
    bytes: Vec<u8>,
    /// Number of the last queued work that writes the slot.
    written_by: u64,
    /// Number of the last queued work that reads or writes the slot.
    touched_by: u64,
}

/// Plan-owned device memory: a handle. A clone co-owns the same bytes.
#[derive(Debug, Clone)]
pub struct DeviceBuffer(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    device: Device,
    slot: u64,
    len: u64,
}

/// All work queued so far, as a number in the order of one device's work.
#[derive(Debug, Clone)]
pub struct DeviceEvent {
    device: Device,
    number: u64,
}

impl Device {
    /// Creates a device without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a device whose queued work takes the host at least `time` to wait for, as of kernels
    /// that take long.
    pub fn busy(time: Duration) -> Self {
        Self(Arc::new(DeviceState { busy: time, ..DeviceState::default() }))
    }

    /// Creates a device of whose tile kernels each takes `time` after the work before it.
    pub fn slow(time: Duration) -> Self {
        Self(Arc::new(DeviceState { kernel_time: time, ..DeviceState::default() }))
    }

    /// Creates a device whose tile kernels never end. It fails once it was polled for `bound` after
    /// one began.
    pub fn hanging(bound: Duration) -> Self {
        let hang = Some(bound);
        Self(Arc::new(DeviceState { kernel_time: Duration::MAX, hang, ..DeviceState::default() }))
    }

    /// Allocates `len` zero bytes.
    pub fn allocate(&self, len: u64) -> DeviceBuffer {
        self.apply_frees();
        let slot = self.0.next_slot.fetch_add(1, Ordering::Relaxed);
        lock(&self.0.memory)
            .slots
            .insert(slot, Slot { bytes: vec![0; index(len)], ..Slot::default() });
        DeviceBuffer(Arc::new(Allocation { device: self.clone(), slot, len }))
    }

    /// Returns the number of slots that are still owned; 0 after every plan is dropped.
    pub fn allocations(&self) -> usize {
        self.apply_frees();
        lock(&self.0.memory).slots.len()
    }

    /// Queues work that reads and writes these slots.
    pub(crate) fn enqueue(
        &self,
        reads: &[u64],
        writes: &[u64],
        work: impl FnOnce(&mut SlotTable) -> Result<()> + Send + 'static,
    ) -> Result<DeviceEvent> {
        self.enqueue_work(reads, writes, Work { is_kernel: false, run: Box::new(work) })
    }

    /// As [`Device::enqueue`], of a tile kernel.
    pub(crate) fn enqueue_kernel(
        &self,
        reads: &[u64],
        writes: &[u64],
        kernel: impl FnOnce(&mut SlotTable) -> Result<()> + Send + 'static,
    ) -> Result<DeviceEvent> {
        self.enqueue_work(reads, writes, Work { is_kernel: true, run: Box::new(kernel) })
    }

    fn enqueue_work(&self, reads: &[u64], writes: &[u64], work: Work) -> Result<DeviceEvent> {
        let mut queue = lock(&self.0.queue);
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        let number = queue.issued + 1;
        let mut memory = lock(&self.0.memory);
        for slot in reads.iter().chain(writes) {
            memory.slot(*slot)?.touched_by = number;
        }
        for slot in writes {
            memory.slot(*slot)?.written_by = number;
        }
        queue.issued = number;
        queue.waiting.push_back(work);
        Ok(DeviceEvent { device: self.clone(), number })
    }

    /// Returns an event after all work so far.
    pub fn now(&self) -> DeviceEvent {
        DeviceEvent { device: self.clone(), number: lock(&self.0.queue).issued }
    }

    /// Executes all queued work.
    pub fn synchronize(&self) -> Result<()> {
        self.wait(&mut || ControlFlow::Continue(())).map(drop)
    }

    /// As [`Device::synchronize`], with a tick after each item. Returns `Break` if the tick did.
    pub(crate) fn wait(&self, tick: Tick<'_>) -> Result<ControlFlow<()>> {
        let began = Instant::now();
        let mut had_work = false;
        loop {
            let polled = self.poll()?;
            let is_idle = polled == Polled::Idle;
            had_work |= !is_idle;
            if is_idle && (!had_work || began.elapsed() >= self.0.busy) {
                return Ok(ControlFlow::Continue(()));
            }
            if tick().is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if polled != Polled::Executed {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Executes one item of queued work, if there is one and its time has passed.
    fn poll(&self) -> Result<Polled> {
        let mut queue = lock(&self.0.queue);
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        let Some(work) = queue.waiting.front() else { return Ok(Polled::Idle) };
        if work.is_kernel && !self.0.kernel_time.is_zero() {
            let ran = queue.began.get_or_insert_with(Instant::now).elapsed();
            if self.0.hang.is_some_and(|bound| ran >= bound) {
                let error = fault(format!("a kernel did not end within {ran:?}"));
                queue.failure = Some(error.clone());
                return Err(error);
            }
            if ran < self.0.kernel_time {
                return Ok(Polled::Busy);
            }
            queue.began = None;
        }
        let Some(work) = queue.waiting.pop_front() else { return Ok(Polled::Idle) };
        let result = (work.run)(&mut lock(&self.0.memory));
        queue.done += 1;
        result.inspect_err(|error| queue.failure = Some(error.clone()))?;
        Ok(Polled::Executed)
    }

    /// Copies bytes to the host.
    pub fn read(&self, buffer: &DeviceBuffer, ranges: &[Range<u64>]) -> Result<Vec<u8>> {
        let done = lock(&self.0.queue).done;
        let mut memory = lock(&self.0.memory);
        let slot = memory.slot(buffer.0.slot)?;
        if slot.written_by > done {
            return Err(fault(format!(
                "slot {} was read before event {} had passed (at {done})",
                buffer.0.slot, slot.written_by
            )));
        }
        let mut read = Vec::new();
        for range in ranges {
            read.extend_from_slice(
                slot.bytes
                    .get(index(range.start)..index(range.end))
                    .ok_or_else(|| fault("read past the end"))?,
            );
        }
        Ok(read)
    }

    /// Copies bytes from the host to the start of a buffer.
    pub fn write(&self, buffer: &DeviceBuffer, bytes: &[u8]) -> Result<()> {
        let done = lock(&self.0.queue).done;
        let mut memory = lock(&self.0.memory);
        let slot = memory.slot(buffer.0.slot)?;
        if slot.touched_by > done {
            return Err(fault(format!(
                "slot {} was written before event {} had passed (at {done})",
                buffer.0.slot, slot.touched_by
            )));
        }
        slot.bytes
            .get_mut(..bytes.len())
            .ok_or_else(|| fault("written past the end"))?
            .copy_from_slice(bytes);
        Ok(())
    }

    fn apply_frees(&self) {
        let freed = std::mem::take(&mut *lock(&self.0.freed));
        let mut memory = lock(&self.0.memory);
        freed.iter().for_each(|slot| drop(memory.slots.remove(slot)));
    }
}

impl std::fmt::Debug for DeviceState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

impl SlotTable {
    /// Returns the bytes of a slot.
    pub(crate) fn bytes(&mut self, slot: u64) -> Result<&mut [u8]> {
        Ok(&mut self.slot(slot)?.bytes)
    }

    /// Writes bytes from this offset on.
    pub(crate) fn write(&mut self, slot: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let target = self
            .bytes(slot)?
            .get_mut(index(offset)..)
            .and_then(|target| target.get_mut(..bytes.len()));
        target.ok_or_else(|| fault("written past the end"))?.copy_from_slice(bytes);
        Ok(())
    }

    /// Copies consecutive parts of `from` to these ranges.
    pub(crate) fn scatter(
        &mut self,
        slot: u64,
        ranges: &[Range<u64>],
        mut from: &[u8],
    ) -> Result<()> {
        for range in ranges {
            let (head, tail) = from
                .split_at_checked(index(range.end - range.start))
                .ok_or_else(|| fault("too few bytes to write"))?;
            self.write(slot, range.start, head)?;
            from = tail;
        }
        if from.is_empty() { Ok(()) } else { Err(fault("too many bytes to write")) }
    }

    fn slot(&mut self, slot: u64) -> Result<&mut Slot> {
        self.slots
            .get_mut(&slot)
            .ok_or_else(|| fault(format!("slot {slot} was freed while in use")))
    }
}

impl DeviceBuffer {
    /// Returns the number that identifies the buffer in the device's work.
    pub(crate) fn slot(&self) -> u64 {
        self.0.slot
    }

    /// Returns the size in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.0.len
    }

    /// Returns the device that holds the buffer.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// True if another handle co-owns the buffer.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        lock(&self.device.0.freed).push(self.slot);
    }
}

impl DeviceEvent {
    /// True if the event belongs to this device.
    pub(crate) fn is_of(&self, device: &Device) -> bool {
        Arc::ptr_eq(&self.device.0, &device.0)
    }

    /// True if the event has passed. Each call executes at most one item of work, so that a loop
    /// over it waits.
    pub fn poll(&self) -> Result<bool> {
        if lock(&self.device.0.queue).done < self.number {
            self.device.poll()?;
        }
        Ok(lock(&self.device.0.queue).done >= self.number)
    }
}

/// Creates the error of a misuse of the device.
pub(crate) fn fault(what: impl Into<String>) -> Error {
    Error::Device { what: what.into() }
}

/// Locks, also after a panic of another thread, which has failed its test already.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_cannot_be_read_before_their_event() {
        let device = Device::new();
        let buffer = device.allocate(4);
        device.write(&buffer, &[1, 2, 3, 4]).unwrap();
        let slot = buffer.slot();
        let event =
            device.enqueue(&[], &[slot], move |memory| memory.write(slot, 1, &[9, 9])).unwrap();
        assert!(matches!(device.read(&buffer, &[0..2, 2..4]), Err(Error::Device { .. })));
        assert!(matches!(device.write(&buffer, &[0]), Err(Error::Device { .. })));
        assert!(event.poll().unwrap());
        assert_eq!(device.read(&buffer, &[0..2, 3..4]).unwrap(), [1, 9, 4]);
    }

    #[test]
    fn an_event_passes_only_after_all_work_before_it() {
        let device = Device::new();
        let events: Vec<_> =
            (0..3).map(|_| device.enqueue(&[], &[], |_| Ok(())).unwrap()).collect();
        assert!(!events[2].poll().unwrap());
        assert!(events[0].poll().unwrap());
        assert!(!events[2].poll().unwrap());
        assert!(events[2].poll().unwrap());
    }

    #[test]
    fn work_that_fails_kills_the_device_and_freed_memory_is_gone() {
        let device = Device::new();
        let buffer = device.allocate(1);
        assert_eq!(device.allocations(), 1);
        let slot = buffer.slot();
        device.enqueue(&[slot], &[], move |memory| memory.bytes(slot).map(|_| ())).unwrap();
        drop(buffer);
        assert_eq!(device.allocations(), 0);
        assert!(
            matches!(device.synchronize(), Err(Error::Device { what }) if what.contains("freed"))
        );
        assert!(device.enqueue(&[], &[], |_| Ok(())).is_err());
    }
}
