//! Device features that the kernels use.
//!
//! Values that a user forces by environment variables.

use annulus_core::{Error, Result};
use wgpu::{CooperativeMatrixProperties, CooperativeScalarType, Features};

/// Device features that the tile kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Row reductions through workgroup memory: any device.
    Plain,
    /// Row reductions by subgroup shuffles and, for f16 inputs, cooperative matrices (experimental
    /// in wgpu): all products of both passes but those of dbias, with f32 accumulators. Used on
    /// request, or if a record shows that it is faster.
    Matrix,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Matrix];

    /// Environment variable that names the level, if the caller requests none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_LEVEL";

    /// Reads the level from [`Level::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if its value names no level.
    pub fn forced() -> Result<Option<Self>> {
        forced(Self::VARIABLE, Self::ALL, Self::name)
    }

    /// Name in [`Level::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Matrix => "matrix",
        }
    }

    /// Lists the levels that a device with these properties can run, lowest first.
    pub(crate) fn of_device(
        features: Features,
        smallest_subgroup: u32,
        matrices: Option<Matrices>,
    ) -> Vec<Self> {
        let multiplies = features.contains(Matrices::FEATURES) && matrices.is_some();
        let runs = |level: &Self| match level {
            Self::Plain => true,
            Self::Matrix => smallest_subgroup >= 8 && multiplies,
        };
        Self::ALL.into_iter().filter(runs).collect()
    }
}

/// Cooperative matrices of a device: f16 × f16 accumulated in f32, square.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Matrices {
    /// Rows, equal to columns.
    size: u32,
    /// Subgroups of a workgroup that have the largest size of the device.
    subgroups: u32,
    /// True if a driver may run a kernel with subgroups smaller than the largest.
    has_smaller_subgroups: bool,
}

impl Matrices {
    /// wgpu features that kernels with cooperative matrices require.
    pub(crate) const FEATURES: Features = Features::SUBGROUP
        .union(Features::SUBGROUP_BARRIER)
        .union(Features::SHADER_F16)
        .union(Features::EXPERIMENTAL_COOPERATIVE_MATRIX);

    /// Selects the largest matrices that a device offers, given its range of subgroup sizes.
    ///
    /// A workgroup of 64 consists of whole subgroups of any of these sizes, and a tile has at least
    /// one matrix per subgroup.
    pub(crate) fn of_device(
        offered: &[CooperativeMatrixProperties],
        smallest: u32,
        largest: u32,
    ) -> Option<Self> {
        let fits = |&size: &u32| {
            let shape = |offer: &CooperativeMatrixProperties| {
                [offer.m_size, offer.n_size, offer.k_size] == [size; 3]
            };
            let types = |offer: &CooperativeMatrixProperties| {
                (offer.ab_type, offer.cr_type)
                    == (CooperativeScalarType::F16, CooperativeScalarType::F32)
            };
            smallest >= size
                && largest <= 64
                && offered.iter().any(|offer| shape(offer) && types(offer))
        };
        let size = [16, 8].into_iter().find(fits)?;
        let of_largest = Self::new(size, largest);
        Some(if smallest == largest { of_largest } else { of_largest.with_smaller_subgroups() })
    }

    /// Matrices of `size` rows, in subgroups of `invocations` of a workgroup of 64.
    pub(crate) const fn new(size: u32, invocations: u32) -> Self {
        Self { size, subgroups: 64 / invocations, has_smaller_subgroups: false }
    }

    /// The same matrices on a device whose driver may choose smaller subgroups.
    pub(crate) const fn with_smaller_subgroups(self) -> Self {
        Self { has_smaller_subgroups: true, ..self }
    }

    /// True if kernels must work with subgroups smaller than the largest, too.
    pub(crate) const fn has_smaller_subgroups(self) -> bool {
        self.has_smaller_subgroups
    }

    /// Subgroups of a workgroup that have the largest size of the device. If it has several sizes,
    /// a driver may choose a smaller one: wgpu cannot request a size.
    pub(crate) const fn subgroups(self) -> u32 {
        self.subgroups
    }

    /// Rows, equal to columns.
    pub(crate) const fn size(self) -> u32 {
        self.size
    }
}

/// Reads the one of `all` that the environment variable `variable` names; `None` if it is not set.
///
/// # Errors
/// [`Error::InvalidArgument`] if its value names none.
pub(crate) fn forced<T: Copy, const COUNT: usize>(
    variable: &'static str,
    all: [T; COUNT],
    name: impl Fn(T) -> &'static str,
) -> Result<Option<T>> {
    let Some(value) = std::env::var_os(variable) else { return Ok(None) };
    let named = all.into_iter().find(|&one| value == name(one));
    let names = all.map(name).join(", ");
    named
        .map(Some)
        .ok_or_else(|| Error::invalid(variable, value.display(), format!("one of {names}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(size: u32, cr_type: CooperativeScalarType) -> CooperativeMatrixProperties {
        let ab_type = CooperativeScalarType::F16;
        CooperativeMatrixProperties {
            m_size: size,
            n_size: size,
            k_size: size,
            ab_type,
            cr_type,
            saturating_accumulation: false,
        }
    }

    #[test]
    fn matrices_are_chosen_by_size_type_and_subgroup() {
        let f16 = CooperativeScalarType::F16;
        let f32 = CooperativeScalarType::F32;
        let both = [offer(8, f32), offer(16, f32)];
        assert_eq!(Matrices::of_device(&both, 32, 32), Some(Matrices::new(16, 32)));
        assert_eq!(
            Matrices::of_device(&both, 8, 32),
            Some(Matrices::new(8, 32).with_smaller_subgroups())
        );
        assert_eq!(Matrices::of_device(&both, 4, 32), None);
        assert_eq!(Matrices::new(8, 32).subgroups(), 2);
        assert_eq!(Matrices::new(16, 64).subgroups(), 1);
        assert_eq!(Matrices::new(16, 16).subgroups(), 4);
        assert_eq!(Matrices::of_device(&both, 64, 128), None);
        assert_eq!(Matrices::of_device(&[offer(16, f16)], 32, 32), None);
        assert_eq!(
            Matrices::of_device(
                &[CooperativeMatrixProperties { n_size: 8, ..offer(16, f32) }],
                32,
                32
            ),
            None
        );
    }

    #[test]
    fn levels_follow_from_subgroups_of_4_to_128() {
        let f32 = CooperativeScalarType::F32;
        let both = [offer(8, f32), offer(16, f32)];
        for (smallest, largest, levels) in [
            (4, 4, 1),
            (4, 32, 1),
            (8, 8, 2),
            (8, 32, 2),
            (16, 16, 2),
            (32, 32, 2),
            (32, 64, 2),
            (64, 64, 2),
            // a subgroup is larger than a workgroup, which matrices need whole
            (64, 128, 1),
            (128, 128, 1),
        ] {
            let matrices = Matrices::of_device(&both, smallest, largest);
            let found = Level::of_device(Matrices::FEATURES, smallest, matrices);
            assert_eq!(found, Level::ALL[..levels], "{smallest} to {largest}");
        }
    }

    #[test]
    fn a_device_runs_the_levels_that_its_features_allow() {
        assert_eq!(Level::of_device(Matrices::FEATURES, 8, Some(Matrices::new(8, 8))), Level::ALL);
        assert_eq!(Level::of_device(Features::empty(), 32, None), [Level::Plain]);
        assert_eq!(Level::of_device(Matrices::FEATURES, 4, None), [Level::Plain]);
        let without_matrices = Level::of_device(Features::SUBGROUP, 8, Some(Matrices::new(8, 8)));
        assert_eq!(without_matrices, [Level::Plain]);
    }
}
