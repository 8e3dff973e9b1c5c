//! Types and constants of the standard ABI, which annulus uses (MPI 5.0, 21.2.2 and appendix A.1).
//!
//! Handles are pointers to incomplete structures; those of predefined objects have fixed values
//! below 4096. The constants have the names and the types of the crate `mpi`, which prefixes those
//! that are variables of a linked MPI with `RSMPI_`.
#![allow(missing_docs, reason = "the names and meanings are MPI's")]
#![allow(non_camel_case_types, non_snake_case, reason = "the names are MPI's")]

use std::{
    ffi::{c_int, c_void},
    ptr::without_provenance_mut,
};

macro_rules! handles {
    ($($handle:ident = $object:ident;)*) => {$(
        #[repr(C)]
        #[derive(Debug)]
        pub struct $object {
            _private: [u8; 0],
        }
        pub type $handle = *mut $object;
    )*};
}

handles! {
    MPI_Comm = MPI_ABI_Comm;
    MPI_Datatype = MPI_ABI_Datatype;
    MPI_Errhandler = MPI_ABI_Errhandler;
    MPI_Message = MPI_ABI_Message;
    MPI_Request = MPI_ABI_Request;
}

/// A handle of Fortran. Its type is that of the C function `MPI_Comm_fromint`.
pub type RSMPI_Fint = c_int;

/// A status of 32 bytes, whose last 20 are the library's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MPI_Status {
    pub MPI_SOURCE: c_int,
    pub MPI_TAG: c_int,
    pub MPI_ERROR: c_int,
    internal: [c_int; 5],
}

pub type MPI_Comm_copy_attr_function = Option<
    unsafe extern "C" fn(
        MPI_Comm,
        c_int,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_int,
    ) -> c_int,
>;
pub type MPI_Comm_delete_attr_function =
    Option<unsafe extern "C" fn(MPI_Comm, c_int, *mut c_void, *mut c_void) -> c_int>;

// error classes; a return code is one of them or a code of the library's
pub const MPI_SUCCESS: u32 = 0;
pub const MPI_ERR_TRUNCATE: u32 = 15;
pub const MPI_ERR_OTHER: u32 = 16;
pub const MPI_ERR_IN_STATUS: u32 = 19;

pub const MPI_MAX_ERROR_STRING: u32 = 512;
pub const MPI_TAG_UB: u32 = 501;
pub const MPI_UNDEFINED: i32 = -32766;

pub const RSMPI_ANY_SOURCE: c_int = -1;
pub const RSMPI_ANY_TAG: c_int = -2;
pub const RSMPI_MAX_LIBRARY_VERSION_STRING: c_int = 8192;
pub const RSMPI_MAX_PROCESSOR_NAME: c_int = 256;
pub const RSMPI_THREAD_FUNNELED: c_int = 1024;
pub const RSMPI_THREAD_SERIALIZED: c_int = 2048;
pub const RSMPI_THREAD_MULTIPLE: c_int = 4096;
pub const RSMPI_UNDEFINED: c_int = MPI_UNDEFINED;

pub const RSMPI_COMM_NULL: MPI_Comm = without_provenance_mut(0x100);
pub const RSMPI_COMM_WORLD: MPI_Comm = without_provenance_mut(0x101);
pub const RSMPI_COMM_SELF: MPI_Comm = without_provenance_mut(0x102);
pub const RSMPI_ERRORS_RETURN: MPI_Errhandler = without_provenance_mut(0x143);
pub const RSMPI_REQUEST_NULL: MPI_Request = without_provenance_mut(0x180);
pub const RSMPI_UINT8_T: MPI_Datatype = without_provenance_mut(0x241);
pub const RSMPI_STATUS_IGNORE: *mut MPI_Status = std::ptr::null_mut();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_size_of_the_abi() {
        assert_eq!(size_of::<MPI_Status>(), 32);
        assert_eq!(std::mem::offset_of!(MPI_Status, MPI_ERROR), 8);
    }
}
