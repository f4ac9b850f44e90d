//! Steps of few rows by recorded graphs: one upload, one replay and one read each.
use std::collections::BTreeMap;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::decoder::{PassInput, RowAt};
use kernels::order::POSITIONS;
use kernels::stage::{StageError, StageOptions};
use kernels::weights::ModelConfig;

use super::GpuEngine;
use crate::Platform;
use crate::attention::Places;
use crate::graph::{Buffer, Graph, Graphs, Pinned};

/// Most rows of a step that a graph computes: more rows take longer to compute than to launch.
pub(super) const FEW: usize = 8;

/// Recorded steps, and what goes to the device and comes back.
pub(super) struct Steps {
    pub(super) graphs: Graphs,
    /// By rows, wanted rows and blocks of positions.
    recorded: BTreeMap<(usize, usize, usize), Graph>,
    /// All input of a step, in the order of [`Input`].
    pub(super) words: Buffer,
    /// Hidden rows before the first layer and behind each.
    hidden: Handle,
    /// Logits where the stage ends with the head, else `hidden`.
    output: Buffer,
    sent: Pinned,
    got: Pinned,
}

/// Where the parts of a step's input lie, each at a multiple of 64 words.
#[derive(Clone, Copy)]
enum Input {
    Tokens,
    Rows,
    Chosen,
    Tables,
    Hidden,
}

impl Input {
    /// First word, where a page table has `most` pages.
    const fn start(self, most: usize) -> usize {
        match self {
            Self::Tokens => 0,
            Self::Rows => 64,
            Self::Chosen => 128,
            Self::Tables => 192,
            Self::Hidden => 192 + (FEW * most).next_multiple_of(64),
        }
    }
}

/// Part of the input buffer.
fn part(words: &Handle, part: Input, most: usize) -> Handle {
    words.clone().offset_start(4 * part.start(most) as u64)
}

impl Steps {
    /// `embedded`: where the embedding goes, for a stage that begins with it.
    pub(super) fn new<R: Platform>(
        graphs: Graphs,
        client: &ComputeClient<R>,
        config: &ModelConfig,
        options: &StageOptions,
        embedded: Option<&Handle>,
    ) -> Result<Self, StageError> {
        let most = options.context.div_ceil(POSITIONS);
        let len = Input::Hidden.start(most) + FEW * config.width;
        let words = client.empty(len * 4);
        let hidden = embedded.cloned().unwrap_or_else(|| part(&words, Input::Hidden, most));
        let (output, numbers) = if options.layers.end == config.layers {
            (client.empty(FEW * config.vocab * 4), FEW * config.vocab)
        } else {
            (hidden.clone(), FEW * config.width)
        };
        let (sent, got) = (graphs.pinned(len)?, graphs.pinned(numbers)?);
        let (words, output) = (graphs.buffer(words)?, graphs.buffer(output)?);
        Ok(Self { graphs, recorded: BTreeMap::new(), words, hidden, output, sent, got })
    }
}

impl<R: Platform> GpuEngine<R> {
    /// A pass of few rows by a graph, which is recorded when the first pass of its shape comes.
    pub(super) fn replay(
        &mut self,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
        blocks: usize,
    ) -> Result<Vec<f32>, StageError> {
        let Some(mut steps) = self.steps.take() else {
            return Err(StageError::Device("a step is being replayed".into()));
        };
        let result = self.replay_with(&mut steps, rows, input, wanted, blocks);
        self.steps = Some(steps);
        result
    }

    fn replay_with(
        &mut self,
        steps: &mut Steps,
        rows: &[RowAt],
        input: PassInput<'_>,
        wanted: &[usize],
        blocks: usize,
    ) -> Result<Vec<f32>, StageError> {
        let (count, width, many) = (rows.len(), self.config.width, wanted.len());
        let most = self.options.context.div_ceil(POSITIONS);
        let blocks = blocks.next_power_of_two().min(most);
        if std::mem::take(&mut self.launched) {
            steps.graphs.join()?;
        }
        let shape = (count, many, blocks);
        if !steps.recorded.contains_key(&shape) {
            let words = &steps.words.handle;
            let places = Places {
                count,
                rows: part(words, Input::Rows, most),
                tables: part(words, Input::Tables, most),
                tables_len: FEW * most,
                blocks,
            };
            let (tokens, chosen) = (part(words, Input::Tokens, most), part(words, Input::Chosen, most));
            let (hidden, output) = (&steps.hidden, &steps.output.handle);
            let graph = steps.graphs.record(|client| {
                self.layers(client, self.table.as_ref().map(|_| &tokens), &places, hidden);
                self.logits(client, hidden, &chosen, many, output);
            })?;
            steps.recorded.insert(shape, graph);
        }
        let (table, tables) = self.tables(rows, Some(most));
        let words = steps.sent.words();
        words[Input::Rows.start(most)..][..table.len()].copy_from_slice(&table);
        words[Input::Tables.start(most)..][..tables.len()].copy_from_slice(&tables);
        for (word, row) in words[Input::Chosen.start(most)..].iter_mut().zip(wanted) {
            *word = *row as u32;
        }
        let mut len = Input::Hidden.start(most);
        match input {
            PassInput::Tokens(tokens) => words[..tokens.len()].copy_from_slice(tokens),
            PassInput::Hidden(hidden) => {
                words[len..][..hidden.len()].copy_from_slice(bytemuck::cast_slice(hidden));
                len += hidden.len();
            }
        }
        let numbers = if self.head.is_some() { many * self.config.vocab } else { count * width };
        let graph = &steps.recorded[&shape];
        steps.graphs.replay(
            (&words[..len], &steps.words),
            graph,
            (&mut steps.got.words()[..numbers], &steps.output),
        )?;
        Ok(bytemuck::cast_slice(&steps.got.words()[..numbers]).to_vec())
    }
}
