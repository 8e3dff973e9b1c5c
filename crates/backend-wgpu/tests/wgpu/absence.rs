//! A machine without a driver: drivers are hidden from the loader.
#![cfg(target_os = "linux")]

use std::process::Output;

use annulus::Error;
use annulus_wgpu::{Gpu, Options};

use super::this_program;

/// Runs one test of this program in a process that finds no driver.
fn without_drivers(test: &str, required: &str) -> Output {
    let mut command = this_program();
    command
        .args(["--exact", test, "--nocapture"])
        .env("ANNULUS_REQUIRE", required)
        .env_remove("RUST_BACKTRACE");
    // older Vulkan loaders read only the second variable
    command
        .env("VK_DRIVER_FILES", "/nowhere/none.json")
        .env("VK_ICD_FILENAMES", "/nowhere/none.json");
    command.output().expect("it starts")
}

#[test]
fn without_a_driver_tests_print_not_run_or_fail_if_one_is_required() {
    let test = "random_cases_hold_on_wgpu";
    let output = without_drivers(test, "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.contains("NOT RUN"), "{errors}");
    let output = without_drivers(test, "golden,wgpu");
    let all = [output.stdout, output.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    assert!(!output.status.success() && all.contains("ANNULUS_REQUIRE has wgpu"), "{all}");
}

/// Opens a device, or checks the error if there is none.
#[test]
fn a_device_opens_or_the_error_names_what_is_missing() {
    if Gpu::list().is_empty() {
        let error = Gpu::open(&Options::default()).expect_err("there is none");
        let expected = matches!(
            &error,
            Error::Unsupported { what, by } if what == "wgpu device 0" && by.contains("driver")
        );
        assert!(expected, "{error}");
        println!("NO DRIVER: {error}");
    } else {
        Gpu::open(&Options::default()).expect("the first adapter opens");
    }
}

#[test]
fn without_a_driver_opening_is_one_error() {
    let output = without_drivers("absence::a_device_opens_or_the_error_names_what_is_missing", "");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("NO DRIVER"), "{printed}");
}
