//! Layers as they lie on a device, and how they are loaded.
use cubecl::server::Handle;
use kernels::tile::ROWS as TILE_ROWS;
use kernels_models::recipe::LayerRecipe;
use kernels_models::rotary::RotaryTable;
use kernels_models::stage::StageError;
use kernels_models::weights::{self, HeadNorms};

use super::memory::Memory;
use crate::attention::Pages;
use crate::error::input;
use crate::load::{Loader, Part, Share};
use crate::platform::Platform;
use crate::product::ExpertMatrix;
use crate::product::operands::Matrix;

/// Weights and KV cache pages of one layer.
pub(super) struct Layer {
    pub(super) attention_norm: Handle,
    /// Query, key, value.
    pub(super) inputs: Vec<Part>,
    pub(super) biases: Option<Handle>,
    pub(super) head_norms: Option<Handle>,
    /// A score per query head.
    pub(super) sinks: Option<Handle>,
    pub(super) output: Vec<Part>,
    pub(super) output_bias: Option<Handle>,
    /// Norms of the outputs of attention and feed-forward.
    pub(super) norms_after: Option<[Handle; 2]>,
    pub(super) ffn_norm: Handle,
    pub(super) feed_forward: FeedForward,
    pub(super) pages: Pages,
    /// `[context, 2 · pairs + 1]`: cosines, sines, the factor of queries.
    pub(super) rotary: Handle,
}

/// What follows attention.
pub(super) enum FeedForward {
    Dense(Gated),
    Experts(Box<Experts>),
}

/// A gated feed-forward block.
pub(super) struct Gated {
    /// Gate, up.
    pub(super) inputs: Vec<Part>,
    pub(super) down: Vec<Part>,
    /// Rows of the gate.
    pub(super) width: usize,
}

/// Final norm and output matrix.
pub(super) struct Head {
    pub(super) norm: Handle,
    pub(super) matrix: Vec<Part>,
}

/// The weights of a mixture.
pub(super) struct Experts {
    pub(super) config: weights::Experts,
    /// One row per expert.
    pub(super) router: Vec<Part>,
    pub(super) router_bias: Option<Handle>,
    /// One per expert.
    pub(super) corrections: Option<Handle>,
    pub(super) bank: Bank,
    /// The expert of every row.
    pub(super) shared: Option<Gated>,
    /// Its gate of one row.
    pub(super) shared_gate: Option<Vec<Part>>,
}

/// Experts on the device, each in a slot.
pub(super) struct Bank {
    /// Gate and up: together, or one by one if their formats differ.
    pub(super) inputs: Vec<ExpertMatrix>,
    pub(super) down: ExpertMatrix,
    /// Of gate and up, and of down: one row per slot.
    pub(super) biases: Option<[Handle; 2]>,
    /// `None`: each expert is in the slot of its number.
    pub(super) slots: Option<Slots>,
}

/// The slot of each expert.
pub(super) struct Slots {
    /// [`NO_SLOT`] for an expert that has none: where pairs are sorted by expert.
    pub(super) exact: Handle,
    /// An expert that has none has that of another, whose output is replaced.
    pub(super) any: Handle,
}

/// No expert of a bank is in this slot.
pub(super) const NO_SLOT: u32 = u32::MAX;

impl FeedForward {
    pub(super) fn load<R: Platform>(
        loader: &mut Loader<'_, R>,
        recipe: &LayerRecipe,
        index: usize,
        in_ram: usize,
    ) -> Result<Self, StageError> {
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let block = |loader: &mut Loader<'_, R>, kind: &str| -> Result<Gated, StageError> {
            let part = |part: &str| name(&format!("{part}{kind}"));
            let inputs = loader.matrices(&["ffn_gate", "ffn_up"].map(part))?;
            let width = inputs.iter().map(|part| part.width).sum::<usize>() / 2;
            Ok(Gated { inputs, down: loader.matrices(&[part("ffn_down")])?, width })
        };
        let Some(config) = recipe.experts else {
            return Ok(Self::Dense(block(loader, "")?));
        };
        let weights::Experts { count, shared, biases, .. } = config;
        if recipe.norms_after {
            return Err(input("expected no norm after a mixture of experts"));
        }
        let share = Share { taken: count - in_ram, of: count };
        let inputs = stacked(loader, &["ffn_gate_exps", "ffn_up_exps"].map(name), share)?;
        let [down] = <[ExpertMatrix; 1]>::try_from(stacked(loader, &[name("ffn_down_exps")], share)?)
            .map_err(|_| input("expected one matrix of outputs"))?;
        let gate = shared.filter(|shared| shared.gated);
        let shared = shared.map(|_| block(loader, "_shexp")).transpose()?;
        let shared_gate = gate.map(|_| loader.matrices(&[name("ffn_gate_inp_shexp")])).transpose()?;
        let router = loader.matrices(&[name("ffn_gate_inp")])?;
        let bias = |loader: &mut Loader<'_, R>, part: &str| loader.vector(&format!("blk.{index}.{part}.bias"));
        let router_bias = biases.then(|| bias(loader, "ffn_gate_inp")).transpose()?;
        let all = |loader: &mut Loader<'_, R>| -> Result<[Handle; 2], StageError> {
            let inputs = ["ffn_gate_exps", "ffn_up_exps"].map(|part| format!("blk.{index}.{part}.bias"));
            let down = [format!("blk.{index}.ffn_down_exps.bias")];
            Ok([loader.vectors_of(&inputs, share)?, loader.vectors_of(&down, share)?])
        };
        let biases = biases.then(|| all(loader)).transpose()?;
        let corrections = format!("blk.{index}.exp_probs_b.bias");
        let corrections = config.corrected.then(|| loader.vector(&corrections)).transpose()?;
        let mut slots = |slot: &dyn Fn(u32) -> u32| {
            loader.words("slots of experts", &(0..count as u32).map(slot).collect::<Vec<u32>>())
        };
        let taken = share.taken as u32;
        let slots = if in_ram > 0 {
            let exact = slots(&|expert| if expert < taken { expert } else { NO_SLOT })?;
            Some(Slots { exact, any: slots(&|expert| expert % taken)? })
        } else {
            None
        };
        let bank = Bank { inputs, down, biases, slots };
        let experts = Experts { config, router, router_bias, corrections, bank, shared, shared_gate };
        Ok(Self::Experts(Box::new(experts)))
    }

    /// The matrices that read the normalised rows.
    pub(super) fn inputs(&self) -> Box<dyn Iterator<Item = &Matrix> + '_> {
        match self {
            Self::Dense(gated) => Box::new(gated.inputs.iter().map(|part| &part.matrix)),
            Self::Experts(experts) => {
                let shared = experts.shared.iter().flat_map(|gated| &gated.inputs);
                let shared = shared.chain(experts.shared_gate.iter().flatten());
                let parts = experts.router.iter().chain(shared).map(|part| &part.matrix);
                Box::new(parts.chain(experts.bank.inputs.iter().map(|matrix| &matrix.matrix)))
            }
        }
    }

    /// Whether some of its experts lie in RAM.
    pub(super) fn has_ram(&self) -> bool {
        matches!(self, Self::Experts(experts) if experts.bank.slots.is_some())
    }

    /// Bytes of weights that a row reads.
    pub(super) fn bytes_per_row(&self) -> u64 {
        let parts = |parts: &[Part]| parts.iter().map(|part| 4 * part.matrix.words() as u64).sum::<u64>();
        let block = |gated: &Gated| parts(&gated.inputs) + parts(&gated.down);
        match self {
            Self::Dense(gated) => block(gated),
            Self::Experts(experts) => {
                let matrices = experts.bank.inputs.iter().chain([&experts.bank.down]);
                let used = matrices.map(|expert| expert.bytes() * experts.config.used as u64).sum::<u64>();
                let gate = experts.shared_gate.as_deref().map_or(0, parts);
                let shared = experts.shared.as_ref().map_or(0, block) + gate;
                parts(&experts.router) + shared + used
            }
        }
    }
}

impl Experts {
    /// Experts of a row.
    pub(super) fn used(&self) -> usize {
        self.config.used
    }

    /// Width of an expert.
    pub(super) fn width(&self) -> usize {
        self.config.width
    }
}

impl ExpertMatrix {
    /// Bytes of one expert.
    fn bytes(&self) -> u64 {
        let rows = self.matrices * self.rows;
        4 * (self.matrix.words() * rows / self.matrix.rows.next_multiple_of(TILE_ROWS)) as u64
    }
}

pub(super) fn layer<R: Platform>(
    loader: &mut Loader<'_, R>,
    recipe: &LayerRecipe,
    index: usize,
    in_ram: usize,
    pages: Pages,
    rotary: Handle,
    head_dim: usize,
) -> Result<Layer, StageError> {
    let weight = |part: &str| format!("blk.{index}.{part}.weight");
    let bias = |part: &str| format!("blk.{index}.{part}.bias");
    let inputs = ["attn_q", "attn_k", "attn_v"];
    let two = |loader: &mut Loader<'_, R>, parts: [&str; 2]| -> Result<[Handle; 2], StageError> {
        Ok([loader.vector(&weight(parts[0]))?, loader.vector(&weight(parts[1]))?])
    };
    Ok(Layer {
        attention_norm: loader.vector(&weight("attn_norm"))?,
        inputs: loader.matrices(&inputs.map(weight))?,
        biases: recipe.biases.then(|| loader.vectors(&inputs.map(bias))).transpose()?,
        head_norms: match recipe.head_norms {
            None => None,
            Some(HeadNorms::Weighted) => Some(loader.vectors(&["attn_q_norm", "attn_k_norm"].map(weight))?),
            Some(HeadNorms::Plain) => Some(loader.ones(2 * head_dim)?),
        },
        sinks: recipe.sinks.then(|| loader.vector(&weight("attn_sinks"))).transpose()?,
        output: loader.matrices(&[weight("attn_output")])?,
        output_bias: recipe.output_bias.then(|| loader.vector(&bias("attn_output"))).transpose()?,
        norms_after: recipe.norms_after.then(|| two(loader, ["post_attention_norm", "post_ffw_norm"])).transpose()?,
        ffn_norm: loader.vector(&format!("blk.{index}.{}", recipe.ffn_norm))?,
        feed_forward: FeedForward::load(loader, recipe, index, in_ram)?,
        pages,
        rotary,
    })
}

/// Uploads the cosines, then the sines, then the factor of queries of each position below `positions`, which the table must cover.
pub(super) fn rotary<R: Platform>(
    memory: &Memory<'_, R>,
    table: &RotaryTable,
    positions: usize,
) -> Result<Handle, StageError> {
    let row = |position| {
        let (cosines, sines) = table.at(position);
        cosines.iter().chain(sines).copied().chain([table.query_factor(position)])
    };
    let numbers: Vec<f32> = (0..positions).flat_map(row).collect();
    memory.created(bytemuck::cast_slice(&numbers).to_vec(), "rotary tables")
}

/// Loads a share of matrices with all experts in their rows: together if they are stored as one.
fn stacked<R: Platform>(
    loader: &mut Loader<'_, R>,
    names: &[String],
    share: Share,
) -> Result<Vec<ExpertMatrix>, StageError> {
    let (parts, count) = (loader.matrices_of(names, share)?, share.taken);
    // All have the same number of rows.
    let all = parts.iter().map(|part| part.width).sum::<usize>() / names.len();
    if let [Part { matrix, .. }] = &parts[..] {
        let (matrix, matrices) = (matrix.clone(), names.len());
        return Ok(vec![ExpertMatrix { matrix, first: 0, matrices, rows: all / count, count }]);
    }
    let find = |start: usize| {
        let holds = |part: &&Part| part.offset <= start && start + all <= part.offset + part.width;
        let part = parts.iter().find(holds).ok_or_else(|| {
            input(format!("a buffer of this device cannot hold the {count} experts of {}; use the CPU", names[0]))
        })?;
        let (matrix, first) = (part.matrix.clone(), start - part.offset);
        Ok(ExpertMatrix { matrix, first, matrices: 1, rows: all / count, count })
    };
    (0..names.len()).map(|index| find(index * all)).collect()
}
