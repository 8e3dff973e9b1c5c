//! Which level a device computes at unasked: a level above [`Level::Plain`] only where a record shows that it is faster.
//!
//! A level is put into [`PROOFS`] for a kind of adapter by somebody who has run `benches/wgpu-levels.sh` on one, where every `speedup` over the level
//! below was above 1 for every pass whose kernels differ, and has kept what it said in `benches/record/`. Until then nobody is given it who has not
//! asked for it.

use wgpu::{AdapterInfo, Backend, DeviceType};

use crate::Level;

/// Adapters for which one measurement speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Vulkan, Metal or DX12: each has a translation of the kernels of its own.
    pub(crate) api: Backend,
    /// As the API numbers makers: of hardware mostly the PCI vendor.
    pub(crate) vendor: u32,
    /// Integrated, discrete, or no hardware at all.
    pub(crate) device_type: DeviceType,
}

impl Kind {
    pub(crate) const fn of(info: &AdapterInfo) -> Self {
        Self { api: info.backend, vendor: info.vendor, device_type: info.device_type }
    }
}

/// What a record has shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proof {
    /// Where it was measured.
    pub(crate) adapters: Kind,
    /// What was faster than every level below it.
    pub(crate) level: Level,
    /// The file that says so.
    pub(crate) record: &'static str,
}

/// All that is known: nothing. No GPU has been measured yet. On Mesa's lavapipe `subgroup` saves some per cent of forward in one version and nothing in
/// another, and `matrix` costs a third more (benches/record/2026-11-21-wgpu-lavapipe.md), so that software adapters compute at `plain` too.
pub(crate) const PROOFS: &[Proof] = &[];

/// The proof of the highest level, of those that a device can run, that is proven for its kind; where there is none, [`Level::Plain`] it is.
pub(crate) fn choose<'a>(proofs: &'a [Proof], kind: Kind, available: &[Level]) -> Option<&'a Proof> {
    proofs.iter().filter(|proof| proof.adapters == kind && available.contains(&proof.level)).max_by_key(|proof| proof.level)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Kind = Kind { api: Backend::Vulkan, vendor: 0x1002, device_type: DeviceType::DiscreteGpu };

    fn proof(adapters: Kind, level: Level) -> Proof {
        Proof { adapters, level, record: "" }
    }

    fn chosen(proofs: &[Proof], available: &[Level]) -> Option<Level> {
        choose(proofs, HERE, available).map(|proof| proof.level)
    }

    #[test]
    fn what_is_not_proven_is_not_chosen() {
        // hardware that nobody can have measured
        assert!(choose(PROOFS, Kind { vendor: 0xdead_beef, ..HERE }, &Level::ALL).is_none());
        assert_eq!(chosen(&[], &Level::ALL), None);
        for elsewhere in [
            Kind { api: Backend::Dx12, ..HERE },
            Kind { vendor: 0x10de, ..HERE },
            Kind { device_type: DeviceType::IntegratedGpu, ..HERE },
            Kind { device_type: DeviceType::Cpu, ..HERE },
        ] {
            assert_eq!(chosen(&[proof(elsewhere, Level::Matrix)], &Level::ALL), None);
        }
    }

    #[test]
    fn the_highest_that_is_proven_and_can_be_run_is_chosen() {
        let proofs = [proof(HERE, Level::Matrix), proof(HERE, Level::Subgroup)];
        assert_eq!(chosen(&proofs, &Level::ALL), Some(Level::Matrix));
        assert_eq!(chosen(&proofs, &[Level::Plain, Level::Subgroup]), Some(Level::Subgroup));
        assert_eq!(chosen(&proofs, &[Level::Plain]), None);
        // whether subgroup itself is worth it is another question
        assert_eq!(chosen(&proofs[..1], &[Level::Plain, Level::Subgroup]), None);
    }

    /// Whether the record of a proof is there and has the level and what it gains.
    fn is_shown(proof: &Proof) -> bool {
        let record = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(proof.record);
        let shows = |text: String| text.contains(proof.level.name()) && text.contains("speedup");
        proof.level != Level::Plain && std::fs::read_to_string(record).is_ok_and(shows)
    }

    #[test]
    fn every_proof_has_its_record() {
        let record = |record| Proof { record, ..proof(HERE, Level::Matrix) };
        assert!(!is_shown(&record("benches/record/nothing.md")) && !is_shown(&record("README.md")));
        assert!(is_shown(&record("benches/record/2026-11-21-wgpu-lavapipe.md")));
        assert!(PROOFS.iter().all(is_shown));
    }
}
