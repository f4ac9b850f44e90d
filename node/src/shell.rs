//! Carries out the core's decisions. No policy lives here. Next: `shell/stages.rs`, `shell/grids.rs`.
use crate::boundary::StageTraffic;
use crate::device::Compute;
use crate::device_thread::command::{Command, Commands};
use crate::driver::queue::DriverHandle;
use crate::handle::last_options::LastOptions;
use crate::hub::EventRouter;
use crate::panics::{answered, logged};
use crate::regions::extent;
use crate::residency::{Key, Residency};
use crate::rows;
use crate::states::States;
use crate::store::Store;
use crate::submissions::Submissions;
use crate::tensors::{Tensor, TensorStore, join};
use crate::transfer::Library;
use crate::views::{Names, count};
use kernels::boundary::Codec;
use node_core::id::{Epoch, JobId, LoadId, NodeId, PartId};
use node_core::input::Input;
use node_core::limits::SLOWER_TIMES;
use node_core::message::FrameHeader;
use node_core::node::Node;
use node_core::output::{Event, Output};
use node_core::work::serve::DoneReason;
use node_core::work::steps::StepsEvent;
use node_core::work::{DownReason, Ending, Order, PartWork, Payload, Placement, QuestionOrigin};
use partitioner::{DeviceId, Question, explain};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use transport::frame::{self, Dtype, Route, WireHeader};
use transport::{Endpoint, GossipSocket, Identity, Priority};

mod expectation;
mod grids;
mod stages;

/// The order to load a part.
struct Ordered {
    key: Key,
    epoch: Epoch,
    load: LoadId,
    /// Nodes that may have its data.
    sources: Vec<NodeId>,
    /// Where it goes.
    device: Device,
}

/// A device, and the queue of its thread.
#[derive(Clone)]
pub(crate) struct Device {
    pub(crate) compute: Arc<Compute>,
    pub(crate) commands: Commands,
}

/// Everything that outputs act on.
pub(crate) struct Shell {
    pub(crate) driver: DriverHandle,
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) identity: Identity,
    pub(crate) gossip: Arc<GossipSocket>,
    pub(crate) endpoint: Arc<Endpoint>,
    /// The node's devices, in the order of its advert.
    pub(crate) devices: Vec<Device>,
    /// The device of each ordered part.
    pub(crate) placed: BTreeMap<Key, u8>,
    pub(crate) tensors: Arc<TensorStore>,
    pub(crate) store: Arc<Store>,
    pub(crate) library: Arc<Library>,
    pub(crate) hub: Arc<EventRouter>,
    pub(crate) residency: Arc<Residency>,
    pub(crate) last_options: Arc<LastOptions>,
    pub(crate) boundary: Arc<StageTraffic>,
    pub(crate) states: Arc<States>,
    pub(crate) submissions: Arc<Submissions>,
}

impl Shell {
    /// Carries out an output, or hands it to a thread that does; never blocks. `node` supplies the names of members and
    /// the steps of jobs.
    pub(crate) fn carry_out(&mut self, output: Output, node: &Node) {
        match output {
            Output::SendDatagram { to, addr, bytes } => {
                // Gossip tolerates loss; a route that is down now may be up in the next round.
                if let Err(e) = self.gossip.send(&to.0, addr, &bytes) {
                    tracing::trace!("a datagram to {to} was not sent: {e}");
                }
            }
            Output::SendMessage { to, bytes } => {
                if let Err(e) = self.endpoint.send_message(to.0, bytes.into()) {
                    tracing::debug!("a message to {to} was not sent: {e}");
                    self.driver.input(Input::Disconnected { node: to });
                }
            }
            Output::SendFrame { to, header, payload, copy } => self.send_frame(to, &header, payload, copy),
            Output::Connect { node, peer_id, addrs } => self.connect(node, &peer_id, addrs),
            Output::Disconnect { node } => self.endpoint.disconnect(node.0),
            Output::Sign { token, bytes } => {
                let signature = self.identity.sign(&bytes);
                self.driver.input(Input::Signed { token, signature });
            }
            Output::Verify { token, peer_id, bytes, signature } => {
                let verify = move || transport::identity::verify(&peer_id, &bytes, &signature);
                self.off_thread(
                    move || Input::Verified { token, valid: verify() },
                    move |_| Input::Verified { token, valid: false },
                );
            }
            Output::Plan { asked, question } => self.plan(asked, question),
            Output::Load { job, epoch, load, order, sources, replaces } => {
                self.load((job, epoch, load), *order, sources, &replaces);
            }
            Output::Restore { job, load, part, step } => {
                self.submit((job, part), Command::Restore { key: (job, part), load, step });
            }
            Output::Continue { job, epoch, order } => self.keep(job, epoch, &order),
            Output::Fetch { job, epoch, order, sources } => self.fetch((job, epoch), *order, sources),
            Output::Challenge { job, epoch, part, nonce } => {
                self.submit((job, part), Command::Challenge { key: (job, part), epoch, nonce });
            }
            Output::Drop { job, part } => self.drop_part((job, part)),
            Output::Unload { job } => self.unload(job),
            Output::Run(run) => self.submit((run.job, run.part), Command::Run(run)),
            Output::Release { job, part, request } => {
                self.submit((job, part), Command::Release { key: (job, part), request });
            }
            Output::Discard { tensor } => drop(self.tensors.take(tensor)),
            Output::Fork { job, part, from, to, positions } => {
                self.submit((job, part), Command::Fork { key: (job, part), from, to, positions });
            }
            Output::Split { tensor, at, of, into } => self.tensors.split(tensor, at, of, into),
            Output::Share { tensor, also } => {
                if let Some(payload) = self.tensors.get(tensor) {
                    self.tensors.put(also, payload);
                }
            }
            Output::Collect { job, from, part, step, kind, bytes } => {
                self.collect((job, part), from, step, kind, bytes)
            }
            Output::Forget { job, part, step, kind } => self.forget_state((job, part), step, kind),
            Output::KeepCheckpoint { job, step } => self.keep_checkpoint(job, step),
            Output::Mirror { job, from, step, parts, simulation } => self.mirror((job, step), from, parts, simulation),
            Output::Remember { peers } => {
                let store = self.store.clone();
                self.runtime.spawn_blocking(move || {
                    if let Err(e) = store.put_peers(&peers) {
                        tracing::warn!("{e}");
                    }
                });
            }
            Output::Notify(event) => self.notify(event, node),
        }
    }

    fn notify(&self, event: Event, node: &Node) {
        let event = named(event, node);
        log(&event, node);
        self.submissions.handle_event(&event);
        self.hub.deliver(event);
    }

    fn plan(&self, asked: QuestionOrigin, question: Question) {
        let question = Arc::new(question);
        let failed = question.clone();
        self.off_thread(
            move || Input::Planned { asked, answer: question.answer() },
            move |why| Input::Planned { asked, answer: failed.failed(&why) },
        );
    }

    /// Loads a part, which the thread of its device then holds.
    fn load(
        &mut self,
        (job, epoch, load): (JobId, Epoch, LoadId),
        order: Order,
        sources: Vec<NodeId>,
        replaces: &[PartId],
    ) {
        let key = (job, order.part);
        self.expect(job, epoch, &order);
        let begun = self.residency.begin(key, order.device, load, order.room(), replaces);
        // A tile of the same number is replaced when the new one is created; its saved states are kept.
        let stays = |part: PartId| part == order.part && matches!(order.work, PartWork::Tile(_));
        for part in replaces.iter().copied().filter(|part| !stays(*part)) {
            self.drop_quietly((job, part));
        }
        if let Some(before) = self.placed.get(&key).filter(|before| **before != order.device) {
            self.command(usize::from(*before), Command::Vacate { key });
        }
        let device = self.devices.get(usize::from(order.device)).cloned();
        let ready = begun.and_then(|()| device.ok_or_else(|| format!("this node has no device {}", order.device)));
        let device = match ready {
            Ok(device) => device,
            Err(reason) => {
                self.drop_quietly(key);
                return self.driver.input(Input::Loaded { job, part: order.part, load, result: Err(reason) });
            }
        };
        self.placed.insert(key, order.device);
        let ordered = Ordered { key, epoch, load, sources, device };
        let Order { name, standby, bytes_max, ram, work, .. } = order;
        match work {
            PartWork::Stage(stage) => self.load_stage(ordered, name, (bytes_max, ram), stage),
            PartWork::Tile(order) => self.load_tile(ordered, bytes_max, standby, Box::new(order)),
        }
    }

    /// Keeps a part under another epoch.
    fn keep(&self, job: JobId, epoch: Epoch, order: &Order) {
        self.expect(job, epoch, order);
        let rows = match &order.work {
            PartWork::Stage(stage) => rows::codec(stage.row.codec),
            PartWork::Tile(_) => Codec::Lossless,
        };
        self.submit((job, order.part), Command::Keep { key: (job, order.part), epoch, rows });
    }

    /// Announces the frames that a part will receive.
    fn expect(&self, job: JobId, epoch: Epoch, order: &Order) {
        let expected = match &order.work {
            PartWork::Stage(stage) => expectation::hidden_rows(stage, order.part),
            PartWork::Tile(tile) => expectation::halos(tile, order.part),
        };
        self.endpoint.expect(route(job, epoch, order.part), expected);
    }

    /// Fetches the data of a part that is not to be loaded yet.
    fn fetch(&self, (job, epoch): (JobId, Epoch), order: Order, sources: Vec<NodeId>) {
        let key = (job, order.part);
        match order.work {
            PartWork::Stage(stage) => self.fetch_stage(key, epoch, order.name, stage, sources),
            PartWork::Tile(tile) => self.fetch_simulation(key, epoch, tile.simulation, sources),
        }
    }

    /// Drops a part.
    fn drop_part(&mut self, key: Key) {
        let device = self.placed.remove(&key);
        self.residency.end(key, || self.command(device.unwrap_or(0).into(), Command::Drop { key }));
    }

    /// Drops a part on the thread of its device, if it is there.
    fn drop_quietly(&mut self, key: Key) {
        let device = self.placed.remove(&key).unwrap_or(0);
        self.command(device.into(), Command::Drop { key });
    }

    fn unload(&mut self, job: JobId) {
        self.endpoint.forget(job.0);
        let held: BTreeSet<u8> =
            self.placed.extract_if(.., |(of, _), _| *of == job).map(|(_, device)| device).collect();
        // A job without parts may have saved states.
        let devices = if held.is_empty() { BTreeSet::from([0]) } else { held };
        let alone = devices.len() == 1;
        self.residency.end_job(job, || {
            devices.iter().for_each(|device| self.command((*device).into(), Command::Unload { job, alone }));
        });
        let submissions = self.submissions.clone();
        self.runtime.spawn_blocking(move || submissions.forget_mirror(job));
        self.submissions.forget_simulation(job);
    }

    fn send_frame(&self, to: NodeId, header: &FrameHeader, payload: Payload, copy: bool) {
        let tensor = match payload {
            Payload::Tokens(tokens) => Some(Tensor::Tokens(tokens)),
            Payload::Tensor(id) => self.tensors.get(id),
            Payload::Tensors(ids) => join(ids.into_iter().map(|id| self.tensors.get(id)).collect()),
        };
        let Some(tensor) = tensor else {
            tracing::error!("the payload of a frame of job {:016x} was dropped before it was sent", header.job.0);
            return;
        };
        let (dtype, width, bytes) = match &tensor {
            Tensor::Tokens(tokens) => (Dtype::U32, 1, frame::from_u32(tokens)),
            Tensor::Hidden(rows) => (Dtype::F32, rows.len() as u32 / header.count.max(1), frame::from_f32(rows)),
            Tensor::Encoded { codec, rows } => {
                (rows::dtype(*codec), rows.len() as u32 / header.count.max(1), rows.clone())
            }
            Tensor::Halo { bytes, dtype } => (*dtype, 1, bytes.clone()),
        };
        let head = WireHeader {
            route: route(header.job, header.epoch, header.part),
            channel: header.channel,
            cursor: header.cursor,
            count: header.count,
            last: header.last,
            continues: header.continues,
            drafts: header.drafts.rows,
            kept: header.drafts.kept,
            round: header.drafts.round,
            dtype,
            width,
        };
        let priority = match tensor {
            _ if copy => Priority::Standby,
            Tensor::Halo { .. } => Priority::Decode,
            _ if header.is_decode() => Priority::Decode,
            Tensor::Tokens(_) | Tensor::Hidden(_) | Tensor::Encoded { .. } => Priority::Prefill,
        };
        let size = bytes.len() as u64;
        let sent = self.endpoint.send_frame(to.0, head, bytes, priority);
        self.boundary.count(copy, size, sent.is_ok());
        if let Err(e) = sent {
            tracing::debug!("a frame to {to} was not sent: {e}");
        }
    }

    fn connect(&self, node: NodeId, peer_id: &[u8], addrs: Vec<std::net::SocketAddr>) {
        match transport::PeerId::from_bytes(peer_id) {
            Ok(peer) if transport::node_id(&peer) == node.0 => self.endpoint.connect(peer, addrs),
            _ => self.driver.input(Input::Disconnected { node }),
        }
    }

    /// Sends a command to the thread of a part's device, unless the node is shutting down.
    fn submit(&self, key: Key, command: Command) {
        self.command(self.placed.get(&key).copied().unwrap_or(0).into(), command);
    }

    fn command(&self, device: usize, command: Command) {
        if let Some(device) = self.devices.get(device) {
            let _ = device.commands.send(command);
        }
    }

    /// Does slow work on another thread. An answer always arrives: `failed` creates it if the work panics.
    fn off_thread(
        &self,
        work: impl FnOnce() -> Input + Send + 'static,
        failed: impl FnOnce(String) -> Input + Send + 'static,
    ) {
        let driver = self.driver.clone();
        self.runtime.spawn_blocking(move || driver.input(answered(work, failed)));
    }

    /// Runs asynchronous work that reports its own result; if it panics, `failed` reports that.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static, failed: impl FnOnce(String) + Send + 'static) {
        let work = self.runtime.spawn(work);
        self.runtime.spawn(async move {
            if let Err(ended) = work.await
                && let Ok(panic) = ended.try_into_panic()
            {
                failed(logged(panic.as_ref()));
            }
        });
    }
}

/// Replaces abbreviated node ids in the core's texts by members' names.
fn named(event: Event, node: &Node) -> Event {
    let name = |text: String| Names::of(node).in_text(&text);
    match event {
        Event::JobDegraded { call, job, reason } => Event::JobDegraded { call, job, reason: name(reason) },
        Event::Done { call, reason: DoneReason::Failed(reason) } => {
            Event::Done { call, reason: DoneReason::Failed(name(reason)) }
        }
        Event::JobEnded { job, ending, figures } => {
            let ending = match ending {
                Ending::Moved(why) => Ending::Moved(name(why)),
                Ending::Failed(why) => Ending::Failed(name(why)),
                ending @ (Ending::Completed | Ending::Cancelled) => ending,
            };
            Event::JobEnded { job, ending, figures }
        }
        Event::Steps { job, event: StepsEvent::Waiting { reason } } => {
            Event::Steps { job, event: StepsEvent::Waiting { reason: name(reason) } }
        }
        event @ (Event::PeerUp { .. }
        | Event::PeerDown { .. }
        | Event::PlanReady { .. }
        | Event::GridPlan { .. }
        | Event::Fleet { .. }
        | Event::Measured { .. }
        | Event::JobInherited { .. }
        | Event::JobPlaced { .. }
        | Event::JobReady { .. }
        | Event::JobMoves { .. }
        | Event::Token { .. }
        | Event::Begun { .. }
        | Event::Preempted { .. }
        | Event::Done { .. }
        | Event::Steps { .. }
        | Event::Lost { .. }
        | Event::Standby { .. }
        | Event::Promoted { .. }
        | Event::Rejected { .. }) => event,
    }
}

/// Logs an event: only what an operator must see.
fn log(event: &Event, node: &Node) {
    let name = |id: &NodeId| Names::of(node).get(*id);
    match event {
        Event::PeerUp { node } => tracing::info!("node {} is up", name(node)),
        Event::PeerDown { node, reason: DownReason::Left } => tracing::info!("node {} left", name(node)),
        Event::PeerDown { node, reason: DownReason::Failed } => tracing::warn!("node {} is down", name(node)),
        Event::JobPlaced { job, epoch, placement, .. } => {
            let placed = placed(placement, &Names::of(node));
            tracing::info!("job {:016x} epoch {}{placed}", job.0, epoch.counter);
        }
        Event::JobReady { job, epoch, .. } => tracing::info!("job {:016x} epoch {} is ready", job.0, epoch.counter),
        Event::Steps { job, event: StepsEvent::Runs { step } } => {
            tracing::info!("job {:016x} runs from step {step}", job.0);
        }
        Event::JobDegraded { job, reason, .. } => tracing::warn!("job {:016x} cannot run: {reason}", job.0),
        Event::JobEnded { job, ending, .. } => match ending {
            Ending::Completed => tracing::info!("job {:016x} is done", job.0),
            Ending::Cancelled => tracing::info!("job {:016x} ended", job.0),
            Ending::Moved(reason) | Ending::Failed(reason) => tracing::warn!("job {:016x} ended: {reason}", job.0),
        },
        Event::Lost { job, node, silent_ms } => {
            tracing::warn!("job {:016x} lost {} after {silent_ms} ms of silence", job.0, name(node));
        }
        Event::Standby { job, part, node, current } => {
            let what = if *current { "is current" } else { "is not current" };
            tracing::info!("job {:016x} part {part}: standby {} {what}", job.0, name(node));
        }
        Event::Promoted { job, epoch, part, node } => {
            let counter = epoch.counter;
            tracing::warn!("job {:016x} epoch {counter}: standby {} takes over part {part}", job.0, name(node));
        }
        Event::Preempted { job, request } => tracing::info!(
            "job {:016x} request {}: the cache is full, so it is computed again later; serve with more sequences",
            job.0,
            request.0
        ),
        Event::JobMoves { job, change } => tracing::info!(
            "job {:016x} moves: fetches {} of weights; {:.2} ms per token or step instead of {:.2}",
            job.0,
            crate::config::Size(change.bytes),
            change.after_ns as f64 / 1e6,
            change.before_ns as f64 / 1e6
        ),
        Event::Measured { node, percent: 100 } => {
            tracing::info!("{} computes at the speed that it advertises", name(node))
        }
        Event::Measured { node, percent } if *percent < 100 * SLOWER_TIMES as u32 => {
            tracing::info!("{} needs {percent} % of its advertised time: plans use the measured time", name(node));
        }
        Event::Measured { node, percent } => {
            tracing::warn!("{} needs {percent} % of its advertised time: plans use the measured time", name(node));
        }
        // Looking up all members' names is expensive: skip it if the line is not logged.
        Event::Rejected { .. } if !tracing::enabled!(tracing::Level::DEBUG) => {}
        Event::Rejected { from, what } => {
            let what = Names::of(node).in_text(what);
            match from {
                Some(from) => tracing::debug!("rejected from {}: {what}", name(from)),
                None => tracing::debug!("rejected: {what}"),
            }
        }
        Event::Steps { job, event: StepsEvent::Checkpoint { step } } => {
            tracing::info!("job {:016x}: checkpoint of step {step}", job.0);
        }
        Event::Steps { job, event: StepsEvent::Waiting { reason } } => {
            tracing::warn!("job {:016x} waits: {reason}", job.0);
        }
        // Logged by the submissions, with the folder of its results.
        Event::JobInherited { .. } => {}
        Event::Steps { event: StepsEvent::Progress { .. } | StepsEvent::Report { .. }, .. }
        | Event::PlanReady { .. }
        | Event::GridPlan { .. }
        | Event::Fleet { .. }
        | Event::Token { .. }
        | Event::Begun { .. }
        | Event::Done { .. } => {}
    }
}

/// Where the parts of a job are, human-readable, for the line after the epoch.
fn placed(placement: &Placement, names: &Names) -> String {
    match placement {
        Placement::Stages(stages) => {
            let stage = |(device, layers): &(DeviceId, std::ops::Range<u32>)| {
                let (node, label) = (NodeId::from(*device), names.label((*device).into(), device.index));
                let who = format!("{} {label}", names.get(node));
                format!("{} layers {}", who.trim_end(), explain::layers(layers))
            };
            format!(": {}", stages.iter().map(stage).collect::<Vec<_>>().join(", "))
        }
        Placement::Tiles { tiles, depth, step } => {
            let tile =
                |(node, block): &(NodeId, partitioner::tiles::Block)| format!("{} {}", names.get(*node), extent(block));
            let tiles = tiles.iter().map(tile).collect::<Vec<_>>().join(", ");
            format!(" from step {step}: {tiles}; halo depth {}", count(*depth as usize, "step"))
        }
    }
}

/// The route of a part's frames.
fn route(job: JobId, epoch: Epoch, part: PartId) -> Route {
    Route {
        job: job.0,
        epoch: transport::frame::Epoch { counter: epoch.counter, issuer: epoch.issuer.0 },
        part: part.0,
    }
}
