//! The events of a streamed answer, and what turns an answer into them: one writer for each API.
use super::error::ApiError;
use super::generation::{Finish, SpelledLogprobs};
use super::output::Part;
use axum::response::sse::Event;
use serde_json::Value;
use std::convert::Infallible;

/// What is known of an answer before its first token.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// Of the request's key, so that the answer has the same ids on every node.
    pub(super) seed: u64,
    /// Unix time in seconds.
    pub(super) created: u64,
    /// The model's name.
    pub(super) model: String,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: usize,
}

impl Head {
    /// The id of a tool call. It has nine letters and digits, as the templates of Mistral require.
    pub(super) fn call_id(&self, index: usize) -> String {
        const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
        let mut seed = blake3::Hasher::new_derive_key("meshnode 2026 id of a tool call");
        seed.update(&self.seed.to_le_bytes()).update(&(index as u64).to_le_bytes());
        seed.finalize().as_bytes()[..9].iter().map(|&b| char::from(DIGITS[usize::from(b) % 36])).collect()
    }
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub(super) struct Ending {
    pub(super) finish: Finish,
    /// Tokens of the answer.
    pub(super) tokens: u32,
    /// Tokens of the prompt that were cached.
    pub(super) cached_tokens: u32,
    /// Those of them that are thoughts, with their tags.
    pub(super) thought_tokens: u32,
}

/// Writes one answer in the form of one API.
///
/// The same parts at the same tokens give the same events: nodes that continue an answer depend on it.
pub(super) trait Writer: Send {
    /// Takes the log-probabilities of a token, before its parts.
    fn logprobs(&mut self, _: &SpelledLogprobs) {}
    /// The whole answer, if it is not streamed.
    fn whole(&mut self, parts: Vec<Part>, ending: &Ending) -> Value;
    /// The first events of a stream.
    fn begin(&mut self) -> Vec<SentEvent>;
    /// The events for the parts that arrived with a token, the last of `tokens`.
    fn step(&mut self, tokens: u32, parts: Vec<Part>) -> Vec<SentEvent>;
    /// The last events of a stream, beginning with the parts that were held back.
    fn end(&mut self, parts: Vec<Part>, ending: &Ending) -> Vec<SentEvent>;
    /// The last events of a stream that failed.
    fn failed(&mut self, error: &ApiError) -> Vec<SentEvent>;
}

/// An event of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SentEvent {
    /// Increases from event to event, and depends on the tokens alone, so that it is the same on every node that streams the
    /// answer. `None` for an error: a client that resumes continues after the last token.
    pub(super) id: Option<u64>,
    /// The event's name, where the API has names.
    pub(super) name: Option<&'static str>,
    pub(super) data: String,
}

impl SentEvent {
    /// An event without a name.
    pub(super) fn unnamed(id: u64, data: String) -> Self {
        Self { id: Some(id), name: None, data }
    }

    /// Whether a client has not received it yet.
    pub(super) fn is_new(&self, after: Option<u64>) -> bool {
        after.is_none_or(|after| self.id.is_none_or(|id| id > after))
    }

    /// The server-sent event.
    pub(super) fn sse(self) -> Result<Event, Infallible> {
        let mut event = Event::default();
        if let Some(id) = self.id {
            event = event.id(id.to_string());
        }
        if let Some(name) = self.name {
            event = event.event(name);
        }
        Ok(event.data(self.data))
    }
}

/// The ids of events where one token can have several: a million times the number of tokens so far, plus the number of the
/// event since then. They fit into a number of JavaScript.
#[derive(Debug, Default)]
pub(super) struct EventIds {
    tokens: u64,
    next: u64,
}

impl EventIds {
    /// An id per token and event. No token has more events: a call, which has four, is longer than one token.
    const PER_TOKEN: u64 = 1_000_000;

    /// The next events come after that number of tokens.
    pub(super) fn after(&mut self, tokens: u32) {
        *self = Self { tokens: u64::from(tokens), next: 0 };
    }

    pub(super) fn next(&mut self) -> u64 {
        let id = self.tokens * Self::PER_TOKEN + self.next.min(Self::PER_TOKEN - 1);
        self.next += 1;
        id
    }
}
