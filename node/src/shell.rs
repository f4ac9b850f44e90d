//! Carries out what the core decides: the hands of a node. No policy lives here.
use crate::boundary::Boundary;
use crate::driver::DriverHandle;
use crate::executor::{self, Command};
use crate::hub::Hub;
use crate::residency::Residency;
use crate::store::Store;
use crate::submissions::Submissions;
use crate::tensors::{Tensor, Tensors};
use crate::transfer::{Ask, Library};
use crate::views::Names;
use kernels::sampler::{Changes, SamplerSettings};
use kernels::stage::{Activations, Draw, Rows, RowsIn, Stage, StageOptions, Want};
use node_core::id::{Epoch, JobId, LoadId, NodeId};
use node_core::input::Input;
use node_core::limits::{CHUNK_POSITIONS_MAX, SLOWER_TIMES};
use node_core::message::FrameHeader;
use node_core::node::Node;
use node_core::output::{Event, Output};
use node_core::work::serve::{DoneReason, StageSpec};
use node_core::work::steps::GridEvent;
use node_core::work::{DownReason, Payload};
use partitioner::{PlanError, explain};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use transport::frame::{self, Dtype, Expectation, FrameHead, Route};
use transport::{Endpoint, GossipSocket, Identity, Priority};

pub(crate) mod grids;

/// Everything outputs need.
pub struct Shell {
    pub(crate) driver: DriverHandle,
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) identity: Identity,
    pub(crate) gossip: Arc<GossipSocket>,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) executor: mpsc::Sender<Command>,
    pub(crate) tensors: Arc<Tensors>,
    pub(crate) store: Arc<Store>,
    pub(crate) library: Arc<Library>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) device: Arc<crate::device::Compute>,
    pub(crate) residency: Arc<Residency>,
    pub(crate) recalled: Arc<crate::handle::Recalled>,
    pub(crate) boundary: Arc<Boundary>,
    pub(crate) tiles: grids::TileShell,
    pub(crate) submissions: Arc<Submissions>,
}

impl Shell {
    /// Does it, or hands it to a thread that does; never blocks. `node` is for the names of members.
    pub fn carry_out(&mut self, output: Output, node: &Node) {
        match output {
            Output::SendDatagram { to, addr, bytes } => {
                // Gossip may be lost; a route that is down now may be up in the next round.
                if let Err(e) = self.gossip.send(&to.0, addr, &bytes) {
                    tracing::trace!("no datagram to {to}: {e}");
                }
            }
            Output::SendMessage { to, bytes } => {
                if let Err(e) = self.endpoint.send_message(to.0, bytes.into()) {
                    tracing::debug!("a message to {to} is lost: {e}");
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
            Output::Plan { token, work, fleet, options, repair } => {
                let plan = move || match repair {
                    Some(current) => partitioner::repair(&current, &work, &fleet, &options),
                    None => partitioner::plan(&work, &fleet, &options),
                };
                self.off_thread(
                    move || Input::Planned { token, result: plan().map(Box::new) },
                    move |why| Input::Planned { token, result: Err(PlanError::Invalid(why.into())) },
                );
            }
            Output::Load { job, epoch, load, stage } => self.load(job, epoch, load, *stage),
            Output::Keep { job, epoch, load, stage } => self.keep(job, epoch, load, &stage),
            Output::Fetch { job, epoch, stage } => self.fetch(job, epoch, *stage),
            Output::Challenge { job, epoch, nonce } => self.execute(Command::Challenge { job, epoch, nonce }),
            Output::Unload { job } => {
                self.endpoint.forget(job.0);
                self.residency.end(job, || self.execute(Command::Unload { job }));
                self.unload_tiles(job);
            }
            Output::Grid(command) => self.carry_out_grid(command),
            Output::Compute { work, job, epoch, items } => self.execute(Command::Compute { work, job, epoch, items }),
            Output::Release { job, request } => self.execute(Command::Release { job, request }),
            Output::Discard { tensor } => drop(self.tensors.take(tensor)),
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
        self.submissions.tell(&event);
        self.hub.tell(event);
    }

    fn send_frame(&self, to: NodeId, header: &FrameHeader, payload: Payload, copy: bool) {
        let tensor = match payload {
            Payload::Tokens(tokens) => Some(Tensor::Tokens(tokens)),
            Payload::Tensor(id) => self.tensors.get(id),
            Payload::Tensors(ids) => executor::join(ids.into_iter().map(|id| self.tensors.get(id)).collect()),
        };
        let Some(tensor) = tensor else {
            tracing::error!("a frame of job {:016x} has lost its rows", header.job.0);
            return;
        };
        let (dtype, width, bytes) = match &tensor {
            Tensor::Tokens(tokens) => (Dtype::U32, 1, frame::from_u32(tokens)),
            Tensor::Hidden(rows) => (Dtype::F32, rows.len() as u32 / header.count.max(1), frame::from_f32(rows)),
            Tensor::Strip { bytes, dtype } => (*dtype, 1, bytes.clone()),
        };
        let head = FrameHead {
            route: route(header.job, header.epoch, header.part),
            channel: header.channel,
            cursor: header.cursor,
            count: header.count,
            last: header.last,
            dtype,
            width,
        };
        let priority = match header.count {
            _ if copy => Priority::Copy,
            _ if matches!(tensor, Tensor::Strip { .. }) => Priority::Decode,
            1 => Priority::Decode,
            _ => Priority::Prefill,
        };
        let size = bytes.len() as u64;
        let sent = self.endpoint.send_frame(to.0, head, bytes, priority);
        self.boundary.count(copy, size, sent.is_ok());
        if let Err(e) = sent {
            tracing::debug!("a frame to {to} is lost: {e}");
        }
    }

    fn connect(&self, node: NodeId, peer_id: &[u8], addrs: Vec<std::net::SocketAddr>) {
        match transport::PeerId::from_bytes(peer_id) {
            Ok(peer) if transport::node_id(&peer) == node.0 => self.endpoint.connect(peer, addrs),
            _ => self.driver.input(Input::Disconnected { node }),
        }
    }

    /// Which frames will come for a stage.
    fn expect(&self, job: JobId, epoch: Epoch, spec: &StageSpec) {
        let rows_in = if spec.layers.start == 0 {
            Expectation::tokens(CHUNK_POSITIONS_MAX)
        } else {
            Expectation::hidden(spec.width, CHUNK_POSITIONS_MAX)
        };
        self.endpoint.expect(route(job, epoch, spec.stage), rows_in);
    }

    /// The stage that the executor holds goes on under another epoch.
    fn keep(&self, job: JobId, epoch: Epoch, load: LoadId, spec: &StageSpec) {
        self.expect(job, epoch, spec);
        self.residency.keep(job, load, spec.bytes_max, || self.execute(Command::Keep { job, epoch, load }));
    }

    /// Gets the weights, loads the stage, warms it, and hands it to the executor.
    fn load(&mut self, job: JobId, epoch: Epoch, load: LoadId, spec: StageSpec) {
        self.recalled.note(&spec);
        self.expect(job, epoch, &spec);
        if let Err(reason) = self.residency.begin(job, load, spec.bytes_max) {
            // The head takes it that a node that failed holds nothing of the job.
            self.residency.end(job, || self.execute(Command::Unload { job }));
            return self.driver.input(Input::Loaded { job, load, result: Err(reason) });
        }
        let (residency, bytes_max) = (self.residency.clone(), spec.bytes_max);
        let (library, ask) = (self.library.clone(), Arc::new(EndpointAsk(self.endpoint.clone())));
        let (driver, executor, device) = (self.driver.clone(), self.executor.clone(), self.device.clone());
        let failed = {
            let (residency, driver, executor) = (residency.clone(), driver.clone(), executor.clone());
            move |reason: String| {
                residency.fail(job, load, || {
                    let _ = executor.send(Command::Unload { job });
                });
                driver.input(Input::Loaded { job, load, result: Err(reason) });
            }
        };
        let panicked = failed.clone();
        let loading = async move {
            let layers = spec.layers.start as usize..spec.layers.end as usize;
            let ordered = Instant::now();
            let held = library
                .share(spec.content, &spec.name, layers.clone(), &spec.sources, &ask)
                .await
                .map_err(|e| e.to_string());
            let got = ordered.elapsed();
            // What is here now, others may fetch from here.
            driver.input(Input::Holdings(library.contents()));
            let loaded = tokio::task::spawn_blocking(move || {
                held.and_then(|held| load_stage(&device, held.file.clone(), &spec, got))
            })
            .await;
            match loaded.unwrap_or_else(|e| Err(format!("loading was interrupted: {e}"))) {
                // The executor tells the core. A stage that nobody wants any more is dropped here.
                Ok(stage) => residency.install(job, load, || {
                    let _ = executor.send(Command::Install { job, epoch, load, stage, bytes_max });
                }),
                Err(reason) => {
                    let layers = explain::layers(&(layers.start as u32..layers.end as u32));
                    tracing::warn!("cannot hold layers {layers} of job {:016x}: {reason}", job.0);
                    failed(reason);
                }
            }
        };
        self.spawn(loading, panicked);
    }

    /// Gets the weights of a stage that is not to be loaded yet.
    fn fetch(&self, job: JobId, epoch: Epoch, spec: StageSpec) {
        let (library, ask) = (self.library.clone(), Arc::new(EndpointAsk(self.endpoint.clone())));
        let (driver, told) = (self.driver.clone(), self.driver.clone());
        let fetching = async move {
            let layers = spec.layers.start as usize..spec.layers.end as usize;
            let held = library.share(spec.content, &spec.name, layers, &spec.sources, &ask).await;
            driver.input(Input::Holdings(library.contents()));
            let result = held.map(|held| held.fetched_bytes).map_err(|e| e.to_string());
            driver.input(Input::Fetched { job, epoch, result });
        };
        self.spawn(fetching, move |reason| told.input(Input::Fetched { job, epoch, result: Err(reason) }));
    }

    fn execute(&self, command: Command) {
        let _ = self.executor.send(command);
    }

    /// Does work that takes time elsewhere. Its answer always comes: `failed` makes it from what a panic said.
    fn off_thread(
        &self,
        work: impl FnOnce() -> Input + Send + 'static,
        failed: impl FnOnce(String) -> Input + Send + 'static,
    ) {
        let driver = self.driver.clone();
        self.runtime.spawn_blocking(move || driver.input(answered(work, failed)));
    }

    /// Does asynchronous work that says itself what came of it; `failed` says it if the work panics.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static, failed: impl FnOnce(String) + Send + 'static) {
        let work = self.runtime.spawn(work);
        self.runtime.spawn(async move {
            if let Err(ended) = work.await
                && let Ok(panic) = ended.try_into_panic()
            {
                failed(panicked(panic.as_ref()));
            }
        });
    }
}

/// What work answers, or what is answered in its place where it panics: whatever waits for it must not wait for ever.
pub(crate) fn answered<T>(work: impl FnOnce() -> T, failed: impl FnOnce(String) -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| failed(panicked(panic.as_ref())))
}

/// Says in the log what a panic said, and in the answer.
fn panicked(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let why = format!("this node failed inside ({}); this is a bug, see its log", text.unwrap_or("no message"));
    tracing::error!("{why}");
    why
}

/// The same event with members' names, where the core's text has the beginning of their ids.
fn named(event: Event, node: &Node) -> Event {
    let name = |text: String| Names::of(node).in_text(&text);
    match event {
        Event::JobDegraded { call, job, reason } => Event::JobDegraded { call, job, reason: name(reason) },
        Event::Done { call, reason: DoneReason::Failed(reason) } => {
            Event::Done { call, reason: DoneReason::Failed(name(reason)) }
        }
        Event::Grid { job, event } => {
            let event = match *event {
                GridEvent::Waiting { reason } => GridEvent::Waiting { reason: name(reason) },
                GridEvent::Ended { result: Err(reason), figures } => {
                    GridEvent::Ended { result: Err(name(reason)), figures }
                }
                event @ (GridEvent::Inherited { .. }
                | GridEvent::Placed { .. }
                | GridEvent::Running { .. }
                | GridEvent::Progress { .. }
                | GridEvent::Report { .. }
                | GridEvent::Checkpoint { .. }
                | GridEvent::Moved
                | GridEvent::Ended { .. }) => event,
            };
            Event::Grid { job, event: Box::new(event) }
        }
        event @ (Event::PeerUp { .. }
        | Event::PeerDown { .. }
        | Event::PlanReady { .. }
        | Event::Fleet { .. }
        | Event::Reshaping { .. }
        | Event::Measured { .. }
        | Event::JobPlaced { .. }
        | Event::JobReady { .. }
        | Event::JobEnded { .. }
        | Event::Token { .. }
        | Event::Done { .. }
        | Event::Lost { .. }
        | Event::Standby { .. }
        | Event::Promoted { .. }
        | Event::GridPlan { .. }
        | Event::Refused { .. }) => event,
    }
}

/// Writes to the user's log what a person would want to wake up for, and no more.
fn log(event: &Event, node: &Node) {
    let name = |id: &NodeId| Names::of(node).get(*id);
    match event {
        Event::PeerUp { node } => tracing::info!("{} is up", name(node)),
        Event::PeerDown { node, reason: DownReason::Left } => tracing::info!("{} left", name(node)),
        Event::PeerDown { node, reason: DownReason::Failed } => tracing::warn!("{} is down", name(node)),
        Event::JobPlaced { job, epoch, plan } => {
            let stage = |stage: &partitioner::Stage| {
                format!("{} layers {}", name(&NodeId(stage.device.0)), explain::layers(&stage.layers))
            };
            let stages: Vec<String> = plan.stages().iter().map(stage).collect();
            tracing::info!("job {:016x} epoch {}: {}", job.0, epoch.counter, stages.join(", "));
        }
        Event::JobReady { job, epoch, .. } => tracing::info!("job {:016x} epoch {} is ready", job.0, epoch.counter),
        Event::JobDegraded { job, reason, .. } => tracing::warn!("job {:016x} cannot run: {reason}", job.0),
        Event::JobEnded { job } => tracing::info!("job {:016x} ended", job.0),
        Event::Lost { job, node, silent_ms } => {
            tracing::warn!("job {:016x} lost {} after {silent_ms} ms of silence", job.0, name(node));
        }
        Event::Standby { job, stage, node, current } => {
            let what = if *current { "is current" } else { "loads" };
            tracing::info!("job {:016x} stage {stage}: standby {} {what}", job.0, name(node));
        }
        Event::Promoted { job, epoch, stage, node } => {
            let counter = epoch.counter;
            tracing::warn!("job {:016x} epoch {counter}: standby {} takes over stage {stage}", job.0, name(node));
        }
        Event::Reshaping { job, change } => tracing::info!(
            "job {:016x} moves: {} of weights for {:.2} ms/token instead of {:.2}",
            job.0,
            crate::config::Size(change.bytes),
            change.after_ns as f64 / 1e6,
            change.before_ns as f64 / 1e6
        ),
        Event::Measured { node, percent: 100 } => tracing::info!("{} computes as fast as it claims", name(node)),
        Event::Measured { node, percent } if *percent < 100 * SLOWER_TIMES as u32 => {
            tracing::info!("{} takes {percent} % of the time that it claims: plans use the measured time", name(node));
        }
        Event::Measured { node, percent } => {
            tracing::warn!("{} takes {percent} % of the time that it claims: plans use the measured time", name(node));
        }
        // Names of all members are looked up for it: not for lines that no log takes.
        Event::Refused { .. } if !tracing::enabled!(tracing::Level::DEBUG) => {}
        Event::Refused { from, what } => {
            let what = Names::of(node).in_text(what);
            match from {
                Some(from) => tracing::debug!("rejected from {}: {what}", name(from)),
                None => tracing::debug!("rejected: {what}"),
            }
        }
        Event::Grid { job, event } => grids::log(*job, event, &Names::of(node)),
        Event::PlanReady { .. }
        | Event::Fleet { .. }
        | Event::Token { .. }
        | Event::Done { .. }
        | Event::GridPlan { .. } => {}
    }
}

/// `got`: what it took to have the weights on this machine.
fn load_stage(
    device: &crate::device::Compute,
    file: Arc<kernels::weights::ModelFile>,
    spec: &StageSpec,
    got: Duration,
) -> Result<Box<dyn Stage>, String> {
    let options = StageOptions {
        layers: spec.layers.start as usize..spec.layers.end as usize,
        sequences: spec.sequences as usize,
        context: spec.context as usize,
        activations: if spec.int8 { Activations::Int8 } else { Activations::F32 },
        threads: device.threads,
    };
    let begun = Instant::now();
    let mut stage = device.load(file, options).map_err(|e| e.to_string())?;
    let loaded = begun.elapsed();
    warm(stage.as_mut(), spec).map_err(|e| e.to_string())?;
    let [got, loaded, first] = [got, loaded, begun.elapsed() - loaded].map(|took| took.as_secs_f64());
    let (layers, total) = (explain::layers(&spec.layers), got + loaded + first);
    tracing::info!(
        "layers {layers} of {} took {total:.2} s: {got:.2} to get the weights, {loaded:.2} to load them, {first:.2} for a step",
        spec.name
    );
    Ok(stage)
}

/// A step nobody asked for, so that the first real one waits for no page and no compiler.
fn warm(stage: &mut dyn Stage, spec: &StageSpec) -> Result<(), kernels::stage::StageError> {
    let zeros = vec![0.0; stage.width()];
    let input = if spec.layers.start == 0 { RowsIn::Tokens(&[0]) } else { RowsIn::Hidden(&zeros) };
    let draw = Draw { settings: SamplerSettings::greedy(), position: 1, changes: Changes::default() };
    let row = Rows { sequence: u64::MAX, position: 0, input, want: Want::Token(draw) };
    stage.forward(&[row])?;
    stage.release(u64::MAX);
    Ok(())
}

/// No frame for this long: no job is generating.
const FRAMES_SILENT: Duration = Duration::from_secs(5);

/// The data plane as a way to ask for weights.
pub struct EndpointAsk(pub Arc<Endpoint>);

impl Ask for EndpointAsk {
    async fn ask(&self, node: NodeId, request: Vec<u8>, max: usize) -> Result<Vec<u8>, String> {
        let response = self.0.request(node.0, request.into()).await.map_err(|e| e.to_string())?;
        response.all(max).await.map_err(|e| e.to_string())
    }

    /// Each peer keeps to its share of the link to here, but all of them together could take more than this end of it:
    /// while frames of a job come and go, they get the same share of the fastest link that was measured.
    fn bytes_per_second(&self) -> Option<u64> {
        let peers = self.0.peers();
        let busy = |peer: &transport::PeerStats| peer.frames_silent_for.is_some_and(|silent| silent < FRAMES_SILENT);
        let far = || peers.iter().filter(|peer| !peer.addr.ip().to_canonical().is_loopback());
        let measured = far().filter_map(|peer| peer.bytes_per_second_in).max().filter(|_| far().any(busy));
        measured.map(|bytes_per_second| bytes_per_second / 10 * 7)
    }
}

pub(crate) fn route(job: JobId, epoch: Epoch, part: u16) -> Route {
    Route { job: job.0, epoch: transport::frame::Epoch { counter: epoch.counter, minter: epoch.minter.0 }, part }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::input::GridInput;
    use node_core::work::steps::SaveKind;

    #[test]
    fn work_that_panics_answers_with_an_error() {
        let planned = answered(
            || panic!("no layers in {}", "the model"),
            |why| Input::Planned { token: 7, result: Err(PlanError::Invalid(why.into())) },
        );
        let Input::Planned { token: 7, result: Err(PlanError::Invalid(why)) } = &planned else { panic!("{planned:?}") };
        assert!(why.contains("no layers in the model") && why.contains("bug"), "{why}");
        let (job, tile, step, kind) = (JobId(1), 2, 3, SaveKind::Checkpoint);
        let collected = answered(
            || std::panic::panic_any(5),
            |why| Input::Grid(GridInput::Collected { job, tile, step, kind, result: Err(why) }),
        );
        assert!(matches!(collected, Input::Grid(GridInput::Collected { result: Err(_), .. })));
        assert!(matches!(answered(|| Input::Wakeup, |_| unreachable!("it did not panic")), Input::Wakeup));
    }
}
