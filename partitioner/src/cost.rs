//! The cost model: the only place that predicts time and memory. All modules that need a prediction use it.
//!
//! Integer nanoseconds and bytes, so that every node and the simulator compute the same figure. Decode is charged at batch 1
//! over half of the context ([`Work::planned_positions`]); memory is charged for the full context of all sequences. Next:
//! `cost/ram.rs`.
pub mod ram;

use crate::fleet::{Device, DeviceId, Endpoint, Fleet, Link, NodeKey};
use crate::work::{Layer, Work};
use alloc::vec::Vec;
use core::ops::Range;

/// Bytes of a frame with one token id (mostly header and checksum): the coordinator sends one to the first stage, and the last
/// stage returns one, per token.
pub const TOKEN_BYTES: u64 = 96;

/// Maximum of a single prediction (a layer, a hop, a launch): 275 s. No caller waits that long for a token, and sums over 1,024
/// layers and 128 stages stay far within 64 bits.
pub const NS_MAX: u64 = 1 << 38;

/// Weight bytes of a stage with these layers: its blocks, the embedding if it is first, the output head if it is last; a tied
/// matrix counts once if one stage is both.
pub fn weight_bytes(work: &Work, layers: &Range<u32>) -> u64 {
    let blocks = blocks(work, layers).iter().fold(0u64, |sum, layer| sum.saturating_add(layer.weight_bytes));
    blocks.saturating_add(ends_bytes(work, layers.start == 0, layers.end as usize == work.layers.len()))
}

/// Bytes of embedding and output head for a stage that is first, last, or both.
fn ends_bytes(work: &Work, first: bool, last: bool) -> u64 {
    match (first, last) {
        (true, true) if work.tied => work.embed_bytes.max(work.head_bytes),
        (true, true) => work.embed_bytes.saturating_add(work.head_bytes),
        (true, false) => work.embed_bytes,
        (false, true) => work.head_bytes,
        (false, false) => 0,
    }
}

/// Bytes of key and value cache for the full context of all sequences.
pub fn cache_bytes(work: &Work, layers: &Range<u32>) -> u64 {
    let tokens = u128::from(work.context) * u128::from(work.sequences);
    let per_token: u128 = blocks(work, layers).iter().map(|layer| u128::from(layer.kv_bytes_per_token)).sum();
    u64::try_from(per_token.saturating_mul(tokens)).unwrap_or(u64::MAX)
}

/// All bytes of a stage: weights, cache, scratch.
pub fn stage_bytes(work: &Work, layers: &Range<u32>) -> u64 {
    weight_bytes(work, layers).saturating_add(cache_bytes(work, layers)).saturating_add(work.scratch_bytes)
}

/// [`stage_bytes`] for many ranges of one job, each in constant time. Only for a job whose total bytes fit in 64 bits.
pub(crate) struct StageBytes<'a> {
    work: &'a Work,
    /// Weights and cache of the blocks before each index.
    before: Vec<u64>,
}

impl<'a> StageBytes<'a> {
    pub(crate) fn new(work: &'a Work) -> Self {
        let mut before = Vec::with_capacity(work.layers.len() + 1);
        before.push(0u64);
        for index in 0..work.layers.len() as u32 {
            let block = work.layers[index as usize].weight_bytes.saturating_add(cache_bytes(work, &(index..index + 1)));
            before.push(before[index as usize].saturating_add(block));
        }
        Self { work, before }
    }

    pub(crate) fn of(&self, layers: &Range<u32>) -> u64 {
        let inner = self.before[layers.end as usize] - self.before[layers.start as usize];
        let blocks = self.work.layers.len() as u32;
        inner
            .saturating_add(ends_bytes(self.work, layers.start == 0, layers.end == blocks))
            .saturating_add(self.work.scratch_bytes)
    }
}

/// Nanoseconds of one step of a stage over `tokens` rows (1 in decode, the chunk in prefill, the batch when batched). Each row
/// attends to [`Work::planned_positions`]. The device holds nothing else, and experts lie in RAM as far as its memory is short.
///
/// `None`: the device has no measured speed.
pub fn stage_ns(work: &Work, device: &Device, layers: &Range<u32>, tokens: u32) -> Option<u64> {
    let ram = ram::ram_on(work, device, layers);
    stage_ns_at(work, device, (layers, ram), tokens, work.planned_positions())
}

/// As [`stage_ns`], with `ram` bytes of the stage's experts in RAM, for rows that attend to `positions` each; 0: over an empty
/// cache.
///
/// `None`: the device has no measured speed.
pub fn stage_ns_at(
    work: &Work,
    device: &Device,
    (layers, ram): (&Range<u32>, u64),
    tokens: u32,
    positions: u32,
) -> Option<u64> {
    let mut sum = device.step_ns.min(NS_MAX);
    for layer in blocks(work, layers) {
        sum = sum.saturating_add(layer_ns(device, layer, tokens, positions)?);
    }
    if layers.end as usize == work.layers.len() {
        sum = sum.saturating_add(head_ns(work, device, tokens)?);
    }
    Some(sum.saturating_add(ram::extra_ns(work, device, layers, ram, tokens)))
}

/// Nanoseconds for one block over `tokens` rows that attend to `positions` each: the fixed cost, the matrix products (weights
/// are read once and every row is computed; the slower of the two counts), and attention.
pub fn layer_ns(device: &Device, layer: &Layer, tokens: u32, positions: u32) -> Option<u64> {
    let fixed_ns = device.layer_ns.min(NS_MAX);
    let products_ns = matrix_ns(device, layer.bytes_read(tokens), layer.flops_per_token, tokens)?;
    Some((fixed_ns + products_ns + attention_ns(device, layer, tokens, positions)).min(NS_MAX))
}

/// Nanoseconds in which `tokens` rows attend to `positions` each: every row reads the keys and values within its window.
fn attention_ns(device: &Device, layer: &Layer, tokens: u32, positions: u32) -> u64 {
    let seen = layer.window.map_or(positions, |window| positions.min(window));
    let bytes = layer.kv_bytes_per_token.saturating_mul(seen.into()).saturating_mul(tokens.into());
    ratio_ns(bytes, device.cache_bytes_per_second).unwrap_or(0) // not measured
}

/// Nanoseconds for final norm and output head over `tokens` rows. (The embedding is a lookup of one row: free.)
pub fn head_ns(work: &Work, device: &Device, tokens: u32) -> Option<u64> {
    matrix_ns(device, work.head_bytes, work.head_flops, tokens)
}

/// Nanoseconds until `bytes` have arrived at the far end: half a round trip and the transfer time. Nothing waits for an
/// acknowledgement.
///
/// `None`: the link is unusable.
pub fn hop_ns(link: &Link, bytes: u64) -> Option<u64> {
    Some((link.rtt_ns / 2).saturating_add(wire_ns(link, bytes)?).min(NS_MAX))
}

/// Nanoseconds that `bytes` occupy a link: this bounds the throughput of many requests.
pub fn wire_ns(link: &Link, bytes: u64) -> Option<u64> {
    ratio_ns(bytes, link.bytes_per_second)
}

/// Predicted nanoseconds per token of one request: the stages' steps and the hops coordinator → first → … → last → coordinator;
/// a hop within one device is free.
///
/// `None`: a device is unknown or unmeasured, or a link is unusable.
pub fn token_ns(work: &Work, fleet: &Fleet, head: NodeKey, stages: &[(DeviceId, Range<u32>)]) -> Option<u64> {
    let mut sum = 0u64;
    let mut at = Endpoint::from(head);
    for (index, (id, layers)) in stages.iter().enumerate() {
        let bytes = if index == 0 { TOKEN_BYTES } else { work.activation_bytes };
        sum = sum.saturating_add(between_ns(fleet, at, *id, bytes)?);
        sum = sum.saturating_add(stage_ns(work, fleet.device(*id)?, layers, 1)?);
        at = (*id).into();
    }
    Some(sum.saturating_add(between_ns(fleet, at, head, TOKEN_BYTES)?))
}

/// Predicted nanoseconds between tokens when many requests keep every stage and link busy: the time of the slowest one.
///
/// `None` as for [`token_ns`].
pub fn bottleneck_ns(work: &Work, fleet: &Fleet, head: NodeKey, stages: &[(DeviceId, Range<u32>)]) -> Option<u64> {
    let mut slowest = 0u64;
    let mut at = Endpoint::from(head);
    for (index, (id, layers)) in stages.iter().enumerate() {
        let bytes = if index == 0 { TOKEN_BYTES } else { work.activation_bytes };
        slowest = slowest.max(busy_ns(fleet, at, *id, bytes)?);
        slowest = slowest.max(stage_ns(work, fleet.device(*id)?, layers, 1)?);
        at = (*id).into();
    }
    Some(slowest.max(busy_ns(fleet, at, head, TOKEN_BYTES)?))
}

/// Predicted nanoseconds per row of a long prompt, in chunks of [`CHUNK_ROWS`] that follow one another through the pipeline:
/// the time of the slowest stage or link.
///
/// `None` as for [`token_ns`].
pub fn prompt_row_ns(work: &Work, fleet: &Fleet, stages: &[(DeviceId, Range<u32>)]) -> Option<u64> {
    let mut slowest = 0u64;
    for (index, (id, layers)) in stages.iter().enumerate() {
        slowest = slowest.max(stage_ns(work, fleet.device(*id)?, layers, CHUNK_ROWS)?);
        if let Some((before, _)) = index.checked_sub(1).and_then(|before| stages.get(before)) {
            let bytes = work.activation_bytes.saturating_mul(CHUNK_ROWS.into());
            slowest = slowest.max(busy_ns(fleet, *before, *id, bytes)?);
        }
    }
    Some(slowest / u64::from(CHUNK_ROWS))
}

/// Rows of a chunk of a prompt in predictions: of that order in pipelines of a few stages, and enough that products are bound
/// by arithmetic.
pub const CHUNK_ROWS: u32 = 128;

/// [`hop_ns`] from one end to another; free within a device, and between a node and its own devices.
pub fn between_ns(fleet: &Fleet, from: impl Into<Endpoint>, to: impl Into<Endpoint>, bytes: u64) -> Option<u64> {
    let (from, to) = (from.into(), to.into());
    if from.is_at(to) { Some(0) } else { hop_ns(fleet.link(from, to), bytes) }
}

/// [`wire_ns`] from one end to another; free as in [`between_ns`].
pub fn busy_ns(fleet: &Fleet, from: impl Into<Endpoint>, to: impl Into<Endpoint>, bytes: u64) -> Option<u64> {
    let (from, to) = (from.into(), to.into());
    if from.is_at(to) { Some(0) } else { wire_ns(fleet.link(from, to), bytes) }
}

/// The roofline of one matrix: its bytes are read once, its flops are computed for each row. Unmeasured flops bound nothing.
fn matrix_ns(device: &Device, bytes: u64, flops: u64, tokens: u32) -> Option<u64> {
    let read = ratio_ns(bytes, device.bytes_per_second)?;
    let compute = match device.flops_per_second {
        0 => 0,
        speed => ratio_ns(flops.saturating_mul(u64::from(tokens)), speed)?,
    };
    Some(read.max(compute))
}

/// `amount / per_second` in nanoseconds, rounded up, at most [`NS_MAX`]; `None` at zero speed.
fn ratio_ns(amount: u64, per_second: u64) -> Option<u64> {
    if per_second == 0 {
        return None;
    }
    let ns = (u128::from(amount) * 1_000_000_000).div_ceil(u128::from(per_second));
    Some(ns.min(u128::from(NS_MAX)) as u64)
}

/// The blocks of a range, limited to the existing ones.
fn blocks<'a>(work: &'a Work, layers: &Range<u32>) -> &'a [Layer] {
    let end = (layers.end as usize).min(work.layers.len());
    let start = (layers.start as usize).min(end);
    &work.layers[start..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Experts;
    use alloc::{collections::BTreeMap, string::String, vec};

    fn work(tied: bool) -> Work {
        let layer =
            Layer { flops_per_token: 200, weight_bytes: 100, kv_bytes_per_token: 3, window: None, experts: None };
        Work {
            layers: vec![layer; 4],
            embed_bytes: 1_000,
            head_bytes: 1_010,
            tied,
            head_flops: 2_000,
            activation_bytes: 50,
            coarser_bytes: Vec::new(),
            context: 10,
            sequences: 2,
            scratch_bytes: 7,
        }
    }

    fn device(id: u8, bytes_per_second: u64, flops_per_second: u64) -> Device {
        Device {
            id: DeviceId::first([id; 16]),
            name: String::new(),
            label: String::new(),
            machine: 0,
            zone: String::new(),
            memory: u64::MAX,
            bytes_per_second,
            flops_per_second,
            copy_bytes_per_second: bytes_per_second,
            step_ns: 5,
            layer_ns: 0,
            cache_bytes_per_second: 0,
            ram: 0,
            ram_bytes_per_second: 0,
            ram_flops_per_second: 0,
            numerics: 0,
            pass_steps: 1,
            excluded: false,
        }
    }

    #[test]
    fn a_step_reads_the_experts_that_its_rows_choose() {
        let plain =
            Layer { flops_per_token: 1, weight_bytes: 1000, kv_bytes_per_token: 1, window: None, experts: None };
        let mixture = |count, used| Layer { experts: Some(Experts { bytes: 800, count, used }), ..plain };
        assert_eq!((plain.bytes_read(1), plain.bytes_read(9)), (1000, 1000));
        // 2 of 8: a quarter of 800; then 7/16 and so on.
        assert_eq!([1, 2, 3].map(|tokens| mixture(8, 2).bytes_read(tokens)), [400, 550, 663]);
        assert_eq!(mixture(8, 2).bytes_read(1000), 1000);
        assert_eq!(
            (mixture(8, 8).bytes_read(1), mixture(8, 9).bytes_read(1), mixture(0, 0).bytes_read(1)),
            (1000, 1000, 1000)
        );
        assert_eq!(mixture(8, 2).bytes_read(0), 200);
        let hostile = Layer { experts: Some(Experts { bytes: u64::MAX, count: u32::MAX, used: 0 }), ..plain };
        assert_eq!(hostile.bytes_read(u32::MAX), 0);
    }

    #[test]
    fn embedding_and_output_head_are_charged_to_their_stages() {
        assert_eq!(weight_bytes(&work(false), &(0..4)), 400 + 1_000 + 1_010);
        assert_eq!(weight_bytes(&work(true), &(0..4)), 400 + 1_010, "a tied matrix is held once");
        assert_eq!(weight_bytes(&work(true), &(0..2)), 200 + 1_000);
        assert_eq!(weight_bytes(&work(true), &(2..4)), 200 + 1_010, "two stages hold the tied matrix twice");
        assert_eq!(stage_bytes(&work(true), &(1..3)), 200 + 2 * 3 * 20 + 7);
        for tied in [false, true] {
            let work = work(tied);
            let table = StageBytes::new(&work);
            for (start, end) in (0..4).flat_map(|start| (start + 1..=4).map(move |end| (start, end))) {
                assert_eq!(table.of(&(start..end)), stage_bytes(&work, &(start..end)));
            }
        }
    }

    #[test]
    fn a_step_takes_the_slower_of_reading_and_computing() {
        let second = 1_000_000_000;
        let reads = device(1, 1_000, 0);
        assert_eq!(stage_ns(&work(true), &reads, &(1..3), 1), Some(5 + 2 * second / 10));
        let computes = device(1, 1_000, 1_000);
        assert_eq!(stage_ns(&work(true), &computes, &(1..3), 1), Some(5 + 2 * second / 5));
        assert_eq!(stage_ns(&work(true), &computes, &(1..3), 10), Some(5 + 2 * second * 2));
        assert_eq!(stage_ns(&work(true), &computes, &(3..4), 1), Some(5 + second / 5 + 2 * second));
        assert_eq!(stage_ns(&work(true), &device(1, 0, 1), &(1..3), 1), None, "no speed, no prediction");
    }

    #[test]
    fn attention_and_fixed_costs_are_charged_per_layer() {
        let second = 1_000_000_000;
        let bare = device(1, 1_000, 0);
        let measured = Device { layer_ns: 7, cache_bytes_per_second: 30, ..bare.clone() };
        let decode = |work: &Work, device: &Device| stage_ns(work, device, &(1..3), 1);
        // A context of 10: 5 positions of 3 bytes each, at 30 bytes per second.
        assert_eq!(decode(&work(true), &measured), decode(&work(true), &bare).map(|ns| ns + 2 * (7 + second / 2)));
        let longer = Work { context: 20, ..work(true) };
        assert_eq!(decode(&longer, &measured), decode(&longer, &bare).map(|ns| ns + 2 * (7 + second)));
        // Whatever the context, an unmeasured cache charges nothing.
        assert_eq!(decode(&longer, &bare), decode(&work(true), &bare));
        assert_eq!(stage_ns_at(&longer, &measured, (&(1..3), 0), 1, 0), decode(&longer, &bare).map(|ns| ns + 2 * 7));
        // Each row of a chunk reads its positions; the fixed cost is paid once.
        let chunk = stage_ns(&longer, &measured, &(1..3), 8);
        assert_eq!(chunk, decode(&longer, &bare).map(|ns| ns + 2 * (7 + 8 * second)));
        // One of the two layers has a window of 2 positions.
        let mut windowed = longer.clone();
        windowed.layers[2].window = Some(2);
        assert_eq!(decode(&windowed, &measured), decode(&longer, &bare).map(|ns| ns + 2 * 7 + second + second / 5));
    }

    #[test]
    fn a_token_pays_half_a_round_trip_per_hop_and_nothing_within_a_device() {
        let link = Link { rtt_ns: 1_000, bytes_per_second: 1_000_000_000 };
        let devices: Vec<Device> = (1..=2).map(|id| device(id, u64::MAX, 0)).collect();
        let mut fleet = Fleet { devices, links: BTreeMap::new(), default_link: link };
        let (a, b) = (DeviceId::first([1; 16]), DeviceId::first([2; 16]));
        let split = [(a, 0..2), (b, 2..4)];
        // Each matrix takes 1 ns at this speed (rounded up): two blocks, then two blocks and the output head.
        let (first, second) = (5 + 2, 5 + 3);
        assert_eq!(token_ns(&work(true), &fleet, a.node, &split), Some(first + 500 + 50 + second + 500 + TOKEN_BYTES));
        assert_eq!(token_ns(&work(true), &fleet, a.node, &[(a, 0..4)]), Some(5 + 5));
        assert_eq!(bottleneck_ns(&work(true), &fleet, a.node, &split), Some(TOKEN_BYTES));
        fleet.links.insert((b.node, a.node), Link { rtt_ns: 0, bytes_per_second: 0 });
        assert_eq!(token_ns(&work(true), &fleet, a.node, &split), None, "the return link is unusable");
    }

    #[test]
    fn extreme_figures_saturate() {
        let most = u64::MAX;
        let huge =
            Layer { flops_per_token: most, weight_bytes: most, kv_bytes_per_token: most, window: None, experts: None };
        let work = Work { layers: vec![huge; 4], context: u32::MAX, sequences: u32::MAX, ..work(false) };
        assert_eq!(stage_bytes(&work, &(0..4)), u64::MAX);
        let slow = Device { layer_ns: u64::MAX, cache_bytes_per_second: 1, ..device(1, 1, 1) };
        assert_eq!(layer_ns(&slow, &huge, u32::MAX, u32::MAX), Some(NS_MAX));
        assert_eq!(layer_ns(&device(1, u64::MAX, 0), &huge, u32::MAX, u32::MAX), Some(1_000_000_000), "no attention");
        assert_eq!(stage_bytes(&work, &(9..12)), work.scratch_bytes, "missing layers take no bytes");
    }
}
