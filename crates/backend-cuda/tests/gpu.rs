//! The CUDA backend on a GPU: number `ANNULUS_DEVICE`, else 0. Several ranks are several threads, each with a stream of its own. A missing GPU is a
//! failure: `scripts/gpu-check` runs this, on purpose.

mod common;

use std::time::Duration;

use annulus_conformance::{
    Subject,
    suite::{self, Scale},
};
use annulus_core::Error;
use annulus_cuda::{Cuda, Variant};

fn gpu() -> impl Subject {
    delayed(Duration::ZERO)
}

fn delayed(delay: Duration) -> impl Subject {
    common::staged("cuda over staged threads", delay, || {
        let number = std::env::var("ANNULUS_DEVICE").unwrap_or_else(|_| "0".into());
        let ordinal = number.parse().map_err(|_| Error::invalid("ANNULUS_DEVICE", &number, "the number of a GPU"))?;
        Cuda::open(ordinal)
    })
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
