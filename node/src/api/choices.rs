//! The choices of an answer, generated at the same time: one for most requests, `n` where a request wants several.
use super::answer::{Answer, Dialect, Finished, FinishedChoice};
use super::app::App;
use super::engine::{Engine, Served, Tokens};
use super::error::ApiError;
use super::events::{Ending, Merge, SentEvent, Total};
use super::generation::{Generation, Order, SpelledLogprobs, Step};
use super::idempotency::{Key, Turn};
use axum::Json;
use axum::response::sse::Sse;
use axum::response::{IntoResponse, Response};
use futures::future::{BoxFuture, try_join_all};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt, stream};
use node_core::work::serve::RequestKey;
use serde_json::Value;
use std::collections::VecDeque;

/// An answer being generated.
pub(super) struct Running<T> {
    /// At least one.
    pub(super) choices: Vec<Pending<T>>,
    /// Of a request with an idempotency key.
    pub(super) turn: Option<Turn>,
    /// The last event that the client has received.
    pub(super) after: Option<u64>,
}

/// A choice that is submitted when its future is polled.
pub(super) struct Pending<T> {
    generation: BoxFuture<'static, Result<Generation<T>, ApiError>>,
    answer: Answer,
    asks_logprobs: bool,
}

impl<T: Tokens> Pending<T> {
    /// Submits the order once for each answer to be written. The first choice has its first token when this returns; the
    /// others find its prompt in the cache.
    ///
    /// # Errors
    /// The request is rejected, or fails before the first token.
    pub(super) async fn start<E: Engine<Tokens = T>>(
        app: &App<E>,
        model: &Served,
        order: &Order,
        name: RequestKey,
        answers: impl Iterator<Item = Answer>,
    ) -> Result<Vec<Self>, ApiError> {
        let asks_logprobs = order.sampling.logprobs.is_some();
        let generation = |choice: usize| {
            let (app, model, mut order) = (app.clone(), model.clone(), order.clone());
            order.sampling.seed = order.sampling.seed.wrapping_add(choice as u64);
            let key = Key::choice(name, choice);
            async move { Generation::start(&app.engine, model, order, key, &app.metrics).await }
        };
        let mut first = Some(generation(0).await?);
        let choices = answers.enumerate().map(|(choice, answer)| {
            let generation = match first.take() {
                Some(first) => std::future::ready(Ok(first)).boxed(),
                None => generation(choice).boxed(),
            };
            Self { generation, answer, asks_logprobs }
        });
        Ok(choices.collect())
    }

    /// Generates the choice to its end.
    async fn whole(self, keep: bool) -> Result<(Value, Ended), ApiError> {
        let mut choice = self.started(keep).await.map_err(|(error, _)| error)?;
        loop {
            match choice.generation.next().await {
                Step::Token { text, logprobs, .. } => {
                    choice.answer.read(&text, logprobs.as_ref());
                    choice.record.push(&text, logprobs);
                }
                Step::End { text, finish } => {
                    let ending = choice.answer.ending(finish, choice.generation.figures().cached_tokens);
                    let whole = choice.answer.whole(&text, &ending);
                    return Ok((whole, Ended { answer: choice.answer, record: choice.record, text, ending }));
                }
                Step::Failed(error) => return Err(error),
            }
        }
    }

    async fn started(self, keep: bool) -> Result<Choice<T>, (ApiError, Answer)> {
        let Self { generation, answer, asks_logprobs } = self;
        match generation.await {
            Ok(generation) => Ok(Choice { generation, answer, record: Record::new(keep, asks_logprobs) }),
            Err(error) => Err((error, answer)),
        }
    }

    /// The events of the first token.
    async fn begin(self, at: usize, keep: bool) -> (usize, Progress<T>) {
        match self.started(keep).await {
            Ok(choice) => Box::new(choice).advance(at).await,
            Err((error, mut answer)) => (at, Progress::Failed(answer.failed(&error))),
        }
    }
}

/// A choice being generated.
struct Choice<T> {
    generation: Generation<T>,
    answer: Answer,
    record: Record,
}

/// What the next token of a choice gives.
enum Progress<T> {
    Continues(Vec<SentEvent>, Box<Choice<T>>),
    Ended(Vec<SentEvent>, Box<Ended>),
    Failed(Vec<SentEvent>),
}

/// A completed choice, with the text that was held back.
struct Ended {
    answer: Answer,
    record: Record,
    text: String,
    ending: Ending,
}

impl<T: Tokens> Choice<T> {
    async fn advance(mut self: Box<Self>, at: usize) -> (usize, Progress<T>) {
        let progress = match self.generation.next().await {
            Step::Token { text, logprobs, .. } => {
                let events = self.answer.step(&text, logprobs.as_ref());
                self.record.push(&text, logprobs);
                Progress::Continues(events, self)
            }
            Step::End { text, finish } => {
                let Self { generation, mut answer, record } = *self;
                let ending = answer.ending(finish, generation.figures().cached_tokens);
                let events = answer.end(&text, &ending);
                Progress::Ended(events, Box::new(Ended { answer, record, text, ending }))
            }
            Step::Failed(error) => Progress::Failed(self.answer.failed(&error)),
        };
        (at, progress)
    }
}

/// The text so far of a choice, if it is to be kept.
struct Record {
    keep: bool,
    text: String,
    /// The length of the text (bytes) after each token.
    ends: Vec<usize>,
    /// The log-probabilities of each token, if the request asks for them.
    logprobs: Vec<Option<SpelledLogprobs>>,
    asks_logprobs: bool,
}

impl Record {
    fn new(keep: bool, asks_logprobs: bool) -> Self {
        Self { keep, text: String::new(), ends: Vec::new(), logprobs: Vec::new(), asks_logprobs }
    }

    /// The text of a token.
    fn push(&mut self, text: &str, logprobs: Option<SpelledLogprobs>) {
        if self.keep {
            self.text.push_str(text);
            self.ends.push(self.text.len());
            if self.asks_logprobs {
                self.logprobs.push(logprobs);
            }
        }
    }
}

impl Ended {
    fn finished(self) -> FinishedChoice {
        let Record { mut text, ends, logprobs, .. } = self.record;
        text.push_str(&self.text);
        self.answer.finished(text, ends, logprobs, self.ending)
    }
}

fn keep(turn: Option<Turn>, ended: impl Iterator<Item = Ended>) {
    if let Some(turn) = turn {
        turn.finish(Finished::new(ended.map(Ended::finished).collect()));
    }
}

impl<T: Tokens> Running<T> {
    /// The whole answer.
    ///
    /// # Errors
    /// A choice fails.
    pub(super) async fn whole(self) -> Result<Response, ApiError> {
        let Self { choices, turn, .. } = self;
        let choices = try_join_all(choices.into_iter().map(|choice| choice.whole(turn.is_some()))).await?;
        let (choices, ended): (Vec<Value>, Vec<Ended>) = choices.into_iter().unzip();
        let total = Total::of(ended.iter().map(|choice| &choice.ending));
        let response = ended.first().map(|first| first.answer.join(choices, &total));
        keep(turn, ended.into_iter());
        Ok(Json(response).into_response())
    }

    /// The answer as a stream of events. The choices are generated whether or not the client has taken the events of the
    /// others: what waits is bounded by their lengths.
    pub(super) fn stream(self, dialect: &Dialect) -> Response {
        let Self { mut choices, turn, after } = self;
        let mut merge = Merge::new(choices.len());
        for (at, choice) in choices.iter_mut().enumerate() {
            merge.push(at, choice.answer.begin());
        }
        let running = FuturesUnordered::new();
        let ended = choices.iter().map(|_| None).collect();
        for (at, choice) in choices.into_iter().enumerate() {
            running.push(choice.begin(at, turn.is_some()).boxed());
        }
        let state = Streaming { merge, running, ended, turn, last: None };
        let events = stream::unfold(state, |mut state| async move { Some((state.next().await?, state)) });
        let new = events.filter(move |event| std::future::ready(event.is_new(after)));
        Sse::new(new.map(SentEvent::sse)).keep_alive(dialect.keep_alive()).into_response()
    }
}

/// The state of a stream.
struct Streaming<T> {
    merge: Merge,
    running: FuturesUnordered<BoxFuture<'static, (usize, Progress<T>)>>,
    /// The completed choices.
    ended: Vec<Option<Box<Ended>>>,
    turn: Option<Turn>,
    /// The events after those of the choices.
    last: Option<VecDeque<SentEvent>>,
}

impl<T: Tokens> Streaming<T> {
    async fn next(&mut self) -> Option<SentEvent> {
        loop {
            if let Some(last) = &mut self.last {
                return last.pop_front();
            }
            if let Some(event) = self.merge.next() {
                return Some(event);
            }
            match self.running.next().await {
                Some((at, Progress::Continues(events, choice))) => {
                    self.merge.push(at, events);
                    self.running.push(choice.advance(at).boxed());
                }
                Some((at, Progress::Ended(events, ended))) => {
                    self.merge.push(at, events);
                    self.merge.end(at);
                    self.ended[at] = Some(ended);
                }
                Some((_, Progress::Failed(events))) => {
                    self.running.clear();
                    self.last = Some(events.into());
                }
                None => self.last = Some(self.close()),
            }
        }
    }

    /// Keeps the answer. Returns the events that close the stream.
    fn close(&mut self) -> VecDeque<SentEvent> {
        let ended: Vec<Ended> = self.ended.drain(..).flatten().map(|ended| *ended).collect();
        let total = Total::of(ended.iter().map(|choice| &choice.ending));
        let closing = ended.first().map(|first| first.answer.close(&total)).unwrap_or_default();
        let closing = self.merge.closing(closing).collect();
        keep(self.turn.take(), ended.into_iter());
        closing
    }
}
