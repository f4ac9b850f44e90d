//! The steps of layers with a mixture of experts.
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::order::Activation;
use kernels_models::{stage, weights};

use super::GpuEngine;
use super::layers::{Bank, Experts, Slots};
use crate::experts::{Choices, Scores, SharedOutput, combine, look_up, route, scale_rows};
use crate::load::Part;
use crate::platform::Platform;
use crate::product::{ExpertRows, Groups, Pairs, expert_product, group, grouped, is_chunked, router_chunks};
use crate::rows::gated;

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
