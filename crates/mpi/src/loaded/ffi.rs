//! Types, constants and functions of MPI, under the names of the crate `mpi`.
//!
//! Types and constants are those of the standard ABI that annulus uses (MPI 5.0, 21.2.2 and
//! appendix A.1).
//!
//! Handles are pointers to incomplete structures; those of predefined objects have fixed values
//! below 4096. The constants have the names and the types of the crate `mpi`, which prefixes those
//! that are variables of a linked MPI with `RSMPI_`.
//!
//! Each function calls the one of the loaded library.
#![allow(missing_docs, reason = "the names and meanings are MPI's")]
#![allow(non_camel_case_types, non_snake_case, reason = "the names are MPI's")]
#![allow(clippy::missing_safety_doc, reason = "the duties are those of MPI's functions")]
#![allow(clippy::too_many_arguments, reason = "the arguments are those of MPI's functions")]

use std::{
    ffi::{c_char, c_int, c_void},
    ptr::without_provenance_mut,
    sync::OnceLock,
};

use super::{OpenedLibrary, opened};

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

/// Major version of the ABI that this module describes.
const ABI_MAJOR: c_int = 1;

/// Declares the table of functions, and for each function one of the same name that calls it. A
/// function without a library returns `MPI_ERR_OTHER` and writes nothing.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// Functions of the loaded library.
        pub(super) struct Table {
            comm_fromint: unsafe extern "C" fn(c_int) -> MPI_Comm,
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Table {
            fn of(library: &OpenedLibrary) -> Result<Self, String> {
                // SAFETY: MPI 5.0 declares a function of each name with these types in its ABI, of
                // which `check_version` finds the version; a shim has the same functions
                unsafe {
                    check_version(library.function("MPI_Abi_get_version")?)?;
                    Ok(Self {
                        comm_fromint: library.function("MPI_Comm_fromint")?,
                        $($name: library.function(stringify!($name))?,)*
                    })
                }
            }
        }

        $(
            #[doc = concat!("`", stringify!($name), "` of the loaded library.")]
            #[inline]
            pub unsafe fn $name($($argument: $type),*) -> c_int {
                match table() {
                    // SAFETY: as MPI requires of the caller
                    Ok(table) => unsafe { (table.$name)($($argument),*) },
                    Err(_) => MPI_ERR_OTHER as c_int,
                }
            }
        )*
    };
}

functions! {
    MPI_Abort(comm: MPI_Comm, code: c_int);
    MPI_Cancel(request: *mut MPI_Request);
    MPI_Comm_create_keyval(
        copy: MPI_Comm_copy_attr_function,
        delete: MPI_Comm_delete_attr_function,
        key: *mut c_int,
        state: *mut c_void,
    );
    MPI_Comm_free(comm: *mut MPI_Comm);
    MPI_Comm_free_keyval(key: *mut c_int);
    MPI_Comm_get_attr(comm: MPI_Comm, key: c_int, value: *mut c_void, found: *mut c_int);
    MPI_Comm_idup(comm: MPI_Comm, new: *mut MPI_Comm, request: *mut MPI_Request);
    MPI_Comm_rank(comm: MPI_Comm, rank: *mut c_int);
    MPI_Comm_set_attr(comm: MPI_Comm, key: c_int, value: *mut c_void);
    MPI_Comm_set_errhandler(comm: MPI_Comm, handler: MPI_Errhandler);
    MPI_Comm_set_name(comm: MPI_Comm, name: *const c_char);
    MPI_Comm_size(comm: MPI_Comm, size: *mut c_int);
    MPI_Comm_split(comm: MPI_Comm, color: c_int, key: c_int, new: *mut MPI_Comm);
    MPI_Comm_test_inter(comm: MPI_Comm, flag: *mut c_int);
    MPI_Error_class(code: c_int, class: *mut c_int);
    MPI_Error_string(code: c_int, text: *mut c_char, length: *mut c_int);
    MPI_Finalize();
    MPI_Finalized(flag: *mut c_int);
    MPI_Get_count(status: *const MPI_Status, datatype: MPI_Datatype, count: *mut c_int);
    MPI_Get_library_version(text: *mut c_char, length: *mut c_int);
    MPI_Get_processor_name(text: *mut c_char, length: *mut c_int);
    MPI_Improbe(
        source: c_int,
        tag: c_int,
        comm: MPI_Comm,
        flag: *mut c_int,
        message: *mut MPI_Message,
        status: *mut MPI_Status,
    );
    MPI_Imrecv(
        buffer: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        message: *mut MPI_Message,
        request: *mut MPI_Request,
    );
    MPI_Init_thread(
        argc: *mut c_int,
        argv: *mut *mut *mut c_char,
        required: c_int,
        provided: *mut c_int,
    );
    MPI_Initialized(flag: *mut c_int);
    MPI_Irecv(
        buffer: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        source: c_int,
        tag: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    );
    MPI_Is_thread_main(flag: *mut c_int);
    MPI_Isend(
        buffer: *const c_void,
        count: c_int,
        datatype: MPI_Datatype,
        dest: c_int,
        tag: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    );
    MPI_Issend(
        buffer: *const c_void,
        count: c_int,
        datatype: MPI_Datatype,
        dest: c_int,
        tag: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    );
    MPI_Query_thread(provided: *mut c_int);
    MPI_Test(request: *mut MPI_Request, flag: *mut c_int, status: *mut MPI_Status);
    MPI_Testsome(
        count: c_int,
        requests: *mut MPI_Request,
        done: *mut c_int,
        indices: *mut c_int,
        statuses: *mut MPI_Status,
    );
}

/// Returns the table, which the first call makes.
pub(super) fn table() -> Result<&'static Table, &'static str> {
    static TABLE: OnceLock<Result<Table, String>> = OnceLock::new();
    let table = TABLE.get_or_init(|| opened().as_ref().map_err(Clone::clone).and_then(Table::of));
    table.as_ref().map_err(String::as_str)
}

/// Converts a communicator handle of Fortran, which is the integer of the C handle (MPI 5.0,
/// 21.2.2).
///
/// # Safety
/// The handle is valid.
pub unsafe fn RSMPI_Comm_f2c(handle: RSMPI_Fint) -> MPI_Comm {
    match table() {
        // SAFETY: as required of the caller
        Ok(table) => unsafe { (table.comm_fromint)(handle) },
        Err(_) => RSMPI_COMM_NULL,
    }
}

/// Checks the version of the ABI. A library may have the function without the ABI, and says -1
/// then.
fn check_version(
    get_version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
) -> Result<(), String> {
    let mut major = -1;
    let mut minor = -1;
    // SAFETY: it may be called at any time; the numbers live through the call
    let code = unsafe { get_version(&raw mut major, &raw mut minor) };
    if code == 0 && major == ABI_MAJOR {
        return Ok(());
    }
    Err(format!("the library has version {major}.{minor} of the ABI of MPI, want {ABI_MAJOR}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_size_of_the_abi() {
        assert_eq!(size_of::<MPI_Status>(), 32);
        assert_eq!(std::mem::offset_of!(MPI_Status, MPI_ERROR), 8);
    }

    /// Reports version `MAJOR`.3 of the ABI.
    unsafe extern "C" fn version<const MAJOR: c_int>(
        major: *mut c_int,
        minor: *mut c_int,
    ) -> c_int {
        // SAFETY: the caller passes pointers to numbers
        unsafe {
            major.write(MAJOR);
            minor.write(3);
        }
        0
    }

    #[test]
    fn another_version_of_the_abi_is_refused() {
        let told = check_version(version::<-1>).unwrap_err();
        assert_eq!(told, "the library has version -1.3 of the ABI of MPI, want 1");
        assert_eq!(check_version(version::<1>), Ok(()));
    }
}
