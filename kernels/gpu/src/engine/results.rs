//! The results of passes: logits, or hidden rows, which the device encodes if that is asked for.
use std::sync::Arc;

use cubecl::server::Handle;
use kernels::boundary::Codec;
use kernels_gpu_grids::{PendingRead, submit_read};
use kernels_models::decoder::PassOutput;
use kernels_models::stage::StageError;

use super::GpuEngine;
use super::handover::Handover;
use super::memory::{Memory, ROWS};
use crate::boundary::RowEncoder;
use crate::error::failed;
use crate::load::write;
use crate::peers::Kept;
use crate::platform::Platform;

/// A pass queued on the device.
pub(super) enum Queued {
    /// A replayed step with this number of result words.
    Step { words: usize, kept: Option<Kept> },
    /// A pass launched by CubeCL, and the read of its results.
    Read { coming: PendingRead, kept: Option<Kept> },
}

impl<R: Platform> GpuEngine<R> {
    /// From now on hidden rows have this encoding. No pass is queued. An encoder is kept while rows are lossless, with the steps
    /// that were recorded with it.
    pub(super) fn prepare_encoder(&mut self, codec: Codec) -> Result<(), StageError> {
        self.encodes = false;
        if codec == Codec::Lossless {
            return Ok(());
        }
        if self.encoder.as_ref().is_none_or(|encoder| encoder.codec != codec) {
            self.encoder = None;
            if let Some(steps) = &mut self.steps {
                steps.forget_encoded();
            }
            let memory = Memory { client: &self.client, number: self.number };
            let encoder = RowEncoder::new(&memory, codec, self.config.width, ROWS)?;
            if let Some(steps) = &mut self.steps {
                steps.prepare_encoded(&memory, &encoder)?;
            }
            self.encoder = Some(encoder);
            self.launched = true; // CubeCL may still write the tables
        }
        self.encodes = true;
        Ok(())
    }

    /// The encoder of hidden rows, unless they are lossless.
    pub(super) fn encoder(&self) -> Option<&RowEncoder> {
        self.encoder.as_ref().filter(|_| self.encodes)
    }

    /// Computes the logits of the `wanted` rows if the stage has the output head, and starts to read the results. Returns them if
    /// there are none to read.
    pub(super) fn begin_results(
        &mut self,
        hidden: &Handle,
        count: usize,
        wanted: &[usize],
    ) -> Result<Option<PassOutput>, StageError> {
        if let Some(encoder) = self.encoder() {
            let encoded = self.client.empty(4 * count * encoder.words());
            encoder.encode(&self.client, self.able, hidden, count, &encoded);
            return self.read(encoded, None).map(|()| None);
        }
        if self.head.is_none() {
            let words = count * self.config.width;
            let handover = self.steps.as_ref().and_then(|steps| steps.handover.as_ref());
            let kept = handover.and_then(Handover::claim).map(|(buffer, kept)| {
                write(&self.client, hidden, &buffer.handle, 0, words);
                kept
            });
            let unused = hidden.size() - 4 * words as u64;
            return self.read(hidden.clone().offset_end(unused), kept).map(|()| None);
        }
        if wanted.is_empty() {
            self.client.flush().map_err(failed)?;
            return Ok(Some(PassOutput::Numbers(Vec::new())));
        }
        let chosen: Vec<u32> = wanted.iter().map(|row| *row as u32).collect();
        let chosen = self.upload(bytemuck::cast_slice(&chosen));
        let logits = self.client.empty(wanted.len() * self.config.vocab * 4);
        self.logits(&self.client, hidden, &chosen, wanted.len(), &logits);
        self.read(logits, None).map(|()| None)
    }

    /// Starts to read results back. Flushes first to get errors: after a failure the device would return stale data.
    fn read(&mut self, results: Handle, kept: Option<Kept>) -> Result<(), StageError> {
        self.client.flush().map_err(failed)?;
        let coming = submit_read(self.client.clone(), results);
        self.queued.push_back(Queued::Read { coming, kept });
        Ok(())
    }

    /// Waits for the oldest queued pass.
    pub(super) fn arrive(&mut self) -> Result<PassOutput, StageError> {
        match self.queued.pop_front().ok_or_else(|| failed("no pass is queued"))? {
            Queued::Step { words, kept } => self.replayed(words, kept),
            Queued::Read { coming, kept } => {
                let read = cubecl::future::block_on(coming).map_err(failed)?;
                if let Some(handover) = self.steps.as_mut().and_then(|steps| steps.handover.as_mut()) {
                    handover.waited();
                }
                let bytes = read.first().ok_or_else(|| failed("a read gave nothing"))?;
                Ok(self.output_of(bytes, kept))
            }
        }
    }

    /// The output of a pass, as it was read from the device.
    pub(super) fn output_of(&self, bytes: &[u8], kept: Option<Kept>) -> PassOutput {
        match (self.encoder(), kept) {
            (Some(encoder), _) => PassOutput::Encoded(encoder.bytes(bytes)),
            (None, Some(kept)) => PassOutput::Held(bytemuck::pod_collect_to_vec(bytes), Arc::new(kept)),
            (None, None) => PassOutput::Numbers(bytemuck::pod_collect_to_vec(bytes)),
        }
    }
}
