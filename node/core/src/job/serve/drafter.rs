//! Drafts of a second, smaller served model: when it is asked for them, and what is measured of it.
//!
//! For each request that asks it, the job of the draft model runs a request of its own, which is *steered*: it receives the
//! tokens of the first one, adds some of its own, and pauses until it is steered again. It samples with the same settings and
//! the same random numbers, so that the two models agree as often as they can. At most one question of a request is open.
use super::drafts::{Accuracy, Choice, StepTimes};
use crate::id::ContentId;
use crate::time::{Duration, Instant};
use alloc::vec::Vec;

/// The draft model of a job, as far as the job knows it.
#[derive(Debug)]
pub(super) struct Drafter {
    pub(super) content: ContentId,
    /// Time from a question to the answer for each draft, nanoseconds. 0 if it was not measured.
    token_ns: u64,
    /// Accuracy of its drafts for all requests. New requests begin with it.
    pub(super) accuracy: Accuracy,
    pauses: Pauses,
    /// Drafts whose step was answered, and those of them that were right.
    pub(super) counts: (u64, u64),
}

/// What a request has of the draft model.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelDrafts {
    /// Number of the request's tokens that the draft model was given.
    pub(super) given: u32,
    pub(super) asked: Option<Asked>,
    /// Drafts for the next decode step.
    pub(super) ready: Vec<u32>,
    /// `None` until it was asked for the first time.
    accuracy: Option<Accuracy>,
    pauses: Pauses,
    /// It was asked although that may not pay, and has yet to answer at the speed that it has later.
    tries: bool,
}

/// A question that was not answered yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    at: Instant,
    /// Number of the request's tokens at that time, which is the position of the first draft.
    pub(super) position: u32,
    count: u32,
    /// The request's next step waits for the answer until then.
    pub(super) waits_until: Option<Instant>,
    /// The draft model had to compute few tokens first, so its time is that of the drafts.
    is_timed: bool,
}

/// Decode steps without a question after questions that were of no use: more with each of them.
#[derive(Clone, Copy, Debug)]
struct Pauses {
    left: u32,
    next: u32,
}

impl Default for Pauses {
    fn default() -> Self {
        Pauses { left: 0, next: PAUSE_MIN }
    }
}

impl Pauses {
    /// Whether a step is one of a pause.
    fn take(&mut self) -> bool {
        let pauses = self.left > 0;
        self.left = self.left.saturating_sub(1);
        pauses
    }

    fn begin(&mut self) {
        self.left = self.next;
        self.next = self.next.saturating_mul(2).min(PAUSE_MAX);
    }
}

impl Drafter {
    pub(super) fn new(content: ContentId) -> Self {
        Drafter { content, token_ns: 0, accuracy: Accuracy::OF_MODELS, pauses: Pauses::default(), counts: (0, 0) }
    }

    /// The number of drafts to ask for before a decode step, at most `most`, and whether they are expected to pay. `instead`:
    /// the drafts that the step has otherwise.
    fn choose(
        &self,
        times: &StepTimes,
        accuracy: Accuracy,
        (most, sharers): (u32, u32),
        instead: Choice,
    ) -> (u32, bool) {
        let Some(alone) = times.alone() else { return (0, false) };
        if let Some(fit) = (alone / WAIT_PARTS * (WAIT_PARTS - 1)).checked_div(self.token_ns) {
            let fit = usize::try_from(fit).unwrap_or(usize::MAX);
            let choice = times.best(accuracy, fit.min(most as usize), sharers, self.token_ns);
            if choice.drafts > 0 && choice > instead {
                return (u32::try_from(choice.drafts).unwrap_or(most), true);
            }
        }
        (most.min(TRIED_DRAFTS), false)
    }

    /// An answer with `count` drafts took this long.
    fn learn(&mut self, count: u32, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX) / u64::from(count.max(1));
        // A pause after a loss says nothing about drafts.
        let took = if self.token_ns > 0 { took.min(4 * self.token_ns) } else { took };
        self.token_ns = (if self.token_ns > 0 { (3 * self.token_ns + took) / 4 } else { took }).max(1);
    }
}

impl ModelDrafts {
    /// The question to ask before a decode step, if one is due. `len`: number of the request's tokens. The draft model is asked
    /// if its drafts are expected to pay, else now and then, to measure it. The step waits for the answer, unless the model has
    /// to compute many tokens first.
    pub(super) fn ask(
        &mut self,
        now: Instant,
        len: u32,
        drafter: &mut Drafter,
        times: &StepTimes,
        (most, sharers): (u32, u32),
        instead: Choice,
    ) -> Option<(u32, u32)> {
        let alone = times.alone()?;
        if most == 0 || self.pauses.take() {
            return None;
        }
        let accuracy = self.accuracy.unwrap_or(drafter.accuracy);
        let (mut count, pays) = drafter.choose(times, accuracy, (most, sharers), instead);
        if pays {
            drafter.pauses = Pauses::default();
        } else if !core::mem::take(&mut self.tries) {
            if drafter.pauses.take() {
                return None;
            }
            drafter.pauses.begin();
        }
        let is_timed = len - self.given <= NEWS_MAX;
        if !is_timed {
            (count, self.tries) = (1, !pays);
        }
        let waits_until = is_timed.then(|| now + Duration::from_nanos(alone));
        self.asked = Some(Asked { at: now, position: len, count, waits_until, is_timed });
        let from = core::mem::replace(&mut self.given, len);
        Some((from, count))
    }

    /// The draft model answered. Returns whether the next step waited for that. `tokens`: those of the request.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        tokens: &[u32],
        drafts: Option<Vec<u32>>,
        drafter: &mut Drafter,
    ) -> bool {
        let asked = self.asked.take();
        let Some(drafts) = drafts else {
            self.given = 0;
            if asked.is_some() {
                self.pauses.begin();
            }
            return asked.is_some_and(|asked| asked.waits_until.is_some());
        };
        let Some(asked) = asked else { return false };
        if asked.is_timed {
            drafter.learn(asked.count, now.since(asked.at));
        }
        if asked.waits_until.is_some() {
            self.ready = drafts;
            self.pauses = Pauses::default();
            return true;
        }
        // Too late to be of use, but the request's tokens show which of them were right.
        let known = tokens.get(asked.position as usize..).unwrap_or_default();
        for (draft, token) in drafts.iter().zip(known) {
            self.learn(draft == token, drafter);
            if draft != token {
                break;
            }
        }
        if !asked.is_timed && known.len() > NEWS_MAX as usize {
            // It does not catch up with the request.
            self.pauses.begin();
        }
        false
    }

    /// A draft was right or wrong.
    pub(super) fn learn(&mut self, right: bool, drafter: &mut Drafter) {
        self.accuracy.get_or_insert(drafter.accuracy).learn(right);
        drafter.accuracy.learn(right);
    }

    /// Until when the next step waits for drafts.
    pub(super) fn waits_until(&self) -> Option<Instant> {
        self.asked.and_then(|asked| asked.waits_until)
    }

    /// The next step waits no longer. An answer that comes now is late, and only measured.
    pub(super) fn stop_waiting(&mut self) {
        self.ready.clear();
        if let Some(asked) = &mut self.asked {
            asked.waits_until = None;
        }
    }

    /// The request no longer has a request of the draft model. Returns whether it had one.
    pub(super) fn leave(&mut self) -> bool {
        let had = self.given > 0;
        *self = ModelDrafts { accuracy: self.accuracy, ..ModelDrafts::default() };
        had
    }
}

/// Decode steps of the first pause, and of the longest one.
const PAUSE_MIN: u32 = 16;
const PAUSE_MAX: u32 = 1024;
/// Drafts of a question that only measures.
const TRIED_DRAFTS: u32 = 2;
/// Tokens that the draft model may have to compute before its drafts: about as many as the longest step has.
const NEWS_MAX: u32 = 16;
/// A step waits for the time of one step. One part of this number is left for answers that take longer than the others.
const WAIT_PARTS: u64 = 4;
