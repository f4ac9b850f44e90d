//! Tensor payloads by id: the core passes ids around, the bytes stay here.
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
    /// Cells of a tile, for the halo of its neighbour.
    Halo {
        /// The cells in memory layout.
        bytes: Bytes,
        /// The element type, which gives the bits per cell.
        dtype: Dtype,
    },
}

/// All payloads that this node still needs. Bounded: the core discards what it does not use, and the transport's
/// credits bound arrivals.
#[derive(Default)]
pub struct Tensors {
    held: Mutex<HashMap<TensorId, (Tensor, Option<transport::Credit>)>>,
    arrivals: AtomicU64,
}

impl Tensors {
    /// Stores an arrived payload under a new id. The sender gets its credit back when the payload is taken.
    pub fn arrive(&self, tensor: Tensor, credit: transport::Credit) -> TensorId {
        let id = TensorId::Arrived(self.arrivals.fetch_add(1, Ordering::Relaxed));
        self.lock().insert(id, (tensor, Some(credit)));
        id
    }

    /// Stores a payload under an id that the core chose.
    pub fn put(&self, id: TensorId, tensor: Tensor) {
        self.lock().insert(id, (tensor, None));
    }

    /// Removes a payload and returns it.
    pub fn take(&self, id: TensorId) -> Option<Tensor> {
        self.lock().remove(&id).map(|(tensor, _credit)| tensor)
    }

    /// Returns a payload and keeps it.
    pub fn get(&self, id: TensorId) -> Option<Tensor> {
        self.lock().get(&id).map(|(tensor, _)| tensor.clone())
    }

    /// Number of stored payloads.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether none is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<TensorId, (Tensor, Option<transport::Credit>)>> {
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Concatenates payloads; `None` if one is missing.
pub fn join(parts: Vec<Option<Tensor>>) -> Option<Tensor> {
    let parts = parts.into_iter().collect::<Option<Vec<Tensor>>>()?;
    parts.into_iter().reduce(|joined, part| match (joined, part) {
        (Tensor::Hidden(mut rows), Tensor::Hidden(more)) => {
            Arc::make_mut(&mut rows).extend_from_slice(&more);
            Tensor::Hidden(rows)
        }
        (Tensor::Tokens(mut tokens), Tensor::Tokens(more)) => {
            tokens.extend(more);
            Tensor::Tokens(tokens)
        }
        // Different kinds never belong to one stage: the stage rejects the empty payload with an error.
        (Tensor::Hidden(_) | Tensor::Tokens(_) | Tensor::Halo { .. }, _) => Tensor::Tokens(Vec::new()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_joined_unless_one_is_missing() {
        let rows = |values: &[f32]| Some(Tensor::Hidden(Arc::new(values.to_vec())));
        assert_eq!(join(vec![rows(&[1.0, 2.0]), rows(&[3.0])]), rows(&[1.0, 2.0, 3.0]));
        assert_eq!(join(vec![rows(&[1.0]), None]), None);
        let tokens = |tokens: &[u32]| Some(Tensor::Tokens(tokens.to_vec()));
        assert_eq!(join(vec![tokens(&[1]), tokens(&[2, 3])]), tokens(&[1, 2, 3]));
    }

    #[test]
    fn a_panic_under_the_lock_does_not_poison_it() {
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
