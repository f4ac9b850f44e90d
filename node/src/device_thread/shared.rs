//! What a device thread shares with the rest of the node.
use crate::device::Compute;
use crate::driver::queue::DriverHandle;
use crate::residency::Residency;
use crate::states::States;
use crate::tensors::TensorStore;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// Another thread asks whether the machine still has the device.
    pub suspected: Arc<AtomicBool>,
}

impl Shared {
    /// Something failed on the device. If the machine no longer has it, the node reports it to the mesh, and its parts move.
    pub(crate) fn suspect(&self) {
        if !self.device.is_gpu() || self.suspected.swap(true, Ordering::Relaxed) {
            return;
        }
        let (device, residency, suspected) = (self.device.clone(), self.residency.clone(), self.suspected.clone());
        let ask = move || {
            if !device.is_there() {
                tracing::error!("{} is gone: its parts move to other devices", device.label());
                residency.gone(device.index);
            }
            suspected.store(false, Ordering::Relaxed);
        };
        if let Err(error) = std::thread::Builder::new().name("device probe".into()).spawn(ask) {
            self.suspected.store(false, Ordering::Relaxed);
            tracing::warn!("cannot ask whether {} is still there: {error}", self.device.label());
        }
    }
}
