//! A simulated device: stages of symbolic layers whose output depends on every token, position and layer range.
//!
//! A row is one 64-bit value. Each layer keeps one hash chain per sequence, `kv' = H(kv, position, row)`, and maps the row
//! to `H(layer, row, kv')`; the row of the last layer becomes the token. A token is right only if every layer processed
//! every position exactly once and in order, under any partition into stages. `solo` computes the reference on one stage.
use crate::grids::Saved;
use crate::host::HostSpec;
use node_core::config::{Capacity, DeviceCapacity};
use node_core::id::{ContentId, Epoch, JobId, LoadId, PartId, RequestId, TensorId};
use node_core::input::Input;
use node_core::limits::CHALLENGE_STEPS;
use node_core::time::{Duration, Instant};
use node_core::work::Payload;
use node_core::work::pages::Pages;
use node_core::work::serve::{Item, ItemResult, SampleSpec, Sampling, StageOrder};
use node_core::work::steps::TileWork;
use node_core::work::{Loaded, Order, PartWork, Run, RunResult};
use std::collections::BTreeMap;

/// A payload sent from one host to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cargo {
    /// Token ids.
    Tokens(Vec<u32>),
    /// Rows of activations, and the bytes per row on the wire.
    Rows(Vec<u64>, u32),
}

impl Cargo {
    /// Size on the wire.
    pub fn wire_bytes(&self) -> u64 {
        match self {
            Cargo::Tokens(tokens) => tokens.len() as u64 * 4,
            Cargo::Rows(rows, row_bytes) => rows.len() as u64 * u64::from(*row_bytes),
        }
    }
}

/// One tile run: when its halos are ready, elements and bytes of each halo, when the run ends, and its result.
pub struct RunTimes {
    pub(crate) halos_ready: Instant,
    pub(crate) sizes: Vec<(u32, u64)>,
    pub(crate) ends: Instant,
    pub(crate) done: Input,
}

/// One device of a host. Its work runs in order, beside that of the others.
#[derive(Debug)]
pub struct Unit {
    bytes_per_second: u64,
    step_ns: u64,
    layer_ns: u64,
    cache_bytes_per_second: u64,
    /// Memory for stages and tiles; the node's advert may claim another amount.
    pub memory: u64,
    /// Bytes of the machine's RAM for experts of its stages.
    pub ram: u64,
    /// End of the work queued so far.
    busy_until: Instant,
    /// The current stall: when the queued work would have ended, and when the stall ends.
    stalled: Option<(Instant, Instant)>,
    /// The machine no longer has it: all its work and its loads fail.
    pub gone: bool,
}

impl Unit {
    fn new(device: &DeviceCapacity) -> Self {
        Unit {
            bytes_per_second: device.bytes_per_second,
            step_ns: device.step_ns,
            layer_ns: device.layer_ns,
            cache_bytes_per_second: device.cache_bytes_per_second,
            memory: device.memory_free,
            ram: device.ram_free,
            busy_until: Instant(0),
            stalled: None,
            gone: false,
        }
    }
}

/// The devices of one host, and its memory of tensors.
#[derive(Debug)]
pub struct Executor {
    skew_percent: u32,
    cell_ns: u64,
    ram_pages: u32,
    /// Its devices, as in its node's advert.
    pub units: Vec<Unit>,
    stages: BTreeMap<(JobId, PartId), Stage>,
    tensors: BTreeMap<TensorId, Cargo>,
    /// Simulation tiles.
    pub(crate) grids: crate::grids::GridDevice,
    /// Number of payloads received; the next one is named by it.
    arrivals: u64,
    /// Never answers again (a driver deadlock).
    pub dead: bool,
    /// Number of upcoming batches that fail (a device reset).
    pub failures: u32,
    /// Number of upcoming loads that are rejected as out of memory.
    pub rejections: u32,
    /// Current batch time in percent of the nominal time.
    pub slow_percent: u32,
    /// Time of all batches of stages so far.
    pub batches_took: Duration,
}

#[derive(Debug)]
struct Stage {
    device: u8,
    epoch: Epoch,
    /// The load order that created it.
    load: LoadId,
    /// Its layers are in memory, or are being read.
    resident: bool,
    bytes: u64,
    /// Bytes of its experts in RAM.
    ram: u64,
    layers: std::ops::Range<u32>,
    order: StageOrder,
    /// Per request and layer of the stage: the hash chain after each position.
    caches: BTreeMap<RequestId, Vec<Vec<u64>>>,
    /// The pages of these caches.
    pages: Pages,
}

impl Executor {
    pub(crate) fn new(spec: &HostSpec) -> Self {
        Executor {
            skew_percent: spec.skew_percent,
            cell_ns: spec.cell_ns,
            ram_pages: spec.ram_pages,
            units: spec.capacity.devices.iter().map(Unit::new).collect(),
            stages: BTreeMap::new(),
            tensors: BTreeMap::new(),
            grids: crate::grids::GridDevice::default(),
            arrivals: 0,
            dead: false,
            failures: 0,
            rejections: 0,
            slow_percent: 100,
            batches_took: Duration::ZERO,
        }
    }

    /// The process died: all device state is lost.
    pub(crate) fn reset(&mut self, spec: &HostSpec) {
        *self = Executor::new(spec);
    }

    /// Work submitted from now on, on any device, starts no earlier than `until`.
    pub(crate) fn stall(&mut self, now: Instant, until: Instant) {
        for unit in self.units.iter_mut().filter(|unit| until > unit.busy_until) {
            let from = unit.stalled.filter(|(_, end)| *end > now).map_or(unit.busy_until.max(now), |(from, _)| from);
            unit.stalled = Some((from, until));
            unit.busy_until = until;
        }
    }

    /// Ends a stall early. Returns its scheduled end, and by how much results due from then on move forward.
    pub(crate) fn end_stall(&mut self, now: Instant) -> Option<(Instant, Duration)> {
        let stalled = |unit: &Unit| unit.stalled.filter(|(_, until)| *until > now);
        let ends = self.units.iter().filter_map(stalled).map(|(from, until)| (until, until.since(from.max(now))));
        // Results of all devices move forward together, by the least of the times.
        let end = ends.reduce(|(a, less), (b, other)| (a.max(b), less.min(other)));
        for unit in &mut self.units {
            if let (Some(_), Some((_, less))) = (unit.stalled.take().filter(|(_, until)| *until > now), end) {
                unit.busy_until = unit.busy_until - less;
            }
        }
        end
    }

    /// A device, by its place in the advert. The node never names another one.
    fn unit(&mut self, device: u8) -> &mut Unit {
        &mut self.units[usize::from(device)]
    }

    /// Whether a device takes a load now, of which `ram` bytes lie in RAM.
    fn takes(&mut self, device: u8, (bytes, ram): (u64, u64)) -> Result<(), String> {
        let Some(unit) = self.units.get(usize::from(device)) else {
            return Err(format!("there is no device {device}"));
        };
        if unit.gone {
            return Err("the device is gone".into());
        }
        if self.rejections > 0 {
            self.rejections -= 1;
            return Err("out of memory".into());
        }
        let free = self.free_on(device);
        if bytes > free {
            return Err(format!("a part of {bytes} bytes, {free} are free"));
        }
        let free = self.ram_free_on(device);
        if ram > free {
            return Err(format!("experts of {ram} bytes in RAM, {free} are free"));
        }
        Ok(())
    }

    /// `Output::Load` of a stage: reserves its memory; its weights may still be in transfer. A stage that exceeds the free
    /// memory is rejected.
    pub fn reserve(
        &mut self,
        now: Instant,
        job: JobId,
        epoch: Epoch,
        load: LoadId,
        order: &Order,
        replaces: &[PartId],
    ) -> Result<(), Box<(Instant, Input)>> {
        let (part, bytes, ram) = (order.part, order.bytes_max, order.ram);
        let old: Vec<Stage> = replaces.iter().filter_map(|part| self.stages.remove(&(job, *part))).collect();
        let reject = |reason| {
            let rejection = Input::Loaded { job, part, load, result: Err(reason) };
            Err(Box::new((now + Duration::from_millis(1), rejection)))
        };
        if let Err(reason) = self.takes(order.device, (bytes, ram)) {
            return reject(reason);
        }
        let PartWork::Stage(stage) = order.work.clone() else { return reject("not a stage".into()) };
        let layers = stage.layers_of(part);
        let mut pages = Pages::of(stage.sequences, stage.context);
        pages.set_ram(self.ram_pages);
        let device = order.device;
        let same = |old: &Stage| old.device == device && old.layers == layers && old.order.content == stage.content;
        let resident = old.iter().any(|old| old.resident && same(old));
        let stage =
            Stage { device, epoch, load, resident, bytes, ram, layers, order: stage, caches: BTreeMap::new(), pages };
        self.stages.insert((job, part), stage);
        Ok(())
    }

    /// Reads the weights of a stage from disk into memory, with empty caches. `None` if the stage was dropped or ordered
    /// again meanwhile.
    pub fn load(&mut self, now: Instant, (job, part): (JobId, PartId), load: LoadId) -> Option<(Instant, Input)> {
        let stage = self.stages.get_mut(&(job, part)).filter(|stage| stage.load == load)?;
        let (bytes, ram, device) = (stage.bytes, stage.ram, stage.device);
        let reading = Duration::from_nanos((bytes + ram).saturating_mul(1_000_000_000) / LOAD_BYTES_PER_SECOND);
        let took = if stage.resident { Duration::from_millis(1) } else { reading + Duration::from_millis(20) };
        stage.resident = true;
        let ends = self.unit(device).busy_until.max(now) + took;
        self.unit(device).busy_until = ends;
        let result = Ok(Loaded { bytes, ram, ram_pages: self.ram_pages, step: None });
        (!self.dead).then_some((ends, Input::Loaded { job, part, load, result }))
    }

    /// The weights are unavailable: frees the reserved memory.
    pub fn give_up(&mut self, job: JobId, part: PartId, load: LoadId) {
        if self.stages.get(&(job, part)).is_some_and(|stage| stage.load == load) {
            self.stages.remove(&(job, part));
        }
    }

    /// `Output::Continue`: a stage stays resident, with its caches, under another epoch.
    pub fn keep(&mut self, job: JobId, epoch: Epoch, part: PartId) {
        if let Some(stage) = self.stages.get_mut(&(job, part)) {
            stage.epoch = epoch;
        }
    }

    /// Memory of a device that no stage or tile uses.
    pub fn free_on(&self, device: u8) -> u64 {
        let stages = self.stages.values().filter(|stage| stage.device == device);
        let taken = stages.fold(0u64, |sum, stage| sum.saturating_add(stage.bytes));
        let taken = taken.saturating_add(self.grids.taken(device));
        self.units.get(usize::from(device)).map_or(0, |unit| unit.memory.saturating_sub(taken))
    }

    /// RAM for experts of a device that no stage uses.
    fn ram_free_on(&self, device: u8) -> u64 {
        let stages = self.stages.values().filter(|stage| stage.device == device);
        let taken = stages.fold(0u64, |sum, stage| sum.saturating_add(stage.ram));
        self.units.get(usize::from(device)).map_or(0, |unit| unit.ram.saturating_sub(taken))
    }

    /// Memory that no stage or tile uses, of all devices together.
    pub fn memory_free(&self) -> u64 {
        (0..self.units.len() as u8).map(|device| self.free_on(device)).sum()
    }

    /// The same of the device that has most.
    pub fn largest_free(&self) -> u64 {
        let there = (0..self.units.len() as u8).filter(|device| !self.units[usize::from(*device)].gone);
        there.map(|device| self.free_on(device)).max().unwrap_or(0)
    }

    /// What the node advertises now.
    pub(crate) fn capacity(&self, spec: &HostSpec) -> Capacity {
        let mut capacity = spec.capacity.clone();
        for (at, device) in (0..).zip(&mut capacity.devices) {
            device.memory_free = self.free_on(at);
            device.ram_free = self.ram_free_on(at);
            device.gone = self.units[usize::from(at)].gone;
        }
        capacity
    }

    /// `Output::Unload`.
    pub fn unload(&mut self, job: JobId) {
        self.stages.retain(|(of, _), _| *of != job);
        self.grids.unload(job);
    }

    /// `Output::Drop`.
    pub fn drop_part(&mut self, job: JobId, part: PartId) {
        self.stages.remove(&(job, part));
        self.grids.drop_tile(job, part);
    }

    /// Runs a batch on a stage. Returns when it ends, and the result; `None` if the device does not answer.
    pub fn compute(&mut self, now: Instant, run: &Run, items: Vec<Item>) -> Option<(Instant, Input)> {
        let (job, part, work) = (run.job, run.part, run.work);
        let rows: u64 = items.iter().map(|item| u64::from(item.count)).sum();
        let seen: u64 = items.iter().map(positions_seen).sum();
        let layers = self.stages.get(&(job, part)).map_or(0, |stage| stage.layers.len() as u64);
        let compute_ns = self.batch_ns(run.device, layers, rows, seen);
        let result = self.run_batch(run, items).map(|results| RunResult::Batch { results, compute_ns });
        let took = Duration::from_nanos(compute_ns);
        let ends = self.unit(run.device).busy_until.max(now) + took;
        self.unit(run.device).busy_until = ends;
        self.batches_took += took;
        (!self.dead).then_some((ends, Input::Ran { job, part, work, result }))
    }

    /// `Output::Challenge`. Returns when it ends, and the result.
    pub fn challenge(
        &mut self,
        now: Instant,
        (job, part): (JobId, PartId),
        epoch: Epoch,
        nonce: u64,
    ) -> Option<(Instant, Input)> {
        let stage = self.stages.get(&(job, part)).filter(|stage| stage.epoch == epoch);
        let digest = stage.map(|stage| stage.layers.clone().fold(nonce, |row, layer| mix(u64::from(layer), row)));
        let layers = stage.map_or(0, |stage| stage.layers.len() as u64);
        let device = stage.map_or(0, |stage| stage.device);
        let step = Duration::from_nanos(self.batch_ns(device, layers, 1, 0));
        let ends = self.unit(device).busy_until.max(now) + step.saturating_mul(CHALLENGE_STEPS);
        self.unit(device).busy_until = ends;
        let result = digest.ok_or_else(|| format!("no stage of {epoch:?} here"));
        (!self.dead).then_some((ends, Input::Challenged { job, epoch, part, nonce, result }))
    }

    /// Cost of a batch as on a real device: one pass over the weights, 10 % more for each further row, and the cache of all
    /// positions that the rows attend to.
    fn batch_ns(&self, device: u8, layers: u64, rows: u64, seen: u64) -> u64 {
        let unit = &self.units[usize::from(device)];
        let pass = layers * LAYER_BYTES.saturating_mul(1_000_000_000) / unit.bytes_per_second.max(1);
        let fixed = unit.step_ns + layers * unit.layer_ns;
        let cache_bytes = layers * POSITION_BYTES * seen;
        let attention = cache_bytes.saturating_mul(1_000_000_000) / unit.cache_bytes_per_second.max(1);
        let predicted = fixed + pass + pass * rows.saturating_sub(1) / 10 + attention;
        predicted * u64::from(self.skew_percent) / 100 * u64::from(self.slow_percent) / 100
    }

    /// A batch succeeds or fails as a whole; its inputs are consumed either way.
    fn run_batch(&mut self, run: &Run, items: Vec<Item>) -> Result<Vec<ItemResult>, String> {
        let made: Vec<TensorId> = items.iter().map(|item| item.output).collect();
        let fails = self.failures > 0;
        self.failures = self.failures.saturating_sub(1);
        let results: Vec<_> = items.into_iter().map(|item| self.compute_item(run, item)).collect();
        let results: Result<Vec<ItemResult>, String> = results.into_iter().collect();
        let fails = fails || self.unit(run.device).gone;
        let results = if fails { Err("the device was lost".into()) } else { results };
        if results.is_err() {
            made.iter().for_each(|tensor| drop(self.tensors.remove(tensor)));
        }
        results
    }

    /// `Output::Release`.
    pub fn release(&mut self, job: JobId, part: PartId, request: RequestId) {
        if let Some(stage) = self.stages.get_mut(&(job, part)) {
            stage.caches.remove(&request);
            stage.pages.release(request);
        }
    }

    /// `Output::Fork`.
    pub fn fork(&mut self, job: JobId, part: PartId, from: RequestId, to: RequestId, positions: u32) {
        let Some(stage) = self.stages.get_mut(&(job, part)) else { return };
        let Some(cache) = stage.caches.get(&from) else { return };
        let first = |chain: &Vec<u64>| chain.iter().copied().take(positions as usize).collect();
        let shared = cache.iter().map(first).collect();
        stage.caches.insert(to, shared);
        stage.pages.share(from, to, positions);
    }

    /// `Output::Load` of a tile. A tile that exceeds the free memory is rejected.
    pub fn load_tile(&mut self, job: JobId, order: &Order, cells: Option<Saved>) -> Result<Loaded, String> {
        self.grids.drop_tile(job, order.part);
        self.takes(order.device, (order.bytes_max, 0))?;
        self.grids.load(job, order, cells)
    }

    /// Advances a tile. Returns when its halos are ready, when the run ends, and the result; `None` if the device does not
    /// answer.
    pub fn run_tile(&mut self, now: Instant, run: &Run, steps: &TileWork) -> Option<RunTimes> {
        let (job, part, work) = (run.job, run.part, run.work);
        let halos = steps.halos_in.iter().map(|&(link, tensor)| (link, self.tensors.remove(&tensor))).collect();
        let cells = self.grids.cells_of(job, part).saturating_mul(u64::from(steps.to - steps.from));
        let percent = u64::from(self.skew_percent) * u64::from(self.slow_percent) / 100;
        let took =
            Duration::from_nanos(self.unit(run.device).step_ns + cells.saturating_mul(self.cell_ns) * percent / 100);
        let unit = self.unit(run.device);
        let begins = unit.busy_until.max(now);
        unit.busy_until = begins + took;
        let fails = unit.gone || self.failures > 0;
        self.failures = self.failures.saturating_sub(1);
        let made = if fails { Err("the device was lost".into()) } else { self.grids.run((job, part), steps, halos) };
        let mut sizes = Vec::new();
        let result = made.map(|(mut made, halos)| {
            for (tensor, cargo) in halos {
                sizes.push((1, cargo.wire_bytes()));
                self.tensors.insert(tensor, cargo);
            }
            made.compute_ns = took.as_nanos() as u64;
            RunResult::Steps(made)
        });
        let done = Input::Ran { job, part, work, result };
        let (halos_ready, ends) = (begins + took / 2, begins + took);
        (!self.dead).then_some(RunTimes { halos_ready, sizes, ends, done })
    }

    /// `Output::Share`.
    pub fn share(&mut self, tensor: TensorId, also: TensorId) {
        if let Some(cargo) = self.tensors.get(&tensor).cloned() {
            self.tensors.insert(also, cargo);
        }
    }

    /// `Output::Discard`.
    pub fn discard(&mut self, tensor: TensorId) {
        self.tensors.remove(&tensor);
    }

    /// `Output::Split`.
    pub fn split(&mut self, tensor: TensorId, at: u32, into: [TensorId; 2]) {
        let parts = match self.tensors.remove(&tensor) {
            Some(Cargo::Rows(mut rows, row_bytes)) => {
                let rest = rows.split_off((at as usize).min(rows.len()));
                [Cargo::Rows(rows, row_bytes), Cargo::Rows(rest, row_bytes)]
            }
            Some(Cargo::Tokens(mut tokens)) => {
                let rest = tokens.split_off((at as usize).min(tokens.len()));
                [Cargo::Tokens(tokens), Cargo::Tokens(rest)]
            }
            None => return,
        };
        self.tensors.extend(into.into_iter().zip(parts));
    }

    /// A copy of a payload to send; `None` if the core named an unknown tensor.
    pub fn give(&mut self, payload: Payload) -> Option<Cargo> {
        match payload {
            Payload::Tokens(tokens) => Some(Cargo::Tokens(tokens)),
            Payload::Tensor(tensor) => self.tensors.get(&tensor).cloned(),
            Payload::Tensors(tensors) => {
                let mut all = (Vec::new(), 0);
                for tensor in tensors {
                    let Some(Cargo::Rows(rows, row_bytes)) = self.tensors.get(&tensor) else { return None };
                    all.0.extend_from_slice(rows);
                    all.1 = *row_bytes;
                }
                Some(Cargo::Rows(all.0, all.1))
            }
        }
    }

    /// Stores a received payload.
    pub fn take(&mut self, cargo: Cargo) -> TensorId {
        self.arrivals += 1;
        let tensor = TensorId::Arrived(self.arrivals);
        self.tensors.insert(tensor, cargo);
        tensor
    }

    /// Ids of all tensors held.
    pub fn tensor_ids(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.tensors.keys().copied()
    }

    /// Number of tensors held, for the leak checker.
    pub fn tensors_held(&self) -> usize {
        self.tensors.len()
    }

    /// Requests with a cache in any stage, for the leak checker.
    pub fn caches_held(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.stages.values().flat_map(|stage| stage.caches.keys().copied())
    }

    /// Concatenates rows, or tokens for the first stage, that arrived in several payloads.
    fn join(&mut self, ids: &[TensorId]) -> Result<Cargo, String> {
        let mut parts = ids.iter().map(|id| self.tensors.remove(id).ok_or_else(|| format!("no rows {id:?} here")));
        let first = parts.next().ok_or("nothing to join")??;
        parts.try_fold(first, |all, part| match (all, part?) {
            (Cargo::Rows(mut all, bytes), Cargo::Rows(rows, _)) => {
                all.extend(rows);
                Ok(Cargo::Rows(all, bytes))
            }
            (Cargo::Tokens(mut all), Cargo::Tokens(tokens)) => {
                all.extend(tokens);
                Ok(Cargo::Tokens(all))
            }
            (Cargo::Rows(..), Cargo::Tokens(_)) | (Cargo::Tokens(_), Cargo::Rows(..)) => {
                Err("cannot join rows and tokens".into())
            }
        })
    }

    fn compute_item(&mut self, run: &Run, item: Item) -> Result<ItemResult, String> {
        let input = match item.input {
            Payload::Tokens(tokens) => Cargo::Tokens(tokens),
            Payload::Tensor(id) => self.tensors.remove(&id).ok_or_else(|| format!("no tensor {id:?} here"))?,
            Payload::Tensors(ids) => self.join(&ids)?,
        };
        let stage =
            self.stages.get_mut(&(run.job, run.part)).ok_or_else(|| format!("no stage of {:?} here", run.job))?;
        if stage.epoch != run.epoch {
            return Err(format!("holds epoch {:?}, expected {:?}", stage.epoch, run.epoch));
        }
        let mut rows = match input {
            Cargo::Tokens(tokens) if stage.layers.start == 0 => {
                tokens.into_iter().map(|token| embed(&stage.order.content, token)).collect()
            }
            Cargo::Tokens(_) => return Err("tokens for a stage without the embedding".into()),
            Cargo::Rows(_, _) if stage.layers.start == 0 => return Err("rows for the first stage".into()),
            Cargo::Rows(rows, _) => rows,
        };
        if rows.len() != item.count as usize {
            return Err(format!("{} rows for {} positions", rows.len(), item.count));
        }
        if !stage.pages.reserve(item.request, item.position.saturating_add(item.count)) {
            let (free, all) = (stage.pages.free(), stage.pages.all());
            return Err(format!(
                "{free} of {all} pages are free, too few for {} positions",
                item.position + item.count
            ));
        }
        let cache = stage.caches.entry(item.request).or_insert_with(|| vec![Vec::new(); stage.layers.len()]);
        for (chain, layer) in cache.iter_mut().zip(stage.layers.clone()) {
            run_layer(chain, layer, item.position, &mut rows)?;
        }
        if stage.layers.end < stage.order.layers_total() {
            let row_bytes = stage.order.row.bytes;
            self.tensors.insert(item.output, Cargo::Rows(rows, row_bytes));
            return Ok(ItemResult::Hidden);
        }
        let sampled = rows.len().saturating_sub(1 + item.drafts as usize);
        let content = stage.order.content;
        match (item.sample, &rows[sampled..]) {
            (None, _) => Ok(ItemResult::Nothing),
            (Some(_), []) => Err("nothing to sample from".into()),
            (Some(sample), [row]) => Ok(ItemResult::Token(choose(&content, *row, &sample).into())),
            (Some(sample), rows) => {
                let spec = |position| SampleSpec { position, ..sample.clone() };
                let rows = rows.iter().zip(sample.position..);
                let tokens = rows.map(|(row, position)| choose(&content, *row, &spec(position)));
                Ok(ItemResult::Tokens(tokens.collect()))
            }
        }
    }
}

/// Sum of the positions that the rows of an item attend to.
fn positions_seen(item: &Item) -> u64 {
    let (rows, first) = (u64::from(item.count), u64::from(item.position));
    rows * first + rows * (rows + 1) / 2
}

/// Runs one layer over consecutive positions; truncates its chain to `position` first.
fn run_layer(chain: &mut Vec<u64>, layer: u32, position: u32, rows: &mut [u64]) -> Result<(), String> {
    let position = position as usize;
    if chain.len() < position {
        return Err(format!("layer {layer} holds {} positions, asked to write {position}", chain.len()));
    }
    chain.truncate(position);
    for row in rows {
        let before = chain.last().copied().unwrap_or(0);
        let kv = mix(mix(before, chain.len() as u64), *row);
        chain.push(kv);
        *row = mix(mix(u64::from(layer), *row), kv);
    }
    Ok(())
}

/// The tokens of a run on one node: the reference for every distributed run.
pub fn solo(content: &ContentId, layers: u32, prompt: &[u32], max_tokens: u32, sampling: &Sampling) -> Vec<u32> {
    let mut chains = vec![Vec::new(); layers as usize];
    let mut answer: Vec<u32> = Vec::new();
    let mut input: Vec<u32> = prompt.to_vec();
    let mut position = 0;
    while answer.len() < max_tokens as usize {
        let mut rows: Vec<u64> = input.iter().map(|token| embed(content, *token)).collect();
        for (layer, chain) in chains.iter_mut().enumerate() {
            run_layer(chain, layer as u32, position, &mut rows).expect("positions of one run follow each other");
        }
        position += input.len() as u32;
        let sample = SampleSpec { sampling: sampling.clone(), position, history: Vec::new(), prompt: 0 };
        let token = choose(content, rows.last().copied().unwrap_or(0), &sample);
        answer.push(token);
        input = vec![token];
    }
    answer
}

fn embed(content: &ContentId, token: u32) -> u64 {
    let mut model = [0; 8];
    model.copy_from_slice(&content.0[..8]);
    mix(u64::from_le_bytes(model), u64::from(token))
}

/// The token after a row. Requests with an even seed mostly repeat themselves, so that some of their drafts are right. Those of
/// a model with a draft model do not; there the two models mostly agree.
fn choose(content: &ContentId, row: u64, sample: &SampleSpec) -> u32 {
    let chance =
        if sample.sampling.temperature_e6 == 0 { 0 } else { mix(sample.sampling.seed, u64::from(sample.position)) };
    let mixed = mix(row, chance);
    if sample.sampling.seed.is_multiple_of(2) {
        let agree = *content == DRAFTED || *content == DRAFTING;
        match agree {
            true if !mixed.is_multiple_of(8) => {
                return (mix(u64::from(sample.position), 1) % u64::from(VOCABULARY)) as u32;
            }
            false if !mixed.is_multiple_of(4) => return sample.position % 5,
            true | false => {}
        }
    }
    (mixed % u64::from(VOCABULARY)) as u32
}

/// A hash of two words: splitmix64's finaliser over their combination.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(25) ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0xD1B5_4A32_D192_ED03);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The model that has a draft model.
pub const DRAFTED: ContentId = ContentId([0xD0; 32]);
/// The draft model.
pub const DRAFTING: ContentId = ContentId([0xD1; 32]);
/// Vocabulary size of symbolic models.
pub const VOCABULARY: u32 = 50_000;
/// Bytes of keys and values per position and symbolic layer.
pub(crate) const POSITION_BYTES: u64 = 1 << 10;
/// Weight bytes per symbolic layer.
pub(crate) const LAYER_BYTES: u64 = 20 << 20;
/// Read rate of weights from disk.
const LOAD_BYTES_PER_SECOND: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::id::WorkId;
    use node_core::work::Task;

    const JOB: JobId = JobId(1);
    const EPOCH: Epoch = Epoch { counter: 1, issuer: node_core::id::NodeId([1; 16]) };

    fn run(task: Task) -> Run {
        Run { work: WorkId(1), job: JOB, epoch: EPOCH, part: PartId(0), device: 0, task }
    }

    fn batch(device: &mut Executor, now: Instant) -> Option<Instant> {
        let answer = device.compute(now, &run(Task::Batch(Vec::new())), Vec::new());
        answer.map(|(at, _)| at)
    }

    fn tile(device: &mut Executor, now: Instant) -> Option<Instant> {
        let (halos_in, halos_out, stops) = (Vec::new(), Vec::new(), Vec::new());
        let steps = TileWork { from: 0, to: 2, halos_in, halos_out, stops };
        device.run_tile(now, &run(Task::Steps(steps.clone())), &steps).map(|times| times.ends)
    }

    #[test]
    fn a_stage_and_a_tile_share_the_device() {
        let mut device = Executor::new(&HostSpec::default());
        let first = batch(&mut device, Instant(0)).expect("an answer");
        let second = tile(&mut device, Instant(0)).expect("an answer");
        let alone = tile(&mut Executor::new(&HostSpec::default()), Instant(0)).expect("an answer");
        assert_eq!(second.since(first), alone.since(Instant(0)), "the tile begins when the batch is done");
        device.stall(second, second + Duration::from_secs(3));
        for answer in [batch(&mut device, second), tile(&mut device, second)] {
            assert!(answer.is_some_and(|at| at > second + Duration::from_secs(3)), "a stall delays both: {answer:?}");
        }
        device.dead = true;
        assert!(
            batch(&mut device, second).is_none() && tile(&mut device, second).is_none(),
            "a dead device answers neither"
        );
    }
}
