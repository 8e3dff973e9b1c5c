//! Table of NCCL's functions: the system's, or any with the same semantics. RCCL, for AMD GPUs, has
//! the same functions under the same names, and its version is the one of NCCL that it follows.
//!
//! Types are those of `nccl.h` since NCCL 2.14, the first with non-blocking communicators.

use std::ffi::{c_char, c_int, c_uint, c_void};

use annulus_core::{Error, Result};
use cudarc::driver::sys::CUstream;

use crate::{
    Api, hip,
    symbols::{missing, open, table},
};

/// Result of a call: [`SUCCESS`], [`IN_PROGRESS`], or an error code.
pub type Status = c_int;
/// ncclSuccess.
pub const SUCCESS: Status = 0;
/// ncclInProgress: poll [`NcclSymbols::async_error`].
pub const IN_PROGRESS: Status = 7;
/// ncclUint8 as element type.
pub const BYTES: c_int = 1;

/// A communicator's handle.
pub type RawCommunicator = *mut c_void;

/// ncclUniqueId: shared by the ranks of one communicator.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId(pub [u8; Self::BYTES]);

impl UniqueId {
    /// Length in bytes.
    pub const BYTES: usize = 128;
}

/// ncclConfig_t as of 2.14; newer libraries recognize its version by its size.
#[repr(C)]
#[derive(Debug)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// Non-blocking calls.
    pub const NON_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
}

table! {
    /// Functions of NCCL or of RCCL.
    pub NcclSymbols
        with api: Api = Api::Cuda
    => {
        version = ncclGetVersion(*mut c_int) -> Status;
        unique_id = ncclGetUniqueId(*mut UniqueId) -> Status;
        init_rank = ncclCommInitRankConfig(
            *mut RawCommunicator, c_int, UniqueId, c_int, *mut Config
        ) -> Status;
        count = ncclCommCount(RawCommunicator, *mut c_int) -> Status;
        user_rank = ncclCommUserRank(RawCommunicator, *mut c_int) -> Status;
        async_error = ncclCommGetAsyncError(RawCommunicator, *mut Status) -> Status;
        abort = ncclCommAbort(RawCommunicator) -> Status;
        destroy = ncclCommDestroy(RawCommunicator) -> Status;
        group_start = ncclGroupStart() -> Status;
        group_end = ncclGroupEnd() -> Status;
        send = ncclSend(*const c_void, usize, c_int, c_int, RawCommunicator, CUstream) -> Status;
        receive = ncclRecv(*mut c_void, usize, c_int, c_int, RawCommunicator, CUstream) -> Status;
        error_string = ncclGetErrorString(Status) -> *const c_char;
    }
}

impl NcclSymbols {
    /// Oldest supported version.
    pub const OLDEST: c_int = 21400;

    /// Loads this machine's NCCL, or its RCCL for the GPUs of HIP.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none, or it is too old.
    pub fn system(api: Api) -> Result<Self> {
        let library = match api {
            Api::Cuda => open(&["libnccl.so.2", "libnccl.so"])
                .ok_or_else(|| missing("NCCL", "no library (libnccl.so.2 was not found)"))?,
            Api::Hip => hip::collectives()?,
        };
        // SAFETY: it is NCCL or RCCL by its name.
        let found = unsafe { Self::of(library, Self::name_of(api), api) }?;
        Self { api, ..found }.checked()
    }

    /// Name of the library for the GPUs of an interface.
    pub const fn name_of(api: Api) -> &'static str {
        match api {
            Api::Cuda => "NCCL",
            Api::Hip => "RCCL",
        }
    }

    /// Name of the library.
    pub const fn name(&self) -> &'static str {
        Self::name_of(self.api)
    }

    /// Checks that the library is the one for the GPUs of `api`.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn serving(self, api: Api) -> Result<Self> {
        if self.api == api {
            return Ok(self);
        }
        Err(Error::unsupported(format!("memory of {}", api.name()), self.name()))
    }

    /// Checks the version.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn checked(self) -> Result<Self> {
        self.number().map(|_| self)
    }

    /// Returns the version; 22809 is 2.28.9.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the call fails or the version is too old.
    pub fn number(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: a pointer to a local.
        let status = unsafe { (self.version)(&raw mut version) };
        if status != SUCCESS || version < Self::OLDEST {
            let oldest = Self::OLDEST;
            return Err(missing(
                self.name(),
                format!("its version is {version}, {oldest} or newer is needed"),
            ));
        }
        Ok(version)
    }

    /// Formats a status with the library's text.
    pub fn words(&self, status: Status) -> String {
        // SAFETY: NCCL returns a static text that ends in 0.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above.
        let words = unsafe { std::ffi::CStr::from_ptr(text) };
        format!("{} (status {status})", words.to_string_lossy())
    }
}
