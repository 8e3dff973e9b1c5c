//! How much of a GPU the kernels use.

use std::ffi::OsStr;

use annulus_core::{Error, Result};
use annulus_device_cuda::{Architecture, Compiler, ImageKind};

/// What of a GPU the kernels for 16-bit elements use. Products of f32 and f64 are the same at every level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Products in the sums' own type: any GPU.
    Plain,
    /// Matrix units (`mma.sync`), forward and backward: any GPU that is new enough at all.
    Matrix,
    /// Besides, the forward pass on warpgroups (`wgmma`), fed by the copy engine: compute capability 9.0 alone. What [`crate::Variant::on_warpgroups`]
    /// cannot serve is computed as at [`Level::Matrix`]. Only where it is asked for: it has run on no GPU yet.
    Warpgroup,
}

impl Level {
    /// From the lowest to the highest.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Matrix, Self::Warpgroup];

    /// The environment variable that names a level, where the caller asks for none.
    pub const VARIABLE: &'static str = "ANNULUS_CUDA_LEVEL";

    /// The level that is taken unasked.
    pub const UNASKED: Self = Self::Matrix;

    /// The level that [`Level::VARIABLE`] names, if it is set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it names none.
    pub fn forced() -> Result<Option<Self>> {
        std::env::var_os(Self::VARIABLE).map(|value| Self::named(&value)).transpose()
    }

    fn named(value: &OsStr) -> Result<Self> {
        let names = Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|level| value == level.name());
        found.ok_or_else(|| Error::invalid(Self::VARIABLE, value.display(), format!("one of {names}")))
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Matrix => "matrix",
            Self::Warpgroup => "warpgroup",
        }
    }

    /// Whether a GPU of this architecture can run it, with what this compiler makes for it.
    ///
    /// # Errors
    /// As [`Compiler::target`].
    pub(crate) fn runs_on(self, architecture: Architecture, compiler: &Compiler) -> Result<bool> {
        let (kind, _) = compiler.target(architecture)?;
        // portable assembly has nothing that is one architecture's alone
        Ok(self < Self::Warpgroup || (architecture == Architecture::HOPPER && kind == ImageKind::Cubin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_known_by_its_name_and_nothing_else() {
        for level in Level::ALL {
            assert_eq!(Level::named(level.name().as_ref()), Ok(level));
        }
        let error = Level::named("4".as_ref()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument, .. } if argument == Level::VARIABLE), "{error}");
    }
}
