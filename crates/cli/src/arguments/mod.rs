//! What the command line says, in types.

pub(crate) mod mask;
pub(crate) mod ring;
pub(crate) mod values;
