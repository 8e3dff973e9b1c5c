//! Heartbeats of a rank whose transfers wait for its own device.
//!
//! A ring does not wait for kernels: it waits for transfers, and these wait for the kernels that
//! write what is sent or read the buffer of a receive. A kernel may take longer than the deadline.
//! So a transport of device memory sends heartbeats of a rank that works as long as one of its
//! transfers waits for the device. No deadline of the ring then ends the wait for a device that
//! hangs; the bound of the device does.

use std::time::{Duration, Instant};

use annulus_core::Control;

use crate::deadline;

/// Minimum time between two heartbeats: the interval of the least deadline, because a transport
/// does not know that of its ring.
const INTERVAL: Duration = match deadline::LEAST.checked_div(deadline::HEARTBEATS) {
    Some(interval) => interval,
    None => deadline::LEAST,
};

/// Heartbeats of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct DeviceHeartbeat {
    last: Option<Instant>,
}

impl DeviceHeartbeat {
    /// Sends a heartbeat of a rank that works if a transfer waits for the device, and the last one
    /// is long enough ago.
    pub(crate) fn poll(&mut self, waits: bool, control: &mut dyn Control) {
        if !waits {
            return;
        }
        let now = Instant::now();
        if self.last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL) {
            self.last = Some(now);
            control.heartbeat(true);
        }
    }
}
