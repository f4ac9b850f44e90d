//! What the device thread shares with the rest of the node.
use crate::device::Compute;
use crate::driver::queue::DriverHandle;
use crate::residency::Residency;
use crate::states::States;
use crate::tensors::TensorStore;
use std::sync::Arc;

/// State that the thread shares with the rest of the node.
pub(crate) struct Shared {
    /// Rows and halos.
    pub tensors: Arc<TensorStore>,
    /// Saved states of tiles.
    pub states: Arc<States>,
    /// Accounting of the memory in use.
    pub residency: Arc<Residency>,
    /// The driver, which receives the results.
    pub driver: DriverHandle,
    /// The device.
    pub device: Arc<Compute>,
}
