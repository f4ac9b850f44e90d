//! Steps of decoding on a device that draws tokens itself: the next step is queued before the token of the last one is read.
//!
//! The device has the token before the host does, so it need not wait for a caller who will most likely ask for just this step. If
//! another batch comes, the queued step is waited for and forgotten: what it wrote lies behind the positions that are held.
use super::{Decoder, Engine, RowAt};
use crate::sampler::SamplerSettings;
use crate::stage::{Rows, RowsIn, RowsOut, StageError, Want};
use crate::threads::Threads;

/// A step of decoding: a row and a draw per sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    rows: Vec<RowAt>,
    draws: Vec<(SamplerSettings, u32)>,
}

/// A step that was queued before it was asked for.
#[derive(Debug)]
pub(super) struct Ahead {
    step: Step,
    /// The tokens that its rows are made of, as the step before drew them.
    tokens: Vec<u32>,
}

impl Step {
    /// The step that follows if every sequence goes on.
    fn next(&self) -> Self {
        let row = |row: &RowAt| RowAt { sequence: row.sequence, position: row.position + 1 };
        Self {
            rows: self.rows.iter().map(row).collect(),
            draws: self.draws.iter().map(|(settings, position)| (*settings, position + 1)).collect(),
        }
    }
}

impl<E: Engine> Decoder<E> {
    /// The batch as a step that the engine draws the tokens of, and the tokens that it is made of; `None` if it is none.
    pub(super) fn step_of(&self, batch: &[Rows<'_>]) -> Option<(Step, Vec<u32>)> {
        if !(self.embeds() && self.last) || batch.is_empty() {
            return None;
        }
        let (mut step, mut tokens) = (Step { rows: Vec::new(), draws: Vec::new() }, Vec::new());
        for rows in batch {
            let (RowsIn::Tokens([token]), Want::Token(draw)) = (rows.input, rows.want) else { return None };
            if !draw.changes.none(&draw.settings)
                || draw.settings.check().is_err()
                || !self.engine.draws(batch.len(), &draw.settings)
            {
                return None;
            }
            step.rows.push(RowAt { sequence: rows.sequence, position: rows.position });
            step.draws.push((draw.settings, draw.position));
            tokens.push(*token);
        }
        Some((step, tokens))
    }

    /// Queues a step, unless it is queued already, and then the next one, which is given: its tokens need not be read first.
    pub(super) fn begin_step(
        &mut self,
        batch: &[Rows<'_>],
        step: &Step,
        tokens: &[u32],
    ) -> Result<Option<Step>, StageError> {
        let queued = self.ahead.as_ref().is_some_and(|ahead| ahead.step == *step && ahead.tokens == tokens);
        if queued {
            self.ahead = None;
            self.held.extend(step.rows.iter().map(|row| (row.sequence, row.position + 1)));
        } else {
            self.forget_ahead()?;
            self.reserve(batch, &vec![1; batch.len()])?;
            self.engine.queue(&step.rows, Some(tokens), &step.draws)?;
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

    /// Waits for a step, behind which `next` is queued, and gives its tokens.
    pub(super) fn end_step(
        &mut self,
        threads: &mut Threads,
        batch: &[Rows<'_>],
        next: Option<Step>,
    ) -> Result<Vec<RowsOut>, StageError> {
        let drawn = self.engine.collect()?;
        if let Some(step) = next {
            // Tokens that the device did not decide are drawn below; the step that was made of them is forgotten then.
            let tokens = drawn.iter().map(|token| token.unwrap_or(u32::MAX)).collect();
            self.ahead = Some(Ahead { step, tokens });
        }
        if let Some(tokens) = drawn.into_iter().collect::<Option<Vec<u32>>>() {
            return Ok(tokens.into_iter().map(RowsOut::Token).collect());
        }
        self.forget_ahead()?;
        let passes = self.begin(threads, batch, &vec![1; batch.len()])?;
        self.end(batch, passes)
    }

    /// Queues a step of the tokens that the step before draws, if there is room for it.
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

    /// Waits for the step that was queued and that nobody asks for.
    pub(super) fn forget_ahead(&mut self) -> Result<(), StageError> {
        if self.ahead.take().is_some() {
            self.engine.collect()?;
        }
        Ok(())
    }
}
