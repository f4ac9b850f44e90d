//! Experts in RAM: which stages a device can hold beyond its memory, and how much longer they take.
//!
//! A device that offers RAM holds a stage whose bytes exceed its memory if the surplus are weights of experts. The same number
//! of experts of each layer then lies in RAM, and the processor computes them while the device computes the others. Both are
//! monotone in the layers: a part of a stage that fits does fit, with at most as many experts of each layer in RAM, and takes
//! at most as long. The search relies on it. Next: `../layers.rs`.
use super::{StageBytes, blocks, matrix_ns, ratio_ns, stage_bytes};
use crate::fleet::Device;
use crate::work::{Experts, Layer, Work};
use alloc::vec::Vec;
use core::ops::Range;

/// One part in this number of the experts of a layer stays on the device, and at least as many as a row uses: with fewer, the
/// device only waits for the processor, and a node without it does as well.
const KEPT_SHARE: u32 = 8;

/// Nanoseconds per layer in which the device's rows are read and the processor's outputs are written: two small transfers and
/// the wait for each. An estimate, not measured on the device.
const EXCHANGE_NS: u64 = 30_000;

/// Bits of a nanosecond's fraction in sums over layers of the time of one expert, which may be far below a nanosecond.
const FRACTION_BITS: u32 = 10;

/// Bytes in a device's memory and in the machine's RAM: what it offers, or what a stage takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes in the device's memory.
    pub memory: u64,
    /// Bytes in RAM: weights of experts.
    pub ram: u64,
}

impl Room {
    /// What a device offers to stages. No RAM if the processor's speed was not measured.
    pub fn of(device: &Device) -> Self {
        Self { memory: device.memory, ram: if device.ram_bytes_per_second == 0 { 0 } else { device.ram } }
    }

    /// What is left beside stages that take `taken`.
    #[must_use]
    pub fn without(self, taken: Room) -> Self {
        Self { memory: self.memory.saturating_sub(taken.memory), ram: self.ram.saturating_sub(taken.ram) }
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Room) -> Self {
        Self { memory: self.memory.saturating_add(other.memory), ram: self.ram.saturating_add(other.ram) }
    }

    /// Bytes in memory and RAM.
    pub fn bytes(self) -> u64 {
        self.memory.saturating_add(self.ram)
    }
}

/// Where the bytes of a stage lie if it has this room: experts lie in RAM only as far as memory is short. `None`: it does not
/// fit.
pub fn placed(work: &Work, layers: &Range<u32>, room: Room) -> Option<Room> {
    let total = stage_bytes(work, layers);
    if total <= room.memory {
        return Some(Room { memory: total, ram: 0 });
    }
    split(total, one_of_each(work, layers), in_ram_max(work), room)
}

/// Bytes of a stage's experts in RAM on a device that holds nothing else. Of a stage that does not fit, the most that may be.
pub(super) fn ram_on(work: &Work, device: &Device, layers: &Range<u32>) -> u64 {
    let room = Room::of(device);
    match placed(work, layers, room) {
        Some(placed) => placed.ram,
        None if room.ram == 0 => 0,
        None => one_of_each(work, layers).saturating_mul(in_ram_max(work).into()),
    }
}

/// Most bytes of experts of these layers that may lie in RAM, out of `ram`.
pub(crate) fn usable(work: &Work, layers: &Range<u32>, ram: u64) -> u64 {
    let each = one_of_each(work, layers);
    let experts = ram.checked_div(each).unwrap_or(0).min(in_ram_max(work).into());
    each.saturating_mul(experts)
}

/// Most bytes of experts in RAM beside this many bytes of a stage in memory: whatever the model, a share of the experts is among
/// these.
pub fn ram_beside_max(memory: u64) -> u64 {
    memory.saturating_mul(u64::from(KEPT_SHARE) - 1)
}

fn split(total: u64, each: u64, most: u32, room: Room) -> Option<Room> {
    let surplus = total.saturating_sub(room.memory);
    if surplus == 0 {
        return Some(Room { memory: total, ram: 0 });
    }
    if each == 0 || surplus.div_ceil(each) > most.into() {
        return None;
    }
    let ram = surplus.div_ceil(each).saturating_mul(each);
    (ram <= room.ram).then_some(Room { memory: total.saturating_sub(ram), ram })
}

/// Bytes of one expert of each layer.
fn one_of_each(work: &Work, layers: &Range<u32>) -> u64 {
    blocks(work, layers).iter().map(expert_bytes).fold(0u64, u64::saturating_add)
}

fn expert_bytes(layer: &Layer) -> u64 {
    let bytes = |experts: Experts| experts.bytes.min(layer.weight_bytes).checked_div(experts.count.into());
    layer.experts.and_then(bytes).unwrap_or(0)
}

/// Most experts of each layer that may lie in RAM. One number for the whole model, whose layers have as many experts.
fn in_ram_max(work: &Work) -> u32 {
    let with = work.layers.iter().filter(|layer| expert_bytes(layer) > 0).filter_map(|layer| layer.experts);
    let most = with.map(|Experts { count, used, .. }| count.saturating_sub(used.max(count.div_ceil(KEPT_SHARE))));
    most.min().unwrap_or(0)
}

/// Nanoseconds that a step over `tokens` rows takes longer if `ram` bytes of the stage's experts lie in RAM.
pub(super) fn extra_ns(work: &Work, device: &Device, layers: &Range<u32>, ram: u64, tokens: u32) -> u64 {
    let each = one_of_each(work, layers);
    if ram == 0 || each == 0 {
        return 0;
    }
    let sums = blocks(work, layers).iter().fold(Sums::default(), |sums, layer| sums.with(device, layer, tokens));
    sums.extra_ns(ram.div_ceil(each).min(in_ram_max(work).into()))
}

/// Sums over layers.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// Layers with experts.
    layers: u64,
    /// Nanoseconds of the experts' products if the device computes all of them.
    device_ns: u64,
    /// Time of the processor per expert in RAM of each layer, in units of 2^-[`FRACTION_BITS`] ns.
    each: u64,
}

impl Sums {
    fn with(self, device: &Device, layer: &Layer, tokens: u32) -> Self {
        let Some(Experts { bytes, count, .. }) = layer.experts.filter(|_| expert_bytes(layer) > 0) else {
            return self;
        };
        let dense = layer.weight_bytes.saturating_sub(bytes);
        let read = |tokens: u32| layer.bytes_read(tokens).saturating_sub(dense);
        // A row's flops are proportional to the weights that it reads.
        let flops = u128::from(layer.flops_per_token) * u128::from(read(1)) / u128::from(layer.bytes_read(1).max(1));
        let flops = u64::try_from(flops).unwrap_or(u64::MAX);
        let device_ns = matrix_ns(device, read(tokens), flops, tokens).unwrap_or(0);
        let read_ns = ratio_ns(read(tokens), device.ram_bytes_per_second).unwrap_or(super::NS_MAX);
        let compute_ns = ratio_ns(flops.saturating_mul(tokens.into()), device.ram_flops_per_second).unwrap_or(0);
        Self {
            layers: self.layers + 1,
            device_ns: self.device_ns + device_ns,
            each: self.each + (read_ns.max(compute_ns) << FRACTION_BITS) / u64::from(count),
        }
    }

    /// The processor and the device compute their experts at the same time, so the slower of the two counts. The device's time
    /// counts as if it computed all experts: a stage never takes less time because some of them lie in RAM.
    fn extra_ns(self, experts: u64) -> u64 {
        if experts == 0 {
            return 0;
        }
        let processor_ns = (u128::from(self.each) * u128::from(experts)) >> FRACTION_BITS;
        let waits_ns = u64::try_from(processor_ns).unwrap_or(u64::MAX).saturating_sub(self.device_ns);
        waits_ns.saturating_add(self.layers * EXCHANGE_NS)
    }
}

/// What stages of many ranges of one job take on one device, each in constant time.
pub(crate) struct RamTable<'a> {
    bytes: &'a StageBytes<'a>,
    room: Room,
    most: u32,
    /// Bytes of one expert of each layer before an index, and sums over these layers; empty if no expert can lie in RAM.
    before: Vec<(u64, Sums)>,
}

impl<'a> RamTable<'a> {
    /// `room`: what the device has for these stages.
    pub(crate) fn new(bytes: &'a StageBytes<'a>, device: &Device, room: Room) -> Self {
        let work = bytes.work;
        let most = if room.ram == 0 { 0 } else { in_ram_max(work) };
        let mut before = Vec::new();
        if most > 0 {
            let mut sum = (0u64, Sums::default());
            before.push(sum);
            for layer in &work.layers {
                sum = (sum.0.saturating_add(expert_bytes(layer)), sum.1.with(device, layer, 1));
                before.push(sum);
            }
        }
        Self { bytes, room, most, before }
    }

    /// Whether any expert may lie in RAM.
    pub(crate) fn has_ram(&self) -> bool {
        self.most > 0
    }

    /// As [`placed`].
    pub(crate) fn placed(&self, layers: &Range<u32>) -> Option<Room> {
        split(self.bytes.of(layers), self.each(layers), self.most, self.room)
    }

    /// Nanoseconds per token that a stage takes longer than with all experts in memory.
    pub(crate) fn extra_ns(&self, layers: &Range<u32>) -> u64 {
        let surplus = self.bytes.of(layers).saturating_sub(self.room.memory);
        let each = self.each(layers);
        if surplus == 0 || each == 0 {
            return 0;
        }
        let [start, end] = [layers.start, layers.end].map(|at| self.before[at as usize].1);
        let sums = Sums {
            layers: end.layers - start.layers,
            device_ns: end.device_ns - start.device_ns,
            each: end.each - start.each,
        };
        sums.extra_ns(surplus.div_ceil(each).min(self.most.into()))
    }

    fn each(&self, layers: &Range<u32>) -> u64 {
        let before = |at: u32| self.before.get(at as usize).map_or(0, |(bytes, _)| *bytes);
        before(layers.end) - before(layers.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::DeviceId;
    use crate::standby::tests;

    const SECOND: u64 = 1_000_000_000;

    /// Layers of 100 bytes, of which 80 are 8 experts of 10 bytes; a row uses 2.
    fn work(layers: usize) -> Work {
        let experts = Some(Experts { bytes: 80, count: 8, used: 2 });
        let layer = Layer { weight_bytes: 100, flops_per_token: 400, kv_bytes_per_token: 0, window: None, experts };
        Work {
            layers: alloc::vec![layer; layers],
            embed_bytes: 0,
            head_bytes: 0,
            head_flops: 0,
            scratch_bytes: 0,
            ..tests::work()
        }
    }

    fn device(memory: u64, ram: u64) -> Device {
        let device = tests::device(DeviceId::first([1; 16]), 1, memory);
        let speeds = Device { bytes_per_second: 1_000, step_ns: 0, ram_bytes_per_second: 100, ..device };
        Device { ram, ..speeds }
    }

    #[test]
    fn whole_experts_of_each_layer_lie_in_ram_as_far_as_memory_is_short() {
        let at = |layers: Range<u32>, memory: u64, ram: u64| {
            let room = Room { memory, ram };
            placed(&work(4), &layers, room).map(|placed| (placed.memory, placed.ram))
        };
        assert_eq!(at(0..2, 200, 0), Some((200, 0)));
        assert_eq!(at(0..2, 200, 1_000), Some((200, 0)), "memory comes first");
        assert_eq!(at(0..2, 199, 0), None);
        assert_eq!(at(0..2, 199, 20), Some((180, 20)), "one expert of each of two layers");
        assert_eq!(at(0..2, 199, 19), None);
        assert_eq!(at(0..2, 80, 120), Some((80, 120)), "a row uses two experts of eight: six may lie in RAM");
        assert_eq!(at(0..2, 79, 1_000), None);
        let mut many = work(4);
        many.layers.iter_mut().for_each(|layer| layer.experts = Some(Experts { bytes: 80, count: 80, used: 1 }));
        assert_eq!(placed(&many, &(0..1), Room { memory: 30, ram: 1_000 }), Some(Room { memory: 30, ram: 70 }));
        assert_eq!(placed(&many, &(0..1), Room { memory: 29, ram: 1_000 }), None, "an eighth stays");
        let mut dense = work(4);
        dense.layers[1].experts = None;
        assert_eq!(placed(&dense, &(0..2), Room { memory: 195, ram: 50 }), Some(Room { memory: 190, ram: 10 }));
        assert_eq!(placed(&dense, &(1..2), Room { memory: 99, ram: 50 }), None, "nothing of it may lie in RAM");
        let unmeasured = Device { ram_bytes_per_second: 0, ..device(10, 50) };
        assert_eq!(Room::of(&unmeasured), Room { memory: 10, ram: 0 });
        assert_eq!([0, 19, 39, 40, 1_000].map(|ram| usable(&work(4), &(0..2), ram)), [0, 0, 20, 40, 120]);
    }

    #[test]
    fn the_slower_of_processor_and_device_counts_and_each_layer_pays_for_the_exchange() {
        let ns = |device: &Device, ram: u64, tokens: u32| {
            let work = work(4);
            super::super::stage_ns_at(&work, device, (&(0..2), ram), tokens, 0).unwrap()
        };
        let of = device(1_000, 1_000);
        // A row reads 20 bytes of each layer's experts and 20 others; each eighth of the experts in RAM adds 2.5 bytes there.
        let plain = 2 * 40 * SECOND / 1_000;
        assert_eq!(ns(&of, 0, 1), plain);
        let fast = Device { ram_bytes_per_second: 500, ..of.clone() };
        assert_eq!(ns(&fast, 20, 1), plain + 2 * EXCHANGE_NS, "the processor is done before the device");
        let extra =
            |bytes_tenths: u64| 2 * bytes_tenths * SECOND / 10 / 100 - 2 * 20 * SECOND / 1_000 + 2 * EXCHANGE_NS;
        assert_eq!(ns(&of, 20, 1), plain + extra(25));
        assert_eq!(ns(&of, 120, 1), plain + extra(150));
        // Of 400 flops half are those of experts: 8 rows compute 1600 flops, six eighths of them on the processor.
        let slow = Device { ram_flops_per_second: 100, ram_bytes_per_second: u64::MAX, ..of };
        let prefill = ns(&slow, 120, 8) - ns(&slow, 0, 8);
        let experts = work(4).layers[0].bytes_read(8) - 20;
        assert_eq!(prefill, 2 * 1_600 * 6 / 8 * SECOND / 100 - 2 * experts * SECOND / 1_000 + 2 * EXCHANGE_NS);
    }

    /// For layers of every kind, also hostile ones.
    #[test]
    fn a_part_of_a_stage_fits_and_takes_no_longer_and_tables_agree() {
        let mut state = 7u64;
        let mut below = |limit: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % limit
        };
        let mut fitted = 0;
        for _ in 0..300 {
            let mut work = work(6);
            for layer in &mut work.layers {
                let count = if below(30) == 0 { below(3) } else { 3 + below(6) } as u32;
                let experts = Experts { bytes: below(120), count, used: below(3) as u32 };
                layer.experts = (below(3) > 0).then_some(experts);
            }
            work.embed_bytes = below(50);
            let ram_bytes_per_second = 20 + below(400);
            let device = Device { ram_bytes_per_second, ..device(100 + below(400), below(400)) };
            let bytes = StageBytes::new(&work);
            let table = RamTable::new(&bytes, &device, Room::of(&device));
            let ranges = || (0..6u32).flat_map(|start| (start + 1..=6).map(move |end| start..end));
            let ns = |layers: &Range<u32>| super::super::stage_ns(&work, &device, layers, 1).unwrap();
            for whole in ranges() {
                let held = placed(&work, &whole, Room::of(&device));
                assert_eq!(table.placed(&whole), held);
                let Some(held) = held else { continue };
                assert_eq!(held.bytes(), stage_bytes(&work, &whole));
                assert!(held.ram <= ram_beside_max(held.memory), "as a plan from the wire is checked");
                let plain =
                    super::super::stage_ns_at(&work, &device, (&whole, 0), 1, work.planned_positions()).unwrap();
                assert_eq!(ns(&whole), plain + table.extra_ns(&whole));
                fitted += usize::from(held.ram > 0);
                for part in ranges().filter(|part| whole.start <= part.start && part.end <= whole.end) {
                    let less = placed(&work, &part, Room::of(&device)).expect("a part of a stage that fits");
                    assert!(less.ram <= held.ram && less.memory <= device.memory);
                    assert!(ns(&part) <= ns(&whole), "{part:?} of {whole:?}");
                }
            }
        }
        assert!(fitted > 300, "{fitted}");
    }
}
