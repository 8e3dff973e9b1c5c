//! How much of a device the kernels use.

use annulus_core::{Error, Result};
use wgpu::{CooperativeMatrixProperties, CooperativeScalarType, Features};

/// What of a device the kernels over tiles use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Rows of a tile are compared and summed up through workgroup memory: any device.
    Plain,
    /// By shuffles within a subgroup: devices whose subgroups have at least 8 invocations. Only where it is asked for, or a record shows it to be faster.
    Subgroup,
    /// Besides, 16-bit products on cooperative matrices (an experimental feature of wgpu): logits, dout·v, and weights times values or dout of f16
    /// inputs, with sums in f32; what is not that is computed as at [`Level::Subgroup`]. Only where it is asked for, or a record shows it to be faster.
    Matrix,
}

impl Level {
    /// From the lowest to the highest.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Subgroup, Self::Matrix];

    /// The environment variable that names a level, where the caller asks for none.
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
            Self::Matrix => "matrix",
        }
    }

    /// What a device with these features, subgroups and matrices can run, from the lowest to the highest.
    pub(crate) fn of_device(features: Features, smallest_subgroup: u32, matrices: Option<Matrices>) -> Vec<Self> {
        let shuffles = features.contains(Features::SUBGROUP) && smallest_subgroup >= 8;
        let multiplies = shuffles && features.contains(Matrices::FEATURES) && matrices.is_some();
        let runs = |level: &Self| match level {
            Self::Plain => true,
            Self::Subgroup => shuffles,
            Self::Matrix => multiplies,
        };
        Self::ALL.into_iter().filter(runs).collect()
    }
}

/// Rows and columns of the cooperative matrices that a device multiplies: f16 times f16, added to f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Matrices {
    Eight,
    Sixteen,
}

impl Matrices {
    /// What kernels with cooperative matrices take.
    pub(crate) const FEATURES: Features = Features::SUBGROUP.union(Features::SHADER_F16).union(Features::EXPERIMENTAL_COOPERATIVE_MATRIX);

    /// The largest that a device offers, which has subgroups of `smallest` to `largest` invocations.
    ///
    /// A workgroup of 64 is whole subgroups of any of these sizes, and a tile has at least one matrix for each of them.
    pub(crate) fn of_device(offered: &[CooperativeMatrixProperties], smallest: u32, largest: u32) -> Option<Self> {
        let fits = |matrices: &Self| {
            let size = matrices.size();
            let shape = |offer: &CooperativeMatrixProperties| [offer.m_size, offer.n_size, offer.k_size] == [size; 3];
            let types = |offer: &CooperativeMatrixProperties| {
                (offer.ab_type, offer.cr_type) == (CooperativeScalarType::F16, CooperativeScalarType::F32)
            };
            smallest >= size && largest <= 64 && offered.iter().any(|offer| shape(offer) && types(offer))
        };
        [Self::Sixteen, Self::Eight].into_iter().find(fits)
    }

    /// Rows, which are as many as the columns.
    pub(crate) const fn size(self) -> u32 {
        match self {
            Self::Eight => 8,
            Self::Sixteen => 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(size: u32, cr_type: CooperativeScalarType) -> CooperativeMatrixProperties {
        let ab_type = CooperativeScalarType::F16;
        CooperativeMatrixProperties { m_size: size, n_size: size, k_size: size, ab_type, cr_type, saturating_accumulation: false }
    }

    #[test]
    fn matrices_are_chosen_that_a_tile_has_enough_of() {
        let (f16, f32) = (CooperativeScalarType::F16, CooperativeScalarType::F32);
        let both = [offer(8, f32), offer(16, f32)];
        assert_eq!(Matrices::of_device(&both, 32, 32), Some(Matrices::Sixteen));
        assert_eq!(Matrices::of_device(&both, 8, 32), Some(Matrices::Eight));
        assert_eq!(Matrices::of_device(&both, 4, 32), None);
        assert_eq!(Matrices::of_device(&both, 64, 128), None);
        assert_eq!(Matrices::of_device(&[offer(16, f16)], 32, 32), None);
        assert_eq!(Matrices::of_device(&[CooperativeMatrixProperties { n_size: 8, ..offer(16, f32) }], 32, 32), None);
    }

    #[test]
    fn a_device_runs_the_levels_that_its_features_allow() {
        assert_eq!(Level::of_device(Matrices::FEATURES, 8, Some(Matrices::Eight)), Level::ALL);
        assert_eq!(Level::of_device(Features::empty(), 32, None), [Level::Plain]);
        assert_eq!(Level::of_device(Matrices::FEATURES, 4, None), [Level::Plain]);
        assert_eq!(Level::of_device(Features::SUBGROUP, 8, Some(Matrices::Eight)), [Level::Plain, Level::Subgroup]);
    }
}
