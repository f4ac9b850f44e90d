//! Tests of the device thread through its queue: commands in, inputs of the core out.
use super::*;
use crate::config::UpOptions;
use crate::device::Devices;
use crate::driver::queue::{DriverQueue, channel};
use crate::residency::Residency;
use kernels::boundary::Codec;
use kernels_models::stage::{ResidentBytes, Rows, SequenceId, Stage, StageError, Submitted};
use kernels_simulations::Simulation;
use node_core::id::{ContentId, JobId, NodeId, PartId, RequestId, TensorId};
use node_core::limits::TILE_PIECE;
use node_core::work::Payload;
use node_core::work::steps::{Action, ActionKind, Schedule, SimulationId, TileOrder, TileResult, TileWork};
use parking_lot::Mutex;
use partitioner::tiles::Block;

/// Longest wait for an answer; no machine is this slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Steps of a simulation that does not end in a test.
const STEPS: u32 = 1_000_000;

/// Cells along an axis of a tile that takes long to initialise.
const LARGE: usize = 12_288;

const EPOCH: Epoch = Epoch { counter: 1, issuer: NodeId([0; 16]) };

struct Bench {
    commands: Commands,
    queue: DriverQueue,
    works: u64,
}

impl Bench {
    fn new(device: &str) -> Self {
        let (driver, queue) = channel();
        let folder = std::env::temp_dir();
        let options = UpOptions { device: device.into(), threads: Some(2), ..UpOptions::solo(folder.clone(), folder) };
        let devices = Devices::open(&options).unwrap();
        let (device, capacity) = (devices.all[0].clone(), devices.capacity);
        let residency = Arc::new(Residency::new(capacity, |_| {}));
        let (tensors, states, suspected) = Default::default();
        let shared = Shared { tensors, states, residency, driver, device, suspected };
        Self { commands: spawn(shared).unwrap().0, queue, works: 0 }
    }

    fn load(&self, job: JobId, size: usize, steps: u32) {
        let text = format!(
            "name = \"t\"\nsteps = {steps}\n[grid]\nsize = [{size}, {size}]\n[rule]\nname = \"life\"\n[initial]\nnoise = 0.4\n"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("t.toml");
        std::fs::write(&file, text).unwrap();
        let simulation = Simulation::read(&file).unwrap();
        let work = crate::submissions::spec::work(&simulation);
        let whole = Block { from: [0; 3], to: work.size };
        let order = TileOrder {
            simulation: SimulationId { content: ContentId([0; 32]), bytes: 1 },
            work,
            depth: 1,
            schedule: Schedule { steps, report_every: 10, checkpoint_every: None, outputs: Vec::new(), looks: None },
            blocks: vec![whole],
            start: TileStart::Initial,
            step_ns: 1,
            snapshot_ms: 0,
        };
        let (order, simulation) = (Box::new(order), Arc::new(simulation));
        self.hold(job, NewPart::Tile { order, standby: None, simulation, checkpoint: None });
    }

    fn hold(&self, job: JobId, part: NewPart) {
        let (key, load, bytes_max) = ((job, PartId(0)), LoadId(1), 1 << 30);
        self.commands.send(Command::Load { key, epoch: EPOCH, load, bytes_max, part }).unwrap();
    }

    fn run(&mut self, job: JobId, from: u32, to: u32) {
        self.works += 1;
        let stops = vec![Action { step: to, what: ActionKind::Report { hash: true } }];
        let task = TileWork { from, to, halos_in: Vec::new(), halos_out: Vec::new(), stops };
        self.give(job, Task::Steps(task));
    }

    fn give(&self, job: JobId, task: Task) {
        let run = Run { work: WorkId(self.works), job, epoch: EPOCH, part: PartId(0), device: 0, task };
        self.commands.send(Command::Run(Box::new(run))).unwrap();
    }

    /// The next answer, as (job, whether it is a load, the result of a run).
    #[expect(clippy::wildcard_enum_match_arm, reason = "only two of the node's inputs are answers")]
    fn answer(&self) -> (JobId, bool, TileResult) {
        loop {
            match self.queue.next_input(PATIENCE).expect("an answer") {
                Input::Loaded { job, result, .. } => {
                    assert_eq!(result.unwrap().step, Some(0));
                    return (job, true, TileResult::default());
                }
                Input::Ran { job, result, .. } => match result.unwrap() {
                    RunResult::Steps(made) => return (job, false, made),
                    RunResult::Batch { results, .. } => panic!("{results:?} of a tile"),
                },
                _ => {}
            }
        }
    }
}

#[test]
fn initialising_a_tile_does_not_delay_another() {
    let (mut bench, small, large) = (Bench::new("cpu"), JobId(1), JobId(2));
    bench.load(small, 256, STEPS);
    assert_eq!(bench.answer(), (small, true, TileResult::default()));
    bench.load(large, LARGE, STEPS);
    for piece in 0..5 {
        bench.run(small, 10 * piece, 10 * piece + 10);
        let (job, loaded, made) = bench.answer();
        assert!(job == small && !loaded, "the large tile was loaded before piece {piece} of the small one");
        assert_eq!(made.reports.len(), 1);
    }
    assert_eq!(bench.answer(), (large, true, TileResult::default()));
}

#[test]
fn a_dropped_tile_stops_initialising() {
    let (mut bench, small, large) = (Bench::new("cpu"), JobId(1), JobId(2));
    bench.load(large, LARGE, STEPS);
    bench.commands.send(Command::Drop { key: (large, PartId(0)) }).unwrap();
    bench.load(small, 256, STEPS);
    assert_eq!(bench.answer(), (small, true, TileResult::default()), "the dropped tile is not reported");
    bench.run(small, 0, 10);
    assert_eq!(bench.answer().0, small);
}

/// A fake stage on a device that computes each batch until `finish`; logs each call with its name.
struct Pretended {
    name: &'static str,
    log: Arc<Mutex<Vec<String>>>,
    /// The first batch is submitted once this receives; `None`: immediately.
    gate: Option<mpsc::Receiver<()>>,
}

impl Pretended {
    fn log(&self, what: &str) {
        self.log.lock().push(format!("{what} {}", self.name));
    }
}

impl Stage for Pretended {
    fn submit(&mut self, _: &mut Threads, _: &[Rows<'_>]) -> Result<Submitted, StageError> {
        if let Some(gate) = self.gate.take() {
            gate.recv().expect("the test opens the gate");
        }
        self.log("submit");
        Ok(Submitted::Queued)
    }

    fn finish(&mut self, _: &mut Threads, batch: &[Rows<'_>]) -> Result<Vec<RowsOut>, StageError> {
        self.log("finish");
        Ok(batch.iter().map(|_| RowsOut::Nothing).collect())
    }

    fn encode_rows(&mut self, _: Codec) {}

    fn cached_positions(&self, _: SequenceId) -> usize {
        0
    }

    fn share(&mut self, _: SequenceId, _: SequenceId, _: usize) -> Result<(), StageError> {
        self.log("share");
        Ok(())
    }

    fn release(&mut self, _: SequenceId) {
        self.log("release");
    }

    fn resident_bytes(&self) -> ResidentBytes {
        ResidentBytes { weights: 1, working: 1 }
    }

    fn width(&self) -> usize {
        1
    }

    fn numerics(&self) -> &str {
        "pretended"
    }
}

impl Bench {
    /// Loads fake stages; the first submits its first batch when the returned sender is used.
    fn stages(&self, names: [&'static str; 2]) -> (mpsc::Sender<()>, Arc<Mutex<Vec<String>>>) {
        let log: Arc<Mutex<Vec<String>>> = Arc::default();
        let (open, gate) = mpsc::channel();
        let mut gate = Some(gate);
        for (job, name) in (1..).zip(names) {
            let stage = Pretended { name, log: log.clone(), gate: gate.take() };
            self.hold(JobId(job), NewPart::Stage { stage: Box::new(stage), file: None, rows: Codec::Lossless, ram: 0 });
            assert!(self.loaded());
        }
        (open, log)
    }

    fn batch(&mut self, job: JobId) {
        self.works += 1;
        let input = Payload::Tokens(vec![1]);
        let (request, output) = (RequestId(7), TensorId::Produced(self.works));
        self.give(
            job,
            Task::Batch(vec![Item { request, position: 0, count: 1, drafts: 0, input, sample: None, output }]),
        );
    }

    /// Whether the next answer is to a load.
    fn loaded(&self) -> bool {
        self.next().is_none()
    }

    /// The next answer: job, work id and result of a run, or `None` for a load.
    #[expect(clippy::wildcard_enum_match_arm, reason = "only two of the node's inputs are answers")]
    fn next(&self) -> Option<(JobId, WorkId, Result<RunResult, String>)> {
        loop {
            match self.queue.next_input(PATIENCE).expect("an answer") {
                Input::Loaded { result, .. } => {
                    result.unwrap();
                    return None;
                }
                Input::Ran { job, work, result, .. } => return Some((job, work, result)),
                _ => {}
            }
        }
    }
}

#[test]
fn a_batch_is_submitted_while_the_device_computes_another() {
    let mut bench = Bench::new("cpu");
    let (open, log) = bench.stages(["a", "b"]);
    bench.batch(JobId(1));
    bench.batch(JobId(2));
    bench.commands.send(Command::Release { key: (JobId(2), PartId(0)), request: RequestId(7) }).unwrap();
    bench.batch(JobId(2));
    open.send(()).unwrap();
    let answers = [(1, 1), (2, 2), (2, 3)].map(|(job, work)| (JobId(job), WorkId(work)));
    assert_eq!(answers.map(|_| bench.next().map(|(job, work, _)| (job, work)).unwrap()), answers);
    let asked = ["submit a", "submit b", "finish a", "finish b", "release b", "submit b", "finish b"];
    assert_eq!(*log.lock(), asked, "a stage gets no call while its batch is on the device");
}

#[test]
fn a_batch_of_another_epoch_or_of_a_missing_stage_is_rejected() {
    let mut bench = Bench::new("cpu");
    let (open, _) = bench.stages(["a", "b"]);
    open.send(()).unwrap();
    let other = Epoch { counter: 2, ..EPOCH };
    bench.commands.send(Command::Keep { key: (JobId(1), PartId(0)), epoch: other, rows: Codec::Lossless }).unwrap();
    bench.batch(JobId(1));
    assert!(bench.next().unwrap().2.unwrap_err().contains("epoch 2, not 1"));
    bench.commands.send(Command::Drop { key: (JobId(2), PartId(0)) }).unwrap();
    bench.batch(JobId(2));
    assert!(bench.next().unwrap().2.unwrap_err().contains("not loaded"));
    bench.run(JobId(1), 0, 10);
    assert!(bench.next().unwrap().2.is_err(), "a stage computes no steps");
}

#[test]
fn a_batch_overtakes_a_tile_run_without_changing_its_result() {
    let (tile, model) = (JobId(5), JobId(1));
    let loaded = || {
        let bench = Bench::new("cpu");
        bench.load(tile, 2048, STEPS);
        assert!(bench.loaded());
        bench
    };
    // Runs of more and more steps, until one consists of several pieces on this machine.
    let mut bench = loaded();
    let (mut run, mut expected) = ((0, 10), Vec::new());
    // The shortest time of a step: a pause of the machine makes none shorter.
    let mut step = Duration::MAX;
    loop {
        let start = Instant::now();
        bench.run(tile, run.0, run.1);
        expected.push((run, bench.answer().2.reports));
        step = step.min(start.elapsed() / (run.1 - run.0));
        // The first run shows what a step takes, and is not split.
        if expected.len() > 1 && step * (run.1 - run.0) > 10 * TILE_PIECE {
            break;
        }
        run = (run.1, 3 * run.1);
    }
    drop(bench);

    let mut bench = loaded();
    let (open, log) = bench.stages(["a", "b"]);
    open.send(()).unwrap();
    bench.batch(model);
    assert_eq!(bench.next().unwrap().0, model);
    let ((last, reports), before) = expected.split_last().unwrap();
    for (run, reports) in before {
        bench.run(tile, run.0, run.1);
        assert_eq!(&bench.answer().2.reports, reports);
    }
    bench.run(tile, last.0, last.1);
    bench.batch(model);
    assert_eq!(bench.next().unwrap().0, model, "the batch overtakes the run");
    bench.batch(model);
    let answers = [bench.next().unwrap(), bench.next().unwrap()];
    assert_eq!(log.lock().len(), 6);
    match answers.into_iter().find(|(job, ..)| *job == tile).expect("an answer to the run").2.unwrap() {
        RunResult::Steps(made) => assert_eq!(&made.reports, reports),
        RunResult::Batch { results, .. } => panic!("{results:?} of a tile"),
    }
}

#[test]
fn gpu_runs_match_the_processor() {
    let found = kernels_gpu::probe();
    let Some(gpu) = found.iter().find(|device| matches!(device.id, kernels::device::DeviceId::Vulkan(_))) else {
        let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "vulkan"));
        assert!(!required, "MESHNODE_REQUIRE names vulkan, but no Vulkan driver was found");
        eprintln!("SKIPPED: no Vulkan driver on this machine");
        return;
    };
    let reports = |device: &str| {
        let mut bench = Bench::new(device);
        bench.load(JobId(1), 256, 200);
        assert!(bench.answer().1);
        let mut reports = Vec::new();
        for (from, to) in [(0, 0), (0, 7), (7, 8), (8, 40), (40, 200)] {
            bench.run(JobId(1), from, to);
            reports.extend(bench.answer().2.reports);
        }
        reports
    };
    assert_eq!(reports(&gpu.id.to_string()), reports("cpu"));
}
