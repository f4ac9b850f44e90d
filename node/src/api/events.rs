//! The events of a streamed answer, and what turns an answer into them: one writer for each API.
use super::error::ApiError;
use super::generation::{Finish, SpelledLogprobs};
use super::output::Part;
use axum::response::sse::Event;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;

/// What is known of an answer before its first token.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// Of the request's key, so that the answer has the same ids on every node.
    pub(super) seed: u64,
    /// The number of this choice in the answer, from 0.
    pub(super) choice: usize,
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
        if self.choice > 0 {
            seed.update(&(self.choice as u64).to_le_bytes());
        }
        seed.finalize().as_bytes()[..9].iter().map(|&b| char::from(DIGITS[usize::from(b) % 36])).collect()
    }
}

/// How a choice ended.
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

/// The tokens of all choices of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Total {
    /// In all choices together.
    pub(super) tokens: u32,
    /// In the longest choice.
    pub(super) longest: u32,
    /// Tokens of the prompt that were cached before the request.
    pub(super) cached_tokens: u32,
}

impl Total {
    /// `endings`: in the order of the choices.
    pub(super) fn of<'a>(endings: impl IntoIterator<Item = &'a Ending>) -> Self {
        let mut endings = endings.into_iter().peekable();
        // The other choices find the prompt that the first one has computed.
        let cached_tokens = endings.peek().map_or(0, |first| first.cached_tokens);
        let none = Self { tokens: 0, longest: 0, cached_tokens };
        endings.fold(none, |total, ending| Self {
            tokens: total.tokens.saturating_add(ending.tokens),
            longest: total.longest.max(ending.tokens),
            cached_tokens,
        })
    }
}

/// Writes one choice in the form of one API.
///
/// The same parts at the same tokens give the same events: nodes that continue an answer depend on it.
pub(super) trait Writer: Send {
    /// Takes the log-probabilities of a token, before its parts. `is_thought`: the token is one of the thoughts, or of their
    /// tags.
    fn logprobs(&mut self, _: &SpelledLogprobs, _is_thought: bool) {}
    /// Takes the parts of a token of an answer that is not streamed.
    fn read(&mut self, parts: Vec<Part>);
    /// The choice, if it is not streamed. `parts`: those that were held back.
    fn whole(&mut self, parts: Vec<Part>, ending: &Ending) -> Value;
    /// The answer with these choices.
    fn join(&self, mut choices: Vec<Value>, _: &Total) -> Value {
        choices.pop().unwrap_or_default()
    }
    /// The first events of a stream.
    fn begin(&mut self) -> Vec<SentEvent>;
    /// The events for the parts that arrived with a token, the last of `tokens`.
    fn step(&mut self, tokens: u32, parts: Vec<Part>) -> Vec<SentEvent>;
    /// The last events of a choice, beginning with the parts that were held back.
    fn end(&mut self, parts: Vec<Part>, ending: &Ending) -> Vec<SentEvent>;
    /// The last events of a stream, after those of all choices.
    fn close(&self, _: &Total) -> Vec<SentEvent> {
        Vec::new()
    }
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

/// Merges the events of several choices into one stream, in an order that depends on the tokens alone, so that nodes that
/// continue a stream send the same events: by their ids, then by choice.
#[derive(Debug)]
pub(super) struct Merge {
    queues: Vec<Queue>,
}

/// Events of a choice that wait for those of the others. A choice has at most as many as its answer has.
#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<SentEvent>,
    ended: bool,
}

impl Merge {
    pub(super) fn new(choices: usize) -> Self {
        Self { queues: (0..choices).map(|_| Queue::default()).collect() }
    }

    /// Takes the next events of a choice.
    pub(super) fn push(&mut self, choice: usize, events: impl IntoIterator<Item = SentEvent>) {
        self.queues[choice].events.extend(events);
    }

    /// No more events of this choice follow.
    pub(super) fn end(&mut self, choice: usize) {
        self.queues[choice].ended = true;
    }

    /// Whether the next event depends on events of this choice that have not arrived.
    pub(super) fn needs(&self, choice: usize) -> bool {
        let queue = &self.queues[choice];
        queue.events.is_empty() && !queue.ended
    }

    /// The next event, once every choice has an event or has ended.
    pub(super) fn next(&mut self) -> Option<SentEvent> {
        if (0..self.queues.len()).any(|choice| self.needs(choice)) {
            return None;
        }
        let fronts = self.queues.iter().enumerate();
        let fronts = fronts.filter_map(|(choice, queue)| Some((queue.events.front()?.id, choice)));
        let (_, choice) = fronts.min()?;
        let event = self.queues[choice].events.pop_front()?;
        Some(self.numbered(event, choice))
    }

    /// The events that close the stream.
    pub(super) fn closing(&self, events: Vec<SentEvent>) -> impl Iterator<Item = SentEvent> {
        events.into_iter().map(|event| self.numbered(event, 0))
    }

    /// Each choice's ids become ids of the stream.
    fn numbered(&self, event: SentEvent, choice: usize) -> SentEvent {
        let id = event.id.map(|id| id * self.queues.len() as u64 + choice as u64);
        SentEvent { id, ..event }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(ids: &[u64]) -> Vec<SentEvent> {
        ids.iter().map(|id| SentEvent::unnamed(*id, format!("{id}"))).collect()
    }

    fn drain(merge: &mut Merge) -> Vec<(u64, String)> {
        std::iter::from_fn(|| merge.next()).map(|event| (event.id.expect("an id"), event.data)).collect()
    }

    /// Whatever arrives first, the stream is the same.
    #[test]
    fn merged_streams_depend_on_the_events_alone() {
        let mut merge = Merge::new(2);
        merge.push(1, events(&[0, 1, 2, 3]));
        assert_eq!(drain(&mut merge), []);
        merge.push(0, events(&[0]));
        let begin = drain(&mut merge);
        assert_eq!(begin, [(0, "0".into()), (1, "0".into())][..1]);
        merge.end(1);
        merge.push(0, events(&[1, 2, 3, 5]));
        merge.end(0);
        let rest: Vec<u64> = drain(&mut merge).into_iter().map(|(id, _)| id).collect();
        assert_eq!(rest, [1, 2, 3, 4, 5, 6, 7, 10]);
        let closing: Vec<Option<u64>> = merge.closing(events(&[6])).map(|event| event.id).collect();
        assert_eq!(closing, [Some(12)]);
    }
}
