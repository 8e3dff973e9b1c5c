//! Output file that all ranks of a job write.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use annulus::comm::Descriptor;

use crate::{
    failure::{Failure, Outcome},
    file::{self, Output, Planned, Staging},
    job::Job,
};

/// Opens the output file of all ranks: rank 0 creates it, the others open it.
///
/// # Ordering
/// Collective over the processes of the job.
pub(crate) fn open(job: &mut Job, target: &Path, tensors: &[Planned]) -> Outcome<Output> {
    if job.is_on_one_node() {
        // on one node all ranks must name the same file; paths on other nodes may differ
        let identity = file::identity(target).unwrap_or_default();
        job.require_same(Descriptor::new().field_as("output", identity, target.display()))?;
        // fails on some file systems, and where a process may not open another one's files
        if let Ok(output) = open_as(job, target, tensors, Staging::Unnamed) {
            return Ok(output);
        }
    }
    // other nodes can open the file only by its name
    let staging = if job.is_mpi() { Staging::Named } else { Staging::Best };
    open_as(job, target, tensors, staging)
}

fn open_as(job: &mut Job, target: &Path, tensors: &[Planned], staging: Staging) -> Outcome<Output> {
    let made = if job.is_leader() {
        Output::create_staged(target, tensors, staging).map(Some)
    } else {
        Ok(None)
    };
    let made = job.agree(made.map_err(Failure::from))?;
    let mine = made.as_ref().map(Output::handle).unwrap_or_default();
    let handles = job.all_gather(mine.as_bytes())?;
    let handle = OsStr::from_bytes(handles.first().map_or(&[], Vec::as_slice));
    let opened = made.map_or_else(|| Output::join(target, tensors, handle), Ok);
    job.agree(opened.map_err(Failure::from))
}

/// Gives the output file its name once the data of all ranks is on the disk.
///
/// # Ordering
/// Collective over the processes of the job.
pub(crate) fn finish(job: &mut Job, output: Output) -> Outcome {
    job.run_local_phase([&output], |_, output| output.sync())?;
    if job.is_leader() {
        let finished = output.finish();
        return job.agree(finished.map_err(Failure::from));
    }
    job.agree(Ok(()))?;
    output.forget();
    Ok(())
}
