//! The thread of tiles as the core sees it: commands, and what it answers when.
use super::*;
use crate::config::UpOptions;
use crate::driver::{self, DriverQueue};
use kernels::grid::simulation::Simulation;
use node_core::id::ContentId;
use node_core::work::steps::{Schedule, SimulationId};
use std::time::Duration;

/// No machine is so slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Cells along an axis of a tile that takes long to make.
const LARGE: usize = 12_288;

struct Bench {
    commands: Commands,
    queue: DriverQueue,
    works: u64,
}

impl Bench {
    fn new(device: &str) -> Self {
        let (driver, queue) = driver::queue();
        let folder = std::env::temp_dir();
        let options = UpOptions { device: device.into(), threads: Some(2), ..UpOptions::solo(folder.clone(), folder) };
        let device = Arc::new(Compute::open(&options).unwrap());
        let residency = Arc::new(Residency::new(device.capacity.clone()));
        let hands = Hands { tensors: Arc::default(), states: Arc::default(), residency, driver, device };
        Self { commands: spawn(hands).unwrap().0, queue, works: 0 }
    }

    fn load(&self, job: JobId, size: usize) {
        let text = format!(
            "name = \"t\"\nsteps = 1000\n[grid]\nsize = [{size}, {size}]\n[rule]\nname = \"life\"\n[initial]\nnoise = 0.4\n"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("t.toml");
        std::fs::write(&file, text).unwrap();
        let simulation = Simulation::read(&file).unwrap();
        let work = crate::submissions::work(&simulation);
        let whole = Block { from: [0; 3], to: work.size };
        let order = TileOrder {
            simulation: SimulationId { content: ContentId([0; 32]), bytes: 1 },
            work,
            depth: 1,
            schedule: Schedule {
                steps: 1000,
                report_every: 10,
                checkpoint_every: None,
                outputs: Vec::new(),
                looks: None,
            },
            blocks: vec![whole],
            start: TileStart::Initial,
            step_ns: 1,
            snapshot_ms: 0,
        };
        let spec = Box::new(TileSpec { key: (job, PartId(0)), standby: None, bytes_max: 1 << 30, order });
        let (load, simulation) = (LoadId(1), Arc::new(simulation));
        self.commands.send(Command::Load { load, spec, simulation, checkpoint: None }).unwrap();
    }

    fn run(&mut self, job: JobId, from: u32, to: u32) {
        self.works += 1;
        let stops = vec![Stop { step: to, what: StopKind::Report { hash: true } }];
        let task = TileWork { from, to, halos_in: Vec::new(), halos_out: Vec::new(), stops };
        self.commands.send(Command::Run { work: WorkId(self.works), key: (job, PartId(0)), task }).unwrap();
    }

    /// The next answer, as (job, whether a tile was loaded, what a run made).
    #[expect(clippy::wildcard_enum_match_arm, reason = "of all inputs of a node two are answers")]
    fn answer(&self) -> (JobId, bool, TileMade) {
        loop {
            match self.queue.next_input(PATIENCE).expect("an answer") {
                Input::Loaded { job, result, .. } => {
                    assert_eq!(result.unwrap().step, Some(0));
                    return (job, true, TileMade::default());
                }
                Input::Ran { job, result, .. } => match result.unwrap() {
                    Made::Steps(made) => return (job, false, made),
                    Made::Batch(results) => panic!("{results:?} of a tile"),
                },
                _ => {}
            }
        }
    }
}

#[test]
fn a_tile_that_is_made_does_not_hold_up_another() {
    let (mut bench, small, large) = (Bench::new("cpu"), JobId(1), JobId(2));
    bench.load(small, 256);
    assert_eq!(bench.answer(), (small, true, TileMade::default()));
    bench.load(large, LARGE);
    for piece in 0..5 {
        bench.run(small, 10 * piece, 10 * piece + 10);
        let (job, loaded, made) = bench.answer();
        assert!(job == small && !loaded, "the large tile is not there before piece {piece} of the small one is made");
        assert_eq!(made.reports.len(), 1);
    }
    assert_eq!(bench.answer(), (large, true, TileMade::default()));
}

#[test]
fn a_tile_that_is_not_wanted_any_more_is_not_made() {
    let (mut bench, small, large) = (Bench::new("cpu"), JobId(1), JobId(2));
    bench.load(large, LARGE);
    bench.commands.send(Command::Drop { key: (large, PartId(0)) }).unwrap();
    bench.load(small, 256);
    assert_eq!(bench.answer(), (small, true, TileMade::default()), "the one that was dropped is not told of");
    bench.run(small, 0, 10);
    assert_eq!(bench.answer().0, small);
}

#[test]
fn runs_of_a_device_are_what_the_processor_makes() {
    let found = kernels_gpu::probe();
    let Some(gpu) = found.iter().find(|device| matches!(device.id, kernels::device::DeviceId::Vulkan(_))) else {
        let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "vulkan"));
        assert!(!required, "MESHNODE_REQUIRE names vulkan, but no Vulkan driver was found");
        eprintln!("SKIPPED: no Vulkan driver on this machine");
        return;
    };
    let reports = |device: &str| {
        let mut bench = Bench::new(device);
        bench.load(JobId(1), 256);
        assert!(bench.answer().1);
        let mut reports = Vec::new();
        for (from, to) in [(0, 0), (0, 7), (7, 8), (8, 40), (40, 1000)] {
            bench.run(JobId(1), from, to);
            reports.extend(bench.answer().2.reports);
        }
        reports
    };
    assert_eq!(reports(&gpu.id.to_string()), reports("cpu"));
}
