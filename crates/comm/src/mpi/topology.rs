//! Calls of MPI that find the processor and the node of every rank. Relies on the rules of
//! [`super::ffi`].
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::ffi::{c_char, c_int};

use annulus_core::Result;
use mpi::ffi;

use super::{
    Patience,
    communicator::{Communicator, complete},
    ffi::{PeerStep, check, count},
};

/// Returns MPI's name of the processor of this process. The caller has entered a communicator.
pub(super) fn processor_name() -> Result<String> {
    // SAFETY: a constant of the linked MPI
    let capacity = count(unsafe { ffi::RSMPI_MAX_PROCESSOR_NAME });
    let mut text = vec![0u8; capacity + 1];
    let mut length = 0;
    // SAFETY: rule 1 (the caller has entered); MPI writes at most `capacity` characters and the
    // length
    let code =
        unsafe { ffi::MPI_Get_processor_name(text.as_mut_ptr().cast::<c_char>(), &raw mut length) };
    check(code, PeerStep::of(0))?;
    text.truncate(count(length).min(capacity));
    Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
}

/// Returns the lowest rank of `communicator` that shares memory with this one.
///
/// Collective over its ranks; the caller has entered it.
pub(super) fn first_rank_on_node(communicator: &Communicator) -> Result<usize> {
    let at = PeerStep::of(communicator.rank());
    let key = c_int::try_from(communicator.rank()).unwrap_or(c_int::MAX);
    // SAFETY: constants of the linked MPI
    let (mut node, null_group) = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_GROUP_NULL) };
    // SAFETY: rules 1 and 2 (the caller has entered); the communicator is alive, and `node` lives
    // through the call; a null info is allowed
    let split = unsafe {
        ffi::MPI_Comm_split_type(
            communicator.raw(),
            ffi::RSMPI_COMM_TYPE_SHARED,
            key,
            ffi::RSMPI_INFO_NULL,
            &raw mut node,
        )
    };
    check(split, at)?;
    let mut node_group = null_group;
    let mut all_group = null_group;
    let lowest = 0;
    let mut first = 0;
    // SAFETY: rules 1 and 2; `node` was created above, and the groups before they are used; all are
    // freed here, once, and used by no other code; the numbers live through the calls
    let codes = unsafe {
        [
            ffi::MPI_Comm_group(node, &raw mut node_group),
            ffi::MPI_Comm_group(communicator.raw(), &raw mut all_group),
            ffi::MPI_Group_translate_ranks(
                node_group,
                1,
                &raw const lowest,
                all_group,
                &raw mut first,
            ),
            ffi::MPI_Group_free(&raw mut node_group),
            ffi::MPI_Group_free(&raw mut all_group),
            ffi::MPI_Comm_free(&raw mut node),
        ]
    };
    codes.into_iter().try_for_each(|code| check(code, at))?;
    Ok(count(first))
}

/// Waits for all ranks, as long as `patience` allows.
///
/// Collective over the ranks of `communicator`, which the caller has entered.
pub(super) fn barrier(communicator: &Communicator, patience: &Patience) -> Result<()> {
    let rank = communicator.rank();
    // SAFETY: a constant of the linked MPI
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    // SAFETY: rules 1 and 2 (the caller has entered); the communicator is alive, and the request
    // lives through the call
    let code = unsafe { ffi::MPI_Ibarrier(communicator.raw(), &raw mut request) };
    check(code, PeerStep::of(rank))?;
    complete(&mut request, rank, patience, "the ranks did not all begin to make the ring")
}

/// Gathers the records of all ranks, which have one length, on all ranks.
///
/// Collective over the ranks of `communicator`, which the caller has entered; waits for at most
/// `patience`. Only here does a collective of MPI move data: frames cannot, because processing them
/// may abort an endpoint that is not created yet.
pub(super) fn all_gather<const LENGTH: usize>(
    communicator: &Communicator,
    mine: [u8; LENGTH],
    patience: &Patience,
) -> Result<Vec<[u8; LENGTH]>> {
    let rank = communicator.rank();
    let length = c_int::try_from(LENGTH).unwrap_or(c_int::MAX);
    // on the heap, and leaked if it fails: MPI may read and write whenever the last rank comes
    let mine = Box::into_raw(Box::new(mine));
    let all = Box::into_raw(vec![[0u8; LENGTH]; communicator.ranks()].into_boxed_slice());
    // SAFETY: a constant of the linked MPI
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    // SAFETY: rules 1 and 2 (the caller has entered); `mine` has `length` bytes and `all` as many
    // for each rank, and both live until the request is complete, or for ever
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
    check(code, PeerStep::of(rank))?;
    complete(&mut request, rank, patience, "the ranks did not all report where they run")?;
    // SAFETY: both came out of `Box::into_raw`, and the operation that used them is complete
    let (_, all) = unsafe { (Box::from_raw(mine), Box::from_raw(all)) };
    Ok(all.into_vec())
}
