//! The longest context of a model that the mesh has the memory for, if the requested one does not fit. Next: `explain.rs`.
use crate::fleet::Fleet;
use crate::layers::plan;
use crate::plan::Options;
use crate::work::Work;

/// Tokens of the shortest context proposed: a chat template and one question take about a hundred.
pub const CONTEXT_MIN: u32 = 128;

/// A context length and a number of concurrent requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Tokens of context per request.
    pub context: u32,
    /// Concurrent requests.
    pub sequences: u32,
}

/// The longest context up to `wanted` for which a plan exists, for the wanted number of concurrent requests; for a single
/// request if there is none for all. `work` describes the model for a context and a number of requests. None if not even
/// [`CONTEXT_MIN`] tokens for one request fit.
///
/// Runs the planner up to two dozen times: call it from a thread that may block.
pub fn largest_fit(wanted: Fit, work: impl Fn(Fit) -> Work, fleet: &Fleet, options: &Options) -> Option<Fit> {
    let options = Options { losses: false, ..options.clone() };
    let fits = |fit: Fit| plan(&work(fit), fleet, &options).is_ok();
    let longest = |sequences: u32| {
        let at = |context: u32| Fit { context, sequences };
        let mut low = CONTEXT_MIN;
        let mut high = wanted.context;
        if low > high || !fits(at(low)) {
            return None;
        }
        // Invariant: `low` fits; contexts above `high` do not, or exceed `wanted`.
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(at(middle)) { low = middle } else { high = middle - 1 }
        }
        Some(at(low))
    };
    longest(wanted.sequences).or_else(|| longest(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Device, DeviceId, Link, NodeKey};
    use crate::plan::Goal;
    use crate::work::Layer;
    use alloc::{collections::BTreeMap, string::String, vec, vec::Vec};

    fn work(fit: Fit) -> Work {
        Work {
            layers: vec![
                Layer {
                    flops_per_token: 200,
                    weight_bytes: 1000,
                    kv_bytes_per_token: 1,
                    window: None,
                    experts: None
                };
                4
            ],
            embed_bytes: 0,
            head_bytes: 0,
            tied: false,
            head_flops: 0,
            activation_bytes: 8,
            coarser_bytes: Vec::new(),
            context: fit.context,
            sequences: fit.sequences,
            scratch_bytes: u64::from(fit.context * fit.sequences) / 4,
        }
    }

    fn fleet(memories: &[u64]) -> Fleet {
        let device = |(at, &memory): (usize, &u64)| Device {
            id: DeviceId::first([at as u8; 16]),
            name: String::new(),
            label: String::new(),
            machine: at as u64,
            zone: String::new(),
            memory,
            bytes_per_second: 1_000_000,
            flops_per_second: 0,
            copy_bytes_per_second: 1_000_000,
            step_ns: 10,
            layer_ns: 0,
            cache_bytes_per_second: 0,
            ram: 0,
            ram_bytes_per_second: 0,
            ram_flops_per_second: 0,
            numerics: 1,
            pass_steps: 1,
            excluded: false,
        };
        let default_link = Link { rtt_ns: 1000, bytes_per_second: 1_000_000 };
        let devices: Vec<Device> = memories.iter().enumerate().map(device).collect();
        Fleet { devices, links: BTreeMap::new(), default_link }
    }

    fn options() -> Options {
        Options { goal: Goal::Latency, head: NodeKey([0; 16]), losses: true }
    }

    #[test]
    fn the_longest_context_fits_and_one_token_more_does_not() {
        for memories in [&[10_000][..], &[4_000, 4_000], &[3_000, 2_500, 6_000]] {
            let fleet = fleet(memories);
            let wanted = Fit { context: 100_000, sequences: 2 };
            let fit = largest_fit(wanted, work, &fleet, &options()).unwrap();
            let planned = |context| plan(&work(Fit { context, ..fit }), &fleet, &options()).is_ok();
            assert_eq!(fit.sequences, 2);
            assert!(planned(fit.context) && !planned(fit.context + 1), "{fit:?} of {memories:?}");
        }
    }

    #[test]
    fn one_request_is_proposed_if_not_all_fit_and_none_if_nothing_fits() {
        let wanted = Fit { context: 2048, sequences: 64 };
        // Weights of 4000 bytes; 128 tokens take 34,816 bytes more for 64 requests, and 544 bytes for one.
        assert_eq!(largest_fit(wanted, work, &fleet(&[5_000]), &options()).map(|fit| fit.sequences), Some(1));
        assert_eq!(largest_fit(wanted, work, &fleet(&[4_100]), &options()), None);
        assert_eq!(largest_fit(wanted, work, &fleet(&[1 << 30]), &options()), Some(wanted), "all that was requested");
        let short = Fit { context: 64, sequences: 1 };
        assert_eq!(largest_fit(short, work, &fleet(&[4_100]), &options()), None, "below the shortest context proposed");
    }
}
