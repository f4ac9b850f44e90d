//! Which command is carried out next: in the order in which they came, except that stages do not wait for tiles.
//!
//! A reader waits for each batch of a model, and steps of a tile may take up to a second where they are not cut. So what stages
//! are asked passes the steps of tiles that wait. Steps that a batch has passed go next, so that neither starves.
use super::Command;
use super::tiles::TileRun;
use node_core::work::Task;
use std::collections::VecDeque;

/// Something to do.
pub(super) enum Work {
    /// A command.
    Command(Command),
    /// The rest of a tile's run, which let a batch pass.
    Rest(Box<TileRun>),
}

/// What waits.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Work>,
    /// A batch has passed the steps at the front.
    passed: bool,
}

impl Queue {
    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A command came.
    pub(super) fn push(&mut self, command: Command) {
        self.waiting.push_back(Work::Command(command));
    }

    /// A run is not done: the rest of it comes before everything of its part that waits.
    pub(super) fn push_rest(&mut self, run: TileRun) {
        self.waiting.push_front(Work::Rest(Box::new(run)));
    }

    /// What is done next. Commands of one part keep their order: only steps of tiles are passed, and only by what stages are
    /// asked.
    pub(super) fn next(&mut self) -> Option<Work> {
        let after_steps = self.waiting.iter().position(|work| kind(work) != Kind::Steps);
        if let Some(at) = after_steps.filter(|&at| at > 0 && !self.passed) {
            match kind(&self.waiting[at]) {
                Kind::Batch => {
                    self.passed = true;
                    return self.waiting.remove(at);
                }
                Kind::OfStage => return self.waiting.remove(at),
                Kind::Steps | Kind::Other => {}
            }
        }
        let work = self.waiting.pop_front()?;
        if kind(&work) == Kind::Steps {
            self.passed = false;
        }
        Some(work)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Steps of a tile.
    Steps,
    /// A batch of a stage.
    Batch,
    /// Something else that only stages are asked.
    OfStage,
    /// What parts of both kinds are asked, or tiles.
    Other,
}

fn kind(work: &Work) -> Kind {
    match work {
        Work::Rest(_) => Kind::Steps,
        Work::Command(Command::Run(run)) => match run.task {
            Task::Steps(_) => Kind::Steps,
            Task::Batch(_) => Kind::Batch,
        },
        Work::Command(Command::Release { .. } | Command::Challenge { .. }) => Kind::OfStage,
        Work::Command(
            Command::Load { .. }
            | Command::Cells { .. }
            | Command::CellsEnd { .. }
            | Command::Restore { .. }
            | Command::Keep { .. }
            | Command::Drop { .. }
            | Command::Unload { .. }
            | Command::Reached,
        ) => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::Tensors;
    use node_core::id::{Epoch, JobId, NodeId, PartId, RequestId, WorkId};
    use node_core::work::Run;
    use node_core::work::steps::TileWork;

    const TILE: JobId = JobId(1);
    const MODEL: JobId = JobId(2);

    fn run(job: JobId, work: u64, task: Task) -> Command {
        let epoch = Epoch { counter: 1, issuer: NodeId([0; 16]) };
        Command::Run(Box::new(Run { work: WorkId(work), job, epoch, part: PartId(0), task }))
    }

    fn steps(work: u64) -> Command {
        run(TILE, work, Task::Steps(task()))
    }

    fn task() -> TileWork {
        TileWork { from: 0, to: 1, halos_in: Vec::new(), halos_out: Vec::new(), stops: Vec::new() }
    }

    fn batch(work: u64) -> Command {
        run(MODEL, work, Task::Batch(Vec::new()))
    }

    /// All that waits, as it is done: steps, batches and rests by their number, the others by their first letter.
    fn drained(queue: &mut Queue) -> Vec<String> {
        let name = |work| match work {
            Work::Rest(run) => format!("rest {}", run.work.0),
            Work::Command(Command::Run(run)) => match run.task {
                Task::Steps(_) => format!("steps {}", run.work.0),
                Task::Batch(_) => format!("batch {}", run.work.0),
            },
            Work::Command(Command::Release { .. }) => "release".into(),
            Work::Command(Command::Drop { .. }) => "drop".into(),
            Work::Command(_) => "other".into(),
        };
        std::iter::from_fn(|| queue.next()).map(name).collect()
    }

    #[test]
    fn batches_and_steps_that_wait_alternate() {
        let mut queue = Queue::default();
        (1..4).for_each(|work| queue.push(steps(work)));
        (1..4).for_each(|work| queue.push(batch(work)));
        assert_eq!(drained(&mut queue), ["batch 1", "steps 1", "batch 2", "steps 2", "batch 3", "steps 3"]);
    }

    #[test]
    fn a_batch_waits_for_one_piece_of_a_run_at_most() {
        let mut queue = Queue::default();
        queue.push(steps(1));
        assert!(matches!(queue.next(), Some(Work::Command(Command::Run(_)))));
        // Three batches come while the run is made piece by piece.
        (1..4).for_each(|work| queue.push(batch(work)));
        let mut order = Vec::new();
        for _ in 0..3 {
            queue.push_rest(TileRun::new(WorkId(1), (TILE, PartId(0)), task(), &Tensors::default()));
            let passing = queue.next();
            assert!(matches!(&passing, Some(Work::Command(_))), "a batch passes the rest");
            assert!(matches!(queue.next(), Some(Work::Rest(_))), "then the rest goes on");
            order.extend(passing);
        }
        assert_eq!(order.len(), 3);
        assert!(queue.is_empty());
    }

    #[test]
    fn what_frees_a_stage_passes_with_its_batch() {
        let mut queue = Queue::default();
        let key = (MODEL, PartId(0));
        queue.push(steps(1));
        queue.push(Command::Release { key, request: RequestId(7) });
        queue.push(batch(1));
        queue.push(batch(2));
        assert_eq!(drained(&mut queue), ["release", "batch 1", "steps 1", "batch 2"]);
    }

    #[test]
    fn nothing_passes_what_both_kinds_of_parts_are_asked() {
        let mut queue = Queue::default();
        queue.push(steps(1));
        queue.push(Command::Drop { key: (TILE, PartId(0)) });
        queue.push(batch(1));
        assert_eq!(drained(&mut queue), ["steps 1", "drop", "batch 1"]);
    }
}
