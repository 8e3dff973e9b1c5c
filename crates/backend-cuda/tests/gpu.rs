//! The CUDA backend on a GPU: number `ANNULUS_DEVICE`, else 0. Several ranks are several threads, each with a stream of its own. A missing GPU is a
//! failure: `scripts/gpu-check` runs this, on purpose.

mod common;

use std::time::Duration;

use annulus_conformance::{
    Subject,
    suite::{self, Scale, Verdict},
};
use annulus_core::{Error, Result};
use annulus_cuda::{Cuda, Level, Variant, device::Architecture};

use common::multiples::OnMultiplesOfEight;

fn open() -> Result<Cuda> {
    let number = std::env::var("ANNULUS_DEVICE").unwrap_or_else(|_| "0".into());
    Cuda::open(number.parse().map_err(|_| Error::invalid("ANNULUS_DEVICE", &number, "the number of a GPU"))?)
}

fn gpu() -> impl Subject {
    delayed(Duration::ZERO)
}

fn delayed(delay: Duration) -> impl Subject {
    common::staged("cuda over staged threads", delay, open)
}

#[test]
fn tiny_random_cases_hold() {
    suite::random_cases(&gpu(), 0..6).unwrap();
}

#[test]
fn random_cases_hold() {
    suite::random_cases(&gpu(), 0..400).unwrap();
}

#[test]
fn a_sample_of_the_matrix_holds() {
    suite::matrix(&gpu(), Scale::OneIn(3)).unwrap();
}

#[test]
fn awkward_sizes_hold() {
    suite::sizes(&gpu(), Scale::Full).unwrap();
}

#[test]
fn the_numeric_rules_hold() {
    suite::numeric_rules(&gpu()).unwrap();
}

#[test]
fn the_metamorphic_relations_hold() {
    suite::metamorphic(&gpu()).unwrap();
}

#[test]
fn every_variant_holds() {
    for Variant { dtype, dim, .. } in Variant::all() {
        for (causal, ragged) in [(false, false), (true, false), (false, true), (true, true)] {
            common::wide(&gpu(), dtype, dim, causal, ragged).unwrap();
        }
    }
}

#[test]
fn bits_repeat_whatever_comes_first() {
    suite::same_bits_over_repeats(&gpu(), 20).unwrap();
    suite::same_bits_under_delay(&gpu(), &delayed(Duration::from_micros(500)), 20).unwrap();
}

/// The level that is never taken unasked: on compute capability 9.0 it holds, elsewhere it is refused.
fn on_warpgroups(holds: impl Fn(&dyn Subject) -> Verdict) -> Verdict {
    let cuda = open().map_err(|error| error.to_string())?;
    if cuda.stream().device().architecture() == Architecture::HOPPER {
        let make = || open()?.at_level(Level::Warpgroup);
        return holds(&OnMultiplesOfEight(common::staged("cuda on warpgroups over staged threads", Duration::ZERO, make)));
    }
    match cuda.at_level(Level::Warpgroup) {
        Err(Error::Unsupported { .. }) => Ok(()),
        other => Err(format!("warpgroups elsewhere than on 9.0: {:?}", other.map(|cuda| cuda.level()))),
    }
}

#[test]
fn tiny_random_cases_hold_on_warpgroups() {
    on_warpgroups(|subject| suite::random_cases(subject, 200..206)).unwrap();
}

#[test]
fn random_cases_hold_on_warpgroups() {
    on_warpgroups(|subject| suite::random_cases(subject, 200..600)).unwrap();
}

#[test]
fn awkward_sizes_hold_on_warpgroups() {
    on_warpgroups(|subject| suite::sizes(subject, Scale::Full)).unwrap();
}

#[test]
fn the_numeric_rules_hold_on_warpgroups() {
    on_warpgroups(suite::numeric_rules).unwrap();
}

#[test]
fn every_variant_holds_on_warpgroups() {
    let hold = |subject: &dyn Subject, causal| {
        Variant::all()
            .filter(|variant| variant.has_matrix())
            .try_for_each(|Variant { dtype, dim, .. }| common::wide(subject, dtype, dim, causal, false))
    };
    on_warpgroups(|subject| hold(subject, false).and_then(|()| hold(subject, true))).unwrap();
}

#[test]
fn bits_repeat_on_warpgroups() {
    on_warpgroups(|subject| suite::same_bits_over_repeats(subject, 20)).unwrap();
}
