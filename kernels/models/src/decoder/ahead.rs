//! Decode steps whose tokens the device samples. A stage with layer 0 queues the next step before the host reads the last token.
//!
//! The device has the token before the host does, and the caller will most likely ask for exactly this step. If another batch
//! comes, the queued step is awaited and discarded: it wrote only beyond the cached positions.
use kernels::threads::Threads;

use super::{Decoder, Engine, PassInput, RowAt};
use crate::hidden_rows::Piece;
use crate::sampler::SamplerSettings;
use crate::stage::{Drawn, RequestedOutput, Rows, RowsIn, RowsOut, StageError};

/// A decode step: one row and one draw per sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    rows: Vec<RowAt>,
    draws: Vec<(SamplerSettings, u32)>,
}

/// Input rows of a step.
#[derive(Debug)]
pub(super) enum StepInput<'a> {
    /// One token per sequence.
    Tokens(Vec<u32>),
    /// One row per sequence.
    Hidden(Vec<Piece<'a>>),
}

impl StepInput<'_> {
    fn as_pass(&self) -> PassInput<'_> {
        match self {
            Self::Tokens(tokens) => PassInput::Tokens(tokens),
            Self::Hidden(hidden) => PassInput::Hidden(hidden),
        }
    }
}

/// A step that was queued ahead of its request.
#[derive(Debug)]
pub(super) struct Ahead {
    step: Step,
    /// Its input tokens, sampled by the previous step.
    tokens: Vec<u32>,
}

impl Step {
    /// The following step if every sequence continues.
    fn next(&self) -> Self {
        let row = |row: &RowAt| RowAt { sequence: row.sequence, position: row.position + 1 };
        Self {
            rows: self.rows.iter().map(row).collect(),
            draws: self.draws.iter().map(|(settings, position)| (*settings, position + 1)).collect(),
        }
    }
}

impl<E: Engine> Decoder<E> {
    /// The batch as a decode step with its input; `None` if the engine cannot sample it.
    pub(super) fn step_of<'a>(&self, batch: &[Rows<'a>]) -> Option<(Step, StepInput<'a>)> {
        if !self.has_head() || batch.is_empty() {
            return None;
        }
        let mut step = Step { rows: Vec::new(), draws: Vec::new() };
        let mut input = if self.embeds() { StepInput::Tokens(Vec::new()) } else { StepInput::Hidden(Vec::new()) };
        for rows in batch {
            let RequestedOutput::Token(draw) = rows.output else { return None };
            match (rows.input, &mut input) {
                (RowsIn::Tokens([token]), StepInput::Tokens(tokens)) => tokens.push(*token),
                (RowsIn::Hidden(row), StepInput::Hidden(hidden)) if row.rows.len() == self.width => hidden.push(row),
                _ => return None,
            }
            if draw.logprobs.is_some()
                || !draw.changes.is_empty(&draw.settings)
                || draw.settings.check().is_err()
                || !self.engine.can_sample(batch.len(), &draw.settings)
            {
                return None;
            }
            step.rows.push(RowAt { sequence: rows.sequence, position: rows.position });
            step.draws.push((draw.settings, draw.position));
        }
        Some((step, input))
    }

    /// Queues `step` unless it is already queued. A stage with layer 0 then queues the step after it, which needs no host round
    /// trip; returns that one.
    pub(super) fn begin_step(
        &mut self,
        batch: &[Rows<'_>],
        step: &Step,
        input: &StepInput<'_>,
    ) -> Result<Option<Step>, StageError> {
        let queued = match (&self.queued_next, input) {
            (Some(ahead), StepInput::Tokens(tokens)) => ahead.step == *step && ahead.tokens == *tokens,
            (None, _) | (_, StepInput::Hidden(_)) => false,
        };
        if queued {
            self.queued_next = None;
            self.held.extend(step.rows.iter().map(|row| (row.sequence, row.position + 1)));
        } else {
            self.forget_ahead()?;
            self.reserve(batch, &vec![1; batch.len()])?;
            self.engine.queue(&step.rows, Some(input.as_pass()), &step.draws)?;
        }
        if !self.embeds() {
            return Ok(None);
        }
        let next = step.next();
        match self.queue_ahead(&next) {
            Ok(ahead) => Ok(ahead.then_some(next)),
            Err(error) => {
                let _ = self.engine.collect();
                Err(error)
            }
        }
    }

    /// Waits for a step, behind which `next` is queued, and returns its tokens.
    pub(super) fn end_step(
        &mut self,
        threads: &mut Threads,
        batch: &[Rows<'_>],
        next: Option<Step>,
    ) -> Result<Vec<RowsOut>, StageError> {
        let drawn = self.engine.collect()?;
        if let Some(step) = next {
            // Tokens that the device left undecided are sampled below; that also discards the queued step that used them.
            let tokens = drawn.iter().map(|token| token.unwrap_or(u32::MAX)).collect();
            self.queued_next = Some(Ahead { step, tokens });
        }
        if let Some(tokens) = drawn.into_iter().collect::<Option<Vec<u32>>>() {
            return Ok(tokens.into_iter().map(|token| RowsOut::Token(Drawn { token, logprobs: None })).collect());
        }
        self.forget_ahead()?;
        let passes = self.begin(threads, batch, &vec![1; batch.len()])?;
        self.end(threads, batch, passes)
    }

    /// Queues a step whose input is the output of the previous step, if there is room for it.
    fn queue_ahead(&mut self, next: &Step) -> Result<bool, StageError> {
        if next.rows.iter().any(|row| row.position >= self.context) {
            return Ok(false);
        }
        let ends: Vec<_> = next.rows.iter().map(|row| (row.sequence, row.position + 1)).collect();
        if self.engine.reserve(&ends).is_err() {
            return Ok(false);
        }
        self.engine.queue(&next.rows, None, &next.draws)?;
        Ok(true)
    }

    /// Waits for the step queued ahead and discards it.
    pub(super) fn forget_ahead(&mut self) -> Result<(), StageError> {
        if self.queued_next.take().is_some() {
            self.engine.collect()?;
        }
        Ok(())
    }
}
