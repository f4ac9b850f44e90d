//! Layers with a mixture of experts: their weights on the device, and their steps.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::Activation;
use kernels::tile::ROWS as TILE_ROWS;
use kernels_models::recipe::LayerRecipe;
use kernels_models::stage::{self, StageError};
use kernels_models::weights;

use super::{FeedForward, Gated, GpuEngine};
use crate::error::input;
use crate::experts::{Choices, Scores, SharedOutput, combine, look_up, route, scale_rows};
use crate::load::{Loader, Part, Share};
use crate::platform::Platform;
use crate::product::operands::Matrix;
use crate::product::{
    ExpertMatrix, ExpertRows, Groups, Pairs, expert_product, group, grouped, is_chunked, router_chunks,
};
use crate::rows::gated;

/// The weights of a mixture.
pub(super) struct Experts {
    config: weights::Experts,
    /// One row per expert.
    router: Vec<Part>,
    router_bias: Option<Handle>,
    /// One per expert.
    corrections: Option<Handle>,
    pub(super) bank: Bank,
    /// The expert of every row.
    shared: Option<Gated>,
    /// Its gate of one row.
    shared_gate: Option<Vec<Part>>,
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

impl<R: Platform> GpuEngine<R> {
    fn choices(&self, experts: &Experts) -> Choices {
        let scratch = &self.scratch.mixture;
        let [numbers, weights] = &scratch.choices;
        Choices { experts: numbers.clone(), weights: weights.clone(), used: experts.config.used }
    }

    /// Chooses the experts of each row.
    pub(super) fn route_rows<L: Platform>(&self, client: &ComputeClient<L>, experts: &Experts, count: usize) {
        let (scratch, choices) = (&self.scratch, self.choices(experts));
        let (all, numbers, bias) = (experts.config.count, &scratch.mixture.scores, experts.router_bias.as_ref());
        let scores = match &experts.router[..] {
            [Part { matrix, .. }] if is_chunked(self.able, matrix, count) => {
                router_chunks(client, self.able, matrix, &scratch.x.floats, count, numbers);
                Scores { numbers, chunked: true, bias }
            }
            router => {
                self.products(client, router, &scratch.x, count, numbers, all, bias, false);
                Scores { numbers, chunked: false, bias: None }
            }
        };
        let corrections = experts.corrections.as_ref();
        route(client, self.able, &scores, corrections, all, experts.config.routing(), count, &choices);
    }

    /// Computes gates and ups of the chosen experts in a bank.
    pub(super) fn expert_gate_up<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        experts: &Experts,
        bank: &Bank,
        count: usize,
    ) {
        let (scratch, choices) = (&self.scratch, self.choices(experts));
        let weights::Experts { count: experts_all, used, width, on_input, .. } = experts.config;
        let (all, pairs) = (bank.down.count, count * used);
        let groups = self.groups(experts, bank, count);
        if let Some(Slots { exact, any }) = &bank.slots {
            let slots = if groups.is_some() { exact } else { any };
            look_up(client, self.able, slots, experts_all, &choices.experts, pairs, &scratch.mixture.slots);
        }
        let chosen = self.chosen(bank);
        if let Some(groups) = groups {
            group(client, chosen, all, pairs, groups);
        }
        let pairs = Pairs { x: &scratch.x, experts: chosen, count: pairs, each: used, groups };
        let integers = self.integers();
        for (index, matrix) in bank.inputs.iter().enumerate() {
            let bias = bank.biases.as_ref().map(|[inputs, _]| {
                // The biases of gate, then of up.
                inputs.clone().offset_start(4 * (index * all * width) as u64)
            });
            let (stride, offset) = (2 * width, index * width);
            let out = ExpertRows { rows: &scratch.both, stride, offset, bias: bias.as_ref() };
            expert_product(client, self.able, matrix, &pairs, integers, &out);
        }
        if on_input {
            // Gate and up are linear: a factor of their input is one of their output.
            scale_rows(client, self.able, &scratch.both, &choices.weights, count * used, 2 * width);
        }
    }

    pub(super) fn gate_experts<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        experts: &Experts,
        count: usize,
        activation: Activation,
    ) {
        let (scratch, pairs) = (&self.scratch, count * experts.config.used);
        let wanted = self.wanted_by(std::iter::once(&experts.bank.down.matrix));
        gated(client, self.able, &scratch.both, activation, pairs, wanted, &scratch.mixture.gated);
    }

    /// The slot that computes each pair.
    fn chosen(&self, bank: &Bank) -> &Handle {
        let scratch = &self.scratch.mixture;
        if bank.slots.is_some() { &scratch.slots } else { &scratch.choices[0] }
    }

    /// Computes the outputs of the chosen experts in a bank.
    pub(super) fn expert_outputs<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        experts: &Experts,
        bank: &Bank,
        count: usize,
    ) {
        let mixture = &self.scratch.mixture;
        let (groups, all) = (self.groups(experts, bank, count), count * experts.config.used);
        let pairs = Pairs { x: &mixture.gated, experts: self.chosen(bank), count: all, each: 1, groups };
        let bias = bank.biases.as_ref().map(|[_, down]| down);
        let out = ExpertRows { rows: &mixture.outputs, stride: self.config.width, offset: 0, bias };
        expert_product(client, self.able, &bank.down, &pairs, self.integers(), &out);
    }

    /// Computes the outputs of the shared expert, if there is one.
    pub(super) fn shared_expert<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        experts: &Experts,
        count: usize,
        activation: Activation,
    ) {
        let (scratch, width) = (&self.scratch, self.config.width);
        let mixture = &scratch.mixture;
        let Some(gated) = &experts.shared else { return };
        let [gates, outputs] = &mixture.shared;
        if let Some(gate) = &experts.shared_gate {
            self.products(client, gate, &scratch.x, count, gates, 1, None, false);
        }
        self.gate_up(client, gated, count, activation, &mixture.shared_gated);
        self.gate(client, gated, count, activation, &mixture.shared_gated);
        self.products(client, &gated.down, &mixture.shared_gated, count, outputs, width, None, false);
    }

    /// Adds the outputs of the experts of each row to the residual stream.
    pub(super) fn combine_experts<L: Platform>(
        &self,
        client: &ComputeClient<L>,
        experts: &Experts,
        count: usize,
        hidden: &Handle,
    ) {
        let (mixture, width, choices) = (&self.scratch.mixture, self.config.width, self.choices(experts));
        let on_input = experts.config.on_input;
        let [gates, outputs] = &mixture.shared;
        let gates = experts.shared_gate.as_ref().map(|_| gates);
        let shared = experts.shared.as_ref().map(|_| SharedOutput { gates, outputs });
        combine(client, self.able, &mixture.outputs, &choices, !on_input, shared.as_ref(), count, width, hidden);
    }

    /// Where pairs are sorted by expert, if those of one expert are computed together in a pass of `count` rows.
    fn groups(&self, experts: &Experts, bank: &Bank, count: usize) -> Option<&Groups> {
        let grouped = grouped(self.able, self.integers(), count * experts.config.used, bank.down.count);
        grouped.then_some(&self.scratch.mixture.groups)
    }

    /// Whether a pass of `count` rows sorts the pairs of a layer by expert.
    pub(super) fn is_grouped(&self, experts: &Experts, count: usize) -> bool {
        self.groups(experts, &experts.bank, count).is_some()
    }

    fn integers(&self) -> bool {
        self.options.activations == stage::Activations::Int8
    }
}
