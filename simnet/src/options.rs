//! Parameters of a simulated world: link quality, disk and driver times. They are printed with the seed of a failing run.
use crate::units;
use node_core::time::Duration;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// World parameters. Keys that a scenario omits are those of a quiet local network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Seed of all random streams.
    #[serde(skip)]
    pub seed: u64,
    /// One-way delay within a region.
    #[serde(with = "units")]
    pub latency: Duration,
    /// Additional one-way delay for each region between two hosts.
    #[serde(with = "units")]
    pub latency_per_region: Duration,
    /// Jitter: adds up to 3/4 of this to a delay, a quarter of it on average.
    #[serde(with = "units")]
    pub jitter: Duration,
    /// Lost datagrams, parts per million. On connections each loss costs a round trip instead.
    pub loss_ppm: u32,
    /// Duplicated datagrams, parts per million.
    pub duplicate_ppm: u32,
    /// Reordered datagrams, parts per million: later ones overtake them.
    pub reorder_ppm: u32,
    /// Bytes per second of one directed link.
    pub bandwidth: u64,
    /// Silence after which a connection breaks.
    #[serde(with = "units")]
    pub idle_timeout: Duration,
    /// Timeout of a connection attempt.
    #[serde(with = "units")]
    pub connect_timeout: Duration,
    /// Time from a write until it is synced.
    #[serde(with = "units")]
    pub sync: Duration,
    /// Share of the unsynced writes that a crash loses.
    pub unsynced_lost_percent: u32,
    /// Share of the unsynced writes that a crash tears. The rest is kept.
    pub unsynced_torn_percent: u32,
    /// Driver time per input.
    #[serde(with = "units")]
    pub handling: Duration,
    /// Time per signature or verification.
    #[serde(with = "units")]
    pub signature: Duration,
    /// Time per plan.
    #[serde(with = "units")]
    pub plan: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options::lan(0)
    }
}

impl Options {
    /// A quiet local network.
    pub fn lan(seed: u64) -> Self {
        Options {
            seed,
            latency: Duration::from_micros(200),
            latency_per_region: Duration::from_millis(20),
            jitter: Duration::from_micros(400),
            loss_ppm: 0,
            duplicate_ppm: 0,
            reorder_ppm: 0,
            bandwidth: 110_000_000,
            idle_timeout: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(2),
            sync: Duration::from_millis(2),
            handling: Duration::from_micros(2),
            unsynced_lost_percent: 100,
            unsynced_torn_percent: 0,
            signature: Duration::from_micros(100),
            plan: Duration::from_millis(1),
        }
    }

    /// A degraded local network drawn from the seed (swarm testing): each impairment is on or off, with a random strength.
    pub fn swarm(seed: u64) -> Self {
        let mut rng = chance(seed, "options");
        let mut some = |most: u32| if rng.random_bool(0.5) { rng.random_range(0..=most) } else { 0 };
        Options {
            loss_ppm: some(10_000),
            duplicate_ppm: some(10_000),
            reorder_ppm: some(50_000),
            jitter: Duration::from_micros(u64::from(some(5_000)) + 100),
            latency: Duration::from_micros(u64::from(some(2_000)) + 50),
            ..Options::lan(seed)
        }
    }
}

/// The random stream for one purpose. Streams are independent: another purpose does not shift them.
pub fn chance(seed: u64, purpose: &str) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let hash = blake3::hash(purpose.as_bytes());
    let mut stream = [0; 8];
    stream.copy_from_slice(&hash.as_bytes()[..8]);
    rng.set_stream(u64::from_le_bytes(stream));
    rng
}
