//! Files: safetensors files, of which each rank reads and writes its own rows by positioned I/O;
//! and text files.
//!
//! A safetensors file is `[u64 header length][JSON header][data]`, little-endian. It is never held
//! in memory as a whole: the header is parsed, and each rank reads only its rows of each tensor. An
//! output has a temporary name until it is complete.

mod dtype;
mod read;
mod regular;
mod rows;
mod staged;
mod text;
mod write;

pub(crate) use dtype::{element_bytes, float, of_floats};
pub(crate) use read::Tensors;
pub(crate) use regular::read_text;
pub(crate) use text::{Document, is_standard_output, write_text};
pub(crate) use write::{Output, Part, Planned};
