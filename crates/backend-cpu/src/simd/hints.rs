//! Prefetch instructions.

/// Prefetches every cache line that holds a part of `memory` into the first-level cache.
///
/// A no-op on other architectures: stable Rust has no prefetch intrinsic for them.
#[inline(always)]
pub(crate) fn prefetch_l1<T>(memory: &[T]) {
    prefetch_l1_at(memory.as_ptr().cast(), size_of_val(memory));
}

/// As [`prefetch_l1`], of `bytes` bytes from `first` on: of memory that no slice describes, because
/// other parts of it are written meanwhile.
#[inline(always)]
pub(crate) fn prefetch_l1_at(first: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    each_line(first, bytes, |line| {
        // SAFETY: a prefetch is a hint. It is allowed for any address and changes nothing but cache
        // contents. SSE is part of every x86-64.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast())
        };
    });
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box((first, bytes));
}

/// Prefetches every cache line that holds a part of `memory` into the second-level cache, for data
/// that is read later.
#[inline(always)]
pub(crate) fn prefetch_l2<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    each_line(memory.as_ptr().cast(), size_of_val(memory), |line| {
        // SAFETY: as in `prefetch_l1_at`.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast())
        };
    });
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(memory);
}

/// Calls `prefetch` with an address in each cache line of 64 bytes that holds one of `bytes` bytes
/// from `first` on.
///
/// Rows of a caller's tensor seldom begin at a line: the allocator aligns to 16 bytes. A row of 64
/// f32 then lies in five lines.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn each_line(first: *const u8, bytes: usize, prefetch: impl Fn(*const u8)) {
    const LINE: usize = 64;
    if bytes == 0 {
        return;
    }
    let offset = first.addr() % LINE;
    for line in 0..(offset + bytes).div_ceil(LINE) {
        prefetch(first.wrapping_sub(offset).wrapping_add(line * LINE));
    }
}
