//! Answers in the form of each API: whole, or as the events of a stream, which a completed answer can repeat.
use super::error::ApiError;
use super::events::{Ending, Head, Merge, SentEvent, Total, Writer};
use super::generation::{Finish, SpelledLogprobs};
use super::output::{OutputReader, Part, Reading, append};
use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Duration;

mod completions;
mod messages;
mod responses;

/// Interval of events while no token arrives (a long prefill, a stage being replaced), so that clients and proxies do not
/// time out.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The API that an answer is written for, with what the request chose of its form.
#[derive(Clone, Debug)]
pub(super) enum Dialect {
    /// OpenAI's chat completions. `include_usage`: a stream ends with the token counts.
    Chat { include_usage: bool },
    /// OpenAI's older completions.
    Completion { include_usage: bool },
    /// Anthropic's messages.
    Messages,
    /// OpenAI's responses, with the fields of the request that an answer repeats.
    Responses(Arc<Map<String, Value>>),
}

impl Dialect {
    fn writer(&self, head: Head) -> Box<dyn Writer> {
        match self {
            Dialect::Chat { include_usage } => Box::new(completions::Chunks::chat(head, *include_usage)),
            Dialect::Completion { include_usage } => Box::new(completions::Chunks::completion(head, *include_usage)),
            Dialect::Messages => Box::new(messages::Message::new(head)),
            Dialect::Responses(request) => Box::new(responses::Items::new(head, request.clone())),
        }
    }

    /// What a stream sends while no token arrives.
    pub(super) fn keep_alive(&self) -> KeepAlive {
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
        match self {
            Dialect::Chat { .. } | Dialect::Completion { .. } | Dialect::Responses(_) => keep_alive.text("waiting"),
            Dialect::Messages => keep_alive.event(Event::default().event("ping").data(r#"{"type": "ping"}"#)),
        }
    }
}

/// A choice of an answer that is being written.
pub(super) struct Answer {
    head: Head,
    reading: Reading,
    reader: OutputReader,
    tokens: u32,
    thought_tokens: u32,
    writer: Box<dyn Writer>,
}

impl Answer {
    pub(super) fn new(dialect: &Dialect, head: Head, reading: Reading) -> Self {
        let writer = dialect.writer(head.clone());
        let reader = OutputReader::new(reading);
        Self { head, reading, reader, tokens: 0, thought_tokens: 0, writer }
    }

    /// How the answer ends after the tokens so far.
    pub(super) fn ending(&self, finish: Finish, cached_tokens: u32) -> Ending {
        Ending { finish, tokens: self.tokens, cached_tokens, thought_tokens: self.thought_tokens }
    }

    /// Takes the text of a token of an answer that is not streamed.
    pub(super) fn read(&mut self, text: &str, logprobs: Option<&SpelledLogprobs>) {
        let parts = self.token(text, logprobs);
        self.writer.read(parts);
    }

    /// The choice, if it is not streamed. `text`: what was held back.
    pub(super) fn whole(&mut self, text: &str, ending: &Ending) -> Value {
        let parts = self.rest(text);
        self.writer.whole(parts, ending)
    }

    /// The answer with these choices.
    pub(super) fn join(&self, choices: Vec<Value>, total: &Total) -> Value {
        self.writer.join(choices, total)
    }

    /// The first events of a stream.
    pub(super) fn begin(&mut self) -> Vec<SentEvent> {
        self.writer.begin()
    }

    /// The events for the text of a token.
    pub(super) fn step(&mut self, text: &str, logprobs: Option<&SpelledLogprobs>) -> Vec<SentEvent> {
        let parts = self.token(text, logprobs);
        if parts.is_empty() { Vec::new() } else { self.writer.step(self.tokens, parts) }
    }

    /// The last events of a stream, beginning with the held-back `text`.
    pub(super) fn end(&mut self, text: &str, ending: &Ending) -> Vec<SentEvent> {
        let parts = self.rest(text);
        self.writer.end(parts, ending)
    }

    /// The last events of a stream, after those of all choices.
    pub(super) fn close(&self, total: &Total) -> Vec<SentEvent> {
        self.writer.close(total)
    }

    /// The last events of a stream that failed.
    pub(super) fn failed(&mut self, error: &ApiError) -> Vec<SentEvent> {
        self.writer.failed(error)
    }

    /// The choice with the text as it was generated, to be kept.
    pub(super) fn finished(
        self,
        text: String,
        ends: Vec<usize>,
        logprobs: Vec<Option<SpelledLogprobs>>,
        ending: Ending,
    ) -> FinishedChoice {
        FinishedChoice { head: self.head, reading: self.reading, text, ends, logprobs, ending }
    }

    fn token(&mut self, text: &str, logprobs: Option<&SpelledLogprobs>) -> Vec<Part> {
        let began = self.reader.is_in_thoughts();
        let parts = self.reader.push(text);
        let is_thought = began || self.reader.is_in_thoughts();
        self.tokens += 1;
        self.thought_tokens += u32::from(is_thought);
        logprobs.into_iter().for_each(|logprobs| self.writer.logprobs(logprobs, is_thought));
        parts
    }

    fn rest(&mut self, text: &str) -> Vec<Part> {
        let mut parts = self.reader.push(text);
        append(&mut parts, self.reader.finish());
        parts
    }
}

/// The log-probabilities of a token in OpenAI's newer form.
fn spelled(logprobs: &SpelledLogprobs) -> Value {
    let one = |(bytes, log): &(Vec<u8>, f64)| json!({"token": String::from_utf8_lossy(bytes), "logprob": log, "bytes": bytes});
    let mut entry = one(&logprobs.token);
    entry["top_logprobs"] = logprobs.top.iter().map(one).collect();
    entry
}

/// A completed answer: its choices, of which there is at least one.
pub(super) struct Finished(Vec<FinishedChoice>);

/// A completed choice.
pub(super) struct FinishedChoice {
    head: Head,
    reading: Reading,
    text: String,
    /// The length of the text (bytes) after each token. What follows was held back until the end.
    ends: Vec<usize>,
    /// The log-probabilities of each token; empty if the request does not ask for them.
    logprobs: Vec<Option<SpelledLogprobs>>,
    ending: Ending,
}

impl Finished {
    /// `choices`: in their order, at least one.
    pub(super) fn new(choices: Vec<FinishedChoice>) -> Self {
        Self(choices)
    }

    /// Approximate memory use.
    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(FinishedChoice::bytes).sum()
    }

    /// Replays the answer for the request that it belongs to. A stream has the events that follow `after`; they are made one by
    /// one, as the client takes them.
    pub(super) fn replay(self: Arc<Self>, dialect: &Dialect, streaming: bool, after: Option<u64>) -> Response {
        let total = Total::of(self.0.iter().map(|choice| &choice.ending));
        let join = self.0.first().map(|first| first.answer(dialect));
        if !streaming {
            let choices = self.0.iter().map(|choice| choice.whole(dialect)).collect();
            return Json(join.map(|answer| answer.join(choices, &total))).into_response();
        }
        let mut merge = Merge::new(self.0.len());
        let close = join.map(|answer| answer.close(&total)).unwrap_or_default();
        let close: Vec<SentEvent> = merge.closing(close).collect();
        let mut choices: Vec<_> = (0..self.0.len()).map(|at| self.clone().events(at, dialect)).collect();
        let events = std::iter::from_fn(move || {
            for (at, events) in choices.iter_mut().enumerate() {
                while merge.needs(at) {
                    match events.next() {
                        Some(events) => merge.push(at, events),
                        None => merge.end(at),
                    }
                }
            }
            merge.next()
        });
        let new = events.chain(close).filter(move |event| event.is_new(after));
        Sse::new(stream::iter(new.map(SentEvent::sse))).into_response()
    }

    /// The events of a choice, step by step.
    fn events(self: Arc<Self>, choice: usize, dialect: &Dialect) -> impl Iterator<Item = Vec<SentEvent>> + use<> {
        let mut answer = self.0[choice].answer(dialect);
        let begin = answer.begin();
        let mut from = 0;
        let steps = (0..=self.0[choice].ends.len()).map(move |at| {
            let choice = &self.0[choice];
            match choice.ends.get(at) {
                Some(end) => {
                    let text = choice.text.get(from..*end).unwrap_or_default();
                    from = *end;
                    answer.step(text, choice.logprobs.get(at).and_then(Option::as_ref))
                }
                None => answer.end(choice.text.get(from..).unwrap_or_default(), &choice.ending),
            }
        });
        std::iter::once(begin).chain(steps)
    }

    #[cfg(test)]
    pub(super) fn sample(text: &str) -> Self {
        Self(vec![FinishedChoice {
            head: Head { seed: 0, choice: 0, created: 0, model: String::new(), prompt_tokens: 0 },
            reading: Reading::default(),
            text: text.to_owned(),
            ends: Vec::new(),
            logprobs: Vec::new(),
            ending: Ending { finish: Finish::Stop, tokens: 0, cached_tokens: 0, thought_tokens: 0 },
        }])
    }
}

impl FinishedChoice {
    fn answer(&self, dialect: &Dialect) -> Answer {
        Answer::new(dialect, self.head.clone(), self.reading)
    }

    fn whole(&self, dialect: &Dialect) -> Value {
        let mut answer = self.answer(dialect);
        let mut from = 0;
        for (at, end) in self.ends.iter().enumerate() {
            let text = self.text.get(from..*end).unwrap_or_default();
            answer.read(text, self.logprobs.get(at).and_then(Option::as_ref));
            from = *end;
        }
        answer.whole(self.text.get(from..).unwrap_or_default(), &self.ending)
    }

    fn bytes(&self) -> usize {
        let stop = match &self.ending.finish {
            Finish::StopString(stop) => stop.len(),
            Finish::Stop | Finish::Length => 0,
        };
        let one = |(bytes, _): &(Vec<u8>, f64)| bytes.len() + size_of::<(Vec<u8>, f64)>();
        let logprobs = self.logprobs.iter().flatten().flat_map(|spelled| spelled.top.iter().chain([&spelled.token]));
        let logprobs: usize = logprobs.map(one).sum();
        logprobs
            + self.text.len()
            + self.ends.len() * size_of::<usize>()
            + self.head.model.len()
            + stop
            + size_of::<Self>()
    }
}
