//! Compute threads that stay: they spin for a moment between pieces of work, then park.
//!
//! A piece of work is one closure called once per worker with the worker's number; what each does follows from the number
//! alone (see [`share`]), so results never depend on timing. The caller is worker 0, and with one worker there is no
//! synchronisation at all.
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Longer waits park: a spinning thread steals time from the network's threads and from other stages on the machine.
const SPIN: Duration = Duration::from_micros(50);
/// Looks at the clock once in so many turns of a spin.
const TURNS_PER_LOOK: u32 = 64;

/// Threads that run closures together.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Rises by one with each piece of work; its task is valid from then until `pending` is zero.
    round: Padded<AtomicUsize>,
    /// Workers that have not finished the round.
    pending: Padded<AtomicUsize>,
    task: UnsafeCell<Option<Task>>,
    stop: AtomicBool,
    /// A worker's closure panicked in this round.
    panicked: AtomicBool,
    sleeping: Vec<Padded<AtomicBool>>,
    caller_sleeps: Padded<AtomicBool>,
    caller: UnsafeCell<Option<Thread>>,
}

type Task = *const (dyn Fn(usize) + Sync);

/// On its own pair of cache lines, so that a write to one does not disturb readers of the next.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

// SAFETY: `task` and `caller` are written by the caller only while no round is open (`pending` is zero), and read by
// workers only within a round, which begins with a release store of `round` and ends with release decrements of `pending`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the task is only a pointer to something `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// `workers` (at least 1) including the caller.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub(crate) fn new(workers: usize) -> std::io::Result<Self> {
        let helpers = workers.max(1) - 1;
        let shared = Arc::new(Shared {
            round: Padded::default(),
            pending: Padded::default(),
            task: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            sleeping: (0..helpers).map(|_| Padded::default()).collect(),
            caller_sleeps: Padded::default(),
            caller: UnsafeCell::new(None),
        });
        let mut pool = Self { shared, threads: Vec::with_capacity(helpers) };
        for helper in 0..helpers {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new().name(format!("compute-{}", helper + 1));
            pool.threads.push(thread.spawn(move || shared.work(helper))?);
        }
        Ok(pool)
    }

    /// Workers including the caller.
    pub(crate) fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task` with every worker's number, at the same time, and returns when all are done.
    ///
    /// # Panics
    /// If the task does, on any worker.
    pub(crate) fn run(&mut self, task: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() {
            return task(0);
        }
        let shared = &*self.shared;
        // SAFETY: no round is open, so no worker reads these; the lifetime is erased only until the end of this function,
        // which does not return or unwind before every worker is done with the task.
        unsafe {
            *shared.task.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Task>(task));
            *shared.caller.get() = Some(std::thread::current());
        }
        shared.pending.0.store(self.threads.len(), Ordering::Relaxed);
        shared.round.0.fetch_add(1, Ordering::SeqCst);
        for (sleeping, thread) in shared.sleeping.iter().zip(&self.threads) {
            if sleeping.0.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        wait(&shared.caller_sleeps.0, || shared.pending.0.load(Ordering::SeqCst) == 0);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a compute thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.round.0.fetch_add(1, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A worker only ends by `stop`; its closures' panics are caught.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self, helper: usize) {
        let mut seen = 0;
        loop {
            wait(&self.sleeping[helper].0, || self.round.0.load(Ordering::SeqCst) != seen);
            seen += 1;
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: a round is open (see `Sync`), so the task is there and outlives it.
            let task = unsafe { &*(*self.task.get()).expect("a round has a task") };
            if catch_unwind(AssertUnwindSafe(|| task(helper + 1))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            // SAFETY: the caller writes this only between rounds, and the round is open until the decrement below.
            let caller = unsafe { (*self.caller.get()).clone() };
            if self.pending.0.fetch_sub(1, Ordering::SeqCst) == 1 && self.caller_sleeps.0.load(Ordering::SeqCst) {
                caller.expect("a round has a caller").unpark();
            }
        }
    }
}

/// Spins, then parks, until `ready`. Whoever makes it ready looks at `sleeps` afterwards and unparks.
fn wait(sleeps: &AtomicBool, ready: impl Fn() -> bool) {
    let mut spun: Option<Instant> = None;
    loop {
        for _ in 0..TURNS_PER_LOOK {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        if spun.get_or_insert_with(Instant::now).elapsed() > SPIN {
            break;
        }
    }
    sleeps.store(true, Ordering::SeqCst);
    while !ready() {
        std::thread::park();
    }
    sleeps.store(false, Ordering::SeqCst);
}

/// The part of `units` that a worker does: contiguous, as even as whole multiples of `grain` allow.
pub(crate) fn share(units: usize, grain: usize, worker: usize, workers: usize) -> Range<usize> {
    let grains = units.div_ceil(grain);
    let bound = |w: usize| (grains * w / workers * grain).min(units);
    bound(worker)..bound(worker + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        for units in [0, 1, 15, 16, 17, 100, 1536, 49152] {
            for workers in 1..9 {
                let mut next = 0;
                for worker in 0..workers {
                    let share = share(units, 16, worker, workers);
                    assert_eq!(share.start, next);
                    next = share.end;
                }
                assert_eq!(next, units);
            }
        }
    }

    #[test]
    fn every_worker_runs_every_round_also_after_parking() {
        for workers in 1..5 {
            let mut pool = Pool::new(workers).unwrap();
            let counts: Vec<_> = (0..workers).map(|_| AtomicUsize::new(0)).collect();
            for round in 0..2000 {
                if round % 500 == 0 {
                    std::thread::sleep(SPIN * 20);
                }
                pool.run(&|worker| {
                    counts[worker].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == round + 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3).unwrap();
        for guilty in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(&|worker| assert_ne!(worker, guilty))));
            assert!(result.is_err());
            pool.run(&|_| {});
        }
    }
}
