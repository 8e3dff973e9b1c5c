//! Prefetch instructions.

/// Prefetches memory into the first-level cache.
///
/// A no-op on other architectures: stable Rust has no prefetch intrinsic for them.
#[inline(always)]
pub(crate) fn prefetch_l1<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in memory.chunks(64 / size_of::<T>()) {
        // SAFETY: a prefetch is a hint. It is allowed for any address and changes nothing but cache
        // contents. SSE is part of every x86-64.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                line.as_ptr().cast(),
            )
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(memory);
}

/// Prefetches memory into the second-level cache, for data that is read later.
#[inline(always)]
pub(crate) fn prefetch_l2<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in memory.chunks(64 / size_of::<T>()) {
        // SAFETY: as in `prefetch_l1`.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(
                line.as_ptr().cast(),
            )
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(memory);
}
