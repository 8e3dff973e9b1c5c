//! How much of a device the kernels use.

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

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Subgroup => "subgroup",
        }
    }
}
