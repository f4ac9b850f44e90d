//! The simulated network: datagrams may be lost, duplicated or reordered; connections deliver in order or break.
//!
//! Delays are computed from the pair of hosts, not stored: a world of n hosts has n² links and no table of them.
use crate::compute::Cargo;
use crate::disk::Piece;
use crate::host::HostId;
use crate::options::{Options, chance};
use node_core::id::ContentId;
use node_core::message::FrameHeader;
use node_core::time::{Duration, Instant};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};

/// All links of a world.
pub struct Network {
    /// Current link parameters; faults change them.
    pub(crate) options: Options,
    /// Truncated datagrams, parts per million.
    pub(crate) corrupt_ppm: u32,
    rng: ChaCha8Rng,
    hosts: Vec<Place>,
    /// Active partitions by number, so that each can end separately.
    cuts: BTreeMap<u64, Cut>,
    cuts_made: u64,
    connections: BTreeMap<Pair, Connection>,
    connection_ids: u64,
}

/// Two hosts, the smaller id first.
pub type Pair = (HostId, HostId);

/// A host's attachment to the network.
struct Place {
    region: u32,
    /// Bandwidth limit on all of its traffic, bytes per second, while a fault imposes one.
    bandwidth: Option<u64>,
    /// When the bottleneck's queue is empty: for weights, and for all other traffic, which has priority.
    free_at: [Instant; 2],
    /// When its network card is idle again, per direction (send, receive) and class.
    card: [[Instant; CLASSES]; 2],
}

/// A partition between two groups.
struct Cut {
    from: Vec<bool>,
    to: Vec<bool>,
    both: bool,
}

/// A reliable connection, or an attempt at one.
pub struct Connection {
    /// Distinguishes it from earlier connections of the same pair.
    pub id: u64,
    /// Lives of both hosts when it was dialled.
    pub lives: (u32, u32),
    /// It is established.
    pub up: bool,
    /// When the last frame, or copy of one, was sent in either direction.
    pub(crate) frame_at: Option<Instant>,
    /// Bytes sent in both directions.
    pub(crate) bytes: u64,
    /// One lane per class: first from the smaller to the larger host id, then the reverse.
    lanes: [[Lane; CLASSES]; 2],
}

/// One direction of one class.
#[derive(Default)]
struct Lane {
    /// When the link is idle again.
    free_at: Instant,
    /// When the last parcel arrives; later ones arrive no earlier.
    last_at: Instant,
    /// Parcels waiting for the connection to be established or for a partition to end, by sequence number.
    held: BTreeMap<u64, Parcel>,
    /// The sequence number of the last parcel.
    sent: u64,
}

/// A unit of data on a reliable connection.
#[derive(Clone, Debug)]
pub enum Parcel {
    /// A control message.
    Message(Vec<u8>),
    /// A frame and its payload; with `true`, a copy for a standby.
    Frame(FrameHeader, Cargo, bool),
    /// A weight transfer request or response.
    Weights(Weights),
}

/// The weight transfer protocol. Each message names its transfer by number.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Asks which pieces of a model the source has.
    Ask(u64, ContentId),
    /// The pieces that the source has.
    Have(u64, BTreeSet<Piece>),
    /// Requests a piece.
    Want(u64, ContentId, Piece),
    /// A requested piece.
    Here(u64, ContentId, Piece),
    /// The source no longer has the piece.
    Lacking(u64, Piece),
}

impl Parcel {
    fn bytes(&self) -> u64 {
        match self {
            Parcel::Message(bytes) => bytes.len() as u64,
            Parcel::Frame(_, cargo, _) => FRAME_HEADER_BYTES + cargo.wire_bytes(),
            Parcel::Weights(Weights::Here(_, _, piece)) => REQUEST_BYTES + piece.bytes,
            Parcel::Weights(_) => REQUEST_BYTES,
        }
    }

    /// Messages, frames, copies and weights use separate streams: parcels of one class arrive in order, and lower classes
    /// are sent first.
    fn class(&self) -> usize {
        match self {
            Parcel::Message(_) => 0,
            Parcel::Frame(_, _, false) => 1,
            Parcel::Frame(_, _, true) => 2,
            Parcel::Weights(_) => WEIGHTS,
        }
    }
}

impl Network {
    pub(crate) fn new(options: Options) -> Self {
        let rng = chance(options.seed, "network");
        Network {
            options,
            corrupt_ppm: 0,
            rng,
            hosts: Vec::new(),
            cuts: BTreeMap::new(),
            cuts_made: 0,
            connections: BTreeMap::new(),
            connection_ids: 0,
        }
    }

    pub(crate) fn add_host(&mut self, region: u32) {
        let card = [[Instant(0); CLASSES]; 2];
        self.hosts.push(Place { region, bandwidth: None, free_at: [Instant(0); 2], card });
    }

    // ---- partitions

    /// Whether traffic from one host to another gets through now.
    pub fn reaches(&self, from: HostId, to: HostId) -> bool {
        if self.cuts.is_empty() {
            return true;
        }
        let crosses = |cut: &Cut, from: HostId, to: HostId| {
            let in_group = |group: &[bool], host: HostId| group.get(host.index()).copied().unwrap_or(false);
            in_group(&cut.from, from) && in_group(&cut.to, to)
        };
        !self.cuts.values().any(|cut| crosses(cut, from, to) || (cut.both && crosses(cut, to, from)))
    }

    /// Partitions two groups until `uncut` is called with the returned number.
    pub(crate) fn cut(&mut self, from: &[HostId], to: &[HostId], both: bool) -> u64 {
        let group = |hosts: &[HostId]| {
            let mut group = vec![false; self.hosts.len()];
            for host in hosts {
                if let Some(member) = group.get_mut(host.index()) {
                    *member = true;
                }
            }
            group
        };
        let cut = Cut { from: group(from), to: group(to), both };
        self.cuts_made += 1;
        self.cuts.insert(self.cuts_made, cut);
        self.cuts_made
    }

    pub(crate) fn uncut(&mut self, cut: u64) {
        self.cuts.remove(&cut);
    }

    pub(crate) fn heal(&mut self) {
        self.cuts.clear();
    }

    /// Resets all link parameters to `usual`; partitions and bottlenecks stay.
    pub(crate) fn mend(&mut self, usual: &Options) {
        self.options = usual.clone();
        self.corrupt_ppm = 0;
    }

    /// Removes a host's bandwidth limit. Parcels queued at the bottleneck lose their place: the caller resends them with
    /// `forward`. False if there was no limit.
    pub(crate) fn widen(&mut self, now: Instant, host: HostId) -> bool {
        let Some(place) = self.hosts.get_mut(host.index()).filter(|place| place.bandwidth.is_some()) else {
            return false;
        };
        (place.bandwidth, place.free_at, place.card) = (None, [now; 2], [[now; CLASSES]; 2]);
        for (pair, connection) in &mut self.connections {
            if pair.0 == host || pair.1 == host {
                for lane in connection.lanes.as_flattened_mut() {
                    (lane.free_at, lane.last_at) = (now, now);
                }
            }
        }
        true
    }

    /// Limits the bandwidth of a host's traffic, bytes per second.
    pub(crate) fn collapse(&mut self, host: HostId, bandwidth: u64) {
        if let Some(place) = self.hosts.get_mut(host.index()) {
            place.bandwidth = Some(bandwidth);
        }
    }

    /// When `bytes` given now have passed the bottlenecks of both ends, if there are any. All traffic of a host shares its
    /// queue; weights wait for everything else.
    fn through(&mut self, now: Instant, ends: [HostId; 2], bytes: u64, class: usize) -> Instant {
        let mut at = now;
        for end in ends {
            let Some(place) = self.hosts.get_mut(end.index()) else { continue };
            if let Some(bandwidth) = place.bandwidth {
                let sending = Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / bandwidth.max(1));
                let [weights, others] = &mut place.free_at;
                if class == WEIGHTS {
                    *weights = (*weights).max(*others).max(at) + sending;
                    at = *weights;
                } else {
                    *others = (*others).max(at) + sending;
                    at = *others;
                }
            }
        }
        at
    }

    pub(crate) fn set_loss(&mut self, loss_ppm: u32) {
        self.options.loss_ppm = loss_ppm;
    }

    // ---- datagrams

    /// Arrival times of a datagram sent now: none if it is lost, two if it is duplicated.
    pub(crate) fn datagram(&mut self, now: Instant, from: HostId, to: HostId, bytes: usize) -> [Option<Instant>; 2] {
        if !self.reaches(from, to) || self.happens(self.options.loss_ppm) {
            return [None, None];
        }
        let sent = self.through(now, [from, to], bytes as u64, 0);
        if sent.since(now) > BUFFER_MAX {
            return [None, None];
        }
        let mut delay = sent.since(now) + self.delay(from, to);
        if self.happens(self.options.reorder_ppm) {
            delay += self.options.latency * 4 + Duration::from_millis(1);
        }
        let again = self.happens(self.options.duplicate_ppm).then(|| now + delay + self.delay(from, to));
        [Some(now + delay), again]
    }

    /// Truncates a datagram with the configured probability.
    pub(crate) fn corrupted(&mut self, mut bytes: Vec<u8>) -> Vec<u8> {
        if self.happens(self.corrupt_ppm) && !bytes.is_empty() {
            bytes.truncate(self.rng.random_range(0..bytes.len()));
        }
        bytes
    }

    /// Mean round-trip time.
    pub fn rtt(&self, a: HostId, b: HostId) -> Duration {
        (self.base(a, b) + self.options.jitter / 4) * 2
    }

    fn base(&self, a: HostId, b: HostId) -> Duration {
        let region = |host: HostId| self.hosts.get(host.index()).map_or(0, |place| place.region);
        self.options.latency + self.options.latency_per_region * region(a).abs_diff(region(b))
    }

    /// One-way delay: the base, plus 3/4 of `jitter` times the square of a uniform draw, so that long delays are rare.
    fn delay(&mut self, from: HostId, to: HostId) -> Duration {
        let jitter = self.options.jitter.as_nanos() as u64;
        let chance = u64::from(self.rng.random_range(0..=1000u32));
        self.base(from, to) + Duration::from_nanos(jitter / 1000 * chance / 1000 * chance * 3 / 4)
    }

    fn happens(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.rng.random_range(0..1_000_000u32) < ppm
    }

    // ---- connections

    /// The connection of a pair, or the attempt at one.
    pub fn connection(&self, pair: Pair) -> Option<&Connection> {
        self.connections.get(&pair)
    }

    /// Starts a connection attempt; parcels held by an earlier connection are lost.
    pub(crate) fn dial(&mut self, pair: Pair, lives: (u32, u32)) -> u64 {
        self.connection_ids += 1;
        let lanes = Default::default();
        let connection = Connection { id: self.connection_ids, lives, up: false, frame_at: None, bytes: 0, lanes };
        self.connections.insert(pair, connection);
        self.connection_ids
    }

    pub(crate) fn establish(&mut self, pair: Pair) {
        if let Some(connection) = self.connections.get_mut(&pair) {
            connection.up = true;
        }
    }

    pub(crate) fn remove(&mut self, pair: Pair) -> Option<Connection> {
        self.connections.remove(&pair)
    }

    /// All connections of one host.
    pub(crate) fn pairs_of(&self, host: HostId) -> Vec<Pair> {
        self.connections.keys().copied().filter(|pair| pair.0 == host || pair.1 == host).collect()
    }

    /// Established connections.
    pub(crate) fn standing(&self) -> impl Iterator<Item = (Pair, &Connection)> {
        self.connections.iter().filter(|(_, connection)| connection.up).map(|(pair, connection)| (*pair, connection))
    }

    /// Bandwidth of an idle link, bytes per second.
    pub(crate) fn bandwidth(&self, a: HostId, b: HostId) -> u64 {
        let narrow = [a, b].into_iter().filter_map(|host| self.hosts.get(host.index())?.bandwidth);
        narrow.chain([self.options.bandwidth]).min().unwrap_or(self.options.bandwidth)
    }

    pub(crate) fn pairs(&self) -> Vec<Pair> {
        self.connections.keys().copied().collect()
    }

    /// Sends a parcel on the lane `from` → `to`. Returns its arrival time and sequence number; `None` if it is held.
    pub(crate) fn send(
        &mut self,
        now: Instant,
        from: HostId,
        to: HostId,
        parcel: Parcel,
    ) -> Option<(Instant, u64, Parcel)> {
        let lane = &mut self.connections.get_mut(&pair(from, to))?.lanes[usize::from(from > to)][parcel.class()];
        lane.sent += 1;
        let number = lane.sent;
        self.forward(now, from, to, number, parcel)
    }

    /// As `send`, for a parcel that already has a sequence number.
    pub(crate) fn forward(
        &mut self,
        now: Instant,
        from: HostId,
        to: HostId,
        number: u64,
        parcel: Parcel,
    ) -> Option<(Instant, u64, Parcel)> {
        let open = self.reaches(from, to);
        let mut delay = self.delay(from, to);
        while self.happens(self.options.loss_ppm) {
            delay += self.rtt(from, to); // retransmission
        }
        let bandwidth = self.options.bandwidth.max(1);
        let (class, bytes) = (parcel.class(), parcel.bytes());
        let connection = self.connections.get_mut(&pair(from, to))?;
        let up = connection.up;
        connection.bytes += bytes;
        if matches!(parcel, Parcel::Frame(..)) {
            connection.frame_at = Some(now);
        }
        let lanes = &mut connection.lanes[usize::from(from > to)];
        if !up || !open || !lanes[class].held.is_empty() {
            lanes[class].held.insert(number, parcel);
            return None;
        }
        // Starts when both cards and the link have finished this class and all lower ones; the transmission time counts
        // once.
        let urgent = |free: &[Instant; CLASSES]| free[..=class].iter().max().copied().unwrap_or(now);
        let cards = [self.hosts[from.index()].card[0], self.hosts[to.index()].card[1]];
        let link = std::array::from_fn(|class| lanes[class].free_at);
        let begins = cards.iter().chain([&link]).map(urgent).fold(now, Instant::max);
        let ends = begins + Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / bandwidth);
        lanes[class].free_at = ends;
        self.hosts[from.index()].card[0][class] = ends;
        self.hosts[to.index()].card[1][class] = ends;
        let through = self.through(ends, [from, to], bytes, class);
        let connection = self.connections.get_mut(&pair(from, to))?;
        let lane = &mut connection.lanes[usize::from(from > to)][class];
        lane.last_at = lane.last_at.max(through + delay);
        Some((lane.last_at, number, parcel))
    }

    /// Holds a parcel that reached a partition in flight.
    pub(crate) fn hold(&mut self, from: HostId, to: HostId, number: u64, parcel: Parcel) {
        if let Some(connection) = self.connections.get_mut(&pair(from, to)) {
            connection.lanes[usize::from(from > to)][parcel.class()].held.insert(number, parcel);
        }
    }

    /// Takes all parcels held between a pair, to resend: (from, to, parcel).
    pub(crate) fn take_held(&mut self, pair: Pair) -> Vec<(HostId, HostId, Parcel)> {
        let Some(connection) = self.connections.get_mut(&pair) else { return Vec::new() };
        let ends = [(pair.0, pair.1), (pair.1, pair.0)];
        let lanes = ends.into_iter().zip(&mut connection.lanes);
        let held =
            lanes.flat_map(|(ends, lanes)| lanes.iter_mut().map(move |lane| (ends, std::mem::take(&mut lane.held))));
        held.flat_map(|((from, to), held)| held.into_values().map(move |parcel| (from, to, parcel))).collect()
    }
}

/// Two hosts, the smaller id first.
pub fn pair(a: HostId, b: HostId) -> Pair {
    (a.min(b), a.max(b))
}

/// Number of parcel classes.
const CLASSES: usize = 4;
/// The last class: weights.
const WEIGHTS: usize = CLASSES - 1;
/// A bottleneck queue drops datagrams that would wait longer than this.
const BUFFER_MAX: Duration = Duration::from_millis(500);
/// Size of the transport's frame header.
const FRAME_HEADER_BYTES: u64 = 64;
/// Size of a weight request, and the overhead of a response.
const REQUEST_BYTES: u64 = 64;
