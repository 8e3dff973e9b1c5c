//! Tensors in safetensors files, read and written a rank's rows at a time by positioned reads and writes.
//!
//! A file is `[u64 header length][JSON header][data]`, little-endian. No file is ever held in memory as a whole: the header is parsed,
//! and of each tensor only the rows that a rank holds are read.

mod header;
mod kind;
mod read;
mod rows;
mod write;

pub(crate) use kind::Kind;
pub(crate) use read::Tensors;
pub(crate) use write::{Output, Planned, identity, write_text};
