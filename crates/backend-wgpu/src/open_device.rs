//! The Vulkan instance of the process, and its devices, which open and close one at a time.
//!
//! Vulkan permits any thread to open and close instances and devices, and ranks that are threads do
//! it at the same time. Two data races make that crash: Vulkan's loader inserts and removes devices
//! in a list without the lock under which it searches it (github.com/KhronosGroup/Vulkan-Loader,
//! issue 2018), and NVIDIA's driver for Linux has one between two instances that are created
//! (github.com/gfx-rs/wgpu, issue 5930). So the process has one instance, which is never destroyed,
//! and a lock is held while it is created and searched, and while a device opens or closes.
//!
//! A forked child has none of the threads of a driver and shares its connection, so no child of the
//! process that used wgpu first opens a device or calls one: everything on it is leaked there.
//!
//! A device closes when the last object on it is dropped, which must therefore be an
//! [`OpenDevice`]: every struct that holds a buffer also has a [`crate::Gpu`], as its last field.
//!
//! Locks that ignore poison.

use std::{
    cell::Cell,
    mem,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use annulus_core::{HomeProcess, Result};

/// The process that used wgpu first.
static HOME: HomeProcess = HomeProcess::unused();

static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();

/// Held while adapters are listed and while a device opens or closes.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// True while this thread closes a device under [`TURN`].
    static CLOSES: Cell<bool> = const { Cell::new(false) };
}

/// Returns true in a forked child of the process that uses wgpu.
pub(crate) fn is_forked() -> bool {
    HOME.is_foreign()
}

/// Checks that this is not a forked child of the process that uses wgpu.
pub(crate) fn check_process() -> Result<()> {
    HOME.check("wgpu")
}

/// Waits until no other thread lists adapters, opens or closes a device of this backend.
pub(crate) fn turn() -> Result<MutexGuard<'static, ()>> {
    check_process()?;
    HOME.note();
    Ok(lock(&TURN))
}

/// Returns the instance of the process. `_turn` is the guard of [`turn`].
pub(crate) fn instance(_turn: &MutexGuard<'static, ()>) -> &'static wgpu::Instance {
    INSTANCE.get_or_init(|| {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        // in every build: shaders without their source, which older validation layers reject, and
        // no layer but those that the environment requests
        descriptor.flags = wgpu::InstanceFlags::empty();
        descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
        // without dxcompiler.dll there is no DX12: the older compiler, FXC, knows no subgroups,
        // takes minutes for unrolled loops, and rejects barriers in loops whose bounds come from a
        // buffer
        descriptor.backend_options.dx12.shader_compiler = wgpu::Dx12Compiler::default_dynamic_dxc();
        wgpu::Instance::new(descriptor)
    })
}

/// Part of a wgpu device that is dropped as soon as the device is closed.
struct Sentinel(Arc<OnceLock<bool>>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        // nobody else sets it
        let _ = self.0.set(CLOSES.get());
    }
}

/// A device and its queue, which close in turn.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    handles: Option<(wgpu::Device, wgpu::Queue)>,
    closed_in_turn: Arc<OnceLock<bool>>,
}

impl OpenDevice {
    /// Keeps a device until it closes in turn. `on_lost` replaces its device-lost callback.
    pub(crate) fn new(
        handles: &(wgpu::Device, wgpu::Queue),
        on_lost: impl Fn(wgpu::DeviceLostReason, String) + Send + 'static,
    ) -> Arc<Self> {
        HOME.note();
        let closed_in_turn = Arc::<OnceLock<bool>>::default();
        let sentinel = Sentinel(Arc::clone(&closed_in_turn));
        // wgpu drops the callback after it has closed the device
        handles.0.set_device_lost_callback(move |reason, what| {
            let _kept = &sentinel;
            on_lost(reason, what);
        });
        Arc::new(Self { handles: Some(handles.clone()), closed_in_turn })
    }

    /// True once the device is closed under the lock, false once it is closed without. A lost
    /// device counts as closed.
    pub(crate) const fn closed_in_turn(&self) -> &Arc<OnceLock<bool>> {
        &self.closed_in_turn
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let Ok(_turn) = turn() else { return mem::forget(self.handles.take()) };
        CLOSES.set(true);
        drop(self.handles.take());
        CLOSES.set(false);
    }
}

/// Locks, ignoring poison: entries are complete or absent even if a holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
