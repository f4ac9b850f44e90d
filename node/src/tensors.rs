//! Tensor payloads by id: the core passes ids around, the bytes stay here.
use bytes::Bytes;
use kernels::boundary::Codec;
use kernels_models::hidden_rows::HiddenRows;
use node_core::id::TensorId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use transport::frame::Dtype;

/// A payload.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tensor {
    /// Hidden rows `[count, width]`: shared, because they may be sent to several peers and more than once.
    Hidden(HiddenRows),
    /// Encoded hidden rows, all of the same number of bytes.
    Encoded {
        /// The encoding.
        codec: Codec,
        /// The rows.
        rows: Bytes,
    },
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

/// A stored payload.
struct Held {
    tensor: Tensor,
    /// Of a payload that arrived.
    _credit: Option<transport::Credit>,
    since: Instant,
}

/// All payloads that this node still needs. Bounded: the core discards what it does not use, and the transport's
/// credits bound arrivals.
#[derive(Default)]
pub(crate) struct TensorStore {
    held: Mutex<HashMap<TensorId, Held>>,
    arrivals: AtomicU64,
}

impl TensorStore {
    /// Stores an arrived payload under a new id. The sender gets its credit back when the payload is taken.
    pub(crate) fn arrive(&self, tensor: Tensor, credit: transport::Credit) -> TensorId {
        let id = TensorId::Arrived(self.arrivals.fetch_add(1, Ordering::Relaxed));
        self.insert(id, tensor, Some(credit));
        id
    }

    /// Stores a payload under an id that the core chose.
    pub(crate) fn put(&self, id: TensorId, tensor: Tensor) {
        self.insert(id, tensor, None);
    }

    fn insert(&self, id: TensorId, tensor: Tensor, credit: Option<transport::Credit>) {
        self.lock().insert(id, Held { tensor, _credit: credit, since: Instant::now() });
    }

    /// How long a payload has been stored.
    pub(crate) fn age(&self, id: TensorId) -> Option<Duration> {
        self.lock().get(&id).map(|held| held.since.elapsed())
    }

    /// Removes a payload and returns it.
    pub(crate) fn take(&self, id: TensorId) -> Option<Tensor> {
        self.lock().remove(&id).map(|held| held.tensor)
    }

    /// Splits rows or tokens after the first `at` of `of`. The parts of a payload that is missing or of another kind are
    /// missing.
    pub(crate) fn split(&self, id: TensorId, at: u32, of: u32, into: [TensorId; 2]) {
        let parts = match self.take(id) {
            Some(Tensor::Hidden(rows)) => {
                let width = rows.len().checked_div(of as usize).unwrap_or(0);
                rows.split_at(at as usize * width).map(|parts| parts.map(Tensor::Hidden))
            }
            Some(Tensor::Encoded { codec, rows }) => {
                let at = at as usize * rows.len().checked_div(of as usize).unwrap_or(0);
                (at <= rows.len())
                    .then(|| [rows.slice(..at), rows.slice(at..)].map(|rows| Tensor::Encoded { codec, rows }))
            }
            Some(Tensor::Tokens(tokens)) => {
                let parts = tokens.split_at_checked(at as usize);
                parts.map(|(first, rest)| [first, rest].map(|part| Tensor::Tokens(part.to_vec())))
            }
            Some(Tensor::Halo { .. }) | None => None,
        };
        for (id, part) in into.into_iter().zip(parts.into_iter().flatten()) {
            self.put(id, part);
        }
    }

    /// Returns a payload and keeps it.
    pub(crate) fn get(&self, id: TensorId) -> Option<Tensor> {
        self.lock().get(&id).map(|held| held.tensor.clone())
    }

    /// Whether none is stored.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, HashMap<TensorId, Held>> {
        self.held.lock()
    }
}

/// Concatenates payloads; `None` if one is missing.
pub(crate) fn join(parts: Vec<Option<Tensor>>) -> Option<Tensor> {
    let parts = parts.into_iter().collect::<Option<Vec<Tensor>>>()?;
    parts.into_iter().reduce(|joined, part| match (joined, part) {
        (Tensor::Hidden(mut rows), Tensor::Hidden(more)) => {
            rows.append(&more);
            Tensor::Hidden(rows)
        }
        (Tensor::Encoded { codec, rows }, Tensor::Encoded { codec: other, rows: more }) if codec == other => {
            Tensor::Encoded { codec, rows: [rows, more].concat().into() }
        }
        (Tensor::Tokens(mut tokens), Tensor::Tokens(more)) => {
            tokens.extend(more);
            Tensor::Tokens(tokens)
        }
        // Different kinds never belong to one stage: the stage rejects the empty payload with an error.
        (Tensor::Hidden(_) | Tensor::Encoded { .. } | Tensor::Tokens(_) | Tensor::Halo { .. }, _) => {
            Tensor::Tokens(Vec::new())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_tokens_are_split() {
        let store = TensorStore::default();
        let [whole, first, rest] = [1, 2, 3].map(TensorId::Produced);
        store.put(whole, Tensor::Hidden(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0].into()));
        store.split(whole, 1, 3, [first, rest]);
        assert_eq!(store.take(first), Some(Tensor::Hidden(vec![1.0, 2.0].into())));
        assert_eq!(store.take(rest), Some(Tensor::Hidden(vec![3.0, 4.0, 5.0, 6.0].into())));
        let encoded = |rows: &'static [u8]| Tensor::Encoded { codec: Codec::Q4, rows: Bytes::from_static(rows) };
        store.put(whole, encoded(b"aabbcc"));
        store.split(whole, 1, 3, [first, rest]);
        assert_eq!(store.take(first), Some(encoded(b"aa")));
        assert_eq!(store.take(rest), Some(encoded(b"bbcc")));
        store.put(whole, Tensor::Tokens(vec![1, 2, 3]));
        store.split(whole, 2, 3, [first, rest]);
        assert_eq!(store.take(first), Some(Tensor::Tokens(vec![1, 2])));
        assert_eq!(store.take(rest), Some(Tensor::Tokens(vec![3])));
        store.put(whole, Tensor::Tokens(vec![1]));
        store.split(whole, 2, 3, [first, rest]);
        store.split(whole, 1, 3, [first, rest]);
        assert!(store.is_empty(), "it is too short, or missing");
    }

    #[test]
    fn payloads_are_joined_unless_one_is_missing() {
        let rows = |values: &[f32]| Some(Tensor::Hidden(values.to_vec().into()));
        assert_eq!(join(vec![rows(&[1.0, 2.0]), rows(&[3.0])]), rows(&[1.0, 2.0, 3.0]));
        assert_eq!(join(vec![rows(&[1.0]), None]), None);
        let encoded = |codec, rows: &'static [u8]| Some(Tensor::Encoded { codec, rows: Bytes::from_static(rows) });
        let (q4, q8) = (Codec::Q4, Codec::Q8);
        assert_eq!(join(vec![encoded(q4, b"aa"), encoded(q4, b"bb")]), encoded(q4, b"aabb"));
        assert_eq!(join(vec![encoded(q4, b"aa"), encoded(q8, b"bb")]), Some(Tensor::Tokens(Vec::new())));
        let tokens = |tokens: &[u32]| Some(Tensor::Tokens(tokens.to_vec()));
        assert_eq!(join(vec![tokens(&[1]), tokens(&[2, 3])]), tokens(&[1, 2, 3]));
    }

    #[test]
    fn a_panic_under_the_lock_does_not_poison_it() {
        let tensors = TensorStore::default();
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _held = tensors.lock();
                panic!("on purpose");
            });
            assert!(panics.join().is_err());
        });
        tensors.put(TensorId::Produced(1), Tensor::Tokens(vec![7]));
        assert!(matches!(tensors.take(TensorId::Produced(1)), Some(Tensor::Tokens(tokens)) if tokens == [7]));
        assert!(tensors.is_empty());
    }
}
