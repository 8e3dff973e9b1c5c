//! Types of the command line's values, and its errors.

pub(crate) mod device;
pub(crate) mod documents;
pub(crate) mod mask;
pub(crate) mod names;
pub(crate) mod refusal;
pub(crate) mod ring;
pub(crate) mod scores;
pub(crate) mod values;
