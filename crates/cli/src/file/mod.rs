//! Files: tensors in safetensors files, read and written a rank's rows at a time by positioned
//! reads and writes; texts as a whole.
//!
//! A safetensors file is `[u64 header length][JSON header][data]`, little-endian. None is ever held
//! in memory as a whole: the header is parsed, and of each tensor only the rows that a rank holds
//! are read. An output of any kind grows under no name where the file system allows that, and takes
//! its name when it is complete.

mod header;
mod kind;
mod object;
mod read;
mod regular;
mod rows;
mod stage;
mod target;
mod text;
mod write;

pub(crate) use kind::Kind;
pub(crate) use object::Object;
pub(crate) use read::Tensors;
pub(crate) use regular::read_text;
pub(crate) use stage::Manner;
pub(crate) use text::{Document, is_standard_output, write_text};
pub(crate) use write::{Output, Part, Planned, identity};
