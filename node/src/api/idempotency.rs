//! Requests that may be sent twice: an `Idempotency-Key` names one, so that a client that lost its answer may ask again,
//! here or on another node, and gets one and the same.
//!
//! Here, the answer is kept. On a node that does not know the key the request runs; its seed, unless the client gave one,
//! comes from the key, so that it samples the same tokens.
use super::error::ApiError;
use super::openai::Finished;
use axum::http::HeaderMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The header's name.
pub(crate) const HEADER: &str = "idempotency-key";
/// Said with an answer that was given before.
pub(crate) const REPLAYED: &str = "idempotent-replayed";
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

    /// The seed of a request whose client gave none: the same on every node.
    pub(crate) fn seed(&self) -> u64 {
        let hash = blake3::derive_key("meshnode 2025 seed of a request by its Idempotency-Key", self.0.as_bytes());
        u64::from_le_bytes(hash[..8].try_into().unwrap_or_default())
    }
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
    by_key: BTreeMap<Key, (Fingerprint, Option<Arc<Finished>>)>,
    done: VecDeque<Key>,
    bytes: usize,
}

/// What a key leads to.
pub(crate) enum Begun {
    /// The request is to run.
    New(Turn),
    /// It has run: this was the answer.
    Again(Arc<Finished>),
}

impl Answers {
    /// Begins a request, or finds its answer.
    ///
    /// # Errors
    /// The key's first request still runs, or was another one.
    pub(crate) fn begin(&self, key: &Key, request: Fingerprint) -> Result<Begun, ApiError> {
        let mut kept = self.lock();
        match kept.by_key.get(key) {
            Some((first, _)) if *first != request => Err(ApiError::key_reused()),
            Some((_, None)) => Err(ApiError::key_running()),
            Some((_, Some(answer))) => Ok(Begun::Again(answer.clone())),
            None => {
                kept.by_key.insert(key.clone(), (request, None));
                Ok(Begun::New(Turn { answers: self.clone(), key: Some(key.clone()) }))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn keep(&mut self, key: Key, answer: Finished) {
        let Some(entry) = self.by_key.get_mut(&key) else { return };
        self.bytes += answer.bytes();
        entry.1 = Some(Arc::new(answer));
        self.done.push_back(key);
        while self.done.len() > ANSWERS_MAX || self.bytes > ANSWER_BYTES_MAX {
            let Some(oldest) = self.done.pop_front() else { return };
            if let Some((_, Some(answer))) = self.by_key.remove(&oldest) {
                self.bytes -= answer.bytes();
            }
        }
    }
}

/// A request that runs under its key. Dropped before its end (it failed, or its client went away), the key is free again.
pub(crate) struct Turn {
    answers: Answers,
    /// Until the end.
    key: Option<Key>,
}

impl Turn {
    /// The whole answer was made.
    pub(crate) fn finish(mut self, answer: Finished) {
        if let Some(key) = self.key.take() {
            self.answers.lock().keep(key, answer);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(key) = &self.key {
            self.answers.lock().by_key.remove(key);
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
        match answers.begin(&key(name), Fingerprint::of("/", b"x")) {
            Ok(Begun::New(turn)) => turn.finish(Finished::pretended(text)),
            Ok(Begun::Again(_)) => panic!("{name} was known"),
            Err(error) => panic!("{error:?}"),
        }
    }

    fn known(answers: &Answers, name: &str) -> bool {
        matches!(answers.begin(&key(name), Fingerprint::of("/", b"x")), Ok(Begun::Again(_)))
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
    fn seeds_depend_on_the_key_alone() {
        assert_eq!(key("a").seed(), key("a").seed());
        assert_ne!(key("a").seed(), key("b").seed());
    }
}
