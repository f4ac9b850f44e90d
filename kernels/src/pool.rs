//! Compute threads that stay: they spin for a moment between pieces of work, then park.
//!
//! Work is a number of units and a closure that does any range of them; which worker does a range must not matter to the
//! result. Each worker begins with a share of its own and takes parts of it from the front, smaller ones as less is left;
//! who has done his own takes from the back of the others'. So a thread that the system runs late, or slowly because
//! somebody else needs the core, holds nobody up for longer than the part it has in hand, and one that does not come at
//! all is not waited for. If it does hold the others up, because it lost its core with a part in hand, it is left out for
//! a while; and so is one worker more whenever the caller himself is denied a core, because then there are more threads
//! than cores for them. The caller is worker 0, and with one worker there is no synchronisation at all.
use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Longer waits park: a spinning thread steals time from the network's threads and from other stages on the machine.
const SPIN: Duration = Duration::from_micros(50);
/// Looks at the clock once in so many turns of a spin.
const TURNS_PER_LOOK: u32 = 64;
/// A worker takes this fraction of what is left of a share: few takings, yet small parts towards the end.
const FRACTION: u32 = 4;
/// Who is waited for longer than this, and longer than twice what the caller had to do himself, has lost his core: the last
/// parts of a round are smaller.
const LATE: Duration = Duration::from_micros(200);
/// He is left out for so many times what he was waited for: trying again costs a ninth at most.
const REST: u32 = 8;
/// But not longer than this.
const REST_MAX: Duration = Duration::from_millis(200);
/// How often the system is asked whether the caller had a core when he wanted one: often enough to matter, and long enough
/// for threads that were woken on one core to be spread over all.
const WATCH: Duration = Duration::from_millis(50);
/// He had not if he waited for more than this fraction of the time.
const DENIED: u32 = 4;
/// How long one helper less is tried then: doubled, up to the longer, each time that trying with all ends like this.
const FEWER: [Duration; 2] = [Duration::from_millis(200), Duration::from_millis(3200)];

/// Threads that run closures together.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// When those that are left out may come back; `None`: there are none.
    rest_ends: Option<Instant>,
    /// When the system was last asked, and what it said (see [`denied`]).
    watched: (Instant, Duration),
    /// How long one helper less is tried next time.
    fewer: Duration,
}

struct Shared {
    /// Changes with each piece of work: what idle workers look at.
    round: Padded<AtomicUsize>,
    /// Grains (the smallest ranges of units) that are not done. Zero: no round is open.
    pending: Padded<AtomicUsize>,
    /// The caller first.
    workers: Vec<Padded<Worker>>,
    task: UnsafeCell<Option<Task>>,
    stop: AtomicBool,
    /// Who to wake when nothing is pending; set before he says that he sleeps.
    caller: Mutex<Option<Thread>>,
    /// The first panic of a worker's closure in this round.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Default)]
struct Worker {
    /// What is left of his share. Taking some keeps the round open until it is subtracted from `pending`.
    share: Share,
    /// Is parked, or about to be.
    sleeping: AtomicBool,
    /// Has parts in hand.
    busy: AtomicBool,
    /// Is left out. Written by the caller only.
    resting: AtomicBool,
}

/// A closure on all workers; the pointer is valid while its round is open.
#[derive(Clone, Copy)]
struct Task {
    run: Run<'static>,
    units: usize,
    grain: usize,
}

type Run<'a> = *const (dyn Fn(usize, Range<usize>) + Sync + 'a);

/// On its own pair of cache lines, so that a write to one does not disturb readers of the next.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

// SAFETY: `task` is written by the caller only while no round is open, and read only by who has taken grains of an open
// round: shares are filled (release) after the task is written, and taken from (acquire) before it is read.
unsafe impl Sync for Shared {}
// SAFETY: as above; the task is only a pointer to something `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// `workers` (at least 1) including the caller.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub(crate) fn new(workers: usize) -> std::io::Result<Self> {
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

    /// Workers including the caller.
    pub(crate) fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task(worker, range)` on all workers at the same time until each of `units` was in one range, and returns when
    /// all calls have. Ranges begin at multiples of `grain`; calls with one worker's number follow one another.
    ///
    /// # Panics
    /// If the task does, on any worker; all other ranges are done nevertheless.
    pub(crate) fn run(&mut self, units: usize, grain: usize, task: &(dyn Fn(usize, Range<usize>) + Sync)) {
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

    /// Everybody beside the caller who is not left out, with his number.
    fn helpers(&self) -> impl Iterator<Item = (usize, &Worker)> {
        let all = self.shared.workers.iter().map(|worker| &worker.0).enumerate();
        all.skip(1).filter(|(_, worker)| !worker.resting.load(Ordering::Relaxed))
    }

    /// One piece of work by the caller and the first `helpers`.
    fn round(
        &mut self,
        helpers: usize,
        start: Instant,
        units: usize,
        grain: usize,
        task: &(dyn Fn(usize, Range<usize>) + Sync),
    ) {
        let Shared { round, pending, workers, .. } = &*self.shared;
        // SAFETY: no round is open, so nobody reads this; the lifetime is erased only until the end of this function, which
        // does not return or unwind before all that was taken is done.
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

    /// Leaves out one helper more if the caller is denied a core.
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
            // A worker only ends by `stop`; its closures' panics are caught.
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
            // Rounds that went by meanwhile needed nobody.
            seen = self.round.0.load(Ordering::SeqCst);
            self.work(number);
        }
    }

    /// Does what there is to take, then says so.
    fn work(&self, number: usize) {
        let worker = &self.workers[number].0;
        let mut done = 0;
        while let Some(part) = self.take(number) {
            worker.busy.store(true, Ordering::Relaxed);
            // SAFETY: part of a round is in hand, which is open until the subtraction below; so the task is there.
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
        // All that is in hand is of one round: the next cannot open before this.
        if done > 0
            && self.pending.0.fetch_sub(done, Ordering::SeqCst) == done
            && self.workers[0].0.sleeping.load(Ordering::SeqCst)
            && let Some(caller) = &*lock(&self.caller)
        {
            caller.unpark();
        }
    }

    /// The next part for a worker: of its own share, else of the nearest that has something left.
    fn take(&self, number: usize) -> Option<Range<u32>> {
        let mut others = (number + 1..number + self.workers.len()).map(|other| other % self.workers.len());
        let own = self.workers[number].0.share.take(End::Front);
        own.or_else(|| others.find_map(|other| self.workers[other].0.share.take(End::Back)))
    }
}

/// A range of grains from which several take: `start` in the upper half of the word, `end` in the lower.
///
/// That a word may come back in a later round is harmless: whoever takes a part owns it by the word that he replaced,
/// whatever he saw before.
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

/// For how long this thread was ready to run and got no core, since it began; zero where the system does not say.
fn denied() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split_whitespace().nth(1).and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// Whether `ready` came true within [`SPIN`].
fn spin(ready: impl Fn() -> bool) -> bool {
    let mut began: Option<Instant> = None;
    loop {
        for _ in 0..TURNS_PER_LOOK {
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

/// Parks until `ready`. Whoever makes it ready looks at `sleeps` afterwards and unparks.
fn sleep(sleeps: &AtomicBool, ready: impl Fn() -> bool) {
    sleeps.store(true, Ordering::SeqCst);
    while !ready() {
        std::thread::park();
    }
    sleeps.store(false, Ordering::SeqCst);
}

/// No lock here is held while anything can panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each unit was done.
    fn counts(pool: &mut Pool, units: usize, grain: usize) -> Vec<usize> {
        let counts: Vec<_> = (0..units).map(|_| AtomicUsize::new(0)).collect();
        pool.run(units, grain, &|_, range| {
            assert!(range.start.is_multiple_of(grain) && !range.is_empty());
            counts[range].iter().for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_unit_is_done_once() {
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
    fn rounds_follow_one_another_also_after_parking() {
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
    fn a_worker_that_is_held_up_leaves_its_share_to_the_others() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..50 {
            let done = AtomicUsize::new(0);
            pool.run(300, 1, &|_, range| {
                if range.contains(&150) {
                    // Nobody comes to help with this part, and everything else is done by others meanwhile.
                    while done.load(Ordering::SeqCst) + range.len() < 300 {
                        std::thread::yield_now();
                    }
                }
                done.fetch_add(range.len(), Ordering::SeqCst);
            });
        }
    }

    #[test]
    fn one_workers_calls_do_not_overlap() {
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
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3).unwrap();
        for guilty in 0..30 {
            let run = || pool.run(30, 1, &|_, range| assert!(!range.contains(&guilty), "unit {guilty}"));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a panic");
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("unit {guilty}")));
            assert_eq!(counts(&mut pool, 30, 1), [1; 30]);
        }
    }
}
