//! The leaf that asks where ranks run: processor, node, and every rank's answer. It stands on the rules of [`super::ffi`].
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    ffi::{c_char, c_int},
    time::Duration,
};

use annulus_core::Result;
use mpi::ffi;

use super::ffi::{Communicator, check, complete, count};

/// What MPI calls the processor of this process. The caller has entered a communicator.
pub(super) fn processor() -> Result<String> {
    // SAFETY: a constant of the linked MPI
    let room = count(unsafe { ffi::RSMPI_MAX_PROCESSOR_NAME });
    let (mut text, mut length) = (vec![0u8; room + 1], 0);
    // SAFETY: rule 1 (the caller has entered); MPI writes at most `room` characters and the number
    let code =
        unsafe { ffi::MPI_Get_processor_name(text.as_mut_ptr().cast::<c_char>(), &raw mut length) };
    check(code, (0, 0))?;
    text.truncate(count(length).min(room));
    Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
}

/// The lowest rank of `communicator` that shares memory with this one. Collective over its ranks; the caller has entered it.
pub(super) fn first_on_node(communicator: &Communicator) -> Result<usize> {
    let about = (communicator.rank(), 0);
    let key = c_int::try_from(communicator.rank()).unwrap_or(c_int::MAX);
    // SAFETY: constants of the linked MPI
    let (mut node, [mut here, mut there]) =
        unsafe { (ffi::RSMPI_COMM_NULL, [ffi::RSMPI_GROUP_NULL; 2]) };
    // SAFETY: rules 1 and 2 (the caller has entered); the communicator lives, and so does what MPI writes to; a null info is allowed
    let split = unsafe {
        ffi::MPI_Comm_split_type(
            communicator.raw(),
            ffi::RSMPI_COMM_TYPE_SHARED,
            key,
            ffi::RSMPI_INFO_NULL,
            &raw mut node,
        )
    };
    check(split, about)?;
    let (lowest, mut first) = (0, 0);
    // SAFETY: rules 1 and 2; `node` was made a moment ago, and the groups before they are used; all are freed here, once, and used by nobody
    // else; the numbers live through the calls
    let codes = unsafe {
        [
            ffi::MPI_Comm_group(node, &raw mut here),
            ffi::MPI_Comm_group(communicator.raw(), &raw mut there),
            ffi::MPI_Group_translate_ranks(here, 1, &raw const lowest, there, &raw mut first),
            ffi::MPI_Group_free(&raw mut here),
            ffi::MPI_Group_free(&raw mut there),
            ffi::MPI_Comm_free(&raw mut node),
        ]
    };
    codes.into_iter().try_for_each(|code| check(code, about))?;
    Ok(count(first))
}

/// Every rank's record, all of one length. Collective over the ranks of `communicator`, which the caller has entered; waits for `patience` at most.
///
/// Only here does a collective move bytes: control messages must not, for they obey aborts, and an endpoint is not to die while it is made.
pub(super) fn gather<const LENGTH: usize>(
    communicator: &Communicator,
    mine: [u8; LENGTH],
    patience: Duration,
) -> Result<Vec<[u8; LENGTH]>> {
    let about = (communicator.rank(), 0);
    let length = c_int::try_from(LENGTH).unwrap_or(c_int::MAX);
    // on the heap, and left there if it fails: MPI may read and write whenever the last rank comes
    let (mine, all) = (
        Box::into_raw(Box::new(mine)),
        Box::into_raw(vec![[0u8; LENGTH]; communicator.ranks()].into_boxed_slice()),
    );
    // SAFETY: a constant of the linked MPI
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    // SAFETY: rules 1 and 2 (the caller has entered); `mine` has `length` bytes and `all` as many for each rank, and both live until the request
    // is complete, or for ever
    let code = unsafe {
        let byte = ffi::RSMPI_UINT8_T;
        ffi::MPI_Iallgather(
            mine.cast(),
            length,
            byte,
            all.cast(),
            length,
            byte,
            communicator.raw(),
            &raw mut request,
        )
    };
    check(code, about)?;
    complete(&mut request, about.0, patience, "the ranks did not all say where they run")?;
    // SAFETY: both came out of `Box::into_raw`, and the operation that used them is complete
    let (_, all) = unsafe { (Box::from_raw(mine), Box::from_raw(all)) };
    Ok(all.into_vec())
}
