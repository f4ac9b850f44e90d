//! Fork-join thread pool with work stealing, whose idle workers spin briefly before they park.
//!
//! A round of work is a number of units and a closure over ranges of them; the result must not depend on which worker
//! runs a range. Each worker starts with its own share and takes parts from the front, smaller ones as less is left,
//! then steals from the back of other shares. A worker that the OS runs late or slowly delays a round by at most the
//! part it has in hand, and one that never runs is not waited for. A worker that does delay a round, because it was
//! descheduled with a part in hand, is benched for a while. If the caller itself is starved of CPU there are more
//! threads than free cores, and one more worker is benched. The caller is worker 0; with one worker there is no
//! synchronisation.
use parking_lot::{Mutex, MutexGuard};
use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Maximum spin before parking: a spinning thread takes CPU time from network threads and other stages on the machine.
const SPIN: Duration = Duration::from_micros(50);
/// Spin iterations per clock read.
const SPINS_PER_CLOCK_READ: u32 = 64;
/// A worker takes 1 / `FRACTION` of what is left of a share: few atomic operations, yet small parts towards the end.
const FRACTION: u32 = 4;
/// A worker that is waited for longer than this, and longer than twice the caller's own share took, was descheduled:
/// the last parts of a round are shorter.
const LATE: Duration = Duration::from_micros(200);
/// A descheduled worker is benched for this multiple of the wait, so retrying costs at most 1/9 of the time.
const REST: u32 = 8;
/// Maximum time on the bench after a wait.
const REST_MAX: Duration = Duration::from_millis(200);
/// Interval between checks whether the caller is starved of CPU: often enough to react, and long enough for the OS to
/// spread threads woken on one core over all cores.
const WATCH: Duration = Duration::from_millis(50);
/// The caller is starved if it was runnable without a core for more than 1 / `DENIED` of the interval.
const DENIED: u32 = 4;
/// Initial and maximum time that one more helper is benched if the caller is starved. Doubles each time the caller is
/// starved again, and resets after an interval without starvation and with all helpers.
const FEWER: [Duration; 2] = [Duration::from_millis(200), Duration::from_millis(3200)];

/// A pool of worker threads, owned by the caller.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// When benched workers return; `None`: no worker is benched.
    rest_ends: Option<Instant>,
    /// Time of the last starvation check, and the value of [`denied`] then.
    watched: (Instant, Duration),
    /// How long a helper is benched at the next starvation.
    fewer: Duration,
}

struct Shared {
    /// Changes with each round; idle workers poll it.
    round: Padded<AtomicUsize>,
    /// Unfinished grains (the smallest ranges of units). Zero: no round is open.
    pending: Padded<AtomicUsize>,
    /// Worker 0 is the caller.
    workers: Vec<Padded<Worker>>,
    task: UnsafeCell<Option<Task>>,
    stop: AtomicBool,
    /// The thread to unpark when nothing is pending; set before it sets `sleeping`.
    caller: Mutex<Option<Thread>>,
    /// The first panic of a worker's closure in this round.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Default)]
struct Worker {
    /// The rest of its share. A taken part keeps the round open until it is subtracted from `pending`.
    share: Share,
    /// Parked, or about to park.
    sleeping: AtomicBool,
    /// Has a part in hand.
    busy: AtomicBool,
    /// Benched. Written by the caller only.
    resting: AtomicBool,
}

/// The closure of a round; the pointer is valid while the round is open.
#[derive(Clone, Copy)]
struct Task {
    run: Run<'static>,
    units: usize,
    grain: usize,
}

type Run<'a> = *const (dyn Fn(usize, Range<usize>) + Sync + 'a);

/// A value on its own pair of cache lines, to prevent false sharing.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

// SAFETY: `task` is written by the caller only while no round is open, and read only by workers that took grains of an
// open round: shares are filled (release) after the task is written, and taken from (acquire) before it is read.
unsafe impl Sync for Shared {}
// SAFETY: as above; the task is only a pointer to something `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `workers` (at least 1) including the caller.
    ///
    /// # Errors
    /// The operating system cannot start a thread.
    pub fn new(workers: usize) -> std::io::Result<Self> {
        let workers = workers.max(1);
        let shared = Arc::new(Shared {
            round: Padded::default(),
            pending: Padded::default(),
            workers: (0..workers).map(|_| Padded::default()).collect(),
            task: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let mut pool = Self {
            shared,
            threads: Vec::with_capacity(workers - 1),
            rest_ends: None,
            watched: (Instant::now(), denied()),
            fewer: FEWER[0],
        };
        for worker in 1..workers {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new().name(format!("compute-{worker}"));
            pool.threads.push(thread.spawn(move || shared.help(worker))?);
        }
        Ok(pool)
    }

    /// Number of workers including the caller.
    pub fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `task(worker, range)` on all workers in parallel, with disjoint ranges that cover `units`, and returns when
    /// all calls have returned. Ranges begin at multiples of `grain`; calls with the same worker number do not overlap.
    ///
    /// # Panics
    /// If the task panics on any worker; all other ranges still run.
    pub fn run(&mut self, units: usize, grain: usize, task: &(dyn Fn(usize, Range<usize>) + Sync)) {
        let grains = units.div_ceil(grain);
        if grains > 1 && !self.threads.is_empty() {
            let start = Instant::now();
            self.end_rests(start);
            self.watch(start);
            let helpers = self.helpers().count().min(grains - 1);
            if helpers > 0 {
                return self.round(helpers, start, units, grain, task);
            }
        }
        if units > 0 {
            task(0, 0..units);
        }
    }

    /// The workers that are neither the caller nor benched, with their numbers.
    fn helpers(&self) -> impl Iterator<Item = (usize, &Worker)> {
        let all = self.shared.workers.iter().map(|worker| &worker.0).enumerate();
        all.skip(1).filter(|(_, worker)| !worker.resting.load(Ordering::Relaxed))
    }

    /// Runs one round on the caller and the first `helpers` helpers.
    fn round(
        &mut self,
        helpers: usize,
        start: Instant,
        units: usize,
        grain: usize,
        task: &(dyn Fn(usize, Range<usize>) + Sync),
    ) {
        let Shared { round, pending, workers, .. } = &*self.shared;
        // SAFETY: no round is open, so no worker reads this; the lifetime is erased only until the end of this
        // function, which does not return or unwind before all taken parts are done.
        unsafe {
            let run = std::mem::transmute::<Run<'_>, Run<'static>>(task);
            *self.shared.task.get() = Some(Task { run, units, grain });
        }
        let grains = units.div_ceil(grain);
        pending.0.store(grains, Ordering::Relaxed);
        let bound = |i: usize| u32::try_from(grains * i / (helpers + 1)).expect("fewer than 2^32 grains");
        let takers = std::iter::once(&workers[0].0).chain(self.helpers().map(|(_, worker)| worker));
        takers.take(helpers + 1).enumerate().for_each(|(i, worker)| worker.share.fill(bound(i)..bound(i + 1)));
        round.0.fetch_add(1, Ordering::SeqCst);
        for (number, worker) in self.helpers().take(helpers) {
            if worker.sleeping.load(Ordering::SeqCst) {
                self.threads[number - 1].thread().unpark();
            }
        }
        self.shared.work(0);
        let finished = Instant::now();
        let done = || pending.0.load(Ordering::SeqCst) == 0;
        if !spin(done) {
            let late: Vec<&Worker> = workers[1..]
                .iter()
                .map(|worker| &worker.0)
                .filter(|worker| worker.busy.load(Ordering::Relaxed))
                .collect();
            *lock(&self.shared.caller) = Some(std::thread::current());
            sleep(&workers[0].0.sleeping, done);
            let waited = finished.elapsed();
            if waited > LATE && waited > 2 * (finished - start) {
                late.iter().for_each(|worker| worker.resting.store(true, Ordering::Relaxed));
                self.rest_ends = Some(Instant::now() + (REST * waited).min(REST_MAX));
            }
        }
        let panic = lock(&self.shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Benches one more helper if the caller is starved of CPU.
    fn watch(&mut self, now: Instant) {
        let (before, denied_before) = self.watched;
        if now - before < WATCH {
            return;
        }
        self.watched = (now, denied());
        if self.watched.1.saturating_sub(denied_before) <= (now - before) / DENIED {
            if self.rest_ends.is_none() {
                self.fewer = FEWER[0];
            }
        } else if let Some((_, last)) = self.helpers().last() {
            last.resting.store(true, Ordering::Relaxed);
            self.rest_ends = Some(now + self.fewer);
            self.fewer = (2 * self.fewer).min(FEWER[1]);
        }
    }

    fn end_rests(&mut self, now: Instant) {
        if self.rest_ends.is_some_and(|end| end <= now) {
            self.rest_ends = None;
            self.watched = (now, denied());
            self.shared.workers.iter().for_each(|worker| worker.0.resting.store(false, Ordering::Relaxed));
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A worker ends only on `stop`; panics of closures are caught.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn help(&self, number: usize) {
        let worker = &self.workers[number].0;
        let mut seen = 0;
        loop {
            let stopped = || self.stop.load(Ordering::SeqCst);
            let called = || {
                let new = self.round.0.load(Ordering::SeqCst) != seen && !worker.resting.load(Ordering::Relaxed);
                new || stopped()
            };
            if !spin(called) {
                sleep(&worker.sleeping, called);
            }
            if stopped() {
                return;
            }
            // Rounds missed in the meantime completed without this worker.
            seen = self.round.0.load(Ordering::SeqCst);
            self.work(number);
        }
    }

    /// Runs parts until none is left to take, then subtracts them from `pending`.
    fn work(&self, number: usize) {
        let worker = &self.workers[number].0;
        let mut done = 0;
        while let Some(part) = self.take(number) {
            worker.busy.store(true, Ordering::Relaxed);
            // SAFETY: the part in hand keeps its round open until the subtraction below, so the task is set and valid.
            let result = unsafe {
                let Task { run, units, grain } = (*self.task.get()).expect("a round has a task");
                let range = part.start as usize * grain..units.min(part.end as usize * grain);
                catch_unwind(AssertUnwindSafe(|| (*run)(number, range)))
            };
            if let Err(panic) = result {
                lock(&self.panic).get_or_insert(panic);
            }
            done += part.len();
        }
        worker.busy.store(false, Ordering::Relaxed);
        // All parts in `done` belong to one round: the next cannot open before this subtraction.
        if done > 0
            && self.pending.0.fetch_sub(done, Ordering::SeqCst) == done
            && self.workers[0].0.sleeping.load(Ordering::SeqCst)
            && let Some(caller) = &*lock(&self.caller)
        {
            caller.unpark();
        }
    }

    /// The next part for a worker: from its own share, else stolen from the next share that is not empty.
    fn take(&self, number: usize) -> Option<Range<u32>> {
        let mut others = (number + 1..number + self.workers.len()).map(|other| other % self.workers.len());
        let own = self.workers[number].0.share.take(End::Front);
        own.or_else(|| others.find_map(|other| self.workers[other].0.share.take(End::Back)))
    }
}

/// A range of grains that several workers take from: `start` in the upper half of the word, `end` in the lower.
///
/// ABA is harmless: a successful compare-exchange owns the part encoded in the word it replaced, whatever was read
/// before.
#[derive(Default)]
struct Share(AtomicU64);

#[derive(Clone, Copy)]
enum End {
    Front,
    Back,
}

impl Share {
    fn fill(&self, grains: Range<u32>) {
        self.0.store(pack(&grains), Ordering::Release);
    }

    fn take(&self, end: End) -> Option<Range<u32>> {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let left = (word >> 32) as u32..word as u32;
            if left.is_empty() {
                return None;
            }
            let count = (left.end - left.start).div_ceil(FRACTION);
            let (part, rest) = match end {
                End::Front => (left.start..left.start + count, left.start + count..left.end),
                End::Back => (left.end - count..left.end, left.start..left.end - count),
            };
            match self.0.compare_exchange_weak(word, pack(&rest), Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(part),
                Err(found) => word = found,
            }
        }
    }
}

fn pack(grains: &Range<u32>) -> u64 {
    u64::from(grains.start) << 32 | u64::from(grains.end)
}

/// Total time this thread was runnable without a core (run-queue delay); zero if the system does not report it.
fn denied() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split_whitespace().nth(1).and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// Spins until `ready`, for at most [`SPIN`]; returns whether it became ready.
fn spin(ready: impl Fn() -> bool) -> bool {
    let mut began: Option<Instant> = None;
    loop {
        for _ in 0..SPINS_PER_CLOCK_READ {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if began.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return false;
        }
    }
}

/// Parks until `ready`. The thread that makes it ready must check `sleeps` afterwards and unpark.
fn sleep(sleeps: &AtomicBool, ready: impl Fn() -> bool) {
    sleeps.store(true, Ordering::SeqCst);
    while !ready() {
        std::thread::park();
    }
    sleeps.store(false, Ordering::SeqCst);
}

/// Locks, ignoring poison: no lock here is held while code can panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each unit ran.
    fn counts(pool: &mut Pool, units: usize, grain: usize) -> Vec<usize> {
        let counts: Vec<_> = (0..units).map(|_| AtomicUsize::new(0)).collect();
        pool.run(units, grain, &|_, range| {
            assert!(range.start.is_multiple_of(grain) && !range.is_empty());
            counts[range].iter().for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_unit_runs_once() {
        for workers in 1..9 {
            let mut pool = Pool::new(workers).unwrap();
            for units in [0, 1, 15, 16, 17, 100, 1536, 49152] {
                for grain in [1, 16] {
                    assert_eq!(counts(&mut pool, units, grain), vec![1; units], "{workers} workers, grain {grain}");
                }
            }
        }
    }

    #[test]
    fn rounds_work_after_workers_parked() {
        for workers in 1..5 {
            let mut pool = Pool::new(workers).unwrap();
            for round in 0..2000 {
                if round % 500 == 0 {
                    std::thread::sleep(SPIN * 20);
                }
                assert_eq!(counts(&mut pool, 7, 1), [1; 7]);
            }
        }
    }

    #[test]
    fn the_share_of_a_delayed_worker_is_stolen() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..50 {
            let done = AtomicUsize::new(0);
            pool.run(300, 1, &|_, range| {
                if range.contains(&150) {
                    // This part cannot be stolen; other workers run everything else in the meantime.
                    while done.load(Ordering::SeqCst) + range.len() < 300 {
                        std::thread::yield_now();
                    }
                }
                done.fetch_add(range.len(), Ordering::SeqCst);
            });
        }
    }

    #[test]
    fn calls_of_one_worker_do_not_overlap() {
        let mut pool = Pool::new(4).unwrap();
        let busy: Vec<_> = (0..4).map(|_| AtomicBool::new(false)).collect();
        for _ in 0..500 {
            pool.run(40, 1, &|worker, _| {
                assert!(!busy[worker].swap(true, Ordering::SeqCst));
                busy[worker].store(false, Ordering::SeqCst);
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
        let mut pool = Pool::new(3).unwrap();
        for guilty in 0..30 {
            let run = || pool.run(30, 1, &|_, range| assert!(!range.contains(&guilty), "unit {guilty}"));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a panic");
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("unit {guilty}")));
            assert_eq!(counts(&mut pool, 30, 1), [1; 30]);
        }
    }
}
