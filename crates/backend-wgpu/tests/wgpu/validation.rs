//! Mistakes that Vulkan's validation layers must report, or their silence over the other tests
//! would mean nothing. Ignored by default: `scripts/wgpu-test` runs each under
//! `scripts/with-validation` and requires that it is reported. The commands are recorded and never
//! submitted, so no driver executes them.
#![cfg(target_os = "linux")]

use annulus_wgpu::wgpu::{
    BufferDescriptor, BufferUsages,
    hal::{
        BufferCopy, CommandEncoder as _, CommandEncoderDescriptor, Device as _, api::Vulkan, vulkan,
    },
};

use super::gpu;

const BYTES: u64 = 256;

/// Records commands on a buffer of [`BYTES`] bytes without wgpu's checks and barriers.
fn record(commands: impl FnOnce(&mut vulkan::CommandEncoder, &vulkan::Buffer)) {
    let Some(gpu) = gpu() else { return };
    let buffer = gpu.device().create_buffer(&BufferDescriptor {
        label: None,
        size: BYTES,
        usage: BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    // SAFETY: none of the three is destroyed through its handle, and each outlives its handle.
    let (device, queue, buffer) = unsafe {
        (
            gpu.device().as_hal::<Vulkan>().expect("a device of Vulkan"),
            gpu.queue().as_hal::<Vulkan>().expect("its queue"),
            buffer.as_hal::<Vulkan>().expect("its buffer"),
        )
    };
    let descriptor = CommandEncoderDescriptor { label: None, queue: &*queue };
    // SAFETY: the encoder and the buffer are of this device, and what is recorded is discarded.
    unsafe {
        let mut encoder = device.create_command_encoder(&descriptor).expect("an encoder");
        encoder.begin_encoding(None).expect("it begins");
        commands(&mut encoder, &buffer);
        encoder.discard_encoding();
    }
}

#[test]
#[ignore = "a mistake: SYNC-HAZARD-WRITE-AFTER-WRITE"]
fn two_writes_without_a_barrier() {
    record(|encoder, buffer| {
        for _ in 0..2 {
            // SAFETY: the range is within the buffer, and the commands never run.
            unsafe { encoder.clear_buffer(buffer, 0..BYTES) };
        }
    });
}

#[test]
#[ignore = "a mistake: VUID-vkCmdCopyBuffer-size"]
fn a_copy_beyond_the_end_of_a_buffer() {
    record(|encoder, buffer| {
        let size = BYTES.try_into().expect("not zero");
        let beyond = BufferCopy { src_offset: 0, dst_offset: BYTES / 2, size };
        // SAFETY: the commands never run.
        unsafe { encoder.copy_buffer_to_buffer(buffer, buffer, std::iter::once(beyond)) };
    });
}
