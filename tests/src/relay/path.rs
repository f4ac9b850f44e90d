//! The effect of one direction between two nodes on a datagram. Pure: the caller supplies clock and randomness.
use std::time::{Duration, Instant};

/// Properties of a direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Delay of every datagram.
    pub latency: Duration,
    /// Additional delay, uniform between zero and this. It never reorders datagrams.
    pub jitter: Duration,
    /// Fraction of datagrams lost, 0 to 1.
    pub loss: f64,
    /// Bandwidth; `None` is unlimited.
    pub bytes_per_second: Option<u64>,
    /// Queue in front of a bandwidth limit, in bytes; datagrams beyond it are dropped.
    pub queue_bytes: u64,
}

impl Link {
    /// An ideal link.
    pub const PLAIN: Self = Self {
        latency: Duration::ZERO,
        jitter: Duration::ZERO,
        loss: 0.0,
        bytes_per_second: None,
        queue_bytes: QUEUE_BYTES,
    };
}

/// Typical of home routers: a third of a second at 6 Mbit/s.
const QUEUE_BYTES: u64 = 256 << 10;

/// Traffic counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Datagrams forwarded.
    pub datagrams: u64,
    /// Payload bytes forwarded.
    pub bytes: u64,
    /// Datagrams dropped at random.
    pub lost: u64,
    /// Datagrams dropped because the queue was full.
    pub overflowed: u64,
    /// Datagrams dropped because the link was cut.
    pub cut: u64,
}

impl std::ops::Add for Passed {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            datagrams: self.datagrams + other.datagrams,
            bytes: self.bytes + other.bytes,
            lost: self.lost + other.lost,
            overflowed: self.overflowed + other.overflowed,
            cut: self.cut + other.cut,
        }
    }
}

/// One direction between two nodes.
#[derive(Clone, Debug)]
pub(super) struct Path {
    pub(super) link: Link,
    pub(super) cut: bool,
    random: Random,
    /// When the last accepted byte leaves the bandwidth-limited queue.
    free_at: Option<Instant>,
    /// Arrival of the last accepted datagram: the next one arrives no earlier.
    last_due: Option<Instant>,
}

/// Outcome for a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Arrives(Instant),
    Lost,
    Overflowed,
    Cut,
}

impl Path {
    pub(super) fn new(link: Link, seed: u64) -> Self {
        Self { link, cut: false, random: Random(seed), free_at: None, last_due: None }
    }

    /// Accepts or drops a datagram of `bytes` at `now`.
    pub(super) fn take(&mut self, now: Instant, bytes: usize) -> Fate {
        // Both numbers are drawn for every datagram, so that losses depend only on the seed and the datagram's index.
        let (luck, delay) = (self.random.fraction(), self.random.fraction());
        if self.cut {
            return Fate::Cut;
        }
        if luck < self.link.loss {
            return Fate::Lost;
        }
        let mut leaves = now;
        if let Some(rate) = self.link.bytes_per_second.map(|rate| rate.max(1) as f64) {
            let begins = self.free_at.map_or(now, |free_at| free_at.max(now));
            let waiting = (begins - now).as_secs_f64() * rate;
            if waiting + bytes as f64 > self.link.queue_bytes as f64 {
                return Fate::Overflowed;
            }
            leaves = begins + Duration::from_secs_f64(bytes as f64 / rate);
            self.free_at = Some(leaves);
        }
        let due = leaves + self.link.latency + self.link.jitter.mul_f64(delay);
        let due = self.last_due.map_or(due, |last| last.max(due));
        self.last_due = Some(due);
        Fate::Arrives(due)
    }
}

/// SplitMix64: the same seed gives the same numbers on every platform.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// A number in `[0, 1)`.
    pub fn fraction(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn latency_and_jitter_delay_within_their_bounds_and_keep_the_order() {
        let start = Instant::now();
        let mut path = Path::new(Link { latency: 20 * MS, jitter: 10 * MS, ..Link::PLAIN }, 7);
        let mut last = start;
        for i in 0..1000 {
            let now = start + MS * i / 4;
            let Fate::Arrives(due) = path.take(now, 100) else { panic!("no loss was configured") };
            assert!(due >= last && due >= now + 20 * MS && due <= now + 30 * MS);
            last = due;
        }
    }

    #[test]
    fn the_seed_determines_the_lost_datagrams() {
        let now = Instant::now();
        let lost = |seed| {
            let mut path = Path::new(Link { loss: 0.02, ..Link::PLAIN }, seed);
            (0..10_000).filter(|_| path.take(now, 100) == Fate::Lost).collect::<Vec<_>>()
        };
        assert!((150..250).contains(&lost(1).len()), "{} of 10,000 at 2 %", lost(1).len());
        assert_eq!(lost(1), lost(1));
        assert_ne!(lost(1), lost(2));
    }

    #[test]
    fn a_narrow_link_carries_its_rate_and_its_queue_is_bounded() {
        let start = Instant::now();
        let link = Link { bytes_per_second: Some(125_000), queue_bytes: 10_000, ..Link::PLAIN };
        let mut path = Path::new(link, 7);
        // 1,000 bytes take 8 ms; ten datagrams are queued, the rest are dropped.
        let fates: Vec<Fate> = (0..15).map(|_| path.take(start, 1000)).collect();
        let expected = |i: u32| if i < 10 { Fate::Arrives(start + 8 * MS * (i + 1)) } else { Fate::Overflowed };
        assert_eq!(fates, (0..15).map(expected).collect::<Vec<_>>());
        // Half of the queue has drained, so half of it can be filled again.
        let later = start + 40 * MS;
        let room = (0..15).filter(|_| path.take(later, 1000) != Fate::Overflowed).count();
        assert_eq!(room, 5);
        let idle = start + Duration::from_secs(1);
        assert_eq!(path.take(idle, 1000), Fate::Arrives(idle + 8 * MS), "the queue is empty");
    }

    #[test]
    fn a_cut_link_drops_everything_and_does_not_shift_the_random_sequence() {
        let now = Instant::now();
        let run = |cut: std::ops::Range<u32>| {
            let mut path = Path::new(Link { loss: 0.5, ..Link::PLAIN }, 3);
            (0..100)
                .map(|i| {
                    path.cut = cut.contains(&i);
                    path.take(now, 10)
                })
                .collect::<Vec<_>>()
        };
        let (whole, cut) = (run(0..0), run(20..40));
        assert!(cut[20..40].iter().all(|f| *f == Fate::Cut));
        assert_eq!((&whole[..20], &whole[40..]), (&cut[..20], &cut[40..]));
    }
}
