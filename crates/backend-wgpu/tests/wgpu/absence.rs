//! A driver that runs out of memory: an adapter that computes on the CPU, in a process whose
//! address space is limited.
#![cfg(target_os = "linux")]

use std::process::Command;

use annulus::{Attention, Dims, Error, comm::threads};
use annulus_core::DType;
use annulus_wgpu::{Options, Tensor};

use super::{adapter, forward, open, ring, this_program};

/// Set for the process whose address space the test limits.
const CHILD: &str = "ANNULUS_TEST_OF_MEMORY";

/// Address space beyond that in use, in bytes.
const ROOM: u64 = 1 << 30;

/// Returns the bytes of address space that this process uses.
fn address_space() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("VmSize");
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    kibibytes * 1024
}

/// Limits the address space of this process.
fn limit_address_space() {
    let pid = std::process::id().to_string();
    let limit = format!("--as={}", address_space() + ROOM);
    let done = Command::new("prlimit").args(["--pid", &pid, &limit]).status();
    assert!(done.expect("prlimit of util-linux").success());
}

/// The body of the test, in a process of its own.
fn exhaust() {
    let Some(gpu) = open(&Options::default()) else { return };
    let dims = Dims::new(1, 40, 2, 8);
    let plan = || {
        let transport = threads::ring(1).remove(0);
        ring(&gpu, transport, &Attention::new(), dims)
    };
    // the kernels are compiled before
    forward(&gpu, &mut plan().expect("a plan"), dims).expect("a pass");
    // 64 MiB each, far below every limit of the device
    let tensor = || Tensor::zeros(&gpu, [1, 1 << 14, 8, 128], DType::F32);
    let before = address_space();
    limit_address_space();
    let mut tensors = Vec::new();
    let error = loop {
        match tensor() {
            Ok(tensor) => tensors.push(tensor),
            Err(error) => break error,
        }
        if tensors.len() as u64 * (64 << 20) > 2 * ROOM {
            // lavapipe of Mesa 26 fills the address space, and ignores that it can map no more
            let is_full = address_space() + (128 << 20) > before + ROOM;
            assert!(is_full, "no limit was reached");
            println!("NOT RUN: this driver does not report that its memory is exhausted");
            return;
        }
    };
    assert!(!tensors.is_empty());
    let typed = matches!(
        &error,
        Error::OutOfMemory { what, asked, free: None } if what == "tensor" && *asked == 64 << 20
    );
    assert!(typed, "{error:?}");
    // the device is not lost
    drop(tensors);
    gpu.synchronize().expect("the device works");
    forward(&gpu, &mut plan().expect("a plan"), dims).expect("a pass");
    println!("OUT OF MEMORY: {error}");
}

#[test]
fn memory_that_the_driver_lacks_is_a_typed_error_and_the_device_survives() {
    let Some(adapter) = adapter() else { return };
    if !adapter.software {
        eprintln!("NOT RUN: {} has memory of its own", adapter.name);
        return;
    }
    if std::env::var_os(CHILD).is_some() {
        return exhaust();
    }
    let name = "absence::memory_that_the_driver_lacks_is_a_typed_error_and_the_device_survives";
    let mut child = this_program();
    let child = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
    let output = child.env_remove("RUST_BACKTRACE").output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if let Some(why) = text.lines().find(|line| line.starts_with("NOT RUN")) {
        eprintln!("{why}");
        return;
    }
    assert!(output.status.success() && text.contains("OUT OF MEMORY"), "{text}{errors}");
}
