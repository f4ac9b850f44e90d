//! Chooses the next command: in arrival order, except that commands of stages overtake tile steps.
//!
//! A client waits for each batch of a model, while the steps of a tile may take up to a second if they are not split.
//! So stage commands overtake queued tile steps. Steps that a batch has overtaken run next, so that neither starves.
use super::command::Command;
use super::tiles::TileRun;
use node_core::work::Task;
use std::collections::VecDeque;

/// An item of the queue.
pub(super) enum Work {
    /// A command.
    Command(Command),
    /// The rest of a tile's run, which let a batch pass.
    Rest(Box<TileRun>),
}

/// The queue of the device thread.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Work>,
    /// A batch has overtaken the steps at the front.
    passed: bool,
}

impl Queue {
    /// Whether the queue is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Appends a command.
    pub(super) fn push(&mut self, command: Command) {
        self.waiting.push_back(Work::Command(command));
    }

    /// Requeues an incomplete run before all other work.
    pub(super) fn push_rest(&mut self, run: TileRun) {
        self.waiting.push_front(Work::Rest(Box::new(run)));
    }

    /// Takes the next item. Commands of one part keep their order: only tile steps are overtaken, and only by commands
    /// that stages alone receive.
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
    /// Another command that only stages receive.
    OfStage,
    /// A command for both kinds of part, or for tiles.
    Other,
}

fn kind(work: &Work) -> Kind {
    match work {
        Work::Rest(_) => Kind::Steps,
        Work::Command(Command::Run(run)) => match run.task {
            Task::Steps(_) => Kind::Steps,
            Task::Batch(_) => Kind::Batch,
        },
        Work::Command(Command::Release { .. } | Command::Fork { .. } | Command::Challenge { .. }) => Kind::OfStage,
        Work::Command(
            Command::Load { .. }
            | Command::Cells { .. }
            | Command::CellsEnd { .. }
            | Command::Restore { .. }
            | Command::Keep { .. }
            | Command::Drop { .. }
            | Command::Vacate { .. }
            | Command::Unload { .. }
            | Command::MarkReached,
        ) => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::TensorStore;
    use node_core::id::{Epoch, JobId, NodeId, PartId, RequestId, WorkId};
    use node_core::work::Run;
    use node_core::work::steps::TileWork;

    const TILE: JobId = JobId(1);
    const MODEL: JobId = JobId(2);

    fn run(job: JobId, work: u64, task: Task) -> Command {
        let epoch = Epoch { counter: 1, issuer: NodeId([0; 16]) };
        Command::Run(Box::new(Run { work: WorkId(work), job, epoch, part: PartId(0), device: 0, task }))
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

    /// The queue in execution order: steps, batches and rests by number, other commands by name.
    fn drained(queue: &mut Queue) -> Vec<String> {
        let name = |work| match work {
            Work::Rest(run) => format!("rest {}", run.work.0),
            Work::Command(Command::Run(run)) => match run.task {
                Task::Steps(_) => format!("steps {}", run.work.0),
                Task::Batch(_) => format!("batch {}", run.work.0),
            },
            Work::Command(Command::Release { .. }) => "release".into(),
            Work::Command(Command::Fork { .. }) => "fork".into(),
            Work::Command(Command::Drop { .. }) => "drop".into(),
            Work::Command(_) => "other".into(),
        };
        std::iter::from_fn(|| queue.next()).map(name).collect()
    }

    #[test]
    fn queued_batches_and_steps_alternate() {
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
        // Three batches arrive while the run is computed piece by piece.
        (1..4).for_each(|work| queue.push(batch(work)));
        let mut order = Vec::new();
        for _ in 0..3 {
            queue.push_rest(TileRun::new(WorkId(1), (TILE, PartId(0)), task(), &TensorStore::default()));
            let passing = queue.next();
            assert!(matches!(&passing, Some(Work::Command(_))), "a batch passes the rest");
            assert!(matches!(queue.next(), Some(Work::Rest(_))), "then the rest continues");
            order.extend(passing);
        }
        assert_eq!(order.len(), 3);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_release_overtakes_steps_like_a_batch() {
        let mut queue = Queue::default();
        let key = (MODEL, PartId(0));
        queue.push(steps(1));
        queue.push(Command::Release { key, request: RequestId(7) });
        queue.push(batch(1));
        queue.push(batch(2));
        assert_eq!(drained(&mut queue), ["release", "batch 1", "steps 1", "batch 2"]);
    }

    #[test]
    fn nothing_overtakes_commands_for_both_kinds_of_part() {
        let mut queue = Queue::default();
        queue.push(steps(1));
        queue.push(Command::Drop { key: (TILE, PartId(0)) });
        queue.push(batch(1));
        assert_eq!(drained(&mut queue), ["steps 1", "drop", "batch 1"]);
    }
}
