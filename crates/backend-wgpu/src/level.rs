//! How much of a device the kernels use.

use annulus_core::{Error, Result};

/// How rows of a tile are summed up and compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Level {
    /// Through workgroup memory: any device.
    Plain,
    /// By shuffles within a subgroup: devices whose subgroups have at least 8 invocations.
    Subgroup,
}

impl Level {
    /// From the lowest to the highest.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Subgroup];

    /// The environment variable that names a level to use in place of the highest, where the caller asks for none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_LEVEL";

    /// The level that [`Level::VARIABLE`] names, if it is set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it names none.
    pub fn forced() -> Result<Option<Self>> {
        let Some(value) = std::env::var_os(Self::VARIABLE) else { return Ok(None) };
        let named = Self::ALL.into_iter().find(|level| value == level.name());
        let names = Self::ALL.map(Self::name).join(", ");
        named.map(Some).ok_or_else(|| Error::invalid(Self::VARIABLE, value.display(), format!("one of {names}")))
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Subgroup => "subgroup",
        }
    }
}
