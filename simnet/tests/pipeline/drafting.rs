//! A second served model makes drafts for the first one.
use super::*;
use node_core::input::Input;
use node_core::job::ProgramView;
use simnet::compute::{DRAFTED, DRAFTING};

/// Layers of the draft model: one host holds them, and computes them in less time than the model takes.
const DRAFT_LAYERS: u32 = 2;
/// The entry node in whose name the draft model is served.
const DRAFT_ENTRY: u32 = 7;
/// Memory for both models.
const MEMORY: u64 = 400 << 20;

/// A mesh that serves a model, and the draft model too unless `alone`.
fn serving(options: Options, alone: bool) -> (Room, Workload) {
    let (mut world, hosts) = Room::empty(options, 6, &with_memory(MEMORY));
    let (epochs, bounds) = (Epochs::default(), Bounds::default());
    world.observe(Box::new(epochs.clone()));
    world.observe(Box::new(bounds.clone()));
    let mut small = symbolic_model(DRAFT_LAYERS, LAYER_BYTES);
    (small.content, small.name) = (DRAFTING, "draft".into());
    let mut draft = Workload::of_entry(DRAFT_ENTRY, COORDINATOR, small);
    if !alone {
        draft.turn_to(&mut world, COORDINATOR);
        assert!(draft.run_until_ready(&mut world, ms(10_000)), "{:?}", draft.notes);
    }
    let mut model = symbolic_model(LAYERS, LAYER_BYTES);
    (model.content, model.draft) = (DRAFTED, Some(DRAFTING));
    let mut work = Workload::deploy(&mut world, COORDINATOR, model);
    assert!(work.run_until_ready(&mut world, ms(10_000)), "{:?}", work.notes);
    (Room { world, hosts, work, epochs, bounds }, draft)
}

/// Drafts of the draft model, and those of them that were right.
fn model_drafts(room: &Room) -> (u64, u64) {
    let node = room.world.host(COORDINATOR).node.as_ref().expect("the coordinator runs");
    let view = node.jobs().find(|view| Some(view.job) == room.work.job).expect("the job");
    match view.program {
        ProgramView::Serve { model_drafts, .. } => model_drafts,
        ProgramView::Steps { .. } => (0, 0),
    }
}

#[test]
fn a_draft_model_makes_a_lone_request_faster() {
    let took = |alone: bool| {
        let (mut room, _) = serving(Options::lan(1), alone);
        let since = room.world.now();
        room.submit(3, 300, 400);
        assert!(room.work.run_until_done(&mut room.world, ms(60_000)), "the request ends");
        let took = room.world.now().since(since).as_secs_f64();
        let counts = model_drafts(&room);
        room.check("a lone request").assert_all_finished("a lone request");
        (took, counts)
    };
    let ((with, (sent, right)), (without, none)) = (took(false), took(true));
    println!("{with:.2} s instead of {without:.2} s; {right} of {sent} drafts were right");
    assert_eq!(none, (0, 0), "no draft model is served");
    assert!(right * 10 > sent * 4 && right > 100, "{right} of {sent} drafts were right");
    assert!(with < 0.8 * without, "{with:.2} s instead of {without:.2} s");
}

#[test]
fn requests_survive_the_loss_of_the_draft_model() {
    for seed in seeds(10) {
        let what = format!("seed {seed}");
        let mut draw = chance(seed, "draft model");
        let (mut room, draft) = serving(Options::lan(seed), false);
        for n in 0..draw.random_range(1..4u64) {
            room.submit(seed * 10 + n, draw.random_range(1..600), draw.random_range(50..400));
        }
        room.run_for(Duration::from_micros(draw.random_range(100_000..1_500_000)));
        match seed % 3 {
            0 => room.world.inject(COORDINATOR, Input::End { job: draft.job.expect("it is served") }),
            1 => {
                if let Some(victim) = draft.stages(&room.world).into_iter().find(|host| *host != COORDINATOR) {
                    room.strike(Fault::Crash(victim));
                }
            }
            _ => {
                let call = *room.work.calls.keys().next().expect("a call");
                room.work.cancel(&mut room.world, call);
            }
        }
        let room = room.check(&what);
        room.assert_all_finished(&what);
        println!("{what}: {:?} drafts", model_drafts(&room));
    }
}
