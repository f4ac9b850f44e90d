//! What kind of world it is: every figure that chance is allowed to use, printed with the seed of a failing run.
use crate::units;
use node_core::time::Duration;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// A world's figures. In a scenario those that are left out are a quiet local network's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Root of all chance.
    #[serde(skip)]
    pub seed: u64,
    /// One-way delay within a region.
    #[serde(with = "units")]
    pub latency: Duration,
    /// More of it for each region between two hosts.
    #[serde(with = "units")]
    pub latency_per_region: Duration,
    /// Most that chance adds to one delay (mean: a quarter of it).
    #[serde(with = "units")]
    pub jitter: Duration,
    /// Datagrams lost, parts per million. On reliable channels each loss costs a round trip instead.
    pub loss_ppm: u32,
    /// Datagrams that arrive twice.
    pub duplicate_ppm: u32,
    /// Datagrams that are overtaken by later ones.
    pub reorder_ppm: u32,
    /// Bytes per second of one directed link.
    pub bandwidth: u64,
    /// Silence after which a connection breaks.
    #[serde(with = "units")]
    pub idle_timeout: Duration,
    /// How long an attempt to connect may take.
    #[serde(with = "units")]
    pub connect_timeout: Duration,
    /// Time from `Remember` until it is on disk.
    #[serde(with = "units")]
    pub sync: Duration,
    /// Of the writes that wait for their sync when a host dies, this share is lost.
    pub unsynced_lost_percent: u32,
    /// And of this share a part is on the disk. The rest is there as a whole.
    pub unsynced_torn_percent: u32,
    /// Time that a node's driver takes for one input.
    #[serde(with = "units")]
    pub handling: Duration,
    /// Time of one signature or verification.
    #[serde(with = "units")]
    pub signature: Duration,
    /// Time of one plan.
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

    /// A local network in some bad mood, drawn from the seed: each trouble is on or off, and has a strength.
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

/// The stream of chance for one purpose: another purpose more or less does not shift it.
pub fn chance(seed: u64, purpose: &str) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let hash = blake3::hash(purpose.as_bytes());
    let mut stream = [0; 8];
    stream.copy_from_slice(&hash.as_bytes()[..8]);
    rng.set_stream(u64::from_le_bytes(stream));
    rng
}
