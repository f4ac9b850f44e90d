//! Simulated tiles: small grids of 64-bit cells whose rule hashes each cell with all its neighbours, so that a missing,
//! stale or repeated halo strip changes the state hash.
//!
//! A tile stores its own cells and its halo by global coordinates; a cell with an unknown neighbour cannot be computed and
//! is an error. `solo` computes the same grid in one piece.
use crate::compute::{Cargo, mix};
use node_core::id::{ContentId, JobId, PartId, TensorId};
use node_core::work::steps::{ActionKind, Report, SaveKind, SimulationId, TileOrder, TileResult, TileStart, TileWork};
use node_core::work::{Loaded, Order, PartWork};
use partitioner::tiles::{Block, TileLink};
use std::collections::BTreeMap;

/// Global coordinates of a cell; outside the grid for halo cells across a periodic boundary.
type Place = [i64; 3];
/// A saved state: cell values by coordinates.
pub type Saved = BTreeMap<Place, u64>;

/// The cells of a box; `None` where the value is unknown.
#[derive(Debug)]
struct Field {
    from: Place,
    to: Place,
    values: Vec<Option<u64>>,
}

impl Field {
    fn new((from, to): (Place, Place)) -> Self {
        let cells = (0..3).map(|axis| (to[axis] - from[axis]) as usize).product();
        Field { from, to, values: vec![None; cells] }
    }

    fn index(&self, at: &Place) -> Option<usize> {
        let within = (0..3).all(|axis| (self.from[axis]..self.to[axis]).contains(&at[axis]));
        let extent = |axis: usize| self.to[axis] - self.from[axis];
        let [x, y, z] = [0, 1, 2].map(|axis| at[axis] - self.from[axis]);
        within.then_some(((z * extent(1) + y) * extent(0) + x) as usize)
    }

    fn get(&self, at: &Place) -> Option<u64> {
        self.values[self.index(at)?]
    }

    fn set(&mut self, at: &Place, value: u64) {
        if let Some(index) = self.index(at) {
            self.values[index] = Some(value);
        }
    }
}

/// The tiles and saved states of one host.
#[derive(Debug, Default)]
pub struct GridDevice {
    tiles: BTreeMap<(JobId, PartId), Tile>,
    states: BTreeMap<(JobId, PartId, u32, SaveKind), Saved>,
}

#[derive(Debug)]
struct Tile {
    part: PartId,
    device: u8,
    bytes: u64,
    order: TileOrder,
    links: Vec<TileLink>,
    step: u32,
    /// With the halo; `None` on a standby without a state.
    cells: Option<Field>,
}

/// The initial value of a cell.
fn initial(seed: u64, at: Place) -> u64 {
    at.iter().fold(seed, |mixed, &place| mix(mixed, place as u64))
}

/// A simulation id that encodes its seed.
pub fn simulation(seed: u64) -> SimulationId {
    let mut name = [0; 32];
    name[..8].copy_from_slice(&seed.to_le_bytes());
    SimulationId { content: ContentId(name), bytes: 1 }
}

/// A simulation whose cell `UNSTABLE` is NaN after this number of steps; the NaN spreads along y by one cell per step in
/// both directions.
pub fn unstable(seed: u64, after: u32) -> SimulationId {
    let SimulationId { content: ContentId(mut name), bytes } = simulation(seed);
    name[8..12].copy_from_slice(&after.to_le_bytes());
    name[12] = 1;
    SimulationId { content: ContentId(name), bytes }
}

/// The first NaN cell of [`unstable`].
pub const UNSTABLE: [u64; 3] = [5, 20, 0];

fn seed(simulation: SimulationId) -> u64 {
    simulation.content.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The NaN cell that a tile reports at this step, if it has one: its coordinates and field.
fn not_finite(order: &TileOrder, part: PartId, step: u32) -> Option<([u64; 3], u16)> {
    let name = order.simulation.content.0;
    let after = name[8..12].first_chunk().map(|bytes| u32::from_le_bytes(*bytes)).filter(|_| name[12] == 1)?;
    let (from, to) = (order.block(part).from, order.block(part).to);
    let [x, y, z] = UNSTABLE;
    let has = (from[0]..to[0]).contains(&x) && (from[2]..to[2]).contains(&z);
    let near = y.clamp(from[1], to[1] - 1);
    (has && y.abs_diff(near) <= u64::from(step.checked_sub(after)?)).then_some(([x, near, z], 0))
}

/// The state hash after this number of steps: the sum over all tiles.
pub fn solo(seed: u64, size: [u64; 3], periodic: [bool; 3], steps: u32) -> u128 {
    alone(seed, size, periodic, steps).last().map_or(0, |(_, hash)| *hash)
}

/// The reference run on one tile: the sum of all cells and the state hash after 0, 1, 2 … `steps` steps.
pub fn alone(seed: u64, size: [u64; 3], periodic: [bool; 3], steps: u32) -> Vec<(i128, u128)> {
    let whole = Block { from: [0; 3], to: size };
    let mut cells = Field::new(bounds(&whole));
    places(&whole).for_each(|at| cells.set(&at, initial(seed, at)));
    let known = |cells: &Field| places(&whole).filter_map(|at| Some((at, cells.get(&at)?))).collect::<Vec<_>>();
    let mut states = Vec::new();
    for step in 0..=steps {
        if step > 0 {
            let mut made = Field::new(bounds(&whole));
            for at in places(&whole) {
                if let Some(value) = next(&cells, size, periodic, [true; 3], at) {
                    made.set(&at, value);
                }
            }
            cells = made;
        }
        let all = known(&cells);
        states.push((total(all.iter().copied()), hash(all)));
    }
    states
}

/// The contribution of cells to the state hash.
pub fn hash(cells: impl IntoIterator<Item = (Place, u64)>) -> u128 {
    let term = |(at, value): (Place, u64)| {
        let low = at.iter().fold(value, |mixed, &place| mix(mixed, place as u64));
        u128::from(low) << 64 | u128::from(mix(low, value))
    };
    cells.into_iter().map(term).fold(0, u128::wrapping_add)
}

fn total(cells: impl Iterator<Item = (Place, u64)>) -> i128 {
    cells.map(|(_, value)| i128::from(value)).sum()
}

fn bounds(block: &Block) -> (Place, Place) {
    (block.from.map(|at| at as i64), block.to.map(|at| at as i64))
}

fn places(block: &Block) -> impl Iterator<Item = Place> + use<> {
    let (from, to) = bounds(block);
    boxed(from, to)
}

fn boxed(from: Place, to: Place) -> impl Iterator<Item = Place> + use<> {
    (from[2]..to[2]).flat_map(move |z| (from[1]..to[1]).flat_map(move |y| (from[0]..to[0]).map(move |x| [x, y, z])))
}

/// The next value of a cell; `None` if a neighbour is unknown. `wraps`: axes that wrap around within this field.
fn next(cells: &Field, size: [u64; 3], periodic: [bool; 3], wraps: [bool; 3], at: Place) -> Option<u64> {
    let mut mixed = 7;
    for z in -1..=1 {
        for y in -1..=1 {
            for x in -1..=1 {
                let mut place = [at[0] + x, at[1] + y, at[2] + z];
                let mut outside = false;
                for axis in 0..3 {
                    let cells = size[axis] as i64;
                    if periodic[axis] && wraps[axis] {
                        place[axis] = place[axis].rem_euclid(cells);
                    }
                    outside |= !periodic[axis] && !(0..cells).contains(&place[axis]);
                }
                mixed = mix(mixed, if outside { 11 } else { cells.get(&place)? });
            }
        }
    }
    Some(mixed)
}

impl Tile {
    fn cut(&self, block: &Block, axis: usize) -> bool {
        block.extent(axis) < self.order.work.size[axis]
    }

    /// A block with its halo, shifted by `shift` grid extents.
    fn grown(&self, block: &Block, shift: [i8; 3], halo: i64) -> (Place, Place) {
        let size = self.order.work.size;
        let ring = |axis: usize| if self.cut(block, axis) { halo } else { 0 };
        let moved = |axis: usize| i64::from(shift[axis]) * size[axis] as i64;
        (
            std::array::from_fn(|axis| block.from[axis] as i64 + moved(axis) - ring(axis)),
            std::array::from_fn(|axis| block.to[axis] as i64 + moved(axis) + ring(axis)),
        )
    }

    /// The coordinates of a halo strip, sent (`out`) or received.
    fn halo_strip(&self, link: &TileLink, out: bool) -> Vec<Place> {
        let reach = i64::from(self.order.depth) * i64::from(self.order.work.radius);
        let (own, peer) = (self.order.block(self.part), &self.order.blocks[usize::from(link.peer)]);
        let (mine, theirs) = match out {
            true => (self.grown(own, [0; 3], 0), self.grown(peer, link.shift, reach)),
            false => (self.grown(own, [0; 3], reach), self.grown(peer, link.shift, 0)),
        };
        let from = std::array::from_fn(|axis| mine.0[axis].max(theirs.0[axis]));
        let to = std::array::from_fn(|axis| mine.1[axis].min(theirs.1[axis]));
        boxed(from, to).collect()
    }

    /// Its block with the halo at full depth.
    fn reach(&self) -> (Place, Place) {
        let reach = i64::from(self.order.depth) * i64::from(self.order.work.radius);
        self.grown(self.order.block(self.part), [0; 3], reach)
    }

    fn fill(&mut self, cells: impl IntoIterator<Item = (Place, u64)>) {
        let mut field = Field::new(self.reach());
        cells.into_iter().for_each(|(at, value)| field.set(&at, value));
        self.cells = Some(field);
    }

    fn owned(&self) -> Saved {
        let cells = self.cells.as_ref();
        places(self.order.block(self.part)).filter_map(|at| Some((at, cells?.get(&at)?))).collect()
    }

    /// Computes one step of all cells whose neighbours are known. `left`: steps until the halo is used up.
    fn advance(&mut self, left: u32) -> Result<(), String> {
        let work = &self.order.work;
        let wraps = std::array::from_fn(|axis| !self.cut(self.order.block(self.part), axis));
        let halo = i64::from(left.saturating_sub(1)) * i64::from(work.radius);
        let (from, to) = self.grown(self.order.block(self.part), [0; 3], halo);
        let cells = self.cells.as_ref().ok_or("no cells")?;
        let inside =
            |at: &Place| (0..3).all(|axis| work.periodic[axis] || (0..work.size[axis] as i64).contains(&at[axis]));
        let mut made = Field::new(self.reach());
        for at in boxed(from, to).filter(inside) {
            let value = next(cells, work.size, work.periodic, wraps, at)
                .ok_or_else(|| format!("a neighbour of {at:?} is not known after step {}", self.step))?;
            made.set(&at, value);
        }
        self.cells = Some(made);
        self.step += 1;
        Ok(())
    }
}

impl GridDevice {
    /// Memory of all tiles.
    pub fn taken(&self, device: u8) -> u64 {
        self.tiles.values().filter(|tile| tile.device == device).map(|tile| tile.bytes).sum()
    }

    /// Number of saved states.
    pub fn states_held(&self) -> usize {
        self.states.len()
    }

    /// `Output::Load` of a tile. `cells`: those of the checkpoint, if it starts from one.
    pub fn load(&mut self, job: JobId, order: &Order, cells: Option<Saved>) -> Result<Loaded, String> {
        let (part, device, bytes) = (order.part, order.device, order.bytes_max);
        let PartWork::Tile(order) = order.work.clone() else { return Err("not a tile".into()) };
        let (cells, step) = match order.start {
            TileStart::Initial => {
                let seed = seed(order.simulation);
                (Some(places(order.block(part)).map(|at| (at, initial(seed, at))).collect()), Some(0))
            }
            TileStart::Checkpoint { step } => (Some(cells.ok_or("the checkpoint is gone")?), Some(step)),
            TileStart::Continue | TileStart::Snapshot => (None, None),
        };
        let links = order.links(part);
        let mut made = Tile { part, device, bytes, order, links, step: step.unwrap_or(0), cells: None };
        if let Some(cells) = cells {
            made.fill(cells);
        }
        self.tiles.insert((job, part), made);
        Ok(Loaded { bytes, ram: 0, ram_pages: 0, step })
    }

    /// `Output::Restore`.
    pub fn restore(&mut self, job: JobId, part: PartId, step: u32) -> Result<Loaded, String> {
        let cells = self.states.remove(&(job, part, step, SaveKind::Snapshot)).ok_or("the snapshot is gone")?;
        let held = self.tiles.get_mut(&(job, part)).ok_or("the tile is gone")?;
        held.fill(cells);
        held.step = step;
        Ok(Loaded { bytes: held.bytes, ram: 0, ram_pages: 0, step: Some(step) })
    }

    /// Advances a tile. Returns its reports and saved states, and the outgoing halos by tensor id.
    pub fn run(
        &mut self,
        (job, part): (JobId, PartId),
        work: &TileWork,
        halos: Vec<(u16, Option<Cargo>)>,
    ) -> Result<(TileResult, Vec<(TensorId, Cargo)>), String> {
        let tile = self.tiles.get_mut(&(job, part)).ok_or("the tile is gone")?;
        if tile.step != work.from {
            return Err(format!("the tile has made {} steps, not {}", tile.step, work.from));
        }
        for (link, cargo) in halos {
            let Some(Cargo::Rows(values, _)) = cargo else { return Err("halo is missing".into()) };
            let places = tile.halo_strip(&tile.links[usize::from(link)], false);
            if places.len() != values.len() {
                return Err(format!("a halo has {} cells, expected {}", values.len(), places.len()));
            }
            let cells = tile.cells.as_mut().ok_or("no cells")?;
            places.iter().zip(values).for_each(|(at, value)| cells.set(at, value));
        }
        let mut made = TileResult::default();
        let mut stops = work.stops.iter().peekable();
        let mut left = tile.order.depth;
        loop {
            while let Some(stop) = stops.next_if(|stop| stop.step <= tile.step) {
                match stop.what {
                    ActionKind::Report { hash: requested } => {
                        let owned = tile.owned();
                        let totals = vec![total(owned.iter().map(|(at, value)| (*at, *value)))];
                        let hash = requested.then(|| hash(owned));
                        let not_finite = not_finite(&tile.order, part, stop.step);
                        made.reports.push((stop.step, Report { totals, hash, not_finite }));
                    }
                    ActionKind::Save(kind) => {
                        let owned = tile.owned();
                        // The planner counts one full state of each kind.
                        let same = |(of_job, number, _, of): &(JobId, PartId, u32, SaveKind)| {
                            (*of_job, *number, *of) == (job, part, kind) && !matches!(kind, SaveKind::Output(_))
                        };
                        assert!(!self.states.keys().any(same), "a tile keeps two full states: {kind:?}");
                        made.saves.push((stop.step, kind, 8 * owned.len() as u64));
                        self.states.insert((job, part, stop.step, kind), owned);
                    }
                }
            }
            if tile.step >= work.to {
                break;
            }
            tile.advance(left)?;
            left = left.saturating_sub(1);
        }
        let cells = tile.cells.as_ref().ok_or("no cells")?;
        let mut out = Vec::new();
        for &(link, tensor) in &work.halos_out {
            let places = tile.halo_strip(&tile.links[usize::from(link)], true);
            let values: Option<Vec<u64>> = places
                .iter()
                .map(|at| {
                    // In this tile's coordinates; the receiver stores the same cells in its own, shifted ones.
                    cells.get(at)
                })
                .collect();
            out.push((tensor, Cargo::Rows(values.ok_or("the outgoing halo has unknown cells")?, 8)));
        }
        Ok((made, out))
    }

    /// A saved state.
    pub fn state(&self, job: JobId, part: PartId, step: u32, kind: SaveKind) -> Option<&Saved> {
        self.states.get(&(job, part, step, kind))
    }

    /// Stores a snapshot fetched from another host.
    pub fn keep(&mut self, job: JobId, part: PartId, step: u32, cells: Saved) {
        self.states.insert((job, part, step, SaveKind::Snapshot), cells);
    }

    /// `Output::Forget`.
    pub fn forget(&mut self, job: JobId, part: PartId, step: u32, kind: SaveKind) {
        self.states.remove(&(job, part, step, kind));
    }

    /// `Output::Drop`.
    pub fn drop_tile(&mut self, job: JobId, part: PartId) {
        self.tiles.remove(&(job, part));
        self.states.retain(|(of, number, _, _), _| (*of, *number) != (job, part));
    }

    /// `Output::Unload`.
    pub fn unload(&mut self, job: JobId) {
        self.tiles.retain(|(of, _), _| *of != job);
        self.states.retain(|(of, _, _, _), _| *of != job);
    }

    /// Number of cells of a tile: the cost of one step.
    pub fn cells_of(&self, job: JobId, part: PartId) -> u64 {
        self.tiles.get(&(job, part)).map_or(1, |tile| tile.order.block(part).cells())
    }
}
