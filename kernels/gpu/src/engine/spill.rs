//! Moves pages of the cache to RAM and back.
use cubecl::bytes::Bytes;
use cubecl::server::Handle;
use kernels_gpu_grids::copy;
use kernels_models::stage::StageError;

use super::GpuEngine;
use super::steps::Steps;
use crate::attention::Pages;
use crate::error::failed;
use crate::graph::{Buffer, Graphs, Pinned};
use crate::pages::{Moves, OUT_AT_ONCE, Pool};
use crate::platform::Platform;

/// Copies pages through pinned memory, on the stream of the recorded steps.
pub(super) struct Mover {
    /// [`OUT_AT_ONCE`] pages, each with its part of every layer in turn. No copy uses it between calls.
    staging: Pinned,
    /// The pages of each layer.
    layers: Vec<Buffer>,
    /// Bytes of a page in one layer.
    bytes: usize,
}

impl Mover {
    fn new(graphs: &Graphs, layers: Vec<Buffer>, bytes: usize) -> Result<Self, StageError> {
        let staging = graphs.pinned(OUT_AT_ONCE * layers.len() * bytes / 4)?;
        Ok(Self { staging, layers, bytes })
    }

    /// Moves pages to RAM, each from its place.
    fn out(&mut self, graphs: &Graphs, pool: &mut Pool, pages: &[(u32, u32)]) -> Result<(), StageError> {
        let Self { staging, layers, bytes } = self;
        let (words, part) = (staging.words(), *bytes / 4);
        for pages in pages.chunks(OUT_AT_ONCE) {
            let mut staged = pages.iter().zip(words.chunks_exact_mut(layers.len() * part));
            let queued = staged.try_for_each(|(&(_, place), words)| {
                let mut parts = layers.iter().zip(words.chunks_exact_mut(part));
                parts.try_for_each(|(layer, words)| graphs.queue_read(layer, place as usize * *bytes, words))
            });
            graphs.settle()?; // after an error too: earlier copies may still run
            queued?;
            for (&(page, _), words) in pages.iter().zip(words.chunks_exact(layers.len() * part)) {
                let contents: &[u8] = bytemuck::cast_slice(words);
                pool.put(page, contents.to_vec());
            }
        }
        Ok(())
    }

    /// Moves pages from RAM, each to its place.
    fn back(&mut self, graphs: &Graphs, pool: &mut Pool, pages: &[(u32, u32)]) -> Result<(), StageError> {
        let Self { staging, layers, bytes } = self;
        let (words, part) = (staging.words(), *bytes / 4);
        for pages in pages.chunks(OUT_AT_ONCE) {
            let mut staged = pages.iter().zip(words.chunks_exact_mut(layers.len() * part));
            let queued = staged.try_for_each(|(&(page, place), words)| {
                let contents = pool.take(page, place);
                if contents.len() != 4 * words.len() {
                    return Err(failed(format!("{} bytes of page {page} are in RAM", contents.len())));
                }
                bytemuck::cast_slice_mut::<u32, u8>(words).copy_from_slice(&contents);
                let mut parts = layers.iter().zip(words.chunks_exact(part));
                parts.try_for_each(|(layer, words)| graphs.queue_write(words, layer, place as usize * *bytes))
            });
            graphs.settle()?; // after an error too: earlier copies may still run
            queued?;
        }
        Ok(())
    }
}

impl<R: Platform> GpuEngine<R> {
    /// Allocates what [`Self::move_pages`] needs.
    ///
    /// # Errors
    /// The host has no memory to pin, or the device failed.
    pub(super) fn prepare_moves(&mut self) -> Result<(), StageError> {
        let Some(steps) = &mut self.steps else { return Ok(()) };
        let layers = self.layers.iter().map(|layer| steps.graphs.buffer(layer.pages.pages.clone()));
        let layers = layers.collect::<Result<Vec<Buffer>, _>>()?;
        steps.mover = Some(Mover::new(&steps.graphs, layers, self.heads.page_bytes())?);
        Ok(())
    }

    /// Moves pages to RAM, then others back from it. Waits for everything that the device computes: it may write to these pages.
    pub(super) fn move_pages(&mut self, moves: &Moves) -> Result<(), StageError> {
        let Some(Steps { graphs, mover, .. }) = &mut self.steps else { return self.move_by_kernels(moves) };
        let mover = mover.as_mut().ok_or_else(|| failed("nothing is prepared to move pages"))?;
        if std::mem::take(&mut self.launched) {
            graphs.join()?;
        }
        // The copies follow the queued steps on their stream, and are complete on return.
        mover.out(graphs, &mut self.pool, &moves.out)?;
        mover.back(graphs, &mut self.pool, &moves.back)
    }

    /// Like [`Self::move_pages`], for a runtime without graphs.
    fn move_by_kernels(&mut self, moves: &Moves) -> Result<(), StageError> {
        let bytes = self.heads.page_bytes();
        let at = |pages: &Pages, place: u32| part(&pages.pages, place as usize * bytes, bytes);
        for pages in moves.out.chunks(OUT_AT_ONCE) {
            let mut parts = Vec::with_capacity(pages.len() * self.layers.len());
            for &(_, place) in pages {
                parts.extend(self.layers.iter().map(|layer| at(&layer.pages, place)));
            }
            let read = cubecl::future::block_on(self.client.read_async(parts)).map_err(failed)?;
            for (&(page, _), layers) in pages.iter().zip(read.chunks_exact(self.layers.len())) {
                let mut contents: Vec<u8> = Vec::with_capacity(layers.len() * bytes);
                layers.iter().for_each(|layer| contents.extend_from_slice(layer));
                self.pool.put(page, contents);
            }
        }
        for &(page, place) in &moves.back {
            let contents = self.client.create(Bytes::from_bytes_vec(self.pool.take(page, place)));
            for (index, layer) in self.layers.iter().enumerate() {
                copy(&self.client, &part(&contents, index * bytes, bytes), &at(&layer.pages, place), bytes / 4);
            }
        }
        self.launched = true;
        self.client.flush().map_err(failed)
    }
}

/// `bytes` bytes of a buffer from byte `start` on.
fn part(buffer: &Handle, start: usize, bytes: usize) -> Handle {
    let behind = buffer.size() - (start + bytes) as u64;
    buffer.clone().offset_start(start as u64).offset_end(behind)
}
