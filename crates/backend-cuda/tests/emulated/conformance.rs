//! The suite on the emulated device, over transports that stage through host memory. Random cases and a sample of the matrix; every numeric rule.

use std::time::Duration;

use annulus_conformance::suite::{self, Scale};

use crate::support::{plain, subject};

#[test]
fn random_cases_hold_on_the_emulated_device() {
    suite::random_cases(&plain(), 0..40).unwrap();
}

#[test]
fn a_sample_of_the_matrix_holds_on_the_emulated_device() {
    suite::matrix(&plain(), Scale::OneIn(13)).unwrap();
}

#[test]
fn the_numeric_rules_hold_on_the_emulated_device() {
    suite::numeric_rules(&plain()).unwrap();
}

#[test]
fn awkward_sizes_hold_on_the_emulated_device() {
    suite::sizes(&plain(), Scale::Full).unwrap();
}

#[test]
fn messages_that_overtake_each_other_change_no_bit() {
    suite::same_bits_under_delay(&plain(), &subject(&[], Duration::from_millis(1)), 3).unwrap();
}
