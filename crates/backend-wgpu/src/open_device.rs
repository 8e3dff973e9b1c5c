//! The Vulkan instance of the process, and its devices, which open and close one at a time.
//!
//! Vulkan permits any thread to open and close instances and devices, and ranks that are threads do
//! it at the same time. Two data races make that crash: Vulkan's loader inserts and removes devices
//! in a list without the lock under which it searches it (github.com/KhronosGroup/Vulkan-Loader,
//! issue 2018), and NVIDIA's driver for Linux has one between two instances that are created
//! (github.com/gfx-rs/wgpu, issue 5930). So the process has one instance, which is never destroyed,
//! and a lock is held while it is created and searched, and while a device opens or closes.
//!
//! A device closes when the last object on it is dropped, which must therefore be an
//! [`OpenDevice`]: every struct that holds a buffer also has a [`crate::Gpu`], as its last field.

use std::{
    cell::Cell,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU8, Ordering},
    },
};

use crate::lock::lock;

static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();

/// Held while adapters are listed and while a device opens or closes.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// True while this thread closes a device under [`TURN`].
    static CLOSES: Cell<bool> = const { Cell::new(false) };
}

/// Waits until no other thread lists adapters, opens or closes a device of this backend.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    lock(&TURN)
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

/// How a device was closed, for tests: [`CloseState::OPEN`] until then.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct CloseState(AtomicU8);

impl CloseState {
    /// Not closed yet.
    pub const OPEN: u8 = 0;
    /// Closed while no other thread opened or closed one.
    pub const IN_TURN: u8 = 1;
    /// Closed by the drop of an object that outlived [`OpenDevice`].
    pub const OUT_OF_TURN: u8 = 2;

    pub fn get(&self) -> u8 {
        self.0.load(Ordering::Acquire)
    }
}

/// Part of a wgpu device that is dropped as soon as the device is closed.
struct Sentinel(Arc<CloseState>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        let how = if CLOSES.get() { CloseState::IN_TURN } else { CloseState::OUT_OF_TURN };
        self.0.0.store(how, Ordering::Release);
    }
}

/// A device and its queue, which close in turn.
#[derive(Debug)]
pub(crate) struct OpenDevice {
    handles: Option<(wgpu::Device, wgpu::Queue)>,
    close_state: Arc<CloseState>,
}

impl OpenDevice {
    /// Keeps a device until it closes in turn. `on_lost` replaces its device-lost callback.
    pub(crate) fn new(
        handles: &(wgpu::Device, wgpu::Queue),
        on_lost: impl Fn(wgpu::DeviceLostReason, String) + Send + 'static,
    ) -> Arc<Self> {
        let close_state = Arc::<CloseState>::default();
        let sentinel = Sentinel(Arc::clone(&close_state));
        // wgpu drops the callback after it has closed the device
        handles.0.set_device_lost_callback(move |reason, what| {
            let _kept = &sentinel;
            on_lost(reason, what);
        });
        Arc::new(Self { handles: Some(handles.clone()), close_state })
    }

    /// How the device was closed; a lost one counts as closed.
    pub(crate) const fn close_state(&self) -> &Arc<CloseState> {
        &self.close_state
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let _turn = turn();
        CLOSES.set(true);
        drop(self.handles.take());
        CLOSES.set(false);
    }
}
