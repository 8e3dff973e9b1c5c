//! What the command line says, in types.

pub(crate) mod mask;
pub(crate) mod names;
pub(crate) mod refusal;
pub(crate) mod ring;
pub(crate) mod values;
