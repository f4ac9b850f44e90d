//! Requests that may be sent twice: an `Idempotency-Key` names one, so that a client that lost its answer may ask again,
//! here or on another node, and gets one and the same. A stream goes on after the event that `Last-Event-ID` names.
//!
//! Here, the answer is kept. A successor of the node that ran the request goes on with it. On a node that does not know the key the
//! request runs; its seed, unless the client gave one, comes from the key, so that it samples the same tokens.
use super::error::ApiError;
use super::openai::Finished;
use axum::http::HeaderMap;
use node_core::work::serve::RequestKey;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The header's name.
pub(crate) const HEADER: &str = "idempotency-key";
/// Said with an answer that was given before.
pub(crate) const REPLAYED: &str = "idempotent-replayed";
/// Says under which key a request can be sent again: that of its client, or one that the node made.
pub(crate) const REQUEST_ID: &str = "x-request-id";
/// The id of the last event that a client has.
const LAST_EVENT: &str = "last-event-id";
/// Bytes of a key: room for several UUIDs.
const KEY_BYTES_MAX: usize = 255;
/// Answers kept: an hour of a client that asks every few seconds.
const ANSWERS_MAX: usize = 1024;
/// Text kept with them.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// A key as a client sent it.
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
                format!("`Idempotency-Key` has 1 to {KEY_BYTES_MAX} visible ASCII characters: send a UUID"),
            )),
        }
    }

    /// A new key, for a request that came without one.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn random() -> Result<Self, ApiError> {
        let random = getrandom::u64().map_err(|e| ApiError::failed(format!("no random id: {e}")))?;
        Ok(Self(format!("req-{random:016x}")))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// What names the request in the mesh. `secret` is the API key of the caller: without it no other caller gets the answer.
    pub(crate) fn request_key(&self, secret: &str) -> RequestKey {
        let mut hasher = blake3::Hasher::new_derive_key("meshnode 2026 name of a request in the mesh");
        hasher.update(&(secret.len() as u64).to_le_bytes()).update(secret.as_bytes()).update(self.0.as_bytes());
        let mut key = [0; 16];
        hasher.finalize_xof().fill(&mut key);
        RequestKey(key)
    }

    /// The seed of a request whose client gave none: the same on every node.
    pub(crate) fn seed(&self) -> u64 {
        let hash = blake3::derive_key("meshnode 2025 seed of a request by its Idempotency-Key", self.0.as_bytes());
        u64::from_le_bytes(hash[..8].try_into().unwrap_or_default())
    }
}

/// The id of the last event that the client has, if it says one.
///
/// # Errors
/// It is no id that events have.
pub(crate) fn last_event(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(value) = headers.get(LAST_EVENT) else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong =
        || ApiError::invalid("Last-Event-ID", "`Last-Event-ID` is the number in `id:` of the last event that came");
    id.ok_or_else(wrong).map(Some)
}

/// What was asked with a key: the same key with anything else is a mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Of a request to `path`.
    pub(crate) fn of(path: &str, body: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(path.as_bytes()).update(&[0]).update(body);
        Self(*hasher.finalize().as_bytes())
    }
}

/// The keys this node knows.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<Mutex<Kept>>);

/// Invariant: `done` names the finished ones among `by_key`, each once, oldest first; `bytes` is the sum of their texts.
/// Those that run are as many as there are connections at most.
#[derive(Default)]
struct Kept {
    by_key: BTreeMap<RequestKey, Known>,
    done: VecDeque<RequestKey>,
    bytes: usize,
    turns: u64,
}

struct Known {
    request: Fingerprint,
    /// Which of the turns runs it, or ran it.
    turn: u64,
    answer: Option<Arc<Finished>>,
}

/// What a key leads to.
pub(crate) enum Begun {
    /// The request is to run.
    New(Turn),
    /// It has run: this was the answer.
    Again(Arc<Finished>),
}

impl Answers {
    /// Begins a request, or finds its answer. A client that `resumes` takes the place of its own connection that broke.
    ///
    /// # Errors
    /// The key's first request still runs, or was another one.
    pub(crate) fn begin(&self, key: RequestKey, request: Fingerprint, resumes: bool) -> Result<Begun, ApiError> {
        let mut kept = self.lock();
        match kept.by_key.get(&key) {
            Some(known) if known.request != request => return Err(ApiError::key_reused()),
            Some(Known { answer: Some(answer), .. }) => return Ok(Begun::Again(answer.clone())),
            Some(_) if !resumes => return Err(ApiError::key_running()),
            Some(_) | None => {}
        }
        kept.turns += 1;
        let turn = kept.turns;
        kept.by_key.insert(key, Known { request, turn, answer: None });
        Ok(Begun::New(Turn { answers: self.clone(), turn, key: Some(key) }))
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn keep(&mut self, key: RequestKey, turn: u64, answer: Finished) {
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

/// A request that runs under its key. Dropped before its end (it failed, or its client went away), the key is free again.
pub(crate) struct Turn {
    answers: Answers,
    turn: u64,
    /// Until the end.
    key: Option<RequestKey>,
}

impl Turn {
    /// The whole answer was made.
    pub(crate) fn finish(mut self, answer: Finished) {
        if let Some(key) = self.key.take() {
            self.answers.lock().keep(key, self.turn, answer);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(key) = &self.key else { return };
        let mut kept = self.answers.lock();
        if kept.by_key.get(key).is_some_and(|known| known.turn == self.turn) {
            kept.by_key.remove(key);
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
            Ok(Begun::New(turn)) => turn.finish(Finished::pretended(text)),
            Ok(Begun::Again(_)) => panic!("{name} was known"),
            Err(error) => panic!("{error:?}"),
        }
    }

    fn known(answers: &Answers, name: &str) -> bool {
        matches!(answers.begin(key(name).request_key(""), Fingerprint::of("/", b"x"), false), Ok(Begun::Again(_)))
    }

    #[test]
    fn the_oldest_answers_make_room() {
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
        let kept = answers.lock();
        assert_eq!((kept.by_key.len(), kept.done.len(), kept.bytes), (0, 0, 0));
    }

    #[test]
    fn a_client_that_resumes_takes_its_own_place() {
        let answers = Answers::default();
        let begin = |resumes| answers.begin(key("k").request_key(""), Fingerprint::of("/", b"x"), resumes);
        let Ok(Begun::New(broken)) = begin(true) else { panic!("the key is free") };
        assert!(begin(false).is_err());
        let Ok(Begun::New(turn)) = begin(true) else { panic!("it may resume") };
        drop(broken);
        assert!(begin(false).is_err(), "the second connection has the key");
        turn.finish(Finished::pretended("x"));
        assert!(known(&answers, "k"));
    }

    #[test]
    fn callers_with_other_secrets_have_other_requests() {
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
