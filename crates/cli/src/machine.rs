//! Reads machine files for the command.

use std::path::Path;

use annulus_core::Result;
use annulus_plan::Machine;

use crate::{file::read_text, message};

/// Reads a machine file.
///
/// # Errors
/// [`annulus_core::Error::Io`] if the file cannot be read, is no JSON, or has an unknown, missing
/// or malformed field; [`annulus_core::Error::InvalidArgument`] of a wrong version or number. All
/// name file and field.
pub(crate) fn read(path: &Path) -> Result<Machine> {
    annulus_machine_file::parse(&read_text(path)?, &message::path(path))
}
