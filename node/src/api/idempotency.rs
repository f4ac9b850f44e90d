//! Idempotent requests: with an `Idempotency-Key`, a client that lost its answer can retry, here or on another node,
//! and gets the same answer. A stream resumes after the event named by `Last-Event-ID`.
//!
//! This node keeps completed answers. A successor of the entry node continues a running request. A node that does not
//! know the key runs the request again; unless the client chose a seed, the seed is derived from the key, so it samples
//! the same tokens.
use super::answer::Finished;
use super::error::ApiError;
use axum::http::HeaderMap;
use node_core::work::serve::RequestKey;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Request header with the client's key.
pub(crate) const HEADER: &str = "idempotency-key";
/// Response header of a replayed answer.
pub(crate) const REPLAYED: &str = "idempotent-replayed";
/// Response header with the key for a retry: the client's, or one that the node chose.
pub(crate) const REQUEST_ID: &str = "x-request-id";
/// The same under the name that Anthropic's clients read.
pub(crate) const REQUEST_ID_OF_ANTHROPIC: &str = "request-id";
/// Request header with the id of the last event that the client received.
const LAST_EVENT: &str = "last-event-id";
/// Bytes of a key: room for several UUIDs.
const KEY_BYTES_MAX: usize = 255;
/// Answers retained: an hour of a client that sends a request every few seconds.
const ANSWERS_MAX: usize = 1024;
/// Total bytes of retained answers.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// An idempotency key, as the client sent it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(String);

impl Key {
    /// The key of a request, if it has one.
    ///
    /// # Errors
    /// It is not 1 to 255 visible ASCII characters, or there are several.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let mut values = headers.get_all(HEADER).iter();
        let Some(value) = values.next() else { return Ok(None) };
        if values.next().is_some() {
            return Err(ApiError::invalid("Idempotency-Key", "send one `Idempotency-Key`, not several"));
        }
        let visible = |text: &&str| text.bytes().all(|b| b.is_ascii_graphic());
        match value.to_str().ok().filter(visible).filter(|text| (1..=KEY_BYTES_MAX).contains(&text.len())) {
            Some(text) => Ok(Some(Self(text.to_owned()))),
            None => Err(ApiError::invalid(
                "Idempotency-Key",
                format!("`Idempotency-Key` must be 1 to {KEY_BYTES_MAX} visible ASCII characters: send a UUID"),
            )),
        }
    }

    /// A new key, for a request without one.
    ///
    /// # Errors
    /// The system's random number generator fails.
    pub(crate) fn random() -> Result<Self, ApiError> {
        let random =
            getrandom::u64().map_err(|e| ApiError::failed(format!("cannot choose a random request id: {e}")))?;
        Ok(Self(format!("req-{random:016x}")))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The request's id in the mesh. It depends on the caller's API key `secret`, so that other callers cannot get the
    /// answer.
    pub(crate) fn request_key(&self, secret: &str) -> RequestKey {
        let mut hasher = blake3::Hasher::new_derive_key("meshnode 2026 name of a request in the mesh");
        hasher.update(&(secret.len() as u64).to_le_bytes()).update(secret.as_bytes()).update(self.0.as_bytes());
        let mut key = [0; 16];
        hasher.finalize_xof().fill(&mut key);
        RequestKey(key)
    }

    /// The id of one of the request's choices.
    pub(crate) fn choice(name: RequestKey, choice: usize) -> RequestKey {
        if choice == 0 {
            return name;
        }
        let mut hasher = blake3::Hasher::new_derive_key("meshnode 2026 name of a choice of a request in the mesh");
        hasher.update(&name.0).update(&(choice as u64).to_le_bytes());
        let mut key = [0; 16];
        hasher.finalize_xof().fill(&mut key);
        RequestKey(key)
    }

    /// The seed of a request whose client chose none: the same on every node.
    pub(crate) fn seed(&self) -> u64 {
        let hash = blake3::derive_key("meshnode 2025 seed of a request by its Idempotency-Key", self.0.as_bytes());
        u64::from_le_bytes(hash[..8].try_into().unwrap_or_default())
    }
}

/// The id of the last event that the client received, if it sent one.
///
/// # Errors
/// The header is not an event id.
pub(crate) fn last_event(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(value) = headers.get(LAST_EVENT) else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong =
        || ApiError::invalid("Last-Event-ID", "`Last-Event-ID` must be the number in `id:` of the last event received");
    id.ok_or_else(wrong).map(Some)
}

/// Hash of the request that a key belongs to: using the key for another request is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a request to `path`.
    pub(crate) fn of(path: &str, body: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(path.as_bytes()).update(&[0]).update(body);
        Self(*hasher.finalize().as_bytes())
    }
}

/// The keys that this node knows, with the answers of completed requests.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<Mutex<AnswerTable>>);

/// Invariant: `done` lists the completed keys of `by_key`, each once, oldest first; `bytes` is the sum of their
/// answers' sizes. The number of running keys is bounded by the number of connections.
#[derive(Default)]
struct AnswerTable {
    by_key: BTreeMap<RequestKey, Known>,
    done: VecDeque<RequestKey>,
    bytes: usize,
    turns: u64,
}

struct Known {
    request: Fingerprint,
    /// The turn that runs or ran it.
    turn: u64,
    answer: Option<Arc<Finished>>,
}

/// Result of beginning a request under a key.
pub(crate) enum Begun {
    /// The request must run.
    New(Turn),
    /// It has run; this is its answer.
    Again(Arc<Finished>),
}

impl Answers {
    /// Begins a request, or returns its answer. A client that `resumes` replaces its own broken connection.
    ///
    /// # Errors
    /// The first request with this key is still running, or was a different one.
    pub(crate) fn begin(&self, key: RequestKey, request: Fingerprint, resumes: bool) -> Result<Begun, ApiError> {
        let mut table = self.lock();
        match table.by_key.get(&key) {
            Some(known) if known.request != request => return Err(ApiError::key_reused()),
            Some(Known { answer: Some(answer), .. }) => return Ok(Begun::Again(answer.clone())),
            Some(_) if !resumes => return Err(ApiError::key_running()),
            Some(_) | None => {}
        }
        table.turns += 1;
        let turn = table.turns;
        table.by_key.insert(key, Known { request, turn, answer: None });
        Ok(Begun::New(Turn { answers: self.clone(), turn, key: Some(key) }))
    }

    fn lock(&self) -> MutexGuard<'_, AnswerTable> {
        self.0.lock()
    }
}

impl AnswerTable {
    fn complete(&mut self, key: RequestKey, turn: u64, answer: Finished) {
        let Some(known) = self.by_key.get_mut(&key).filter(|known| known.turn == turn) else { return };
        self.bytes += answer.bytes();
        known.answer = Some(Arc::new(answer));
        self.done.push_back(key);
        while self.done.len() > ANSWERS_MAX || self.bytes > ANSWER_BYTES_MAX {
            let Some(oldest) = self.done.pop_front() else { return };
            if let Some(Known { answer: Some(answer), .. }) = self.by_key.remove(&oldest) {
                self.bytes -= answer.bytes();
            }
        }
    }
}

/// A request that runs under its key. Dropping it before its end (it failed, or its client disconnected) frees the key.
pub(crate) struct Turn {
    answers: Answers,
    turn: u64,
    /// `None` once the request has ended.
    key: Option<RequestKey>,
}

impl Turn {
    /// Stores the complete answer.
    pub(crate) fn finish(mut self, answer: Finished) {
        if let Some(key) = self.key.take() {
            self.answers.lock().complete(key, self.turn, answer);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(key) = &self.key else { return };
        let mut table = self.answers.lock();
        if table.by_key.get(key).is_some_and(|known| known.turn == self.turn) {
            table.by_key.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key(text.to_owned())
    }

    fn run(answers: &Answers, name: &str, text: &str) {
        match answers.begin(key(name).request_key(""), Fingerprint::of("/", b"x"), false) {
            Ok(Begun::New(turn)) => turn.finish(Finished::sample(text)),
            Ok(Begun::Again(_)) => panic!("{name} was known"),
            Err(error) => panic!("{error:?}"),
        }
    }

    fn known(answers: &Answers, name: &str) -> bool {
        matches!(answers.begin(key(name).request_key(""), Fingerprint::of("/", b"x"), false), Ok(Begun::Again(_)))
    }

    #[test]
    fn the_oldest_answers_are_evicted() {
        let answers = Answers::default();
        for i in 0..ANSWERS_MAX + 10 {
            run(&answers, &format!("k{i}"), "short");
        }
        assert!(!known(&answers, "k9") && known(&answers, "k10"));
        let long = "x".repeat(ANSWER_BYTES_MAX / 2 - 1024);
        for name in ["a", "b", "c"] {
            run(&answers, name, &long);
        }
        assert!(!known(&answers, "a") && !known(&answers, "k10") && known(&answers, "b") && known(&answers, "c"));
        run(&answers, "longer than all", &"x".repeat(ANSWER_BYTES_MAX + 1));
        let table = answers.lock();
        assert_eq!((table.by_key.len(), table.done.len(), table.bytes), (0, 0, 0));
    }

    #[test]
    fn a_client_that_resumes_replaces_its_broken_connection() {
        let answers = Answers::default();
        let begin = |resumes| answers.begin(key("k").request_key(""), Fingerprint::of("/", b"x"), resumes);
        let Ok(Begun::New(broken)) = begin(true) else { panic!("the key is free") };
        assert!(begin(false).is_err());
        let Ok(Begun::New(turn)) = begin(true) else { panic!("it may resume") };
        drop(broken);
        assert!(begin(false).is_err(), "the second connection has the key");
        turn.finish(Finished::sample("x"));
        assert!(known(&answers, "k"));
    }

    #[test]
    fn request_keys_depend_on_the_callers_secret() {
        let (a, b) = (key("k").request_key("a"), key("k").request_key("b"));
        assert_ne!(a, b);
        assert_ne!(key("ab").request_key(""), key("b").request_key("a"));
        assert_eq!(key("k").request_key("a"), a);
    }

    #[test]
    fn seeds_depend_on_the_key_alone() {
        assert_eq!(key("a").seed(), key("a").seed());
        assert_ne!(key("a").seed(), key("b").seed());
    }
}
