//! Flags of the backend and its device.

use std::time::Duration;

use clap::Args;

use super::{
    ring::{BackendName, TransportName},
    values::whole,
};
use crate::{backend::BackendChoice, failure::Outcome};

/// Flags that choose the backend and its device.
#[derive(Debug, Clone, Args)]
pub(crate) struct DeviceFlags {
    /// Compute backend
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) backend: BackendName,
    /// Device number, counted from 0 as `annulus doctor` lists them. Default: the ranks of a node
    /// use its GPUs in turn; with wgpu the first and those of its kind
    #[arg(long, value_name = "N", value_parser = whole)]
    device: Option<usize>,
}

impl DeviceFlags {
    /// Opens the backend.
    pub(crate) fn open(
        &self,
        transport: TransportName,
        deadline: Duration,
    ) -> Outcome<BackendChoice> {
        BackendChoice::open(self.backend, self.device, transport, deadline)
    }
}
