//! States that were put aside, by name: until whoever wants them has fetched them.
use crate::submissions::look::Look;
use bytes::Bytes;
use kernels::grid::Region;
use node_core::id::{ContentId, JobId};
use node_core::work::steps::SaveKind;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

/// Names a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateName {
    /// Whose.
    pub job: JobId,
    /// Which tile.
    pub tile: u16,
    /// After which step.
    pub step: u32,
    /// What it is.
    pub kind: SaveKind,
}

/// All of this node's. Bounded by the core: a tile waits while too many are not fetched.
#[derive(Debug, Default)]
pub struct States(Mutex<HashMap<StateName, Bytes>>);

/// What a request for a state begins with.
const STATE: &[u8] = b"meshnode/tile-state/1 ";
/// What a request for a part of a checkpoint begins with.
const CHECKPOINT: &[u8] = b"meshnode/checkpoint/1 ";
/// What a request to look at a simulation begins with.
const LOOK: &[u8] = b"meshnode/look/1 ";
/// What a request for a packed simulation begins with.
const SIMULATION: &[u8] = b"meshnode/simulation/1 ";

impl States {
    /// Keeps one.
    pub fn put(&self, name: StateName, bytes: Bytes) {
        self.lock().insert(name, bytes);
    }

    /// One, which stays.
    pub fn get(&self, name: &StateName) -> Option<Bytes> {
        self.lock().get(name).cloned()
    }

    /// One, which is given up.
    pub fn take(&self, name: &StateName) -> Option<Bytes> {
        self.lock().remove(name)
    }

    /// All of a tile are given up.
    pub fn drop_tile(&self, job: JobId, tile: u16) {
        self.lock().retain(|name, _| (name.job, name.tile) != (job, tile));
    }

    /// All of a job are.
    pub fn drop_job(&self, job: JobId) {
        self.lock().retain(|name, _| name.job != job);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StateName, Bytes>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A question to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A state that it put aside.
    State(StateName),
    /// A box of cells of the checkpoint of a step, by start and end.
    Checkpoint {
        /// Whose.
        job: JobId,
        /// Of which step.
        step: u32,
        /// The lowest x, y and z.
        start: [u64; 3],
        /// One beyond the highest.
        end: [u64; 3],
    },
    /// A packed simulation.
    Simulation(ContentId),
    /// How a simulation stands.
    Look(Look),
}

impl Wanted {
    /// The cells of a box, of the checkpoint of a step.
    pub fn checkpoint(job: JobId, step: u32, region: Region) -> Self {
        let (start, end) = (region.start.map(|at| at as u64), region.end.map(|at| at as u64));
        Wanted::Checkpoint { job, step, start, end }
    }

    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Wanted::State(StateName { job, tile, step, kind }) => {
                let (kind, number) = match kind {
                    SaveKind::Checkpoint => (0u16, 0),
                    SaveKind::Snapshot => (1, 0),
                    SaveKind::Output(number) => (2, *number),
                };
                let mut bytes = STATE.to_vec();
                bytes.extend(job.0.to_le_bytes());
                bytes.extend(step.to_le_bytes());
                [*tile, kind, number].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
                bytes
            }
            Wanted::Checkpoint { job, step, start, end } => {
                let mut bytes = CHECKPOINT.to_vec();
                bytes.extend(job.0.to_le_bytes());
                bytes.extend(step.to_le_bytes());
                start.iter().chain(end).for_each(|value| bytes.extend(value.to_le_bytes()));
                bytes
            }
            Wanted::Look(look) => [LOOK, look.encode().as_slice()].concat(),
            Wanted::Simulation(content) => [SIMULATION, content.0.as_slice()].concat(),
        }
    }

    /// What was sent; none if it is something else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if let Some(rest) = bytes.strip_prefix(STATE) {
            let rest: &[u8; 18] = rest.try_into().ok()?;
            let (job, rest) = rest.split_first_chunk::<8>()?;
            let (step, rest) = rest.split_first_chunk::<4>()?;
            let [tile, kind, number] = std::array::from_fn(|at| u16::from_le_bytes([rest[2 * at], rest[2 * at + 1]]));
            let kind = match kind {
                0 => SaveKind::Checkpoint,
                1 => SaveKind::Snapshot,
                2 => SaveKind::Output(number),
                _ => return None,
            };
            let (job, step) = (JobId(u64::from_le_bytes(*job)), u32::from_le_bytes(*step));
            return Some(Wanted::State(StateName { job, tile, step, kind }));
        }
        if let Some(rest) = bytes.strip_prefix(LOOK) {
            return Look::decode(rest).map(Wanted::Look);
        }
        if let Some(rest) = bytes.strip_prefix(SIMULATION) {
            return Some(Wanted::Simulation(ContentId(rest.try_into().ok()?)));
        }
        let rest: &[u8; 60] = bytes.strip_prefix(CHECKPOINT)?.try_into().ok()?;
        let (job, rest) = rest.split_first_chunk::<8>()?;
        let (step, rest) = rest.split_first_chunk::<4>()?;
        let (values, _) = rest.as_chunks::<8>();
        let at = |from: usize| std::array::from_fn(|axis| u64::from_le_bytes(values[from + axis]));
        let (job, step) = (JobId(u64::from_le_bytes(*job)), u32::from_le_bytes(*step));
        Some(Wanted::Checkpoint { job, step, start: at(0), end: at(3) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_survive_the_way_and_nonsense_is_none() {
        let state = StateName { job: JobId(7), tile: 3, step: 1 << 30, kind: SaveKind::Output(9) };
        let part = Wanted::Checkpoint { job: JobId(u64::MAX), step: 4, start: [1, 2, 3], end: [4, 5, 6] };
        for wanted in [Wanted::State(state), part, Wanted::Simulation(ContentId([5; 32]))] {
            let bytes = wanted.encode();
            assert_eq!(Wanted::decode(&bytes), Some(wanted));
            (0..bytes.len()).for_each(|end| assert_eq!(Wanted::decode(&bytes[..end]), None));
        }
    }
}
