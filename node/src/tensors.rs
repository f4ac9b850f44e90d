//! Payloads by name: the core passes ids around, the bytes wait here.
use bytes::Bytes;
use node_core::id::TensorId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use transport::frame::Dtype;

/// A payload.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// Hidden rows `[count, width]`: shared, because they may be sent to several peers and more than once.
    Hidden(Arc<Vec<f32>>),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Cells of a grid for a neighbour of the tile that has them.
    Halo {
        /// As they lie in memory.
        bytes: Bytes,
        /// How many bits a cell has.
        dtype: Dtype,
    },
}

/// All payloads of this node that are still needed. Bounded by the core: it discards what it does not use, and
/// transport's credits bound what arrives.
#[derive(Default)]
pub struct Tensors {
    held: Mutex<HashMap<TensorId, (Tensor, Option<transport::Credit>)>>,
    arrivals: AtomicU64,
}

impl Tensors {
    /// Keeps an arrival and names it. Its sender gets the credit back when the payload is taken.
    pub fn arrive(&self, tensor: Tensor, credit: transport::Credit) -> TensorId {
        let id = TensorId::Arrived(self.arrivals.fetch_add(1, Ordering::Relaxed));
        self.lock().insert(id, (tensor, Some(credit)));
        id
    }

    /// Keeps a payload under a name of the core's.
    pub fn put(&self, id: TensorId, tensor: Tensor) {
        self.lock().insert(id, (tensor, None));
    }

    /// Gives a payload up.
    pub fn take(&self, id: TensorId) -> Option<Tensor> {
        self.lock().remove(&id).map(|(tensor, _credit)| tensor)
    }

    /// A payload that stays here.
    pub fn get(&self, id: TensorId) -> Option<Tensor> {
        self.lock().get(&id).map(|(tensor, _)| tensor.clone())
    }

    /// Payloads held now.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// None held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<TensorId, (Tensor, Option<transport::Credit>)>> {
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_under_the_lock_spoils_nothing_for_others() {
        let tensors = Tensors::default();
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _held = tensors.lock();
                panic!("on purpose");
            });
            assert!(panics.join().is_err());
        });
        tensors.put(TensorId::Made(1), Tensor::Tokens(vec![7]));
        assert!(matches!(tensors.take(TensorId::Made(1)), Some(Tensor::Tokens(tokens)) if tokens == [7]));
        assert!(tensors.is_empty());
    }
}
