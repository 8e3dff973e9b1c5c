//! What the command line says, in types.


pub(crate) mod ring;
pub(crate) mod values;
pub(crate) mod mask;
