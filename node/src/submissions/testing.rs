//! Test support: small simulations, submissions, and the events that a core sends about them.
use super::Submissions;
use super::spec::content_id;
use super::submission::Submission;
use crate::driver::queue::{self, DriverHandle};
use crate::hub::EventRouter;
use crate::states::{StateName, States};
use crate::views::Views;
use bytes::Bytes;
use kernels_simulations::Simulation;
use node_core::id::{Epoch, JobId, NodeId};
use node_core::input::Input;
use node_core::output::Event;
use node_core::work::steps::StepsEvent;
use node_core::work::{Ending, Placement};
use parking_lot::Mutex;
use partitioner::tiles::Block;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// The node that the submissions belong to.
pub(crate) const ME: NodeId = NodeId([1; 16]);
/// The id of a submission that is made without [`Submissions`].
pub(crate) const JOB: JobId = JobId(0x2a);
/// Cells of the simulation [`heat`] along x and y.
pub(crate) const SIZE: [usize; 2] = [32, 16];

/// Parses a job file.
pub(crate) fn simulation(text: &str) -> Simulation {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    std::fs::write(&path, text).unwrap();
    Simulation::read(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// A plate with a picture every 10 steps and a checkpoint every 20.
pub(crate) fn heat(steps: u64) -> Simulation {
    simulation(&format!(
        "name = \"plate\"\nsteps = {steps}\ncheckpoint_every = 20\n[grid]\nsize = {SIZE:?}\n[rule]\nname = \"heat\"\n\
         rate = 0.1\n[[output]]\nkind = \"png\"\nevery = 10\n"
    ))
}

/// A submission that no core knows; `out`: the folder of its outputs.
pub(crate) fn submission(job: JobId, simulation: Simulation, out: Option<PathBuf>) -> Submission {
    let id = content_id(&simulation);
    Submission {
        job,
        simulation: Arc::new(simulation),
        id,
        out,
        told: Mutex::default(),
        view: Mutex::default(),
        forces: Mutex::default(),
        results: Mutex::default(),
        changed: watch::channel(0).0,
    }
}

/// The rows `from..to` of the simulation [`heat`].
pub(crate) fn rows(from: usize, to: usize) -> Block {
    Block { from: [0, from as u64, 0], to: [SIZE[0] as u64, to as u64, 1] }
}

/// The values of a tile's part of a frame, all equal.
pub(crate) fn values(cells: usize, value: f32) -> Bytes {
    transport::frame::from_f32(&vec![value; cells])
}

/// The job was placed on `node`, with these tiles.
pub(crate) fn placed(job: JobId, node: NodeId, blocks: &[Block]) -> Event {
    let tiles = blocks.iter().map(|block| (node, *block)).collect();
    let placement = Box::new(Placement::Tiles { tiles, depth: 2, step: 0 });
    Event::JobPlaced { job, epoch: Epoch { counter: 1, issuer: ME }, step_ns: 1_000_000, placement }
}

/// An event of the job's steps.
pub(crate) fn steps(job: JobId, event: StepsEvent) -> Event {
    Event::Steps { job, event }
}

/// The job ended.
pub(crate) fn ended(job: JobId, ending: Ending) -> Event {
    Event::JobEnded { job, ending, figures: Vec::new() }
}

/// The submissions of a node whose core is played by the test.
pub(crate) struct Bench {
    pub(crate) all: Arc<Submissions>,
    /// What the core answers to requests for views.
    pub(crate) views: Arc<Mutex<Views>>,
    states: Arc<States>,
    driver: DriverHandle,
    inputs: Arc<Mutex<Vec<Input>>>,
    /// The folder of the node's own files.
    pub(crate) folder: tempfile::TempDir,
}

impl Bench {
    /// A node without submissions.
    pub(crate) fn new() -> Self {
        Self::in_folder(tempfile::tempdir().unwrap())
    }

    /// A node that continues with the files of an earlier run.
    pub(crate) fn in_folder(folder: tempfile::TempDir) -> Self {
        let (driver, queue) = queue::channel();
        let views: Arc<Mutex<Views>> = Arc::default();
        let inputs: Arc<Mutex<Vec<Input>>> = Arc::default();
        let (answers, log) = (views.clone(), inputs.clone());
        std::thread::spawn(move || queue.serve(&answers, |input| log.lock().push(input)));
        let states = Arc::new(States::default());
        let place = folder.path().join("simulations");
        let core = (driver.clone(), Arc::new(EventRouter::new()));
        let all = Arc::new(Submissions::new(ME, 7, core, states.clone(), place));
        Self { all, views, states, driver, inputs, folder }
    }

    /// The inputs that the core has received.
    pub(crate) fn inputs(&self) -> Vec<Input> {
        // The queue is in order: when the views are answered, all earlier inputs have arrived.
        let _ = futures::executor::block_on(self.driver.views());
        self.inputs.lock().clone()
    }

    /// Collects a state that an owner saved on this node.
    pub(crate) fn deliver(&self, name: StateName, bytes: Bytes) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let size = bytes.len() as u64;
        self.states.put(name, bytes);
        self.all.collect(runtime.handle(), ME, name, size)
    }
}
