//! Bytes between hosts: datagrams that may be lost, doubled or overtaken, and connections that keep order or break.
//!
//! Delays are computed from the pair of hosts, never stored: a world of n hosts has n² links and no table of them.
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
    /// As they are now: faults change them.
    pub(crate) options: Options,
    /// Datagrams that lose their tail, parts per million.
    pub(crate) corrupt_ppm: u32,
    rng: ChaCha8Rng,
    hosts: Vec<Place>,
    /// By number, so that each can end alone.
    cuts: BTreeMap<u64, Cut>,
    cuts_made: u64,
    connections: BTreeMap<Pair, Connection>,
    connection_ids: u64,
}

/// Two hosts, the smaller id first.
pub type Pair = (HostId, HostId);

/// A host as links see it.
struct Place {
    region: u32,
    /// What everything to and from it has to go through, where that is less than usual.
    bandwidth: Option<u64>,
    /// When what it has given to that bottleneck is through: weights, and everything else, which is sent first.
    free_at: [Instant; 2],
    /// When its network card has sent, and received, everything of each class.
    card: [[Instant; CLASSES]; 2],
}

/// Silence between groups.
struct Cut {
    from: Vec<bool>,
    to: Vec<bool>,
    both: bool,
}

/// A reliable connection, or an attempt at one.
pub struct Connection {
    /// Tells this connection from an earlier one of the same pair.
    pub id: u64,
    /// Lives of both ends when it began.
    pub lives: (u32, u32),
    /// It stands.
    pub up: bool,
    /// When the last frame or copy was sent on it, either way.
    pub(crate) frame_at: Option<Instant>,
    /// Bytes sent on it, both ways.
    pub(crate) bytes: u64,
    /// First the lanes from the smaller to the larger id, then those back: one a class.
    lanes: [[Lane; CLASSES]; 2],
}

/// One direction.
#[derive(Default)]
struct Lane {
    /// When the link has sent all it was given.
    free_at: Instant,
    /// When the last parcel arrives: later ones do not overtake it.
    last_at: Instant,
    /// Waiting for the connection to stand, or for a partition to end, by the order of sending.
    held: BTreeMap<u64, Parcel>,
    /// Parcels sent.
    sent: u64,
}

/// Something on a reliable channel.
#[derive(Clone, Debug)]
pub enum Parcel {
    /// A control message.
    Message(Vec<u8>),
    /// A frame and what it carries; or the copy of one, for a standby.
    Frame(FrameHeader, Cargo, bool),
    /// A request for weights, or an answer.
    Weights(Weights),
}

/// What hosts send each other about the weights of a model. A transfer is named by its number.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Which pieces are there?
    Ask(u64, ContentId),
    /// These are.
    Have(u64, BTreeSet<Piece>),
    /// Send this piece.
    Want(u64, ContentId, Piece),
    /// Here it is.
    Here(u64, ContentId, Piece),
    /// It is not there any more.
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

    /// Messages, frames, copies and weights travel on separate streams: parcels of a class arrive in order, and a lower class is
    /// sent first.
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

    /// Whether bytes get from one host to another now.
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

    /// Cuts groups off, until `uncut` with the number that comes back.
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

    /// Everything but the cuts and the bottlenecks is as `usual` again.
    pub(crate) fn mend(&mut self, usual: &Options) {
        self.options = usual.clone();
        self.corrupt_ppm = 0;
    }

    /// A host's links let everything through again. Nothing waits before its bottleneck any more: what did is to be sent
    /// anew, with `forward`. False if there was no bottleneck.
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

    /// What a host's links let through from now on.
    pub(crate) fn collapse(&mut self, host: HostId, bandwidth: u64) {
        if let Some(place) = self.hosts.get_mut(host.index()) {
            place.bandwidth = Some(bandwidth);
        }
    }

    /// When `bytes` given now are through the bottlenecks of both ends, if there are any; their queues are shared by all
    /// that goes to and from a host, and weights wait for everything else.
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

    /// When copies of a datagram sent now arrive: none, one or two times.
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

    /// A datagram as it arrives: whole, or without its tail.
    pub(crate) fn corrupted(&mut self, mut bytes: Vec<u8>) -> Vec<u8> {
        if self.happens(self.corrupt_ppm) && !bytes.is_empty() {
            bytes.truncate(self.rng.random_range(0..bytes.len()));
        }
        bytes
    }

    /// Round trip without chance.
    pub fn rtt(&self, a: HostId, b: HostId) -> Duration {
        (self.base(a, b) + self.options.jitter / 4) * 2
    }

    fn base(&self, a: HostId, b: HostId) -> Duration {
        let region = |host: HostId| self.hosts.get(host.index()).map_or(0, |place| place.region);
        self.options.latency + self.options.latency_per_region * region(a).abs_diff(region(b))
    }

    /// One-way: base plus a jitter whose square is uniform-ish, so that long delays are rare.
    fn delay(&mut self, from: HostId, to: HostId) -> Duration {
        let jitter = self.options.jitter.as_nanos() as u64;
        let chance = u64::from(self.rng.random_range(0..=1000u32));
        self.base(from, to) + Duration::from_nanos(jitter / 1000 * chance / 1000 * chance * 3 / 4)
    }

    fn happens(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.rng.random_range(0..1_000_000u32) < ppm
    }

    // ---- connections

    /// The connection or attempt of a pair.
    pub fn connection(&self, pair: Pair) -> Option<&Connection> {
        self.connections.get(&pair)
    }

    /// Begin an attempt; what an earlier connection held is lost.
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

    /// Connections of one host.
    pub(crate) fn pairs_of(&self, host: HostId) -> Vec<Pair> {
        self.connections.keys().copied().filter(|pair| pair.0 == host || pair.1 == host).collect()
    }

    /// Connections that stand.
    pub(crate) fn standing(&self) -> impl Iterator<Item = (Pair, &Connection)> {
        self.connections.iter().filter(|(_, connection)| connection.up).map(|(pair, connection)| (*pair, connection))
    }

    /// What a link lets through while nothing else is on it.
    pub(crate) fn bandwidth(&self, a: HostId, b: HostId) -> u64 {
        let narrow = [a, b].into_iter().filter_map(|host| self.hosts.get(host.index())?.bandwidth);
        narrow.chain([self.options.bandwidth]).min().unwrap_or(self.options.bandwidth)
    }

    pub(crate) fn pairs(&self) -> Vec<Pair> {
        self.connections.keys().copied().collect()
    }

    /// Give a parcel to the lane `from` → `to`: when it arrives and its number, or nothing if it is held for now.
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

    /// The same for a parcel that has its number already.
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
            delay += self.rtt(from, to); // sent again
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
        // Begins when both cards and the link are done with this class and all lower ones, and takes the time of one of them.
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

    /// Hold a parcel that met a partition on its way.
    pub(crate) fn hold(&mut self, from: HostId, to: HostId, number: u64, parcel: Parcel) {
        if let Some(connection) = self.connections.get_mut(&pair(from, to)) {
            connection.lanes[usize::from(from > to)][parcel.class()].held.insert(number, parcel);
        }
    }

    /// What both lanes of a pair hold, to be sent again: (from, to, parcel).
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

/// Classes of parcels.
const CLASSES: usize = 4;
/// The last class: weights.
const WEIGHTS: usize = CLASSES - 1;
/// A queue before a bottleneck drops datagrams that would wait longer than this.
const BUFFER_MAX: Duration = Duration::from_millis(500);
/// What the transport puts before a payload.
const FRAME_HEADER_BYTES: u64 = 64;
/// A request for weights, or what stands around an answer.
const REQUEST_BYTES: u64 = 64;
