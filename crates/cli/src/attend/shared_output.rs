//! Output file that all ranks of a job write.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use annulus::comm::Descriptor;
use annulus_core::Fingerprint;

use crate::{
    failure::{Failure, Outcome},
    file::{OutputFile, PlannedTensor},
    job::Job,
};

/// Opens the output file of all ranks: rank 0 creates it, the others open it by its temporary name.
///
/// # Ordering
/// Collective over the processes of the job.
pub(crate) fn open(job: &mut Job, target: &Path, tensors: &[PlannedTensor]) -> Outcome<OutputFile> {
    // paths of its folder may differ between nodes
    let name = target.file_name().unwrap_or_default();
    let name = Fingerprint::new().bytes(name.as_bytes()).finish();
    job.require_same(Descriptor::new().field_as("output", name, target.display()))?;
    let made =
        if job.is_leader() { OutputFile::create(target, tensors).map(Some) } else { Ok(None) };
    let made = job.agree(made.map_err(Failure::from))?;
    let mine = made.as_ref().map(OutputFile::temporary_name).unwrap_or_default();
    let names = job.all_gather(mine.as_bytes())?;
    let name = OsStr::from_bytes(names.first().map_or(&[], Vec::as_slice));
    let opened = made.map_or_else(|| OutputFile::join(target, tensors, name), Ok);
    job.agree(opened.map_err(Failure::from))
}

/// Gives the output file its name once the data of all ranks is on the disk.
///
/// # Ordering
/// Collective over the processes of the job.
pub(crate) fn finish(job: &mut Job, output: OutputFile) -> Outcome {
    job.run_local_phase([&output], |_, output| output.sync())?;
    if job.is_leader() {
        let finished = output.finish();
        return job.agree(finished.map_err(Failure::from));
    }
    job.agree(Ok(()))?;
    output.release();
    Ok(())
}
