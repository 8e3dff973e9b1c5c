//! GPU features that the kernels use.

use std::ffi::OsStr;

use annulus_core::{Error, Result};
use annulus_device_cuda::{Architecture, Compiler, Device, ImageKind};

/// GPU features that the kernels for 16-bit elements use. f32 and f64 are the same at every level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Scalar multiply-adds: any supported GPU.
    Plain,
    /// Tensor cores by `mma.sync`, forward and backward: any supported GPU.
    Matrix,
    /// Also forward and backward on warpgroups (`wgmma`, TMA): compute capability 9.0 only. What
    /// these cannot serve is computed as at [`Level::Matrix`]: specs beyond
    /// [`crate::Variant::on_warpgroups`] and [`crate::Variant::backward_on_warpgroups`], passes of
    /// few queries ([`crate::Cuda::MIN_WARPGROUP_ROWS`]), and dK and dV of a rank whose own queries
    /// TMA cannot read (address and strides of q and dout that are multiples of 16 bytes).
    Warpgroup,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Matrix, Self::Warpgroup];

    /// Environment variable that names the level of [`crate::Cuda::open`].
    pub const VARIABLE: &'static str = "ANNULUS_CUDA_LEVEL";

    /// Reads the level from [`Level::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if its value names no level.
    pub fn forced() -> Result<Option<Self>> {
        std::env::var_os(Self::VARIABLE).map(|value| Self::named(&value)).transpose()
    }

    fn named(value: &OsStr) -> Result<Self> {
        let names = Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|level| value == level.name());
        found.ok_or_else(|| {
            Error::invalid(Self::VARIABLE, value.display(), format!("one of {names}"))
        })
    }

    /// Name in [`Level::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Matrix => "matrix",
            Self::Warpgroup => "warpgroup",
        }
    }

    /// Returns the highest level that the device and the compiler support: the level if none is
    /// requested. It was the fastest one on an H200 (`docs/cuda.md`).
    pub(crate) fn highest(device: &Device, compiler: &Compiler) -> Self {
        match Self::Warpgroup.check(device, compiler) {
            Ok(()) => Self::Warpgroup,
            Err(_) => Self::Matrix,
        }
    }

    /// Checks that the device and the compiler support the level.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; as [`Compiler::target`].
    pub(crate) fn check(self, device: &Device, compiler: &Compiler) -> Result<()> {
        if self < Self::Warpgroup {
            return Ok(());
        }
        let what = format!("cuda level {}", self.name());
        if !device.has_tensor_maps() {
            return Err(Error::unsupported(what, "a driver without cuTensorMapEncodeTiled"));
        }
        let architecture = device.architecture();
        let (kind, _) = compiler.target(architecture)?;
        // PTX for an older architecture has no wgmma or TMA
        if architecture != Architecture::HOPPER || kind != ImageKind::Cubin {
            let device = format!("{} (compute capability {architecture})", device.name());
            return Err(Error::unsupported(what, device));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_parse_from_their_names_only() {
        for level in Level::ALL {
            assert_eq!(Level::named(level.name().as_ref()), Ok(level));
        }
        let error = Level::named("4".as_ref()).unwrap_err();
        let Error::InvalidArgument { argument, .. } = &error else { panic!("{error}") };
        assert_eq!(argument, Level::VARIABLE);
    }
}
