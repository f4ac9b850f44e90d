//! Weight transfers between hosts: missing pieces, the choice of sources, and lost sources.
//!
//! Rules as in `node/src/transfer/schedule.rs`: all sources in parallel, a few pieces from each; received pieces are kept.
use super::{Happening, World};
use crate::disk::{Piece, Record, pieces};
use crate::host::HostId;
use crate::network::{Pair, Parcel, Weights, pair};
use node_core::id::{ContentId, Epoch, JobId, LoadId, NodeId, PartId};
use node_core::input::Input;
use node_core::time::{Duration, Instant};
use node_core::work::{Order, PartWork};
use std::collections::{BTreeMap, BTreeSet};

/// All running transfers.
#[derive(Default)]
pub(super) struct Transfers {
    running: BTreeMap<u64, Transfer>,
    begun: u64,
}

/// The purpose of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Weights of a stage to load into memory.
    Load { job: JobId, part: PartId, load: LoadId },
    /// Weights of a stage to store on disk.
    Fetch { job: JobId, epoch: Epoch, part: PartId },
}

/// The transfer of a host's share of a model.
struct Transfer {
    host: HostId,
    life: u32,
    purpose: Purpose,
    content: ContentId,
    /// Never empty.
    missing: BTreeSet<Piece>,
    sources: BTreeMap<HostId, Source>,
    /// Bytes received.
    fetched: u64,
    /// The last failure of a source.
    last: String,
}

/// A host that may have some of the pieces.
struct Source {
    /// The connection of the last request.
    connection: Option<u64>,
    /// The pieces that it reported; `None` until it answers.
    has: Option<BTreeSet<Piece>>,
    asked: BTreeMap<Piece, Instant>,
    /// How long its last piece took.
    took: Duration,
    failures: u32,
    rests_until: Instant,
}

impl World {
    /// Stores a whole model on a host's disk, as a user's file.
    pub fn give_model(&mut self, host: HostId, content: ContentId, layers_total: u32) {
        self.hosts[host.index()].disk.give(content, layers_total);
        self.announce_holdings(host);
    }

    /// Whether every piece of a model is on some host's disk.
    pub fn has_all_of(&self, content: ContentId, layers_total: u32) -> bool {
        let kept: BTreeSet<Piece> = self.hosts.iter().flat_map(|host| host.disk.pieces(content)).collect();
        pieces(&(0..layers_total), layers_total).all(|piece| kept.contains(&piece))
    }

    /// Reports to a node the models of which its disk has pieces.
    pub(super) fn announce_holdings(&mut self, host: HostId) {
        let contents = self.hosts[host.index()].disk.contents();
        if !contents.is_empty() {
            self.inject(host, Input::Holdings(contents));
        }
    }

    /// Fetches the missing weights of a stage, then continues with its purpose.
    pub(super) fn begin_transfer(&mut self, host: HostId, purpose: Purpose, order: &Order, sources: &[NodeId]) {
        let PartWork::Stage(stage) = &order.work else { return };
        let here = &self.hosts[host.index()];
        let (content, life) = (stage.content, here.life);
        let needed = pieces(&stage.layers_of(order.part), stage.layers_total());
        let missing: BTreeSet<Piece> = needed.filter(|piece| !here.disk.has(content, *piece)).collect();
        if missing.is_empty() {
            return self.transferred(host, purpose, 0);
        }
        let sources: Vec<HostId> = sources.iter().filter_map(|node| self.host_of(*node)).collect();
        self.transfers.begun += 1;
        let id = self.transfers.begun;
        let mut transfer = Transfer {
            host,
            life,
            purpose,
            content,
            missing,
            sources: BTreeMap::new(),
            fetched: 0,
            last: "there is no source".into(),
        };
        for source in sources.into_iter().filter(|source| *source != host) {
            let connection = self.send_weights(host, source, Weights::Ask(id, content));
            let rests_until = self.now;
            let (asked, took) = (BTreeMap::new(), Duration::ZERO);
            let source_state = Source { connection, has: None, asked, took, failures: 0, rests_until };
            transfer.sources.insert(source, source_state);
        }
        self.transfers.running.insert(id, transfer);
        self.transfer(id);
    }

    /// Checks a transfer: silent sources, pieces to request, completion.
    pub(super) fn transfer(&mut self, id: u64) {
        let Some(transfer) = self.transfers.running.get(&id) else { return };
        let host = &self.hosts[transfer.host.index()];
        if host.life != transfer.life || !host.runs() {
            self.transfers.running.remove(&id);
            return;
        }
        if host.paused_until.is_none() {
            self.drop_silent_sources(id);
            self.ask_for_pieces(id);
            if self.fail_unavailable(id) {
                return;
            }
        }
        self.queue.push(self.now + LOOK, Happening::Transfer { id });
    }

    /// Drops requests on broken connections: they get no answer.
    fn drop_silent_sources(&mut self, id: u64) {
        let Some(transfer) = self.transfers.running.get_mut(&id) else { return };
        let (now, host, last) = (self.now, transfer.host, &mut transfer.last);
        let (network, hosts) = (&self.network, &self.hosts);
        transfer.sources.retain(|source, state| {
            let stands = network.connection(pair(host, *source)).map(|connection| connection.id);
            if state.connection == stands && stands.is_some() {
                return true;
            }
            if state.has.is_some() && state.asked.is_empty() {
                return true;
            }
            *last = format!("{}: the connection broke", hosts[source.index()].node_id);
            state.asked.clear();
            state.failures += 1;
            state.rests_until = now + REST * (1 << state.failures.min(8));
            state.has.is_some() && state.failures < FAILURES_MAX
        });
    }

    fn ask_for_pieces(&mut self, id: u64) {
        while let Some((host, source, content, piece)) = self.next_piece(id) {
            let connection = self.send_weights(host, source, Weights::Want(id, content, piece));
            let asked = self.transfers.running.get_mut(&id).and_then(|transfer| transfer.sources.get_mut(&source));
            if let Some(state) = asked {
                state.connection = connection;
                state.asked.insert(piece, self.now);
            }
        }
    }

    /// The next piece to request, from the least loaded source. A late piece is requested from a second source that is
    /// idle.
    fn next_piece(&self, id: u64) -> Option<(HostId, HostId, ContentId, Piece)> {
        let transfer = self.transfers.running.get(&id)?;
        let asked = |piece: &Piece| transfer.sources.values().filter(|source| source.asked.contains_key(piece)).count();
        if transfer.sources.values().map(|source| source.asked.len()).sum::<usize>() >= ASKED_MAX {
            return None;
        }
        let late = |piece: &Piece| {
            let mut waited =
                transfer.sources.values().filter_map(|source| Some((source.asked.get(piece)?, source.took)));
            waited.any(|(since, took)| *since + LATE_MIN.max(took * 2) <= self.now)
        };
        let mut ready: Vec<(usize, &HostId, &Source)> = transfer
            .sources
            .iter()
            .filter(|(_, source)| source.asked.len() < WINDOW && source.rests_until <= self.now)
            .map(|(host, source)| (source.asked.len(), host, source))
            .collect();
        ready.sort_unstable_by_key(|(busy, host, _)| (*busy, **host));
        let first = ready.iter().find_map(|(_, host, source)| {
            let has = source.has.as_ref()?;
            let piece = transfer.missing.iter().find(|piece| has.contains(piece) && asked(piece) == 0)?;
            Some((**host, *piece))
        });
        let second = || {
            ready.iter().filter(|(busy, ..)| *busy == 0).find_map(|(_, host, source)| {
                let has = source.has.as_ref()?;
                let piece = transfer.missing.iter().find(|p| has.contains(p) && asked(p) == 1 && late(p))?;
                Some((**host, *piece))
            })
        };
        let (source, piece) = first.or_else(second)?;
        Some((transfer.host, source, transfer.content, piece))
    }

    /// Fails a transfer if no source has one of the missing pieces. Returns whether it has ended.
    fn fail_unavailable(&mut self, id: u64) -> bool {
        let Some(transfer) = self.transfers.running.get(&id) else { return true };
        let unanswered = transfer.sources.values().any(|source| source.has.is_none());
        let has =
            |piece: &Piece| transfer.sources.values().any(|s| s.has.as_ref().is_some_and(|has| has.contains(piece)));
        let Some(piece) = transfer.missing.iter().find(|piece| !unanswered && !has(piece)) else { return false };
        let reason = format!("no peer could give piece {} of part {}: {}", piece.number, piece.part, transfer.last);
        self.fail_transfer(id, reason);
        true
    }

    fn fail_transfer(&mut self, id: u64, reason: String) {
        let Some(transfer) = self.transfers.running.remove(&id) else { return };
        self.announce_holdings(transfer.host);
        match transfer.purpose {
            Purpose::Load { job, part, load } => {
                self.hosts[transfer.host.index()].executor.give_up(job, part, load);
                self.inject(transfer.host, Input::Loaded { job, part, load, result: Err(reason) });
                self.measure_memory(transfer.host);
            }
            Purpose::Fetch { job, epoch, part } => {
                self.inject(transfer.host, Input::Fetched { job, epoch, part, result: Err(reason) });
            }
        }
    }

    /// All weights of a stage are on the disk.
    fn transferred(&mut self, host: HostId, purpose: Purpose, fetched: u64) {
        self.announce_holdings(host);
        match purpose {
            Purpose::Load { job, part, load } => {
                if let Some(answer) = self.hosts[host.index()].executor.load(self.now, (job, part), load) {
                    self.answer_at(host, answer);
                }
            }
            Purpose::Fetch { job, epoch, part } => {
                self.answer(host, self.options.sync, Input::Fetched { job, epoch, part, result: Ok(fetched) });
            }
        }
    }

    /// Sends over the established connection, or a new one. Returns its id.
    fn send_weights(&mut self, from: HostId, to: HostId, weights: Weights) -> Option<u64> {
        self.send_parcel(from, self.hosts[to.index()].node_id, Parcel::Weights(weights));
        self.network.connection(pair(from, to)).map(|connection| connection.id)
    }

    /// A request or an answer arrives. An answer uses the connection of its request, or is dropped.
    pub(super) fn weights_arrive(&mut self, pair: Pair, from: HostId, weights: Weights) {
        let to = if pair.0 == from { pair.1 } else { pair.0 };
        let disk = &self.hosts[to.index()].disk;
        match weights {
            Weights::Ask(id, content) => {
                let have = Weights::Have(id, disk.pieces(content));
                self.post(to, from, Parcel::Weights(have));
            }
            Weights::Want(id, content, piece) => {
                let has = disk.has(content, piece);
                let answer = if has { Weights::Here(id, content, piece) } else { Weights::Lacking(id, piece) };
                self.post(to, from, Parcel::Weights(answer));
            }
            Weights::Have(id, has) => {
                let lacks = format!("{} does not hold it", self.hosts[from.index()].node_id);
                let Some(transfer) = self.transfers.running.get_mut(&id) else { return };
                let Some(source) = transfer.sources.get_mut(&from) else { return };
                if has.is_empty() {
                    transfer.last = lacks;
                }
                source.has = Some(has);
                self.continue_transfer(id);
            }
            Weights::Lacking(id, piece) => {
                let source = self.transfers.running.get_mut(&id).and_then(|transfer| transfer.sources.get_mut(&from));
                if let Some(source) = source {
                    source.asked.remove(&piece);
                    source.has.iter_mut().for_each(|has| _ = has.remove(&piece));
                }
                self.continue_transfer(id);
            }
            Weights::Here(id, content, piece) => self.piece_arrives(to, from, id, (content, piece)),
        }
    }

    fn piece_arrives(&mut self, to: HostId, from: HostId, id: u64, (content, piece): (ContentId, Piece)) {
        if !self.hosts[to.index()].disk.has(content, piece)
            && let Err(reason) = self.write(to, Record::Weights(content, piece))
        {
            return self.fail_transfer(id, reason);
        }
        let now = self.now;
        if let Some(transfer) = self.transfers.running.get_mut(&id) {
            transfer.fetched += piece.bytes;
            if let Some(source) = transfer.sources.get_mut(&from)
                && let Some(since) = source.asked.get(&piece)
            {
                (source.took, source.failures) = (now.since(*since), 0);
            }
        }
        // Other transfers of this host may need the same piece.
        let same = |transfer: &&mut Transfer| transfer.host == to && transfer.content == content;
        let mut whole = Vec::new();
        for (other, transfer) in self.transfers.running.iter_mut().filter(|(_, transfer)| same(transfer)) {
            transfer.missing.remove(&piece);
            transfer.sources.values_mut().for_each(|source| _ = source.asked.remove(&piece));
            if transfer.missing.is_empty() {
                whole.push(*other);
            }
        }
        for done in whole {
            if let Some(transfer) = self.transfers.running.remove(&done)
                && self.hosts[to.index()].life == transfer.life
            {
                self.transferred(to, transfer.purpose, transfer.fetched);
            }
        }
        self.continue_transfer(id);
    }

    /// Requests the next pieces without waiting for the next check.
    fn continue_transfer(&mut self, id: u64) {
        self.ask_for_pieces(id);
        self.fail_unavailable(id);
    }
}

/// Requests in flight per source: one piece is in transit while another is read.
const WINDOW: usize = 2;
/// Requests in flight per transfer: bounds the memory that pieces take.
const ASKED_MAX: usize = 8;
/// A piece is not requested from a second source before this time.
const LATE_MIN: Duration = Duration::from_millis(500);
/// Backoff of a source whose connection broke; it doubles with each further failure.
const REST: Duration = Duration::from_millis(125);
/// A source is dropped after this number of failures in a row.
const FAILURES_MAX: u32 = 4;
/// Interval of transfer checks.
const LOOK: Duration = Duration::from_millis(50);
