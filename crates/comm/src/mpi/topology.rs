//! Calls of MPI that gather the processor and the node of every rank. Relies on the rules of
//! [`super::ffi`].
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    ffi::{c_char, c_int},
    ptr,
};

use annulus_core::Result;
use annulus_mpi::ffi;

use super::{
    Timeout,
    communicator::{Communicator, complete},
    ffi::{PeerStep, check, count},
};

/// Tag of the records. Frames, which a rank may send while others still gather, have another.
const TAG: c_int = 1;

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

/// Gathers the records of all ranks, which have one length, on all ranks, by the algorithm of
/// [`super::all_gather`] with blocking rounds.
///
/// Frames cannot carry them, because processing frames may abort an endpoint that is not created
/// yet. `MPI_Iallgather` would connect every pair of ranks in some MPIs (Open MPI's is linear), which
/// costs a descriptor for each.
///
/// Collective over the ranks of `communicator`, which the caller has entered; waits for at most
/// `timeout` in each round.
pub(super) fn all_gather<const LENGTH: usize>(
    communicator: &Communicator,
    mine: [u8; LENGTH],
    timeout: &Timeout,
) -> Result<Vec<[u8; LENGTH]>> {
    let (rank, ranks) = (communicator.rank(), communicator.ranks());
    // records of `rank`, `rank + 1`, …; on the heap, and leaked if a round fails: MPI may read and
    // write it whenever the last rank comes
    let mut records = vec![[0u8; LENGTH]; ranks];
    records[0] = mine;
    let records: *mut [u8; LENGTH] = Box::leak(records.into_boxed_slice()).as_mut_ptr();
    let failure = "the ranks did not all report where they run";
    let bytes = |records: usize| c_int::try_from(records * LENGTH).unwrap_or(c_int::MAX);
    let mut reach = 1;
    while reach < ranks {
        let count = reach.min(ranks - reach);
        let source = (rank + reach) % ranks;
        let target = (rank + ranks - reach) % ranks;
        // SAFETY: constants of the linked MPI
        let (mut receive, mut send) = unsafe { (ffi::RSMPI_REQUEST_NULL, ffi::RSMPI_REQUEST_NULL) };
        // SAFETY: rules 1 and 2 (the caller has entered); `count` records from number `reach` on
        // are within the allocation, which lives until both requests are complete, or for ever
        let started = unsafe {
            let into = records.add(reach).cast();
            let (byte, raw) = (ffi::RSMPI_UINT8_T, communicator.raw());
            let peer = rank_number(source);
            ffi::MPI_Irecv(into, bytes(count), byte, peer, TAG, raw, &raw mut receive)
        };
        check(started, PeerStep::of(source))?;
        // SAFETY: as above; the first `count` records are complete, and the receive writes behind
        // them
        let started = unsafe {
            let (byte, raw) = (ffi::RSMPI_UINT8_T, communicator.raw());
            let peer = rank_number(target);
            ffi::MPI_Isend(records.cast(), bytes(count), byte, peer, TAG, raw, &raw mut send)
        };
        check(started, PeerStep::of(target))?;
        complete(&mut receive, rank, timeout, failure)?;
        complete(&mut send, rank, timeout, failure)?;
        reach *= 2;
    }
    // SAFETY: the allocation of `ranks` records that was leaked above; all operations that used it
    // are complete
    let mut records = unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(records, ranks)) };
    records.rotate_right(rank);
    Ok(records.into_vec())
}

/// Converts a rank to the type of MPI.
fn rank_number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}
