//! The unit that multiplies tiles of bf16 pairs, and whether this process can use AMX's.
//!
//! # Source
//! Intel's manual, volume 1, the chapter on AMX (detection); Linux, `Documentation/arch/x86/xstate.rst`
//! (permission).

/// Rows of a tile of C and A, lanes of a tile of C and B, and pairs of one product.
pub(crate) const TILE_SIZE: usize = 16;

/// Unit that multiplies tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileUnit {
    /// The instructions; this process has the permission to use them.
    Amx,
    /// Scalar arithmetic with the same bits.
    Emulated,
}

/// Returns whether this process can use the AMX of its processor, or why not; `None` if the
/// processor has no AMX with bf16.
///
/// The first call on such a processor asks Linux for the permission, which the process and its later
/// threads keep. It enlarges signal frames to about 12 KB, so that an alternative signal stack of 8
/// KB is refused from then on. Linux refuses the permission if such a stack is in force.
pub fn amx() -> Option<Result<(), &'static str>> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return linux::amx();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    None
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod linux {
    use std::{arch::asm, sync::OnceLock};

    /// See [`super::amx`].
    pub(super) fn amx() -> Option<Result<(), &'static str>> {
        static AMX: OnceLock<Option<Result<(), &str>>> = OnceLock::new();
        *AMX.get_or_init(|| {
            has_instructions().then(|| {
                if !has_saved_state() {
                    Err("the operating system does not save its registers")
                } else if !has_permission() {
                    Err("the kernel refused the permission (an alternative signal stack below 12 KB?)")
                } else {
                    Ok(())
                }
            })
        })
    }

    /// True if the processor has AMX with bf16.
    fn has_instructions() -> bool {
        use std::arch::x86_64::__cpuid_count;
        const OSXSAVE: u32 = 1 << 27;
        // bits of leaf 7: AMX-BF16 and AMX-TILE
        const FEATURES: u32 = 1 << 22 | 1 << 24;
        __cpuid_count(0, 0).eax >= 0x1e
            && __cpuid_count(1, 0).ecx & OSXSAVE != 0
            && __cpuid_count(7, 0).edx & FEATURES == FEATURES
    }

    /// True if the operating system saves tiles. Called only where [`has_instructions`].
    fn has_saved_state() -> bool {
        // bits of XCR0: tile configuration and tile data
        const STATE: u32 = 3 << 17;
        let state: u32;
        // SAFETY: OSXSAVE, which the caller has checked, says that XGETBV may be executed; it reads
        // register 0, which exists.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") state, out("edx") _,
                options(nomem, nostack, preserves_flags));
        }
        state & STATE == STATE
    }

    /// Asks Linux for the permission to use tile data.
    fn has_permission() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        let answer: i64;
        // SAFETY: a system call without pointers; RCX and R11 are overwritten by the instruction.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA, out("rcx") _, out("r11") _, options(nostack));
        }
        answer == 0
    }
}
